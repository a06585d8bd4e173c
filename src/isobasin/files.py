"""Files and folders that appear whole or not at all, and the resume file of a long computation.

An output is first written into a temporary folder beside it, `.NAME.isobasin-tmp-XXXX/`:

isobasin-writer.json    the name of the output and the machine of the writer; locked as long as the writer lives
new                     what the output will be, a file or a folder
old                     what the output was, only where the system can not exchange two folders
after.json              for an output that appears together with another one: how to recognise that one

Then `new` takes the place of the output in one step. A killed writer leaves its temporary folder and no lock; the next
writer to the same output finishes or undoes what it began (`recover`).
"""

import atexit
import ctypes
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal, Protocol, Self, runtime_checkable

from isobasin.errors import IsobasinError

Content = bytes | str | Callable[[IO[bytes]], object]
"""What a file shall hold: bytes, text (written as UTF-8), or a function that writes to the stream it is given."""

_MARKER, _AFTER = "isobasin-writer.json", "after.json"
_TEMPORARY = ".isobasin-tmp-"
_MAX_NAME = 200  # bytes: file systems allow 255, and temporary names are longer than those of the outputs
_LIVE: dict[Path, tuple[int, Path]] = {}  # temporary folders that are in use: process, output
_RESERVED: dict[Path, tuple[int, int | None]] = {}  # lock files of outputs: process, open file


# -- outputs ---------------------------------------------------------------------------------------------------------


def atomic_write(path: Path, data: Content, *, error: type[IsobasinError] = IsobasinError) -> None:
    """Write a temporary file beside `path`, flush it to the disk, and rename it to `path`.

    A reader sees the old file or the new one, also if the process is killed at any moment.
    """
    atomic_write_all({path: data}, error=error)


def atomic_write_all(contents: Mapping[Path, Content], *, error: type[IsobasinError] = IsobasinError) -> None:
    """The same for several files: none is renamed before all are on the disk."""
    (path, data), *others = contents.items()
    with disk_errors(path, error), AtomicOutput(path) as first:
        first.write(data)
        commit_with(first, dict(others), error=error)


def commit_with(
    first: "AtomicOutput", files: Mapping[Path, Content], *, error: type[IsobasinError] = IsobasinError
) -> None:
    """Commit an output and, directly after it, files that belong to it; none if one of them can not be written.

    If the process is killed in between, `recover` puts the other files in place.
    """
    first.flush()
    with ExitStack() as stack:
        others = []
        for path, data in files.items():
            with disk_errors(path, error):
                others.append(stack.enter_context(AtomicOutput(path)))
                others[-1].write(data)
                others[-1].follow(first)
        first.commit()
        for other in others:
            with disk_errors(other.path, error):
                other.commit()


@contextmanager
def disk_errors(path: Path, error: type[IsobasinError] = IsobasinError) -> Iterator[None]:
    """Raise an error of the operating system as one line that names the output."""
    try:
        yield
    except OSError as failure:
        reason = failure.strerror or failure
        raise error(f"{path}: can not be written ({reason}); free space or choose another place") from failure


