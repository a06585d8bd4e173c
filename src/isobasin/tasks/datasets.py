"""Data sets for training and measuring, by name or by path, and the augmentation of training batches."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.data import shipped
from isobasin.errors import IsobasinError
from isobasin.tasks.images import Images, PictureFiles, pillow, read_images, scale_pixels
from isobasin.tasks.source import DataError, chosen, digest, exists, load_from_hub, read_bytes
from isobasin.tasks.task import Batch, Task
from isobasin.tasks.text import Label, Table, find_table, is_table, read_table
from isobasin.tasks.tokenizer import PAD, UNKNOWN, VOCABULARIES, Vocabulary, make_vocabulary

ACCELERATOR_BATCHES = 4  # batches that an accelerator evaluates at once, so that launching kernels does not dominate
_DEFAULT_LENGTH = 256  # tokens
_BATCH_SIZES = {"image": 250, "text": 64, "lm": 32}
_VOCABULARY_BYTES = 4 * 2**20  # of a long text, from which a vocabulary is made
_MAX_HASHED_FILES = 64  # of more files, only names and sizes are hashed
_MEGABYTE = 10**6
_DEFAULT_SIDE = 224  # of pictures that differ in size
_TEXT_SUFFIXES = ("", ".txt", ".text", ".md", ".raw", ".tokens")
_PARTS = {"train": ("train",), "valid": ("valid", "val", "dev", "heldout"), "test": ("test", "heldout")}


@dataclass(frozen=True)
class Split:
    """Stored inputs: pixels uint8 (N, C, H, W) or ids (N, T) with classes (N,), or one row of ids without targets."""

    inputs: Tensor
    targets: Tensor | None

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Dataset:
    """Data that a model is trained and measured on. `pad` is the padding token of short rows, which is masked."""

    name: str
    kind: str  # image, text or lm
    train: Split
    test: Split
    valid: Split | None  # of a long text only
    n_classes: int | None
    vocabulary: Vocabulary | None
    image: tuple[int, int, int] | None  # channels, height, width
    sequence: int | None
    facts: Mapping[str, Any]

    @property
    def pad(self) -> int | None:
        return PAD if self.kind == "text" else None

    def task(
        self, split: str = "test", *, samples: int | None = None, batch_size: int | None = None, seed: int = 0
    ) -> Task:
        """A split, or a random part of it, as a task that models are measured on.

        The order is that of the split, but texts of a held-out split are sorted by length, longest first, so that
        batches have little padding.
        """
        part: Split | None = {"train": self.train, "test": self.test, "valid": self.valid}.get(split)
        if part is None:
            raise IsobasinError(f"data set {self.name!r}: no split {split!r}; expected train or test")
        inputs, targets = part.inputs, part.targets
        n = len(part) if targets is not None else (len(part) - 1) // (self.sequence or 1)
        used = chosen(n, samples, seed)
        if self.pad is not None and split != "train":
            lengths = (inputs[used] != self.pad).sum(1)
            used = [used[i] for i in lengths.argsort(descending=True, stable=True).tolist()]
        size = batch_size or _BATCH_SIZES[self.kind]

        def batches() -> Iterator[Batch]:
            for start in range(0, len(used), size):
                yield self._batch(inputs, targets, used[start : start + size])

        settings = {"samples": samples, "batch_size": size, "seed": seed, "split": split, "sequence": self.sequence}
        fingerprint = digest([repr([self.name, self.facts["files"], settings]).encode()])
        return Task(self.kind, self.name, self.name, len(used), settings, fingerprint, batches)

    def _batch(self, inputs: Tensor, targets: Tensor | None, used: Sequence[int]) -> Batch:
        if targets is None:
            assert self.sequence is not None
            x, y = windows(inputs, torch.tensor(used) * self.sequence, self.sequence)
            counts = self.vocabulary.n_bytes() if self.vocabulary else None
            return Batch({"input_ids": x}, y, None if counts is None else int(counts[y].sum()))
        x = model_inputs(inputs[used])
        if self.pad is None:
            return Batch({"pixel_values" if self.kind == "image" else "input_ids": x}, targets[used])
        mask = x != self.pad
        width = int(mask.sum(1).max())  # rows are padded on the right
        return Batch({"input_ids": x[:, :width], "attention_mask": mask[:, :width]}, targets[used])


def eval_batch_size(kind: str, device: str) -> int:
    """The batch size for evaluation on a device."""
    return _BATCH_SIZES[kind] * (1 if device == "cpu" else ACCELERATOR_BATCHES)


@lru_cache(maxsize=2)  # several jobs in one process read the same data
def open_dataset(name: str, root: Path | None, *, sequence: int | None = None, side: int | None = None) -> Dataset:
    """A data set by name, or a file or folder by path, absolute or under the root.

    `NAME:VOCABULARY` chooses how text is tokenised: `imdb:words-30000`, `shakespeare:characters`, `wikitext-103:bpe`.
    `sequence` is the number of tokens of a row or window; images are resized to `side` × `side` pixels.
    """
    kind, place, words = locate(name, root)
    if kind == "image":
        return _open_images(name, place, side)
    length = _DEFAULT_LENGTH if sequence is None else sequence
    if length < 1:
        raise IsobasinError(f"data set {name!r}: sequence {length}, expected 1 or more tokens")
    return (_open_texts if kind == "text" else _open_long_text)(name, place, length, words)


def open_labelled_texts(name: str, root: Path | None) -> "LabelledTexts":
    """Labelled text before it is tokenised."""
    kind, place, _ = locate(name, root)
    if kind != "text":
        raise IsobasinError(f"data set {name!r} is {kind}, expected labelled text")
    return _read_labelled_texts(place)


def _open_images(name: str, place: Path | str, side: int | None) -> Dataset:
    (x, y, seen), (tx, ty, held) = (_read_pixels(place, split, side) for split in ("train", "test"))
    if x.shape[1:] != tx.shape[1:]:
        raise IsobasinError(f"data set {name!r}: training pictures {tuple(x.shape[1:])}, test {tuple(tx.shape[1:])}")
    if (seen.classes or ()) != (held.classes or ()):
        raise IsobasinError(f"data set {name!r}: the classes of training and test differ; expected the same folders")
    files = [f for images in (seen, held) if isinstance(images.pixels, PictureFiles) for f in images.pixels.files]
    content = {"pixels": digest([x.numpy().tobytes(), tx.numpy().tobytes()])} if not files else _hashes(files)
    n_classes = int(max(y.max(), ty.max())) + 1
    image = (x.shape[1], x.shape[2], x.shape[3])
    facts = {"name": name, "train": len(x), "test": len(tx), "classes": n_classes, "files": content}
    return Dataset(name, "image", Split(x, y), Split(tx, ty), None, n_classes, None, image, None, facts)


def _open_texts(name: str, place: Path | str, length: int, words: str) -> Dataset:
    rows = _read_labelled_texts(place)
    used = make_vocabulary(words, rows.train[0])
    train, test = (Split(used.rows(texts, length), torch.tensor(y)) for texts, y in (rows.train, rows.test))
    content = _hashes(rows.files) or {"text": digest(t.encode() for t in (*rows.train[0], *rows.test[0]))}
    facts = {"name": name, "train": len(train), "test": len(test), "classes": len(rows.classes), "files": content}
    facts |= {"vocabulary": used.name, "tokens": used.size}
    return Dataset(name, "text", train, test, None, len(rows.classes), used, None, length, facts)


def _open_long_text(name: str, place: Path | str, length: int, words: str) -> Dataset:
    text = _read_text_parts(place)
    sample = text.train[:_VOCABULARY_BYTES].decode("utf-8", "replace").splitlines(keepends=True)
    used = make_vocabulary(words, sample)
    train, valid, test = (Split(used.stream(part), None) for part in (text.train, text.valid, text.test))
    for part in (train, test):
        if len(part) <= length:
            raise IsobasinError(f"data set {name!r}: {len(part)} tokens in a split, expected more than {length}")
    content = _hashes(text.files) or {"text": digest([text.train, text.test])}
    facts = {"name": name, "train": len(train), "test": len(test), "files": content}
    facts |= {"vocabulary": used.name, "tokens": used.size}
    return Dataset(name, "lm", train, test, valid, None, used, None, length, facts)


def _hashes(files: Sequence[Path]) -> dict[str, str]:
    if len(files) > _MAX_HASHED_FILES:
        listing = "\n".join(f"{file.parent.name}/{file.name} {file.stat().st_size}" for file in files)
        return {f"{len(files)} files": hashlib.sha256(os.fsencode(listing)).hexdigest()}
    return {file.name: hashlib.sha256(read_bytes(file)).hexdigest() for file in files}


def windows(tokens: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs (N, length) from each start on, and the next tokens as targets, int64."""
    ids = tokens.unfold(0, length + 1, 1)[starts].long()
    return ids[:, :-1], ids[:, 1:]


