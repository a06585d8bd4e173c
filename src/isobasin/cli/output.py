"""What commands produce: the result on standard output, progress on standard error, checkpoints, and their cost."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobasin.cli.options import SaveOptions
from isobasin.errors import TransformError
from isobasin.files import check_output_file, strict_json

if TYPE_CHECKING:
    from torch import Tensor

    from isobasin.symmetries.transform import Transform
    from isobasin.weights import Weights

OnProgress = Callable[[str, int, int], None]  # (title, done, of)


def emit(facts: Any, lines: Sequence[str], as_json: bool) -> None:
    """Print the result: one strict JSON object, or lines of text."""
    text = json.dumps(strict_json(facts), allow_nan=False) if as_json else "\n".join(lines)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        # A file name that is not UTF-8, or a terminal without ×, must not turn a finished command into an error.
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). The exit code stays; Python's flush at exit must not fail either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def number(value: float | None, spec: str, missing: str = "–") -> str:
    return missing if value is None else format(value, spec)


def space_label(row: Mapping[str, Any]) -> str:
    """The space of a row of an alignment, with its layer if it has one."""
    return str(row["space"]) if row["layer"] is None else f"layer {row['layer']:>3} {row['space']}"


def note(text: str) -> None:
    """Print a remark on standard error."""
    print(text, file=sys.stderr)


@contextmanager
def progress(*, quiet: bool, keep: bool = False) -> Iterator[OnProgress]:
    """A function `(title, done, of)` that shows progress on standard error; nothing if `quiet`, or without a terminal.

    There is one bar, which shows the last title and disappears at the end. With `keep` there is one for each title, and
    they stay; without a terminal, a line is printed for each title.
    """
    if quiet or not sys.stderr.isatty():
        titles: set[str] = set()

        def announce(title: str, done: int, of: int) -> None:
            if keep and not quiet and title not in titles:
                titles.add(title)
                note(f"{title} …")

        yield announce
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description:16}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=not keep) as bars:
        tasks: dict[str, tuple[TaskID, int]] = {}

        def show(title: str, done: int, of: int) -> None:
            key = title if keep else ""
            task, last = tasks.get(key) or (bars.add_task(title, total=of), 0)
            if done < last:  # the next stage begins
                bars.reset(task)
            bars.update(task, description=title, completed=done, total=of)
            tasks[key] = task, done

        yield show


def counted(on_progress: OnProgress, title: str, total: int) -> Callable[..., None]:
    """A function that advances the progress by one at each call, whatever its arguments."""
    numbers = count(1)
    return lambda *_: on_progress(title, next(numbers), total)


def check_transform_path(path: Path | None, save: SaveOptions, inputs: Sequence[Path]) -> None:
    """Refuse a transform file that exists, or that would lie inside an input or inside the output folder."""
    if path is None:
        return
    check_output_file(path, force=save.force, what="the transform file", error=TransformError)
    for folder in (save.output, *inputs):
        if path.resolve().is_relative_to(folder.resolve()):
            raise TransformError(f"--save-transform {path}: lies inside {folder}; choose a place beside it")


@contextmanager
def saved_transform(transform: "Transform", path: Path | None) -> Iterator[None]:
    """Save a transform if the body succeeds: a failure leaves neither a transform without a model nor the reverse."""
    from isobasin.symmetries.transform_file import save_transform

    if path is None:
        yield
        return
    aside = path.with_name(f".{path.name}.isobasin-tmp-{os.getpid()}")
    try:
        save_transform(transform, aside, force=True)
        yield
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_model(
    weights: "Weights",
    save: SaveOptions,
    *,
    quiet: bool,
    inputs: Sequence[Path] = (),
    on_tensor: "Callable[[str, Tensor | None], None] | None" = None,
) -> str:
    """Write a checkpoint folder, tensor by tensor; return the floating-point types written, joined by `+`."""
    from isobasin.checkpoint import dtype_name

    with progress(quiet=quiet) as on_progress:
        advance = counted(on_progress, "writing", len(weights))

        def watch(name: str, tensor: "Tensor | None") -> None:
            advance()
            if on_tensor:
                on_tensor(name, tensor)

        dtypes = weights.save(
            save.output,
            dtype=save.dtype,
            force=save.force,
            max_shard_size=save.max_shard_size,
            inputs=inputs,
            watch=watch,
        )
    return "+".join(sorted({dtype_name(d) for d in dtypes.values() if d.is_floating_point}))


@contextmanager
def measured_cost(interval: float = 0.01) -> "Iterator[dict[str, float | None]]":
    """Time and peak memory of the body of a `with` statement; the yielded dictionary is filled when it ends.

    The peak that matters is that of anonymous memory: the system drops pages of mapped files when memory is short. It
    is sampled where the system reports it (Linux), else it is None.
    """
    import resource

    cost: dict[str, float | None] = {}
    samples, stop = [0], threading.Event()

    def sample() -> None:
        while True:
            samples[0] = max(samples[0], _anonymous_kb())
            if stop.wait(interval):
                return

    thread = threading.Thread(target=sample, daemon=True)
    start = time.perf_counter()
    thread.start()
    try:
        yield cost
    finally:
        cost["seconds"] = round(time.perf_counter() - start, 3)
        stop.set()
        thread.join()
        unit = 1024 if sys.platform == "darwin" else 1  # macOS reports bytes, other systems kilobytes
        cost["peak_rss_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit / 1024, 1)
        cost["peak_anon_mb"] = round(samples[0] / 1024, 1) or None


def _anonymous_kb() -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return 0
