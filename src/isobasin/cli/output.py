"""What commands produce: the result on standard output, progress on standard error, checkpoints, and their cost."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from isobasin.cli.options import SaveOptions
from isobasin.errors import ArchitectureError, IsobasinError, TransformError, is_memory_problem, one_line, printable
from isobasin.files import check_kind, check_output_file, recover, reserve, strict_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from isobasin.symmetries.check import OutputChange
    from isobasin.symmetries.transform import Transform
    from isobasin.weights import Weights

OnProgress = Callable[[str, int, int], None]  # (title, done, of)


def emit(facts: Any, lines: Sequence[str], as_json: bool) -> None:
    """Print the result: one strict JSON object, or lines of text."""
    text = json.dumps(strict_json(facts), allow_nan=False) if as_json else "\n".join(map(printable, lines))
    try:
        print(text, flush=True)
    except BrokenPipeError:  # the reader has closed the pipe (`| head`): the exit code stays
        discard_output(sys.stdout)
    except OSError as error:
        discard_output(sys.stdout)
        raise IsobasinError(
            f"standard output can not be written ({error.strerror}): free space or choose another place"
        ) from error


def discard_output(stream: TextIO) -> None:
    """Discard what could not be printed: Python's flush at exit must not fail too."""
    with suppress(OSError, ValueError):  # a stream without a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def number(value: float | None, spec: str, missing: str = "–") -> str:
    return missing if value is None else format(value, spec)


def space_label(row: Mapping[str, Any]) -> str:
    """The space of a row of an alignment, with its layer if it has one."""
    return str(row["space"]) if row["layer"] is None else f"layer {row['layer']:>3} {row['space']}"


def note(text: str) -> None:
    """Print a remark on standard error; if that is closed or full, nothing."""
    try:
        if sys.stderr is not None:
            print(printable(text), file=sys.stderr, flush=True)
    except OSError:
        discard_output(sys.stderr)


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


def n_processes() -> int:
    """The processes of this run. torchrun and accelerate set this variable, and RANK."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this process prints and writes."""
    return n_processes() <= 1 or int(os.environ.get("RANK", "0")) == 0


def reserve_outputs(*paths: Path | None) -> None:
    """Refuse outputs that another process is computing, and keep them until the command ends."""
    for path in paths:
        if path is not None and is_first_process():
            reserve(path)


def check_outputs(save: SaveOptions, inputs: Sequence[Path], transform: Path | None = None) -> None:
    """Refuse outputs that exist or lie inside an input, and an unknown size, before anything is computed.

    What a killed run left is recovered first: the folder and its transform may both be there in part.
    """
    from isobasin.checkpoint.writer import check_output, parse_size

    for folder in (save.output, *inputs):  # first: a lock would lie there, too
        if transform is not None and transform.resolve().is_relative_to(folder.resolve()):
            raise TransformError(f"--save-transform {transform}: lies inside {folder}; choose a place beside it")
    reserve_outputs(save.output.resolve(), transform)
    for path in (save.output.resolve(), transform):
        if path is not None:
            recover(path)
    with suppress(OSError):  # a folder that can not be read is reported when it is written
        check_output(save.output.resolve(), list(inputs), force=save.force)
    parse_size(save.max_shard_size)
    if transform is not None:
        _check_transform_path(transform, save, inputs)


def _check_transform_path(path: Path, save: SaveOptions, inputs: Sequence[Path]) -> None:
    """Refuse a transform file that exists."""
    what: dict[str, Any] = {"what": "the transform file", "error": TransformError}
    check_output_file(path, force=save.force, inputs=[f for f in inputs if f.is_file()], **what)
    check_kind(path, "transform", error=TransformError)


def existing(*sources: str | Path | None) -> list[Path]:
    """Those among some sources of data that are files or folders, and no names of data sets."""
    return [Path(source) for source in sources if source is not None and Path(source).exists()]


def verified_change(
    before: "Weights",
    after: "Weights",
    verify: str,
    *,
    seed: int = 0,
    device: "torch.device | None" = None,
    quiet: bool,
) -> "OutputChange":
    """The largest change of a moved model's outputs; an error if it is more than rounding.

    `largest` is None if the model was not run: with `none`, or with `auto` where transformers or memory do not allow
    it; and if its own outputs are not finite. The reason is noted.
    """
    from isobasin.symmetries.check import OutputChange, require_same_outputs

    if verify == "none":
        return OutputChange(None)
    try:
        found = require_same_outputs(before, after, seed=seed, device=device)
    except Exception as error:
        if verify == "model" or not (isinstance(error, ArchitectureError) or is_memory_problem(error)):
            raise
        if not quiet:
            note(f"the model was not run before and after: {one_line(str(error))}")
        return OutputChange(None)
    if found.note:
        note(found.note)
    return found


def transform_files(transform: "Transform", path: Path | None) -> dict[Path, bytes]:
    """The file of --save-transform, for `write_model`."""
    from isobasin.symmetries.transform_file import encode_transform

    return {} if path is None else {path: encode_transform(transform)}


def write_model(
    weights: "Weights",
    save: SaveOptions,
    *,
    quiet: bool,
    inputs: Sequence[Path] = (),
    files: "Mapping[Path, bytes] | None" = None,
    on_tensor: "Callable[[str, Tensor | None], None] | None" = None,
) -> str:
    """Write a checkpoint folder, tensor by tensor; return the floating-point types written, joined by `+`.

    `files` appear together with the folder: there is no transform without its model, nor the reverse.
    """
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
            trust_remote_code=save.trust_remote_code,
            inputs=inputs,
            files=files,
            watch=watch,
        )
    return "+".join(sorted({dtype_name(d) for d in dtypes.values() if d.is_floating_point}))


@contextmanager
def measured_cost(interval: float = 0.1) -> "Iterator[dict[str, float | None]]":
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
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            cost["peak_device_mb"] = round(sys.modules["torch"].cuda.max_memory_allocated() / 1e6, 1)


def _anonymous_kb() -> int:
    try:
        with open("/proc/self/status", encoding="ascii") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssAnon:"))
    except (OSError, StopIteration):
        return 0


def companion_facts(folder: Path | None, save: SaveOptions) -> dict[str, Any]:
    """What JSON adds about files of the model's folder that are not copied; nothing where all are."""
    from isobasin.checkpoint import find_companions

    found = None if folder is None else find_companions(folder, trust_remote_code=save.trust_remote_code)
    return {"not_copied": dict(found.left_out)} if found and found.left_out else {}


def not_copied_lines(facts: dict[str, Any]) -> list[str]:
    """The files that are not copied, by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in facts.get("not_copied", {}).items():
        by_reason.setdefault(reason, []).append(name)
    return [f"not copied  {', '.join(names)} ({reason})" for reason, names in by_reason.items()]


def left_out_lines(facts: dict[str, Any]) -> list[str]:
    """What was not compared, where heads or vocabularies differ."""
    left_out = facts.get("left_out", {})
    return [f"left out of {model.upper()}  {', '.join(names)}" for model, names in left_out.items() if names]