class AtomicOutput:
    """An output that appears, or is replaced, whole or not at all: write to `new`, then `commit`.

    With `folder`, `new` is an empty folder, and folders above `path` are created. At the end of a `with` block the
    temporary folder is removed; without `commit` nothing has changed.
    """

    def __init__(self, path: Path, *, folder: bool = False) -> None:
        recover(path)
        self.path = path
        self._created_parents = [parent for parent in path.parents if not parent.exists()]  # innermost first
        try:
            if folder:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._root, self._lock = _make_temporary(path)
            self.new, self._old = self._root / "new", self._root / "old"
            if folder:
                self.new.mkdir()
        except BaseException:
            self.discard()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def write(self, data: Content) -> None:
        """Write `new` as a file, and flush it to the disk."""
        with self.new.open("wb") as stream:
            if callable(data):
                data(stream)
            else:
                stream.write(data.encode() if isinstance(data, str) else data)
            stream.flush()
            os.fsync(stream.fileno())

    def flush(self) -> None:
        """Flush a folder `new` with its content to the disk."""
        if self.new.is_dir():
            for path in (*self.new.rglob("*"), self.new):
                _sync(path)

    def follow(self, first: "AtomicOutput") -> None:
        """Let this output be due as soon as `first` is in place."""
        after = {"path": str(first.path.absolute()), "stamps": _stamps(first.new)}
        (self._root / _AFTER).write_text(json.dumps(after), encoding="utf-8")

    def commit(self) -> None:
        """Put `new`, flushed to the disk, in the place of the output; `discard` then deletes the old one."""
        if not (self.path.is_dir() and any(self.path.iterdir())):
            os.replace(self.new, self.path)
        elif not _exchange(self.new, self.path):
            os.rename(self.path, self._old)
            os.rename(self.new, self.path)
        _sync(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary folder: after `commit` with the old output, without it the old output stays."""
        if hasattr(self, "_root"):
            _settle(self._root, self.path)
            os.close(self._lock)
            _LIVE.pop(self._root, None)
            del self._root
        for parent in self._created_parents:
            with suppress(OSError):  # not empty: another process uses it
                parent.rmdir()


def remove(path: Path) -> None:
    """Delete a file or folder: it disappears in one step, not file by file."""
    with AtomicOutput(path) as place, suppress(FileNotFoundError):
        os.rename(path, place.new)


def _make_temporary(path: Path) -> tuple[Path, int]:
    """Make the temporary folder of an output with its marker; return it and the handle that keeps the lock."""
    while True:
        root = path.with_name(_prefix(path) + secrets.token_hex(4))
        _LIVE[root] = os.getpid(), path  # first, so that no interrupt leaves a folder that is not listed
        root.mkdir(mode=0o700)
        try:
            return root, _write_marker(root / _MARKER, path)
        except FileNotFoundError:  # `recover` in another process took the folder for one that was left
            del _LIVE[root]
        except BaseException:
            _settle(root, path)
            del _LIVE[root]
            raise


def _write_marker(file: Path, path: Path) -> int:
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        _lock(handle, wait=True)
        os.write(handle, json.dumps({"output": path.name, **_machine()}).encode())
        _check_same_file(handle, file)
    except BaseException:
        os.close(handle)
        raise
    return handle


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False where the system or the file system can not."""
    names = os.fsencode(one), os.fsencode(other)
    try:
        libc = ctypes.CDLL(None)
        if sys.platform == "darwin":
            return bool(libc.renamex_np(*names, 2) == 0)  # RENAME_SWAP
        return bool(libc.renameat2(-100, names[0], -100, names[1], 2) == 0)  # AT_FDCWD, RENAME_EXCHANGE
    except (AttributeError, OSError, TypeError):  # no such function; no C library to load
        return False


def _sync(path: Path) -> None:
    """Flush the data of a file, or the names in a folder, to the disk."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _prefix(path: Path) -> str:
    return f".{_short(path.name)}{_TEMPORARY}"


def _short(name: str) -> str:
    """The name of an output as a part of other names: as it is, or its hash if it is long."""
    data = os.fsencode(name)
    return name if len(data) <= _MAX_NAME else hashlib.sha256(data).hexdigest()


# -- recovery --------------------------------------------------------------------------------------------------------


def recover(path: Path) -> None:
    """Finish or undo what killed writers to `path` began, and remove their temporary folders.

    A writer counts as killed if the lock of its marker is free and it ran on this machine; others are left alone.
    """
    try:
        found = [root for root in path.parent.iterdir() if root.name.startswith(_prefix(path))]
    except OSError:  # no folder, or one that can not be listed
        return
    for root in sorted(found):
        with suppress(OSError):  # another process recovers it, or it is not what a writer leaves
            _recover_from(root, path)


def recover_all(folder: Path) -> None:
    """The same for all outputs in `folder` and for writers on any machine. The caller knows that no writer runs."""
    for root in folder.glob(f".*{_TEMPORARY}*"):
        _settle(root, folder / root.name[1:].rpartition(_TEMPORARY)[0])


@atexit.register
def remove_unfinished() -> None:
    """Settle what this process began and an interrupt left: it may arrive between two lines, before a `with` block."""
    for root, (process, path) in list(_LIVE.items()):
        if process == os.getpid():
            _settle(root, path)
        del _LIVE[root]


def _recover_from(root: Path, path: Path) -> None:
    marker = root / _MARKER
    if root.is_symlink():
        return
    try:
        handle = os.open(marker, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        root.rmdir()  # if it is empty, which it is before the marker is written and after it is deleted
        return
    try:
        if not _lock(handle, wait=False):
            return
        _check_same_file(handle, marker)
        found = _read_marker(handle)
        if found is None and [file.name for file in root.iterdir()] == [_MARKER]:  # killed while it wrote the marker
            marker.unlink()
            root.rmdir()
        elif found and found.get("output") == path.name and _is_this_machine(found):
            _settle(root, path)
    finally:
        os.close(handle)


def _settle(root: Path, path: Path) -> None:
    """Finish or undo an output, and delete its temporary folder, the marker last."""
    new, old = root / "new", root / "old"
    if new.exists() and old.exists():  # stopped between the two renames
        try:
            os.rename(old, path)
        except OSError:
            return  # the place is taken: keeping a hidden folder is safer than deleting the only copy
    elif new.exists() and _is_due(root / _AFTER):
        with suppress(OSError):
            os.replace(new, path)
    for part in (new, old, root / _AFTER, root / _MARKER, root):
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            with suppress(OSError):  # it is not there
                part.unlink()


def _is_due(after: Path) -> bool:
    """Whether the output is in place that this one belongs to."""
    try:
        found = json.loads(after.read_text(encoding="utf-8"))
        return bool(found["stamps"]) and bool(found["stamps"].items() <= _stamps(Path(found["path"])).items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _stamps(path: Path) -> dict[str, str]:
    """What recognises a file, or the files in a folder, after a rename."""
    files = path.iterdir() if path.is_dir() else [path]
    stats = {file.name if path.is_dir() else "": file.stat() for file in files}
    return {name: f"{stat.st_ino} {stat.st_mtime_ns} {stat.st_size}" for name, stat in stats.items()}


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock an open file until this process ends or closes it; False if another one has it, or without such locks."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


def _check_same_file(handle: int, file: Path) -> None:
    if not os.path.samestat(os.fstat(handle), file.stat()):
        raise FileNotFoundError(file)


def _machine() -> dict[str, str | None]:
    """The name of this machine, and (Linux) a number that its containers share and that changes when it starts."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = None
    return {"host": socket.gethostname(), "boot": boot}


def _is_this_machine(marker: Mapping[str, Any]) -> bool:
    here = _machine()
    return marker.get("host") == here["host"] or (here["boot"] is not None and marker.get("boot") == here["boot"])


def _read_marker(handle: int) -> dict[str, Any] | None:
    try:
        found = json.loads(os.read(handle, 2**16))
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


# -- one writer at a time --------------------------------------------------------------------------------------------


def reserve(path: Path) -> None:
    """Refuse an output that another process is computing, and keep it for this one until `release`.

    The lock of the file `.NAME.isobasin-lock` beside it ends with the process; the next writer deletes what a killed
    one left. Without effect where the system has no such locks.
    """
    lock = path.absolute().with_name(f".{_short(path.name)}.isobasin-lock")
    if lock in _RESERVED or (path.exists() and not (path.is_file() or path.is_dir())):
        return
    while True:
        _RESERVED[lock] = os.getpid(), None  # first, so that no interrupt leaves a file that is not listed
        try:
            handle = _open_lock(lock)
        except OSError:  # the folder is not there, or can not be written: what writes the output says so
            del _RESERVED[lock]
            return
        if handle is None:
            del _RESERVED[lock]
            raise IsobasinError(
                f"{path}: another isobasin is computing it; wait until it has finished, or choose another name"
            )
        _RESERVED[lock] = os.getpid(), handle
        try:
            _check_same_file(handle, lock)
        except FileNotFoundError:  # the other one has just finished, and deleted it
            os.close(handle)
            continue
        return


def release() -> None:
    """Give up all outputs that this process keeps."""
    for lock, (process, handle) in list(_RESERVED.items()):
        if process == os.getpid():
            with suppress(OSError):
                if handle is not None or _open_lock(lock) is not None:
                    lock.unlink()
        if _RESERVED.pop(lock, None) and handle is not None:
            os.close(handle)


atexit.register(release)


def _open_lock(file: Path) -> int | None:
    """The handle of a lock file that this process has locked; None if another one has."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
    if not _is_locked(handle):
        return handle
    os.close(handle)
    return None


def _is_locked(handle: int) -> bool:
    """Whether another process has the lock of an open file; if not, this one has it now."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # no such locks
        return False
    return False


# -- checks ----------------------------------------------------------------------------------------------------------


FileKind = Literal["transform", "witness", "path result", "page", "figure"]
# The entry in a safetensors header that says what we wrote.
SAFETENSORS_MARKS: dict[FileKind, str] = {"transform": "isobasin-transform", "witness": "isobasin-witness"}
_MAX_HEADER = 100_000_000  # bytes, as in the safetensors library
# What the other files that we write have in their first bytes.
_BEGINNINGS: dict[FileKind, tuple[int, re.Pattern[bytes]]] = {
    "path result": (100, re.compile(rb'\{\s*"kind":\s*"isobasin\.path"')),
    "page": (2**20, re.compile(rb'(?is)<!doctype html.*<p class="brand">isobasin</p>')),
    "figure": (
        2**12,
        re.compile(rb"(?s)(\x89PNG|<\?xml).*Matplotlib|%PDF-1\.4\n%\xac\xdc \xab\xba"),
    ),  # as matplotlib writes
}


def check_output_file(
    path: Path,
    *,
    force: bool,
    kind: FileKind | None = None,
    inputs: Sequence[Path] = (),
    what: str | None = None,
    error: type[IsobasinError] = IsobasinError,
) -> None:
    """Raise if no file can be written at `path`, before anything is computed; it must not be one of the `inputs`, nor
    lie inside one. With `force` it replaces a file of its `kind` only."""
    recover(path)
    remove_obsolete(path)
    if path.is_dir():
        raise error(f"{path}: a folder, expected the name of a file to write")
    if path.exists() and not path.is_file():
        raise error(f"{path}: a device or pipe, expected the name of a file to write")
    if path.exists() and not force:
        raise error(f"{path}: already there; choose another name, or use --force to replace it")
    if not path.parent.is_dir():
        raise error(f"{path.parent}: no such folder for {what or path.name}; create it first")
    for folder in inputs:
        if path.resolve() == folder.resolve() or (path.exists() and folder.exists() and path.samefile(folder)):
            raise error(f"{path}: is the input {folder}; choose another name")
        if path.resolve().is_relative_to(folder.resolve()):
            raise error(f"{path}: lies inside the input {folder}; choose a place beside it")
    if kind is not None:
        check_kind(path, kind, error=error)


def check_kind(path: Path, kind: FileKind, *, error: type[IsobasinError] = IsobasinError) -> None:
    """Raise if there is a file at `path` that we did not write as this kind."""
    if path.exists() and not is_of_kind(path, kind):
        raise error(f"{path}: not a {kind} of isobasin, so it is not replaced; choose another name, or delete it first")


def is_of_kind(path: Path, kind: FileKind) -> bool:
    """Whether a file is what we write as this kind; an empty one is of any kind."""
    with path.open("rb") as stream:
        if kind in SAFETENSORS_MARKS:
            return path.stat().st_size == 0 or SAFETENSORS_MARKS[kind] in _safetensors_metadata(stream)
        size, beginning = _BEGINNINGS[kind]
        start = stream.read(size)
    return not start or beginning.match(start) is not None


def _safetensors_metadata(stream: IO[bytes]) -> dict[str, Any]:
    """The metadata of a safetensors file; empty if it is none."""
    try:
        header = json.loads(stream.read(min(int.from_bytes(stream.read(8), "little"), _MAX_HEADER)))
        return dict(header["__metadata__"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return {}


# -- resuming --------------------------------------------------------------------------------------------------------


@runtime_checkable
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
        self.output, self.path = output, output.with_name(f".{_short(output.name)}.isobasin-{kind}")
        text = json.dumps(cache_key, sort_keys=True, default=str)
        self._key = hashlib.sha256(text.encode()).hexdigest()
        self._tensors, self._writes = tensors, writes
        if writes:
            recover(self.path)  # the last result may be there already, and nothing would be written again
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


def remove_obsolete(output: Path) -> None:
    """Delete resume files that are older than the output they were for: its writer was killed before it did."""
    with suppress(OSError, ValueError):  # no output; a folder without files
        written = min(file.stat().st_mtime_ns for file in (output.iterdir() if output.is_dir() else [output]))
        # A pair of models has a file of its own; its labels are letters or numbers.
        name = re.compile(rf"\.{re.escape(_short(output.name))}(\.\w+-\w+)?\.isobasin-(partial|learning)")
        for file in output.parent.iterdir():
            if name.fullmatch(file.name) and file.stat().st_mtime_ns <= written:
                file.unlink()


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