def model_inputs(inputs: Tensor) -> Tensor:
    """Stored inputs as a model reads them: bytes of images scaled to −1 … 1, ids as int64, floats unchanged."""
    if inputs.dtype == torch.uint8 and inputs.ndim == 4:
        return scale_pixels(inputs)
    return inputs if inputs.is_floating_point() else inputs.long()


# -- known data sets -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KnownDataset:
    """A data set that is known by name: its kind, its possible paths under the data root, its id on the hub."""

    kind: str  # image, text or lm
    places: tuple[str, ...] = ()
    hub: str | None = None  # `owner/name`, or `owner/name:configuration`
    shipped: str | None = None  # its name among the data inside the package


_LM1B = "1-billion-word-language-modeling-benchmark-r13output"
KNOWN = {
    "digits": KnownDataset("image", shipped="mnist"),
    "shakespeare": KnownDataset("lm", shipped="shakespeare"),
    "mnist": KnownDataset("image", ("MNIST", "mnist"), "ylecun/mnist"),
    "fashion-mnist": KnownDataset(
        "image", ("FashionMNIST", "fashion-mnist", "fashion_mnist"), "zalando-datasets/fashion_mnist"
    ),
    "cifar10": KnownDataset("image", ("cifar-10-batches-py", "cifar-10-batches-bin", "cifar10"), "uoft-cs/cifar10"),
    "cifar100": KnownDataset("image", ("cifar-100-python", "cifar-100-binary", "cifar100"), "uoft-cs/cifar100"),
    "tiny-imagenet": KnownDataset("image", ("tiny-imagenet-200", "tiny-imagenet"), "zh-plus/tiny-imagenet"),
    "imagenet": KnownDataset("image", ("imagenet", "ILSVRC/Data/CLS-LOC", "ILSVRC2012"), "ILSVRC/imagenet-1k"),
    "ag_news": KnownDataset("text", ("ag_news", "ag_news_csv"), "fancyzhx/ag_news"),
    "imdb": KnownDataset("text", ("imdb", "aclImdb"), "stanfordnlp/imdb"),
    "dbpedia": KnownDataset("text", ("dbpedia", "dbpedia_csv", "dbpedia_14"), "fancyzhx/dbpedia_14"),
    "enwik8": KnownDataset("lm", ("enwik8/enwik8", "enwik8")),
    "wikitext-103": KnownDataset(
        "lm", ("wikitext-103-raw", "wikitext-103", "wikitext"), "Salesforce/wikitext:wikitext-103-raw-v1"
    ),
    "one-billion-word": KnownDataset("lm", (_LM1B, "one-billion-word", "lm1b"), "billion-word-benchmark/lm1b"),
    "tinyshakespeare": KnownDataset("lm", ("tinyshakespeare/input.txt", "tinyshakespeare")),
}


