"""The command `demo`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from isobasin.cli.printing import note
from isobasin.demo import run_demo


def demo_facts(output: Path, *, seed: int, force: bool, quiet: bool) -> dict[str, Any]:
    with _bars(quiet) as watch:
        return run_demo(output, seed=seed, force=force, watch=watch)


@contextmanager
def _bars(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each stage, kept when it is full; without a terminal, a line when a stage begins."""
    seen: dict[str, Any] = {}
    if quiet or not sys.stderr.isatty():

        def told(stage: str, done: int, of: int) -> None:
            if stage not in seen and not quiet:
                note(f"{stage} …")
            seen[stage] = done

        yield told
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:

        def drawn(stage: str, done: int, of: int) -> None:
            if stage not in seen:
                seen[stage] = bar.add_task(stage, total=of)
            bar.update(seen[stage], completed=done)

        yield drawn


def demo_lines(facts: dict[str, Any]) -> list[str]:
    accuracy = facts["accuracy"]
    rows = [
        f"{row['metric']:12s} {row['path']:8s} {_short(row['A'])} {_short(row['middle'])} {_short(row['B'])} "
        f"{_short(row['barrier'])}"
        for row in facts["table"]
    ]
    return [
        f"a RoPE model for digits, attention drawn anew from two seeds; scope {facts['scope']}, "
        f"matcher {facts['matcher']}",
        f"{'':12s} {'path':8s} {'A':>9s} {'half-way':>9s} {'B':>9s} {'barrier':>9s}",
        *rows,
        f"accuracy of the average: {accuracy['naive average']:.1%} as they are, {accuracy['aligned average']:.1%} "
        f"aligned (A {accuracy['A']:.1%}, B {accuracy['B']:.1%})",
        facts["sentence"],
        f"{facts['report']}: open it in a browser; {facts['seconds']:.0f} s",
    ]


def _short(value: float | None) -> str:
    return f"{'–':>9s}" if value is None else f"{value:9.4f}"
