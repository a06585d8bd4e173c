"""Sources of data: errors, files, digests, the choice of samples, and data sets of the `datasets` library."""

import hashlib
import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isobasin.errors import IsobasinError

_PLAIN_NAMES = {"raw", "data", "test", "train", "val", "validation"}
_SPLITS = {"test": ("test", "validation", "dev"), "train": ("train",)}
_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(?<!\.[a-z]{2})(?<!\.[a-z]{3})")  # ids do not end like file names


class DataError(IsobasinError):
    """Data that can not be read, or that this model can not be measured on."""

    def __init__(self, data: Path | str, what: str) -> None:
        super().__init__(f"--data {data}: {what}")


def exists(data: Path) -> bool:
    """Whether there is a file or folder, or a one-line error."""
    try:
        return data.exists()
    except OSError as error:  # no permission, or a name that is too long
        raise DataError(f"{data!s:.200}", f"can not be read ({error.strerror}); give another path") from error


def check_exists(data: Path) -> None:
    if not exists(data):
        raise DataError(data, "no such file or folder")


def read_bytes(file: Path) -> bytes:
    """The content of a file, or a one-line error."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(file, f"can not be read ({error.strerror}): expected a file that you may read") from error


def short_name(data: Path | str) -> str:
    """A name for figures: that of the file without its suffix, or of the folder above if the name is generic.

    >>> short_name("sets/MNIST/raw"), short_name("imdb/test.csv"), short_name("input.txt")
    ('mnist', 'imdb', 'input')
    """
    path = Path(data)
    parts = [path.name.split(".")[0] or path.name, *(parent.name for parent in path.parents)]
    return next((part for part in parts if part and part.lower() not in _PLAIN_NAMES), parts[0]).lower()


def chosen(n: int, max_samples: int | None, seed: int) -> list[int]:
    """The indices of the samples that are used, in the order of the file: all of them, or a random subset.

    A random subset of a folder that is sorted by class stays balanced.
    """
    if max_samples is None or max_samples >= n:
        return list(range(n))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[:max_samples].sort().values.tolist()


def digest(parts: Iterable[bytes]) -> str:
    """sha256 over the parts, each preceded by its length, so that different sequences of parts differ."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


# -- the `datasets` library ------------------------------------------------------------------------------------------


def is_dataset(data: Path) -> bool:
    """Whether `save_to_disk` wrote this folder, or nothing exists there and the name may be a hub id."""
    if exists(data) and data.is_dir():
        return (data / "dataset_dict.json").is_file() or (
            (data / "state.json").is_file() and (data / "dataset_info.json").is_file()
        )
    return is_hub_id(data)


def is_hub_id(data: Path) -> bool:
    """Whether the name can be that of a data set on the hub; False if `datasets` is not installed."""
    return not exists(data) and bool(_HUB_ID.fullmatch(data.as_posix())) and _library(data, needed=False) is not None


def load_split(data: Path, split: str) -> Any:
    """One split, as a `datasets.Dataset`."""
    library = _library(data)
    try:
        found = library.load_from_disk(str(data)) if data.is_dir() else load_from_hub(data.as_posix())
    except Exception as error:  # the library and the network raise errors of many kinds
        folder = data.is_dir()
        what = "datasets can not load it" if folder else "no such file or folder, and no data set of that name"
        raise DataError(data, f"{what} ({type(error).__name__}: {error!s:.160})".replace("\n", " ")) from error
    if not isinstance(found, Mapping):
        return found
    for name in _SPLITS.get(split, (split,)):
        if name in found:
            return found[name]
    raise DataError(data, f"has the splits {', '.join(found)}; expected {' or '.join(_SPLITS.get(split, (split,)))}")


def load_from_hub(name: str) -> Any:
    """All splits of `owner/name`, or of `owner/name:configuration`."""
    hub, _, configuration = name.partition(":")
    return _library(Path(name)).load_dataset(hub, *([configuration] if configuration else []))


def split_columns(data: Path, split: str) -> dict[str, Sequence[Any]]:
    """All columns of a split except images, in memory."""
    found = load_split(data, split)
    plain = [name for name in found.column_names if type(found.features[name]).__name__ != "Image"]
    return {name: list(found[name]) for name in plain}


def _library(data: Path, *, needed: bool = True) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        if needed:
            raise IsobasinError(
                f"--data {data}: saved by datasets, which is not here: pip install 'isobasin[study]'"
            ) from error
        return None
