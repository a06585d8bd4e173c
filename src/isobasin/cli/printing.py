"""Answers on standard output, progress on standard error."""

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol


def emit(facts: Any, lines: Sequence[str], as_json: bool) -> None:
    """Print the answer: one strict JSON object, or lines for a person."""
    text = json.dumps(_strict(facts), allow_nan=False) if as_json else "\n".join(lines)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        # A name that is no UTF-8, or a terminal without ×, must not turn a finished command into an error.
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # Nobody reads on (`| head`): the exit code still answers, and Python's own flush at exit finds no pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _strict(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): _strict(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(v) for v in value]
    return value


def note(text: str) -> None:
    """A remark for a person, beside the answer."""
    print(text, file=sys.stderr)


class Step(Protocol):
    def __call__(self, done: int) -> None: ...


@contextmanager
def progress(title: str, total: int, *, quiet: bool) -> Iterator[Step]:
    """A bar on standard error with an estimate of what is left; silent if asked, or if nobody is watching."""
    if quiet or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda done: bar.update(task, completed=done)
