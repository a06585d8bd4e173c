"""Text to train on: labelled rows, or one long text cut into training, validation and test."""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.tasks.source import DataError, read_bytes
from isobasin.tasks.tables import ROWS, Label, Table, is_table, read_table

MEGABYTE = 10**6
_TEXT = ("", ".txt", ".text", ".md", ".raw", ".tokens")
_PARTS = {"train": ("train",), "valid": ("valid", "val", "dev", "heldout"), "test": ("test", "heldout")}


@dataclass(frozen=True)
class Rows:
    """Texts with the number of their class, 0 … n − 1, in both splits; the files they came from."""

    train: tuple[tuple[str, ...], tuple[int, ...]]
    test: tuple[tuple[str, ...], tuple[int, ...]]
    classes: tuple[str, ...]
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Text:
    """Bytes of the three parts of a text."""

    train: bytes
    valid: bytes
    test: bytes
    files: tuple[Path, ...] = ()


def read_rows(place: Path | str) -> Rows:
    """A folder with a table for each split, `pos` and `neg` folders (aclImdb), or an id on the hub."""
    if isinstance(place, str):
        tables, files = [read_table(place, split=split) for split in ("train", "test")], []
    elif (place / "train" / "pos").is_dir():
        return _review_folders(place)
    else:
        files = [_table_of(place, split) for split in ("train", "test")]
        tables = [read_table(file) for file in files]
    return _numbered(tables, tuple(files))


def _table_of(folder: Path, split: str) -> Path:
    """`train.csv`, else `train_subset.csv`, else the only table whose name begins so."""
    if not folder.is_dir():
        raise DataError(folder, "one table; labelled text comes in two: a folder with train.csv and test.csv")
    files = sorted(f for f in folder.iterdir() if f.is_file() and f.suffix in ROWS)
    for fits in (
        [f for f in files if f.stem == split],
        [f for f in files if f.stem == f"{split}_subset"],
        [f for f in files if f.stem.startswith(split)],
    ):
        if len(fits) == 1:
            return fits[0]
    raise DataError(folder, f"no table, or several, for the split {split!r}; expected {split}.csv")


def _numbered(tables: Sequence[Table], files: tuple[Path, ...]) -> Rows:
    """Classes in the order of their numbers or names; both splits are counted alike."""
    known = sorted({label for table in tables for label in table.labels}, key=_rank)
    numbers = {label: i for i, label in enumerate(known)}
    train, test = ((t.texts, tuple(numbers[label] for label in t.labels)) for t in tables)
    return Rows(train, test, tuple(map(str, known)), files)


def _rank(label: Label) -> tuple[int, str]:
    text = str(label)
    return (int(text), "") if text.lstrip("-").isdecimal() else (2**62, text)


def _review_folders(place: Path) -> Rows:
    """train/neg, train/pos, test/neg, test/pos with a file for each review."""

    def split(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
        found = [(f, i) for i, kind in enumerate(("neg", "pos")) for f in sorted((place / name / kind).glob("*.txt"))]
        if not found:
            raise DataError(place / name, "no reviews; expected neg/*.txt and pos/*.txt")
        return tuple(read_bytes(f).decode("utf-8", "replace") for f, _ in found), tuple(i for _, i in found)

    return Rows(split("train"), split("test"), ("neg", "pos"))


def read_parts(place: Path | str) -> Text:
    """A text file, cut; a folder with a file (or folder) for each part; or an id on the hub."""
    if isinstance(place, str):
        return _from_hub(place)
    if place.is_file():
        return cut(read_bytes(place), (place,), enwik8=place.stem.startswith("enwik8"))
    found = {part: _part_files(place, names) for part, names in _PARTS.items()}
    if found["train"] and found["test"]:
        valid = found["valid"] or found["test"]
        files = tuple(dict.fromkeys((*found["train"], *valid, *found["test"])))
        train, held, test = (b"".join(map(read_bytes, part)) for part in (found["train"], valid, found["test"]))
        return Text(train, held, test, files)
    if is_table(place):
        raise DataError(place, "a folder of tables, which a language model does not read; give text files")
    everything = [f for f in sorted(place.rglob("*")) if f.is_file() and f.suffix in _TEXT]
    if not everything or any(_named(f.name, names) for f in everything for names in _PARTS.values()):
        raise DataError(place, "expected text files for training and for tests, such as wiki.train.tokens")
    return cut(b"\n".join(map(read_bytes, everything)), tuple(everything))


def _part_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """Files of a part: named so (wiki.train.tokens, train.txt), or all in a folder named so (training-…)."""
    for path in sorted(folder.iterdir()):
        if _named(path.name, names):
            if path.is_dir():
                return sorted(f for f in path.iterdir() if f.is_file())
            if path.suffix in _TEXT:
                return [path]
    return []


def _named(name: str, names: Sequence[str]) -> bool:
    return name.lower().startswith(tuple(names)) or any(word in names for word in name.lower().split("."))


def cut(content: bytes, files: tuple[Path, ...] = (), *, enwik8: bool = False) -> Text:
    """90, 5 and 5 hundredths; of an enwik8 that is not whole the last megabyte is the test, that before validation.

    >>> [len(part) for part in (lambda t: (t.train, t.valid, t.test))(cut(bytes(1000)))]
    [900, 50, 50]
    """
    short = enwik8 and len(content) != 100 * MEGABYTE
    last = MEGABYTE if short and len(content) > 4 * MEGABYTE else len(content) // 20
    if last < 2:
        raise IsobasinError(f"a text of {len(content)} bytes is too short to be cut into training and test")
    return Text(content[: -2 * last], content[-2 * last : -last], content[-last:], files)


def _from_hub(name: str) -> Text:
    try:
        library: Any = importlib.import_module("datasets")
        hub, _, configuration = name.partition(":")
        found = library.load_dataset(hub, configuration or None)
        parts = {split: "\n".join(found[split]["text"]).encode() for split in found}
    except Exception as error:  # whatever the library, the network or the hub may say
        why = f"{error!s:.120}".replace("\n", " ")
        raise IsobasinError(f"data set {name!r} is not to be had from the hub ({why}): give --data ROOT") from error
    return Text(parts["train"], parts.get("validation", parts["test"]), parts["test"])
