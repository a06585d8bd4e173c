"""A file appears whole or not at all."""

import os
from pathlib import Path

from isobasin.errors import IsobasinError


def check_place(path: Path, *, force: bool) -> None:
    """Whether a file can be written there, before anything is computed."""
    if path.is_dir():
        raise IsobasinError(f"{path}: a folder, expected the name of a file to write")
    if path.exists() and not force:
        raise IsobasinError(f"{path}: already there; choose another name or use --force")
    if not path.parent.is_dir():
        raise IsobasinError(f"{path.parent}: no such folder for {path.name}; create it first")


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the place, flush, rename over it."""
    temporary = path.with_name(f".{path.name}.isobasin-tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise IsobasinError(
            f"{path}: can not be written ({error.strerror}); free space or choose another place"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
