"""Files and folders that are written atomically, and the resume file of a long computation."""

import hashlib
import json
import math
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol, Self

from isobasin.errors import IsobasinError

Content = bytes | str | Callable[[IO[bytes]], object]
"""What a file shall hold: bytes, text (written as UTF-8), or a function that writes to the stream it is given."""

_MARKER = "isobasin-writer.json"
_TEMPORARY = ".isobasin-tmp-"


# -- single files ----------------------------------------------------------------------------------------------------


def atomic_write(path: Path, data: Content, *, error: type[IsobasinError] = IsobasinError) -> None:
    """Write a temporary file beside `path`, flush it to the disk, and rename it to `path`.

    A reader sees the old file or the new one, also if the process is killed at any moment.
    """
    atomic_write_all({path: data}, error=error)


def atomic_write_all(contents: Mapping[Path, Content], *, error: type[IsobasinError] = IsobasinError) -> None:
    """The same for several files: none is renamed before all are on the disk."""
    temporary = {path: path.with_name(f".{path.name[:100]}{_TEMPORARY}{os.getpid()}") for path in contents}
    path = None
    try:
        for path, data in contents.items():
            _write(temporary[path], data)
        for path in contents:
            temporary[path].replace(path)
    except OSError as failure:
        reason = failure.strerror or failure
        raise error(f"{path}: can not be written ({reason}); free space or choose another place") from failure
    finally:
        for file in temporary.values():
            with suppress(OSError):  # after the rename, or without a folder, there is no such file
                file.unlink()


def _write(file: Path, data: Content) -> None:
    with file.open("wb") as stream:
        if callable(data):
            data(stream)
        else:
            stream.write(data.encode() if isinstance(data, str) else data)
        stream.flush()
        os.fsync(stream.fileno())


def check_output_file(
    path: Path,
    *,
    force: bool,
    inputs: tuple[Path, ...] = (),
    what: str | None = None,
    error: type[IsobasinError] = IsobasinError,
) -> None:
    """Raise if no file can be written at `path`, before anything is computed; it must not lie inside `inputs`."""
    if path.is_dir():
        raise error(f"{path}: a folder, expected the name of a file to write")
    if path.exists() and not force:
        raise error(f"{path}: already there; choose another name or use --force")
    if not path.parent.is_dir():
        raise error(f"{path.parent}: no such folder for {what or path.name}; create it first")
    for folder in inputs:
        if path.resolve().is_relative_to(folder.resolve()):
            raise error(f"{path}: lies inside the input {folder}; choose a place beside it")


# -- folders ---------------------------------------------------------------------------------------------------------


class AtomicFolder:
    """A folder `out` that appears, or is replaced, whole or not at all.

    `.NAME.isobasin-tmp-XXXX/` beside it holds a marker (process and host of the writer), `new/`, into which the caller
    writes, and between two renames `old/`, the folder that is replaced. The marker lies outside `new/`, so that no
    output contains it, and is removed last, so that `remove_stale` recognises what a killed process left.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._created_parents = [path for path in out.parents if not path.exists()]  # innermost first
        out.parent.mkdir(parents=True, exist_ok=True)
        self._root = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
        self.new, self._old = self._root / "new", self._root / "old"
        marker = {"pid": os.getpid(), "host": socket.gethostname()}
        try:
            (self._root / _MARKER).write_text(json.dumps(marker), encoding="utf-8")
            self.new.mkdir()
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def commit(self) -> None:
        """Flush the content of `new` to the disk, then rename `new` to `out`; `discard` deletes the old folder."""
        for path in self.new.rglob("*"):
            _sync(path)
        _sync(self.new)
        if self._out.exists() and any(self._out.iterdir()):
            os.rename(self._out, self._old)
        os.rename(self.new, self._out)
        _sync(self._out.parent)

    def discard(self) -> None:
        """Remove the temporary folder: after `commit` with the old output, without it the old output stays."""
        _remove(self._root, self._out)
        for folder in self._created_parents:
            with suppress(OSError):  # not empty: another process uses it
                folder.rmdir()


def remove_stale(out: Path) -> None:
    """Remove what killed writers to `out` left, and restore the folder that one of them had moved aside.

    A temporary folder is stale if its marker names this host and a process that has ended; others are left alone.
    """
    if not out.parent.is_dir():
        return
    for root in sorted(out.parent.iterdir()):
        if root.name.startswith(_prefix(out)) and not root.is_symlink() and _is_stale(root / _MARKER):
            _remove(root, out)


def remove_temporary(folder: Path) -> None:
    """The same for all outputs in `folder` and for writers on any host. The caller knows that no writer runs."""
    for root in folder.glob(f".*{_TEMPORARY}*"):
        _remove(root, folder / root.name[1:].rpartition(_TEMPORARY)[0])


def _prefix(out: Path) -> str:
    return f".{out.name}{_TEMPORARY}"


def _is_stale(marker: Path) -> bool:
    try:
        found = json.loads(marker.read_text(encoding="utf-8"))
        return bool(found["host"] == socket.gethostname()) and not _is_alive(found["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_alive(pid: int) -> bool:
    if os.name != "posix" or type(pid) is not int or pid <= 0:  # elsewhere signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _sync(path: Path) -> None:
    """Flush the data of a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(root: Path, out: Path) -> None:
    """Delete a temporary folder; first restore `old` if the process stopped between the two renames."""
    if (root / "new").exists() and (root / "old").exists():
        try:
            os.rename(root / "old", out)
        except OSError:
            return  # the place is taken: keeping a hidden folder is safer than deleting the only copy
    for name in ("new", "old"):
        shutil.rmtree(root / name, ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)