def locate(name: str, root: Path | None) -> tuple[str, Path | str, str]:
    """The kind of a data set (image, text or lm), its path or hub id, and its vocabulary; nothing is read yet."""
    plain, _, words = name.rpartition(":")
    if not plain or words.partition("-")[0] not in VOCABULARIES:
        plain, words = name, ""
    if known := KNOWN.get(plain):
        kind, place = known.kind, shipped(known.shipped) if known.shipped else _find(plain, known, root)
    else:
        kind, place = _detect(name, [Path(plain), *([root / plain] if root is not None else [])])
    return kind, place, words or ("words" if kind == "text" else "bytes")


def _find(name: str, known: KnownDataset, root: Path | None) -> Path | str:
    """The first of its paths that exists under the root; otherwise the id on the hub, unless HF_HUB_OFFLINE is set."""
    for place in known.places:
        if root is not None and (root / place).exists():
            return root / place
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
    if known.hub is not None and not offline:
        return known.hub
    where = "no data root was given" if root is None else f"not under {root}"
    raise IsobasinError(f"data set {name!r}: {where}; expected {' or '.join(known.places)} there: give --data ROOT")


def _detect(name: str, places: Sequence[Path]) -> tuple[str, Path]:
    """The first place that exists, and the kind of data in it.

    A table for each split, or reviews in folders, are labelled text; text files one long text; anything else images.
    """
    place = next((place for place in places if exists(place)), None)
    if place is None:
        names = ", ".join(KNOWN)
        raise IsobasinError(f"data set {name!r}: no such file or folder, and no known name; known: {names}")
    if (place / "train" / "pos").is_dir() or (place.is_dir() and is_table(place)):
        return "text", place
    pattern = re.compile(r".*\.(txt|text|md|raw|tokens)|enwik\d+|[^.]+")
    files = [place] if place.is_file() else [f for f in place.iterdir() if f.is_file()]
    texts = (f for f in files if pattern.fullmatch(f.name) and "ubyte" not in f.name and "batch" not in f.name)
    return "lm" if any(texts) else "image", place


# -- labelled text ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabelledTexts:
    """Texts and classes 0 … n − 1 of both splits, the names of the classes, and the files that were read."""

    train: tuple[tuple[str, ...], tuple[int, ...]]
    test: tuple[tuple[str, ...], tuple[int, ...]]
    classes: tuple[str, ...]
    files: tuple[Path, ...] = ()


