"""Data to train and to measure on, by name or by path: pictures, labelled text, or one long text.

>>> from isobasin.study.datasets import open_dataset
>>> digits = open_dataset("digits", None)
>>> digits.kind, digits.n_classes, len(digits.train), len(digits.test), digits.image
('image', 10, 8000, 2000, (1, 28, 28))
>>> digits.task(samples=100).n_samples
100
"""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobasin.data import shipped
from isobasin.errors import IsobasinError
from isobasin.learning.judge import WIDER
from isobasin.tasks.source import chosen, digest, read_bytes
from isobasin.tasks.tables import is_table
from isobasin.tasks.task import Batch, Task

from .corpora import Rows, read_parts, read_rows
from .datasets_pictures import picture_files, read_pictures
from .datasets_places import KNOWN, NAMES, SHIPPED, Known, find
from .examples import ready, windows
from .vocabulary import KINDS, Vocabulary, made

SEQUENCE = 256  # tokens that a model reads at once, unless said
_BATCH = {"image": 250, "text": 64, "lm": 32}
_SAMPLE = 4 * 2**20  # bytes of a long text that a vocabulary is made of
_MANY = 64  # files that are hashed one by one; of more, names and sizes are


@dataclass(frozen=True)
class Split:
    """Inputs as they are stored: pixels uint8 (N, C, H, W), ids (N, T) with classes (N,), or one row without."""

    inputs: Tensor
    targets: Tensor | None

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class Dataset:
    """What a model is trained and measured on. `pad` is the token that fills short rows, and is masked."""

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
        return self.vocabulary.pad if self.kind == "text" and self.vocabulary else None

    def task(
        self, split: str = "test", *, samples: int | None = None, batch_size: int | None = None, seed: int = 0
    ) -> Task:
        """A split as a task that models are measured on: all of it, or a random part.

        In its order; texts that are not trained on come longest first, so that batches hold little padding.
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
        size = batch_size or _BATCH[self.kind]

        def batches() -> Iterator[Batch]:
            for start in range(0, len(used), size):
                yield self._batch(inputs, targets, used[start : start + size])

        settings = {"samples": samples, "batch_size": size, "seed": seed, "split": split, "sequence": self.sequence}
        said = digest([repr([self.name, self.facts["files"], settings]).encode()])
        return Task(self.kind, self.name, self.name, len(used), settings, said, batches)

    def _batch(self, inputs: Tensor, targets: Tensor | None, used: Sequence[int]) -> Batch:
        if targets is None:
            assert self.sequence is not None
            x, y = windows(inputs, torch.tensor(used) * self.sequence, self.sequence)
            return Batch({"input_ids": x}, y, self._n_bytes(y))
        x = ready(inputs[used])
        if self.pad is None:
            return Batch({"pixel_values" if self.kind == "image" else "input_ids": x}, targets[used])
        mask = x != self.pad
        width = int(mask.sum(1).max())  # rows are filled on the right
        return Batch({"input_ids": x[:, :width], "attention_mask": mask[:, :width]}, targets[used])

    def _n_bytes(self, targets: Tensor) -> int | None:
        counts = self.vocabulary.n_bytes() if self.vocabulary else None
        return None if counts is None else int(counts[targets].sum())


def at_once(kind: str, device: str) -> int:
    """How many samples of this kind of data are measured at once on a device."""
    return _BATCH[kind] * (1 if device == "cpu" else WIDER)


def open_dataset(
    name: str,
    root: Path | None,
    *,
    sequence: int | None = None,
    vocabulary: Vocabulary | None = None,
    side: int | None = None,
) -> Dataset:
    """A data set by name, or a file or folder by path, absolute or under the root.

    `NAME:VOCABULARY` says how text becomes tokens: `imdb:words-30000`, `shakespeare:characters`, `wikitext-103:bpe`;
    or give a `vocabulary` that exists, such as that of a pretrained model. `sequence` is the number of tokens that a
    row, or a window, has; `side` that of the pixels that pictures are resized to.
    """
    length = SEQUENCE if sequence is None else sequence
    if vocabulary is not None:
        return _open(name, root, length, vocabulary, side)
    return _remembered(name, root, length, side)


def locate(name: str, root: Path | None) -> str:
    """Whether a data set is there, without reading it; its kind: image, text or lm."""
    return _found(name, root)[0].kind


def rows_of(name: str, root: Path | None) -> Rows:
    """Labelled text as it stands, without a vocabulary."""
    known, place, _ = _found(name, root)
    if known.kind != "text":
        raise IsobasinError(f"data set {name!r} is {known.kind}, expected labelled text")
    return read_rows(place)


@lru_cache(maxsize=2)  # several jobs in one process read the same data; what is read is never changed
def _remembered(name: str, root: Path | None, length: int, side: int | None) -> Dataset:
    return _open(name, root, length, None, side)


def _open(name: str, root: Path | None, length: int, vocabulary: Vocabulary | None, side: int | None) -> Dataset:
    known, place, words = _found(name, root)
    if known.kind == "image":
        return _pictures(name, place, side)
    if length < 1:
        raise IsobasinError(f"data set {name!r}: sequence {length}, expected 1 or more tokens")
    if known.kind == "text":
        return _labelled(name, place, length, vocabulary, words or known.vocabulary)
    return _long_text(name, place, length, vocabulary, words or known.vocabulary)


def _found(name: str, root: Path | None) -> tuple[Known, Path | str, str | None]:
    """What it is, where it lies, and the vocabulary that its name asks for."""
    plain, _, words = name.rpartition(":")
    if not plain or words.partition("-")[0] not in KINDS:
        plain, words = name, ""
    if plain in SHIPPED:
        return SHIPPED[plain], shipped({"digits": "mnist"}.get(plain, plain)), words or None
    if plain in KNOWN:
        return KNOWN[plain], find(plain, KNOWN[plain], root), words or None
    for place in (Path(plain), *([root / plain] if root is not None else [])):
        if place.exists():
            return _guessed(place), place, words or None
    raise IsobasinError(f"data set {name!r}: no such file or folder, and no known name; known: {', '.join(NAMES)}")


def _guessed(place: Path) -> Known:
    """A table for each split, or reviews by folder: labelled text; text files: one long text; else pictures."""
    if (place / "train" / "pos").is_dir() or (place.is_dir() and is_table(place)):
        return Known("text", (), vocabulary="words")
    pattern = re.compile(r".*\.(txt|text|md|raw|tokens)|enwik\d+|[^.]+")
    texts = [place] if place.is_file() else [f for f in place.iterdir() if f.is_file()]
    if any(pattern.fullmatch(f.name) and "ubyte" not in f.name and "batch" not in f.name for f in texts):
        return Known("lm", ())
    return Known("image", ())


def _pictures(name: str, place: Path | str, side: int | None) -> Dataset:
    (x, y, seen), (tx, ty, held) = (read_pictures(place, split, side) for split in ("train", "test"))
    if x.shape[1:] != tx.shape[1:]:
        raise IsobasinError(f"data set {name!r}: training pictures {tuple(x.shape[1:])}, test {tuple(tx.shape[1:])}")
    if (seen.classes or ()) != (held.classes or ()):
        raise IsobasinError(f"data set {name!r}: the classes of training and test differ; expected the same folders")
    files = picture_files(seen) + picture_files(held)
    content = {"pixels": digest([x.numpy().tobytes(), tx.numpy().tobytes()])} if not files else _hashes(files)
    n_classes = int(max(y.max(), ty.max())) + 1
    channels, height, width = x.shape[1:]
    facts = {"name": name, "train": len(x), "test": len(tx), "classes": n_classes, "files": content}
    return Dataset(
        name, "image", Split(x, y), Split(tx, ty), None, n_classes, None, (channels, height, width), None, facts
    )


def _labelled(name: str, place: Path | str, length: int, vocabulary: Vocabulary | None, words: str) -> Dataset:
    rows = read_rows(place)
    used = vocabulary or made(words, rows.train[0])
    train, test = (Split(used.rows(texts, length), torch.tensor(y)) for texts, y in (rows.train, rows.test))
    content = _hashes(rows.files) or {"text": digest(t.encode() for t in (*rows.train[0], *rows.test[0]))}
    facts = {"name": name, "train": len(train), "test": len(test), "classes": len(rows.classes), "files": content}
    facts |= {"vocabulary": used.name, "tokens": used.size}
    return Dataset(name, "text", train, test, None, len(rows.classes), used, None, length, facts)


def _long_text(name: str, place: Path | str, length: int, vocabulary: Vocabulary | None, words: str) -> Dataset:
    text = read_parts(place)
    sample = text.train[:_SAMPLE].decode("utf-8", "replace").splitlines(keepends=True)
    used = vocabulary or made(words, sample)
    train, valid, test = (Split(used.stream(part), None) for part in (text.train, text.valid, text.test))
    for part in (train, test):
        if len(part) <= length:
            raise IsobasinError(f"data set {name!r}: {len(part)} tokens in a split, expected more than {length}")
    content = _hashes(text.files) or {"text": digest([text.train, text.test])}
    facts = {"name": name, "train": len(train), "test": len(test), "files": content}
    facts |= {"vocabulary": used.name, "tokens": used.size}
    return Dataset(name, "lm", train, test, valid, None, used, None, length, facts)


def _hashes(files: Sequence[Path]) -> dict[str, str]:
    if len(files) > _MANY:
        said = "\n".join(f"{file.parent.name}/{file.name} {file.stat().st_size}" for file in files)
        return {f"{len(files)} files": hashlib.sha256(said.encode()).hexdigest()}
    return {file.name: hashlib.sha256(read_bytes(file)).hexdigest() for file in files}
