"""Data sets for training and measuring, by name or by path, and the augmentation of training batches.

>>> from isobasin.tasks.datasets import open_dataset
>>> digits = open_dataset("digits", None)
>>> digits.kind, digits.n_classes, len(digits.train), len(digits.test), digits.image
('image', 10, 8000, 2000, (1, 28, 28))
>>> digits.task(samples=100).n_samples
100
"""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.data import shipped
from isobasin.errors import IsobasinError
from isobasin.tasks import corpora
from isobasin.tasks.corpora import KnownDataset
from isobasin.tasks.images import PictureFiles, scale_pixels
from isobasin.tasks.source import chosen, digest, read_bytes
from isobasin.tasks.task import Batch, Task
from isobasin.tasks.text import is_table
from isobasin.tasks.tokenizer import VOCABULARIES, Vocabulary, make_vocabulary

ACCELERATOR_BATCHES = 4  # batches that an accelerator evaluates at once, so that launching kernels does not dominate
_DEFAULT_LENGTH = 256  # tokens
_BATCH_SIZES = {"image": 250, "text": 64, "lm": 32}
_VOCABULARY_BYTES = 4 * 2**20  # of a long text, from which a vocabulary is made
_MAX_HASHED_FILES = 64  # of more files, only names and sizes are hashed


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
        return self.vocabulary.pad if self.kind == "text" and self.vocabulary else None

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


def open_dataset(
    name: str,
    root: Path | None,
    *,
    sequence: int | None = None,
    vocabulary: Vocabulary | None = None,
    side: int | None = None,
) -> Dataset:
    """A data set by name, or a file or folder by path, absolute or under the root.

    `NAME:VOCABULARY` chooses how text is tokenised: `imdb:words-30000`, `shakespeare:characters`, `wikitext-103:bpe`;
    or `vocabulary` is an existing one, such as that of a pretrained model. `sequence` is the number of tokens of a
    row or window; images are resized to `side` × `side` pixels.
    """
    length = _DEFAULT_LENGTH if sequence is None else sequence
    opener = _open if vocabulary is None else _open.__wrapped__  # not cached
    return opener(name, root, length, vocabulary, side)


def locate(name: str, root: Path | None) -> str:
    """The kind of a data set (image, text or lm), without reading it; an error if it is not there."""
    return _find(name, root)[0].kind


def open_labelled_texts(name: str, root: Path | None) -> corpora.LabelledTexts:
    """Labelled text before it is tokenised."""
    known, place = _find(name, root)
    if known.kind != "text":
        raise IsobasinError(f"data set {name!r} is {known.kind}, expected labelled text")
    return corpora.read_labelled_texts(place)


@lru_cache(maxsize=2)  # several jobs in one process read the same data
def _open(name: str, root: Path | None, length: int, vocabulary: Vocabulary | None, side: int | None) -> Dataset:
    known, place = _find(name, root)
    if known.kind == "image":
        return _open_images(name, place, side)
    if length < 1:
        raise IsobasinError(f"data set {name!r}: sequence {length}, expected 1 or more tokens")
    opener = _open_texts if known.kind == "text" else _open_long_text
    return opener(name, place, length, vocabulary, known.vocabulary)


def _find(name: str, root: Path | None) -> tuple[KnownDataset, Path | str]:
    """The description of a data set, with the vocabulary that its name requests, and its place."""
    plain, _, words = name.rpartition(":")
    if not plain or words.partition("-")[0] not in VOCABULARIES:
        plain, words = name, ""
    place: Path | str
    if plain in corpora.SHIPPED:
        known, place = corpora.SHIPPED[plain], shipped({"digits": "mnist"}.get(plain, plain))
    elif plain in corpora.KNOWN:
        known, place = corpora.KNOWN[plain], corpora.find(plain, corpora.KNOWN[plain], root)
    else:
        known, place = _detect(name, [Path(plain), *([root / plain] if root is not None else [])])
    return replace(known, vocabulary=words or known.vocabulary), place


def _detect(name: str, places: Sequence[Path]) -> tuple[KnownDataset, Path]:
    """The first place that exists, and what it holds.

    A table for each split, or reviews in folders, are labelled text; text files one long text; anything else images.
    """
    place = next((place for place in places if place.exists()), None)
    if place is None:
        names = ", ".join(corpora.NAMES)
        raise IsobasinError(f"data set {name!r}: no such file or folder, and no known name; known: {names}")
    if (place / "train" / "pos").is_dir() or (place.is_dir() and is_table(place)):
        return KnownDataset("text", (), vocabulary="words"), place
    pattern = re.compile(r".*\.(txt|text|md|raw|tokens)|enwik\d+|[^.]+")
    files = [place] if place.is_file() else [f for f in place.iterdir() if f.is_file()]
    texts = (f for f in files if pattern.fullmatch(f.name) and "ubyte" not in f.name and "batch" not in f.name)
    return KnownDataset("lm" if any(texts) else "image", ()), place


