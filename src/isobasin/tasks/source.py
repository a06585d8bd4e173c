"""Where data comes from: the words of a complaint about it, and which of its samples are used."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import torch

from isobasin.errors import IsobasinError

_PLAIN_NAMES = {"raw", "data", "test", "train", "val", "validation"}


class DataError(IsobasinError):
    """Data that can not be read, or that this model can not be measured on."""

    def __init__(self, data: Path | str, what: str) -> None:
        super().__init__(f"--data {data}: {what}")


def check_exists(data: Path) -> None:
    try:
        found = data.exists()
    except OSError as error:  # no permission to look, a name too long
        raise DataError(f"{data!s:.200}", f"can not be read ({error.strerror})") from error
    if not found:
        raise DataError(data, "no such file or folder")


def read_bytes(file: Path) -> bytes:
    """The whole file, or one line that says why not."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(file, f"can not be read ({error.strerror}): expected a file that you may read") from error


def short_name(data: Path | str) -> str:
    """A word for figures: the file's name without its suffix, or the folder above where that says nothing.

    >>> short_name("sets/MNIST/raw"), short_name("imdb/test.csv"), short_name("input.txt")
    ('mnist', 'imdb', 'input')
    """
    path = Path(data)
    parts = [path.name.split(".")[0] or path.name, *(parent.name for parent in path.parents)]
    return next((part for part in parts if part and part.lower() not in _PLAIN_NAMES), parts[0]).lower()


def chosen(n: int, max_samples: int | None, seed: int) -> list[int]:
    """The samples used, in the order of the file: all, or the first of a random order.

    A folder sorted by class stays balanced when only a part of it is used.
    """
    if max_samples is None or max_samples >= n:
        return list(range(n))
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[:max_samples].sort().values.tolist()


def digest(parts: Iterable[bytes]) -> str:
    """sha256 over parts, each behind its length, so that no two sequences of parts look alike."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()
