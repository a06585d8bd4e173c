"""Results on disk, found by the key of their job: a folder appears under its name whole, or not at all.

DIR/done/<kind>-<key>/result.json     what the work gave back, the job, its seconds and commit, the names of its files
DIR/done/<kind>-<key>/…               the files
DIR/failed/<kind>-<key>.json          the error, how often it was tried
DIR/scratch/<kind>-<key>/             what unfinished work keeps to go on from
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.files import write_text
from isobasin.path.fingerprint import source_commit

from .jobs import Job, strict

RESULT = "result.json"
_UNFINISHED = ".unfinished-"
_PLAIN_LIST = re.compile(r"\[\n([^\[\]{}]*)\n *\]")


@dataclass(frozen=True)
class Place:
    """Where a job in work writes: `folder` is empty at first, `commit` makes it the result."""

    folder: Path
    job: Job
    target: Path

    def commit(self, found: dict[str, Any], *, seconds: float) -> dict[str, Any]:
        """Write result.json, have all of it on the disk, and rename it to where it is looked for."""
        files = sorted(path.name for path in self.folder.iterdir())
        took = round(seconds, 3)
        # Work that times its own parts says so under `seconds`; the time of all of it is then with the job.
        about = {**_about(self.job), "seconds": took, "git": source_commit()}
        result: dict[str, Any] = strict({"seconds": took, **found, "job": about, "files": files})
        write_json(self.folder / RESULT, result)
        for path in self.folder.rglob("*"):
            if path.is_file():
                _sync(path)
        if self.target.exists():  # its weights were dropped, and are needed again
            shutil.rmtree(self.target)
        os.rename(self.folder, self.target)
        return result


@dataclass(frozen=True)
class Store:
    """The folder of a study.

    >>> import tempfile
    >>> from isobasin.study.jobs import Job
    >>> store, job = Store(Path(tempfile.mkdtemp())), Job("pretrain", {"seed": 1})
    >>> with store.writing(job) as place:
    ...     result = place.commit({"loss": float("nan")}, seconds=1.0)
    >>> store.is_done(job), store.result(job)["loss"]
    (True, None)
    """

    root: Path

    @property
    def scratch(self) -> Path:
        return self.root / "scratch"

    def folder(self, job: Job) -> Path:
        return self.root / "done" / job.name

    def is_done(self, job: Job) -> bool:
        """Whether there is a result."""
        return (self.folder(job) / RESULT).is_file()

    def is_whole(self, job: Job) -> bool:
        """Whether there is a result, and every file of it: weights may have been dropped since."""
        if not self.is_done(job):
            return False
        return all((self.folder(job) / name).exists() for name in self.result(job).get("files", ()))

    def result(self, job: Job) -> dict[str, Any]:
        return read_json(self.folder(job) / RESULT)

    @contextmanager
    def writing(self, job: Job) -> Iterator[Place]:
        """A temporary sibling to write into; without `commit` nothing of it is left."""
        done = self.root / "done"
        done.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{job.name}-", dir=done))
        folder.chmod(0o755)  # mkdtemp makes it for its owner alone
        try:
            yield Place(folder, job, self.folder(job))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def failure(self, job: Job) -> dict[str, Any] | None:
        """Why a job failed, in this run or an earlier one."""
        path = self._failed(job)
        return read_json(path) if path.is_file() else None

    def record_failure(self, job: Job, error: str, attempts: int) -> None:
        self._failed(job).parent.mkdir(parents=True, exist_ok=True)
        write_json(self._failed(job), {"error": error, "attempts": attempts, "job": _about(job)})

    def forget_failure(self, job: Job) -> None:
        self._failed(job).unlink(missing_ok=True)

    def forget_scratch(self, folder: Path) -> None:
        if folder.is_relative_to(self.scratch):
            shutil.rmtree(folder, ignore_errors=True)

    def drop_weights(self, job: Job) -> None:
        """Delete all files of a result but result.json."""
        for name in self.result(job).get("files", ()):
            path = self.folder(job) / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove what killed work left half-written. Only for the one run that holds the folder."""
        for path in (self.root / "done").glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _failed(self, job: Job) -> Path:
        return self.root / "failed" / f"{job.name}.json"


def _about(job: Job) -> dict[str, Any]:
    return {"kind": job.kind, "settings": job.settings, "needs": [need.name for need in job.needs]}


def write_json(path: Path, value: Any) -> None:
    """Strict JSON, whole or not at all."""
    text = json.dumps(strict(value), allow_nan=False, indent=1, ensure_ascii=False)
    write_text(path, _rows_on_lines(text) + "\n")


def _rows_on_lines(text: str) -> str:
    """A list of plain values on one line: a curve of 25 points is a row, not a page.

    >>> _rows_on_lines(json.dumps({"curve": [1.5, 2.5], "name": "a [b]"}, indent=1))
    '{\\n "curve": [1.5, 2.5],\\n "name": "a [b]"\\n}'
    """
    return _PLAIN_LIST.sub(lambda found: "[" + " ".join(line.strip() for line in found[1].split("\n")) + "]", text)


def read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise IsobasinError(f"{path}: can not be read as JSON ({error}); delete it to have it made again") from error
    if not isinstance(found, dict):
        raise IsobasinError(
            f"{path}: holds {type(found).__name__}, expected an object; delete it to have it made again"
        )
    return found


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