# -- resuming --------------------------------------------------------------------------------------------------------


class ResumeStore(Protocol):
    """Intermediate results of one computation, by name."""

    def find(self, name: str) -> Any | None: ...

    def keep(self, name: str, value: Any) -> None: ...


class NullResumeStore:
    """Keeps nothing."""

    def find(self, name: str) -> Any | None:
        return None

    def keep(self, name: str, value: Any) -> None:
        pass


class ResumeFile:
    """Results in one file beside `output`, so that an interrupted computation continues where it stopped.

    The file `.NAME.isobasin-KIND` belongs to one `cache_key`: all that the results depend on, such as hashes of models
    and data, options and the version. A file with another key, or a damaged one, counts as empty. `keep` replaces the
    file atomically. Values are JSON; with `tensors` they may hold tensors (`torch.save`, read with `weights_only`).
    With `writes=False` the file is read and never changed, as in all processes of a group but the first.
    """

    def __init__(
        self,
        output: Path,
        kind: str,
        cache_key: Mapping[str, Any],
        *,
        tensors: bool = False,
        writes: bool = True,
    ) -> None:
        self.output, self.path = output, output.with_name(f".{output.name[:100]}.isobasin-{kind}")
        text = json.dumps(cache_key, sort_keys=True, default=str)
        self._key = hashlib.sha256(text.encode()).hexdigest()
        self._tensors, self._writes = tensors, writes
        self._values = self._read()

    @property
    def n_found(self) -> int:
        """The number of results. A `__len__` would make an empty store false."""
        return len(self._values)

    def find(self, name: str) -> Any | None:
        return self._values.get(name)

    def keep(self, name: str, value: Any) -> None:
        self._values = self._values | {name: value}
        if self._writes:
            atomic_write(self.path, self._encode)

    def close(self) -> None:
        """Delete the file: the output is written, and the results are no longer needed."""
        if self._writes:
            self.path.unlink(missing_ok=True)

    def _encode(self, stream: IO[bytes]) -> None:
        content = {"cache_key": self._key, "values": self._values}
        if self._tensors:
            import torch

            torch.save(content, stream)
        else:
            stream.write(json.dumps(content).encode())

    def _read(self) -> dict[str, Any]:
        try:
            if self._tensors:
                import torch

                found = torch.load(self.path, weights_only=True, map_location="cpu")
            else:
                found = json.loads(self.path.read_bytes())
            return dict(found["values"]) if found["cache_key"] == self._key else {}
        except Exception:  # no file, or a damaged one, for which torch and json raise errors of many kinds
            return {}


# -- JSON ------------------------------------------------------------------------------------------------------------


def strict_json(value: Any, *, max_depth: int | None = None) -> Any:
    """The value as strict JSON data: tuples become lists, NaN and infinities null, lone surrogates question marks."""
    if max_depth is not None and max_depth < 0:
        raise ValueError("nested too deeply")
    inside = None if max_depth is None else max_depth - 1
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {strict_json(str(name)): strict_json(item, max_depth=inside) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict_json(item, max_depth=inside) for item in value]
    return value
