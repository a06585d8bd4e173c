"""The data sets of the study on disk or on the hub: known names and layouts, and readers of both splits."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.tasks.images import Images, pillow, read_images
from isobasin.tasks.source import DataError, load_from_hub, read_bytes
from isobasin.tasks.text import Label, Table, find_table, is_table, read_table

_MEGABYTE = 10**6
_DEFAULT_SIDE = 224  # of pictures that differ in size
_TEXT_SUFFIXES = ("", ".txt", ".text", ".md", ".raw", ".tokens")
_PARTS = {"train": ("train",), "valid": ("valid", "val", "dev", "heldout"), "test": ("test", "heldout")}


@dataclass(frozen=True)
class KnownDataset:
    """A data set that is known by name: its kind, its possible paths under the data root, its id on the hub."""

    kind: str  # image, text or lm
    places: tuple[str, ...]
    hub: str | None = None  # `owner/name`, or `owner/name:configuration`
    vocabulary: str = "bytes"


KNOWN: Mapping[str, KnownDataset] = MappingProxyType(
    {
        "mnist": KnownDataset("image", ("MNIST", "mnist"), "ylecun/mnist"),
        "fashion-mnist": KnownDataset(
            "image", ("FashionMNIST", "fashion-mnist", "fashion_mnist"), "zalando-datasets/fashion_mnist"
        ),
        "cifar10": KnownDataset("image", ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10"), "uoft-cs/cifar10"),
        "cifar100": KnownDataset("image", ("cifar-100-python", "cifar-100-binary", "cifar100"), "uoft-cs/cifar100"),
        "tiny-imagenet": KnownDataset("image", ("tiny-imagenet-200", "tiny-imagenet"), "zh-plus/tiny-imagenet"),
        "imagenet": KnownDataset("image", ("imagenet", "ILSVRC/Data/CLS-LOC", "ILSVRC2012"), "ILSVRC/imagenet-1k"),
        "ag_news": KnownDataset("text", ("ag_news", "ag_news_csv"), "fancyzhx/ag_news", "words"),
        "imdb": KnownDataset("text", ("imdb", "aclImdb"), "stanfordnlp/imdb", "words"),
        "dbpedia": KnownDataset("text", ("dbpedia", "dbpedia_csv", "dbpedia_14"), "fancyzhx/dbpedia_14", "words"),
        "enwik8": KnownDataset("lm", ("enwik8/enwik8", "enwik8")),
        "wikitext-103": KnownDataset(
            "lm", ("wikitext-103-raw", "wikitext-103", "wikitext"), "Salesforce/wikitext:wikitext-103-raw-v1"
        ),
        "one-billion-word": KnownDataset(
            "lm",
            ("1-billion-word-language-modeling-benchmark-r13output", "one-billion-word", "lm1b"),
            "billion-word-benchmark/lm1b",
        ),
        "tinyshakespeare": KnownDataset("lm", ("tinyshakespeare/input.txt", "tinyshakespeare")),
    }
)
SHIPPED: Mapping[str, KnownDataset] = MappingProxyType(
    {"digits": KnownDataset("image", ()), "shakespeare": KnownDataset("lm", ())}
)
NAMES = (*SHIPPED, *KNOWN)


def find(name: str, known: KnownDataset, root: Path | None) -> Path | str:
    """The first of its paths that exists under the root; otherwise the id on the hub, unless HF_HUB_OFFLINE is set."""
    for place in known.places:
        if root is not None and (root / place).exists():
            return root / place
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if known.hub is not None and not offline:
        return known.hub
    where = "no data root was given" if root is None else f"not under {root}"
    raise IsobasinError(f"data set {name!r}: {where}; expected {' or '.join(known.places)} there: give --data ROOT")


# -- labelled text ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelledTexts:
    """Texts and classes 0 … n − 1 of both splits, the names of the classes, and the files that were read."""

    train: tuple[tuple[str, ...], tuple[int, ...]]
    test: tuple[tuple[str, ...], tuple[int, ...]]
    classes: tuple[str, ...]
    files: tuple[Path, ...] = ()


def read_labelled_texts(place: Path | str) -> LabelledTexts:
    """A folder with a table for each split, folders `pos` and `neg` (aclImdb), or an id on the hub."""
    if isinstance(place, str):
        return _numbered([read_table(place, split=split) for split in ("train", "test")])
    if (place / "train" / "pos").is_dir():
        return LabelledTexts(_reviews(place / "train"), _reviews(place / "test"), ("neg", "pos"))
    files = [_table_of(place, split) for split in ("train", "test")]
    return _numbered([read_table(file) for file in files], tuple(files))


def _table_of(folder: Path, split: str) -> Path:
    if not folder.is_dir():
        raise DataError(folder, "one table; labelled text comes in two: a folder with train.csv and test.csv")
    if found := find_table(folder, split):
        return found
    raise DataError(folder, f"no table, or several, for the split {split!r}; expected {split}.csv")


def _numbered(tables: Sequence[Table], files: tuple[Path, ...] = ()) -> LabelledTexts:
    """Number the classes of both splits in the order of their numbers or names."""
    known = sorted({label for table in tables for label in table.labels}, key=_rank)
    numbers = {label: i for i, label in enumerate(known)}
    train, test = ((t.texts, tuple(numbers[label] for label in t.labels)) for t in tables)
    return LabelledTexts(train, test, tuple(map(str, known)), files)


def _rank(label: Label) -> tuple[int, str]:
    text = str(label)
    return (int(text), "") if text.lstrip("-").isdecimal() else (2**62, text)


def _reviews(folder: Path) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """One split of aclImdb: neg/*.txt and pos/*.txt, a file for each review."""
    found = [(f, i) for i, kind in enumerate(("neg", "pos")) for f in sorted((folder / kind).glob("*.txt"))]
    if not found:
        raise DataError(folder, "no reviews; expected neg/*.txt and pos/*.txt")
    return tuple(read_bytes(f).decode("utf-8", "replace") for f, _ in found), tuple(i for _, i in found)


# -- long text -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextParts:
    """The bytes of the training, validation and test part of a text, and the files that were read."""

    train: bytes
    valid: bytes
    test: bytes
    files: tuple[Path, ...] = ()


def read_text_parts(place: Path | str) -> TextParts:
    """A text file, which is cut into parts; a folder with a file (or folder) for each part; or an id on the hub."""
    if isinstance(place, str):
        return _from_hub(place)
    if place.is_file():
        return cut(read_bytes(place), (place,), enwik8=place.stem.startswith("enwik8"))
    found = {part: _part_files(place, names) for part, names in _PARTS.items()}
    if found["train"] and found["test"]:
        valid = found["valid"] or found["test"]
        files = tuple(dict.fromkeys((*found["train"], *valid, *found["test"])))
        train, held_out, test = (b"".join(map(read_bytes, part)) for part in (found["train"], valid, found["test"]))
        return TextParts(train, held_out, test, files)
    if is_table(place):
        raise DataError(place, "a folder of tables, which a language model does not read; give text files")
    everything = [f for f in sorted(place.rglob("*")) if f.is_file() and f.suffix in _TEXT_SUFFIXES]
    if not everything or any(_is_named(f.name, names) for f in everything for names in _PARTS.values()):
        raise DataError(place, "expected text files for training and for tests, such as wiki.train.tokens")
    return cut(b"\n".join(map(read_bytes, everything)), tuple(everything))


def _part_files(folder: Path, names: Sequence[str]) -> list[Path]:
    """The file of a part (wiki.train.tokens, train.txt), or all files of its folder (training-…)."""
    for path in sorted(folder.iterdir()):
        if _is_named(path.name, names):
            if path.is_dir():
                return sorted(f for f in path.iterdir() if f.is_file())
            if path.suffix in _TEXT_SUFFIXES:
                return [path]
    return []


def _is_named(name: str, names: Sequence[str]) -> bool:
    return name.lower().startswith(tuple(names)) or any(word in names for word in name.lower().split("."))


def cut(content: bytes, files: tuple[Path, ...] = (), *, enwik8: bool = False) -> TextParts:
    """Cut a text into 90 %, 5 % and 5 %; of an incomplete enwik8 the last two megabytes are validation and test.

    >>> [len(part) for part in (lambda t: (t.train, t.valid, t.test))(cut(bytes(1000)))]
    [900, 50, 50]
    """
    incomplete = enwik8 and len(content) != 100 * _MEGABYTE
    last = _MEGABYTE if incomplete and len(content) > 4 * _MEGABYTE else len(content) // 20
    if last < 2:
        raise IsobasinError(f"a text of {len(content)} bytes is too short to be cut into training and test")
    return TextParts(content[: -2 * last], content[-2 * last : -last], content[-last:], files)


def _from_hub(name: str) -> TextParts:
    try:
        found = load_from_hub(name)
        parts = {split: "\n".join(found[split]["text"]).encode() for split in found}
    except Exception as error:  # the library and the network raise errors of many kinds
        why = f"{error!s:.120}".replace("\n", " ")
        raise IsobasinError(f"data set {name!r} is not to be had from the hub ({why}): give --data ROOT") from error
    return TextParts(parts["train"], parts.get("validation", parts["test"]), parts["test"])


# -- images ----------------------------------------------------------------------------------------------------------


def read_pixels(place: Path | str, split: str, side: int | None) -> tuple[Tensor, Tensor, Images]:
    """Pixels uint8 (N, channels, height, width), classes int64, and the images as read.

    `side` resizes the images to a square; images that differ in size are resized anyway.
    """
    images = read_images(place, split)
    pixels = images.pixels
    if not isinstance(pixels, np.ndarray):
        sizes = {pixels[i].shape[:2] for i in range(min(len(pixels), 64))}
        same = len(sizes) == 1 and sizes == {(size[0],) * 2 for size in sizes}
        side = side or (next(iter(sizes))[0] if same else _DEFAULT_SIDE)
    if side is not None and not (isinstance(pixels, np.ndarray) and pixels.shape[1:3] == (side, side)):
        channels = 1 if isinstance(pixels, np.ndarray) and pixels.shape[3] == 1 else 3
        pixels = np.stack([_resized(pixels[i], side, channels) for i in range(len(pixels))])
    assert isinstance(pixels, np.ndarray)
    if pixels.shape[1] != pixels.shape[2]:
        raise DataError(place, f"pictures of {pixels.shape[1]} × {pixels.shape[2]}; a square is expected: give a side")
    planes = torch.from_numpy(np.array(pixels)).permute(0, 3, 1, 2).contiguous()
    return planes, torch.as_tensor(images.labels, dtype=torch.int64), images


def _resized(picture: np.ndarray, side: int, channels: int) -> np.ndarray:
    """The centre square, as `side` × `side` pixels."""
    image = pillow()
    wide = picture if picture.shape[2] == channels else picture.repeat(channels, axis=2)
    if wide.shape[:2] == (side, side):
        return wide
    found = image.fromarray(wide[:, :, 0] if channels == 1 else wide)
    short = min(found.size)
    left, top = (found.width - short) // 2, (found.height - short) // 2
    square = found.resize((side, side), image.Resampling.BILINEAR, box=(left, top, left + short, top + short))
    return np.asarray(square).reshape(side, side, channels)