def _open_images(name: str, place: Path | str, side: int | None) -> Dataset:
    (x, y, seen), (tx, ty, held) = (corpora.read_pixels(place, split, side) for split in ("train", "test"))
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


def _open_texts(name: str, place: Path | str, length: int, vocabulary: Vocabulary | None, words: str) -> Dataset:
    rows = corpora.read_labelled_texts(place)
    used = vocabulary or make_vocabulary(words, rows.train[0])
    train, test = (Split(used.rows(texts, length), torch.tensor(y)) for texts, y in (rows.train, rows.test))
    content = _hashes(rows.files) or {"text": digest(t.encode() for t in (*rows.train[0], *rows.test[0]))}
    facts = {"name": name, "train": len(train), "test": len(test), "classes": len(rows.classes), "files": content}
    facts |= {"vocabulary": used.name, "tokens": used.size}
    return Dataset(name, "text", train, test, None, len(rows.classes), used, None, length, facts)


def _open_long_text(name: str, place: Path | str, length: int, vocabulary: Vocabulary | None, words: str) -> Dataset:
    text = corpora.read_text_parts(place)
    sample = text.train[:_VOCABULARY_BYTES].decode("utf-8", "replace").splitlines(keepends=True)
    used = vocabulary or make_vocabulary(words, sample)
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
        return {f"{len(files)} files": hashlib.sha256(listing.encode()).hexdigest()}
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


# -- augmentation ----------------------------------------------------------------------------------------------------

Augmentation = Callable[[Tensor, torch.Generator], Tensor]  # random numbers are drawn from the generator only
AUGMENTATIONS = ("none", "shift", "flip-crop", "drop-words")
_DROPPED_SHARE = 0.2  # of words
_CHANGES = {"shift": "image", "flip-crop": "image", "drop-words": "text"}


def augmentation(name: str, kind: str | None = None) -> Augmentation | None:
    """An augmentation by name: `shift` by a pixel, `flip-crop`, `drop-words`, or `none` (returns None).

    If `kind` (image, text or lm) is given, the augmentation must suit data of this kind.
    """
    if name not in AUGMENTATIONS:
        raise IsobasinError(f"augment {name!r} is unknown, expected one of {', '.join(AUGMENTATIONS)}")
    if kind is not None and _CHANGES.get(name, kind) != kind:
        raise IsobasinError(f"augment {name!r} changes {_CHANGES[name]} data, but these are {kind}; use none")
    return {"shift": shifted(by=1), "flip-crop": flipped_and_cropped(by=4), "drop-words": dropped(_DROPPED_SHARE)}.get(
        name
    )


def shifted(by: int, fill: float = -1.0) -> Augmentation:
    """Shift each image of a batch by up to `by` pixels in both directions; new pixels are `fill` (−1 is black).

    >>> picture = torch.zeros(1, 1, 2, 2)
    >>> shifted(1)(picture, torch.Generator().manual_seed(0)).shape
    torch.Size([1, 1, 2, 2])
    """
    if by < 1:
        raise IsobasinError(f"shift by {by} pixels: expected 1 or more")

    def shift(images: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = images.shape
        moves = torch.randint(2 * by + 1, (2, n, 1), generator=generator, device="cpu").to(images.device)
        rows = moves[0] + torch.arange(height, device=images.device)  # (n, height)
        columns = moves[1] + torch.arange(width, device=images.device)  # (n, width)
        number = torch.arange(n, device=images.device)[:, None, None]
        wide = F.pad(images, (by,) * 4, value=fill).movedim(1, -1)  # (n, height + 2 by, width + 2 by, channels)
        return wide[number, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)

    return shift


def flipped_and_cropped(by: int, fill: float = -1.0) -> Augmentation:
    """Mirror each image with probability ½, then shift it, as is usual for CIFAR."""
    shift = shifted(by, fill)

    def change(images: Tensor, generator: torch.Generator) -> Tensor:
        mirrored = (torch.rand(len(images), generator=generator, device="cpu") < 0.5).to(images.device)
        return shift(torch.where(mirrored[:, None, None, None], images.flip(-1), images), generator)

    return change


def dropped(share: float, *, pad: int = 0, unknown: int = 1) -> Augmentation:
    """Replace each word by the unknown word with probability `share`; padding stays.

    >>> dropped(0.5)(torch.tensor([[5, 6, 7, 0]]), torch.Generator().manual_seed(0)).tolist()
    [[1, 6, 1, 0]]
    """
    if not 0 < share < 1:
        raise IsobasinError(f"drop a share of {share} of all words: expected more than 0 and less than 1")

    def drop(tokens: Tensor, generator: torch.Generator) -> Tensor:
        chance = torch.rand(tokens.shape, generator=generator, device="cpu").to(tokens.device)
        return torch.where((chance < share) & (tokens != pad), unknown, tokens)

    return drop
