"""What commands produce: the result on standard output, progress on standard error, checkpoints, and their cost."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from isobasin.cli.options import SaveOptions
from isobasin.errors import TransformError

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import Tensor

    from isobasin.symmetries.transform import Transform
    from isobasin.weights import Weights


def emit(facts: Any, lines: Sequence[str], as_json: bool) -> None:
    """Print the result: one strict JSON object, or lines of text."""
    import json

    from isobasin.files import strict_json

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


def note(text: str) -> None:
    """Print a remark on standard error."""
    print(text, file=sys.stderr)


class Step(Protocol):
    """Sets a progress bar to `done`, and its title where one is given."""

    def __call__(self, done: int, title: str | None = None) -> None: ...


@contextmanager
def progress(title: str, total: int, *, quiet: bool) -> Iterator[Step]:
    """A progress bar on standard error with the remaining time; none if `quiet`, or without a terminal."""
    with progress_bars(quiet=quiet, transient=True) as bars:
        if bars is None:
            yield lambda done, title=None: None
            return
        task = bars.add_task(title, total=total)
        yield lambda done, title=None: bars.update(task, completed=done, description=title)


def counted(step: Step) -> Callable[..., None]:
    """A function that advances a progress bar by one at each call, whatever its arguments."""
    numbers = count(1)
    return lambda *_: step(next(numbers))


@contextmanager
def progress_bars(*, quiet: bool, transient: bool, width: int = 0) -> "Iterator[Progress | None]":
    """A display for progress bars on standard error; None if `quiet`, or without a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    description = TextColumn(f"{{task.description:{width or ''}}}")
    columns = (description, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=transient) as bars:
        yield bars


def check_transform_path(path: Path | None, save: SaveOptions, inputs: Sequence[Path]) -> None:
    """Refuse a transform file that exists, or that would lie inside an input or inside the output folder."""
    from isobasin.symmetries.transform_file import check_free

    if path is None:
        return
    check_free(path, force=save.force)
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

    with progress("writing", len(weights), quiet=quiet) as step:
        advance = counted(step)

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


class Cost:
    """Time and peak memory of the body of a `with` statement.

    The peak that matters is that of anonymous memory: the system drops pages of mapped files when memory is short. It
    is sampled where the system reports it (Linux), else it is None.
    """

    def __init__(self, interval: float = 0.01) -> None:
        self._interval = interval
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._peak_kb = 0
        self.seconds = 0.0

    def __enter__(self) -> Self:
        self._start = time.perf_counter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.seconds = time.perf_counter() - self._start
        self._stop.set()
        self._thread.join()

    @property
    def peak_anon_mb(self) -> float | None:
        return round(self._peak_kb / 1024, 1) if self._peak_kb else None

    @property
    def peak_rss_mb(self) -> float:
        import resource

        unit = 1024 if sys.platform == "darwin" else 1  # macOS reports bytes, other systems kilobytes
        return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit / 1024, 1)

    def to_dict(self, digits: int = 3) -> dict[str, float | None]:
        return {
            "seconds": round(self.seconds, digits),
            "peak_rss_mb": self.peak_rss_mb,
            "peak_anon_mb": self.peak_anon_mb,
        }

    def _sample(self) -> None:
        while True:
            self._peak_kb = max(self._peak_kb, _anonymous_kb())
            if self._stop.wait(self._interval):
                return


def _anonymous_kb() -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return 0
