"""Results on disk, found by the key of their job. A result appears complete under its name, or not at all.

The folder of a study, as `study run` writes it:

DIR/study.json                        the grid, a row for each cell, the runs
DIR/done/<kind>-<key>/result.json     the result, the job, its seconds and commit, the names of its files
DIR/done/<kind>-<key>/…               the files
DIR/failed/<kind>-<key>.json          the error and the number of attempts
DIR/scratch/<kind>-<key>/             checkpoints of unfinished work

A finished study can be packed into one file, NAME.jsonl: {"study": …} on the first line, the content of study.json;
then {"name": "<kind>-<key>", "result": …} for each result. Files beside result.json are not packed.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.files import (
    AtomicOutput,
    atomic_write,
    check_output_file,
    disk_errors,
    recover,
    recover_all,
    remove,
    strict_json,
)
from isobasin.path.provenance import source_commit
from isobasin.study.plan import Job

RESULT = "result.json"
STUDY = "study.json"
PACKED = ".jsonl"
_DONE = f"[!.]*/{RESULT}"  # unfinished results have a hidden name
_PLAIN_LIST = re.compile(r"\[\n([^\[\]{}]*)\n *\]")


@dataclass(frozen=True)
class PendingResult:
    """Where a running job writes: `folder` is empty at first, `commit` turns it into the result."""

    job: Job
    place: AtomicOutput

    @property
    def folder(self) -> Path:
        return self.place.new

    def commit(self, found: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """Write result.json, and rename the folder to its final name."""
        files = sorted(path.name for path in self.folder.iterdir())
        took = round(seconds, 3)
        # A work function that times its own parts gives them as `seconds`; the total is then under `job`.
        about = {**_job_dict(self.job), "seconds": took, "git": source_commit()}
        result: dict[str, Any] = strict_json({"seconds": took, **found, "job": about, "files": files})
        write_json(self.folder / RESULT, result)
        self.place.flush()
        self.place.commit()
        return result


@dataclass(frozen=True)
class Store:
    """The folder of a study."""

    root: Path

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    def folder(self, job: Job) -> Path:
        return self.root / "done" / job.name

    def is_done(self, job: Job) -> bool:
        """Whether there is a result."""
        return (self.folder(job) / RESULT).is_file()

    def is_complete(self, job: Job) -> bool:
        """Whether there is a result with all of its files: weights may have been dropped since."""
        if not self.is_done(job):
            return False
        return all((self.folder(job) / name).exists() for name in self.result(job).get("files", ()))

    def result(self, job: Job) -> dict[str, Any]:
        return read_json(self.folder(job) / RESULT)

    @contextmanager
    def writing(self, job: Job) -> Iterator[PendingResult]:
        """A temporary folder to write into. It is removed unless `commit` was called."""
        (self.root / "done").mkdir(parents=True, exist_ok=True)
        with AtomicOutput(self.folder(job), folder=True) as place:
            yield PendingResult(job, place)

    def failure(self, job: Job) -> dict[str, Any] | None:
        """The recorded failure of a job, in this run or an earlier one."""
        path = self._failed(job)
        return read_json(path) if path.is_file() else None

    def record_failure(self, job: Job, error: str, attempts: int) -> None:
        self._failed(job).parent.mkdir(parents=True, exist_ok=True)
        write_json(self._failed(job), {"error": error, "attempts": attempts, "job": _job_dict(job)})

    def remove_failure(self, job: Job) -> None:
        self._failed(job).unlink(missing_ok=True)

    def remove_scratch(self, folder: Path) -> None:
        if folder.is_relative_to(self.scratch):
            shutil.rmtree(folder, ignore_errors=True)

    def drop_weights(self, job: Job) -> None:
        """Delete all files of a result except result.json."""
        for name in self.result(job).get("files", ()):
            remove(self.folder(job) / name)

    def remove_unfinished(self) -> None:
        """Remove the temporary folders of killed workers. Only the run that holds the lock may do this."""
        for folder in (self.root, self.root / "done", self.root / "failed"):
            recover_all(folder)

    def _failed(self, job: Job) -> Path:
        return self.root / "failed" / f"{job.name}.json"


def _job_dict(job: Job) -> dict[str, Any]:
    return {"kind": job.kind, "settings": job.settings, "needs": [need.name for need in job.needs]}


@dataclass(frozen=True)
class StoredStudy:
    """All JSON of a study: the content of study.json, None if there is none, and each result by its name."""

    path: Path
    table: Mapping[str, Any] | None
    results: Mapping[str, Mapping[str, Any]]


def stored_studies(folder: Path) -> list[StoredStudy]:
    """The study in a folder or a packed file, or all studies one level below a folder, ordered by their names.

    If there are both a folder NAME and a file NAME.jsonl, the folder is read.
    """
    if folder.is_file():
        return [_read_packed(folder)]
    if _holds_study(folder):
        return [_read_folder(folder)]
    try:
        packed = {path.stem: path for path in folder.iterdir() if path.suffix == PACKED and path.is_file()}
        folders = {path.name: path for path in folder.iterdir() if path.is_dir() and _holds_study(path)}
    except OSError as error:
        raise IsobasinError(f"{folder}: can not be read ({error.strerror}); expected the folder of a study") from error
    return [
        _read_folder(path) if path.is_dir() else _read_packed(path) for _, path in sorted((packed | folders).items())
    ]


def _holds_study(folder: Path) -> bool:
    return (folder / STUDY).is_file() or any((folder / "done").glob(_DONE))


def _read_folder(folder: Path) -> StoredStudy:
    results = {path.parent.name: strict_json(read_json(path)) for path in sorted((folder / "done").glob(_DONE))}
    table = strict_json(read_json(folder / STUDY)) if (folder / STUDY).is_file() else None
    return StoredStudy(folder, table, results)


def _read_packed(path: Path) -> StoredStudy:
    try:
        # str.splitlines would also split at separators inside JSON strings.
        first, *rest = (strict_json(json.loads(line)) for line in path.read_text(encoding="utf-8").split("\n") if line)
        return StoredStudy(path, first["study"], {line["name"]: dict(line["result"]) for line in rest})
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise IsobasinError(f"{path}: is not a packed study ({error!r}); pack the folder of the study again") from error


def _is_packed(path: Path) -> bool:
    try:
        return bool(_read_packed(path))
    except IsobasinError:
        return False


def pack(folder: Path, output: Path | None = None) -> Path:
    """Write study.json and all results of a study into one file, `<folder>.jsonl` beside the folder by default."""
    if not _holds_study(folder):
        raise IsobasinError(f"{folder}: no study in it, expected {STUDY} or done/*/{RESULT}")
    study = _read_folder(folder)
    lines = [{"study": study.table}, *({"name": name, "result": result} for name, result in study.results.items())]
    place = folder.with_name(folder.name + PACKED) if output is None else output
    check_output_file(place, force=True)
    if place.exists() and not _is_packed(place):
        raise IsobasinError(f"{place}: already there, and no packed study; choose another name with -o")
    atomic_write(place, "".join(json.dumps(line, allow_nan=False, ensure_ascii=False) + "\n" for line in lines))
    return place


def unpack(path: Path, output: Path | None = None) -> Path:
    """Write a packed study as the folder that `study run` can continue; `<name>` beside the file by default."""
    study, folder = _read_packed(path), path.with_suffix("") if output is None else output
    recover(folder)
    if folder.exists():
        raise IsobasinError(f"{folder}: already there; choose another folder with -o")
    with disk_errors(folder), AtomicOutput(folder, folder=True) as output_folder:
        for name, result in study.results.items():
            place = output_folder.new / "done" / Path(name).name
            place.mkdir(parents=True)
            write_json(place / RESULT, result)
        if study.table is not None:
            write_json(output_folder.new / STUDY, study.table)
        output_folder.flush()
        output_folder.commit()
    return folder


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON, atomically."""
    text = json.dumps(strict_json(value), allow_nan=False, indent=1, ensure_ascii=False)
    atomic_write(path, _compact_lists(text) + "\n")


def _compact_lists(text: str) -> str:
    """Put each list of plain values on one line.

    >>> _compact_lists(json.dumps({"curve": [1.5, 2.5], "name": "a [b]"}, indent=1))
    '{\\n "curve": [1.5, 2.5],\\n "name": "a [b]"\\n}'
    """
    return _PLAIN_LIST.sub(lambda found: "[" + " ".join(line.strip() for line in found[1].split("\n")) + "]", text)


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise IsobasinError(f"{path}: can not be read as JSON ({error}); delete it to have it made again") from error
    if not isinstance(found, dict):
        raise IsobasinError(
            f"{path}: holds {type(found).__name__}, expected an object; delete it to have it made again"
        )
    return found
