"""Single files: written whole or not at all, and never in somebody's way."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from isobasin.errors import IsobasinError

Fill = Callable[[IO[bytes]], object]  # writes to the stream it is given


def write_whole(path: Path, data: bytes | Fill, *, error: type[IsobasinError] = IsobasinError) -> None:
    """Write beside the place, flush, rename over it: a reader, or a kill, meets the old file or the new one."""
    aside = path.with_name(f".{path.name[:100]}.isobasin-tmp-{os.getpid()}")
    try:
        with aside.open("wb") as stream:
            stream.write(data) if isinstance(data, bytes) else data(stream)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    except OSError as failure:
        raise error(f"{path}: can not be written ({failure.strerror}); free space or choose another place") from failure
    finally:
        with suppress(OSError):  # it is gone after the rename, and a place without a folder never had it
            aside.unlink()


def write_text(path: Path, text: str) -> None:
    """The same for text, in UTF-8."""
    write_whole(path, text.encode())


def check_place(
    path: Path,
    *,
    force: bool,
    inputs: tuple[Path, ...] = (),
    what: str | None = None,
    error: type[IsobasinError] = IsobasinError,
) -> None:
    """Whether a file can be written there, before anything is computed; it must not lie inside the folders `inputs`."""
    if path.is_dir():
        raise error(f"{path}: a folder, expected the name of a file to write")
    if path.exists() and not force:
        raise error(f"{path}: already there; choose another name or use --force")
    if not path.parent.is_dir():
        raise error(f"{path.parent}: no such folder for {what or path.name}; create it first")
    for folder in inputs:
        if path.resolve().is_relative_to(folder.resolve()):
            raise error(f"{path}: lies inside the input {folder}; choose a place beside it")