def _read_labelled_texts(place: Path | str) -> LabelledTexts:
    """A folder with a table for each split, folders `pos` and `neg` (aclImdb), or an id on the hub."""
    if isinstance(place, str):
        return _numbered([read_table(place, split=split) for split in ("train", "test")])
    if (place / "train" / "pos").is_dir():
        return LabelledTexts(_reviews(place / "train"), _reviews(place / "test"), ("neg", "pos"))
    if not place.is_dir():
        raise DataError(place, "one table; labelled text comes in two: a folder with train.csv and test.csv")
    files = []
    for split in ("train", "test"):
        if (found := find_table(place, split)) is None:
            raise DataError(place, f"no table, or several, for the split {split!r}; expected {split}.csv")
        files.append(found)
    return _numbered([read_table(file) for file in files], tuple(files))


def _numbered(tables: Sequence[Table], files: tuple[Path, ...] = ()) -> LabelledTexts:
    """Number the classes of both splits in the order of their numbers or names."""
    known = sorted({label for table in tables for label in table.labels}, key=_rank)
    numbers = {label: i for i, label in enumerate(known)}
    train, test = ((t.texts, tuple(numbers[label] for label in t.labels)) for t in tables)
    return LabelledTexts(train, test, tuple(map(str, known)), files)


def _rank(label: Label) -> tuple[int, str]:
    text = str(label)
    return (int(text), "") if re.fullmatch(r"-?\d{1,18}", text) else (2**62, text)


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


def _read_text_parts(place: Path | str) -> TextParts:
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
    """Cut a text into 90 %, 5 % and 5 %; of an incomplete enwik8 the last two megabytes are validation and test."""
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


def _read_pixels(place: Path | str, split: str, side: int | None) -> tuple[Tensor, Tensor, Images]:
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


# -- augmentation ----------------------------------------------------------------------------------------------------

Augmentation = Callable[[Tensor, torch.Generator], Tensor]  # random numbers are drawn from the generator only


def shifted(by: int) -> Augmentation:
    """Shift each image of a batch by up to `by` pixels in both directions; new pixels are −1, which is black."""
    if by < 1:
        raise IsobasinError(f"shift by {by} pixels: expected 1 or more")

    def shift(images: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = images.shape
        moves = torch.randint(2 * by + 1, (2, n, 1), generator=generator, device="cpu").to(images.device)
        rows = moves[0] + torch.arange(height, device=images.device)  # (n, height)
        columns = moves[1] + torch.arange(width, device=images.device)  # (n, width)
        number = torch.arange(n, device=images.device)[:, None, None]
        wide = F.pad(images, (by,) * 4, value=-1.0).movedim(1, -1)  # (n, height + 2 by, width + 2 by, channels)
        return wide[number, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)

    return shift


def flipped_and_cropped(by: int) -> Augmentation:
    """Mirror each image with probability ½, then shift it, as is usual for CIFAR."""
    shift = shifted(by)

    def change(images: Tensor, generator: torch.Generator) -> Tensor:
        mirrored = (torch.rand(len(images), generator=generator, device="cpu") < 0.5).to(images.device)
        return shift(torch.where(mirrored[:, None, None, None], images.flip(-1), images), generator)

    return change


def dropped(share: float) -> Augmentation:
    """Replace each word by the unknown word with probability `share`; padding stays."""
    if not 0 < share < 1:
        raise IsobasinError(f"drop a share of {share} of all words: expected more than 0 and less than 1")

    def drop(tokens: Tensor, generator: torch.Generator) -> Tensor:
        chance = torch.rand(tokens.shape, generator=generator, device="cpu").to(tokens.device)
        return torch.where((chance < share) & (tokens != PAD), UNKNOWN, tokens)

    return drop


# The kind of data that each changes, and the function.
_AUGMENTATIONS = {
    "shift": ("image", shifted(by=1)),
    "flip-crop": ("image", flipped_and_cropped(by=4)),
    "drop-words": ("text", dropped(0.2)),
}
AUGMENTATIONS = ("none", *_AUGMENTATIONS)


def augmentation(name: str, kind: str | None = None) -> Augmentation | None:
    """An augmentation by name: `shift` by a pixel, `flip-crop`, `drop-words`, or `none` (returns None).

    If `kind` (image, text or lm) is given, the augmentation must suit data of this kind.
    """
    if name not in AUGMENTATIONS:
        raise IsobasinError(f"augment {name!r} is unknown, expected one of {', '.join(AUGMENTATIONS)}")
    if name == "none":
        return None
    changed, found = _AUGMENTATIONS[name]
    if kind not in (None, changed):
        raise IsobasinError(f"augment {name!r} changes {changed} data, but these are {kind}; use none")
    return found
