"""Small files, written whole or not at all."""

import os
from pathlib import Path

from isobasin.errors import IsobasinError


def write_text(path: Path, text: str) -> None:
    """Write beside, then rename: whoever reads sees the old file or the new one."""
    aside = path.with_name(f".{path.name[:100]}.isobasin-tmp-{os.getpid()}")
    try:
        with aside.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    except OSError as error:
        raise IsobasinError(f"{path} can not be written ({error.strerror}): choose another place") from error
    finally:
        aside.unlink(missing_ok=True)


def check_place(path: Path, *, force: bool, inputs: tuple[Path, ...] = ()) -> None:
    """Refuse a result file that is in the way, before anything is computed."""
    if path.is_dir():
        raise IsobasinError(f"output {path} is a folder, expected the name of a file")
    if path.exists() and not force:
        raise IsobasinError(f"output {path} exists already; use --force to replace it, or choose another name")
    if not path.parent.is_dir():
        raise IsobasinError(f"output {path}: there is no folder {path.parent}; make it first")
    for folder in inputs:
        if path.resolve().is_relative_to(folder.resolve()):
            raise IsobasinError(f"output {path} lies inside the input {folder}; choose a place beside it")
