"""A data set of the `datasets` library: a folder it saved, or a hub id where there is a network."""

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.tasks.source import DataError

_SPLITS = {"test": ("test", "validation", "dev"), "train": ("train",)}
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(?<!\.[a-z]{2})(?<!\.[a-z]{3})")  # a file's suffix is no id


def is_dataset(data: Path) -> bool:
    """Whether `save_to_disk` wrote this folder, or nothing is there and the name may be a hub id."""
    if data.is_dir():
        return (data / "dataset_dict.json").is_file() or (
            (data / "state.json").is_file() and (data / "dataset_info.json").is_file()
        )
    return is_hub_id(data)


def is_hub_id(data: Path) -> bool:
    """Whether the name could be a data set's on the hub: only where `datasets` is there to ask."""
    return not data.exists() and bool(_HUB_ID.fullmatch(data.as_posix())) and _library(data, needed=False) is not None


def open_dataset(data: Path, split: str) -> Any:
    """One split, as the library gives it."""
    library = _library(data)
    try:
        found = library.load_from_disk(str(data)) if data.is_dir() else library.load_dataset(data.as_posix())
    except Exception as error:  # whatever the library, the network or the hub may say
        folder = data.is_dir()
        what = "datasets can not load it" if folder else "no such file or folder, and no data set of that name"
        raise DataError(data, f"{what} ({type(error).__name__}: {error!s:.160})".replace("\n", " ")) from error
    if not isinstance(found, Mapping):
        return found
    for name in _SPLITS.get(split, (split,)):
        if name in found:
            return found[name]
    raise DataError(data, f"has the splits {', '.join(found)}; expected {' or '.join(_SPLITS.get(split, (split,)))}")


def dataset_columns(data: Path, split: str) -> dict[str, Sequence[Any]]:
    """All columns but pictures, in memory."""
    found = open_dataset(data, split)
    plain = [name for name in found.column_names if type(found.features[name]).__name__ != "Image"]
    return {name: list(found[name]) for name in plain}


def _library(data: Path, *, needed: bool = True) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        if needed:
            raise IsobasinError(f"--data {data}: saved by datasets, which is not here: pip install datasets") from error
        return None
