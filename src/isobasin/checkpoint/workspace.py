"""A marked temporary folder beside an output, from which the output appears whole or not at all.

`.NAME.isobasin-tmp-XXXX/` holds the marker (process and host of the writer), `new/`, the folder to be, and
between two renames `old/`, the folder that it replaces. The marker lies outside `new/`, so that no output
carries it, and is removed last, so that whatever a killed run leaves can be recognised.
"""

import json
import os
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

from isobasin.errors import CheckpointError

_MARKER = "isobasin-writer.json"


class Workspace:
    """Makes the temporary folder; `new` is where to write, `commit` or `discard` how to end."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self._made_parents = _make_parents(out.parent)
        self._root = Path(tempfile.mkdtemp(prefix=_prefix(out), dir=out.parent))
        self.new, self._old = self._root / "new", self._root / "old"
        marker = {"pid": os.getpid(), "host": socket.gethostname()}
        try:
            (self._root / _MARKER).write_text(json.dumps(marker), encoding="utf-8")
            self.new.mkdir()
        except BaseException:
            self.discard()
            raise

    def commit(self) -> None:
        """Make `new` the output: data on disk first, then the renames; `discard` deletes the old folder."""
        for file in self.new.iterdir():
            _sync(file)
        _sync(self.new)
        if self._out.exists() and any(self._out.iterdir()):
            os.rename(self._out, self._old)
        os.rename(self.new, self._out)
        _sync(self._out.parent)

    def discard(self) -> None:
        """Leave nothing behind: after `commit` the old folder goes, without it the old folder stays."""
        _remove(self._root, self._out)
        for folder in self._made_parents:
            with suppress(OSError):  # not empty: someone else uses it by now
                folder.rmdir()


def remove_stale(out: Path) -> None:
    """Remove what killed writers to `out` left, and give back the folder one of them had moved aside.

    A folder is stale if its marker names this host and a process that is no more; any other is left alone.
    """
    if not out.parent.is_dir():
        return
    for root in sorted(out.parent.iterdir()):
        if root.name.startswith(_prefix(out)) and not root.is_symlink() and _is_stale(root / _MARKER):
            _remove(root, out)


def check_output(out: Path, inputs: list[Path], *, force: bool) -> None:
    """Refuse an output that would destroy something: an input, a file, a filled folder (without `force`)."""
    for folder in inputs:
        _check_apart(out, folder)
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(f"output {out} is a file, expected a folder: choose another name")
    if any(out.iterdir()) and not force:
        raise CheckpointError(f"output {out} exists and is not empty: choose another name, or replace it by force")
    if any(out.iterdir()) and not (out / "config.json").is_file():
        # A slip of the pen (`-o ~ --force`) must not delete a home.
        raise CheckpointError(f"output {out} holds no config.json, so it is no checkpoint: remove it yourself")


def _check_apart(out: Path, folder: Path) -> None:
    """`out` is not `folder`, nor inside it, nor does it contain it or a file that it links to."""
    resolved = folder.resolve()
    if out == resolved or out.is_relative_to(resolved):
        raise CheckpointError(f"output {out} is the input {folder} or inside it: choose another folder")
    links = (file.resolve() for file in folder.iterdir()) if folder.is_dir() else ()
    if any(path.is_relative_to(out) for path in (resolved, *links)):
        raise CheckpointError(f"input {folder} lies inside the output {out}: choose another folder")


def _prefix(out: Path) -> str:
    return f".{out.name}.isobasin-tmp-"


def _make_parents(folder: Path) -> list[Path]:
    """Make `folder` and the folders above it; those that were missing, innermost first."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return missing


def _is_stale(marker: Path) -> bool:
    try:
        found = json.loads(marker.read_text(encoding="utf-8"))
        return bool(found["host"] == socket.gethostname()) and not _is_alive(found["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _is_alive(pid: int) -> bool:
    if os.name != "posix" or type(pid) is not int or pid <= 0:  # elsewhere, signal 0 is no question
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def _sync(path: Path) -> None:
    """Have the data of a file, or the names in a folder, on the disk before going on."""
    if path.is_dir() and os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(root: Path, out: Path) -> None:
    """Delete a temporary folder; first give back the folder it holds if that was moved aside in vain."""
    if (root / "new").exists() and (root / "old").exists():  # stopped between the two renames
        try:
            os.rename(root / "old", out)
        except OSError:
            return  # someone else took the place: better a hidden folder too many than one too few
    for name in ("new", "old"):
        shutil.rmtree(root / name, ignore_errors=True)
    shutil.rmtree(root, ignore_errors=True)
