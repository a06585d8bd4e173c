"""Text to token ids for models that are trained here: bytes, characters, words, or byte pairs.

All but bytes are made of the training text and saved as a tokenizer of the `tokenizers` library: its file lies beside
a trained model, so that the model reads text by itself wherever it is loaded.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.tasks.source import digest

SPECIAL = ("[PAD]", "[UNK]", "[MASK]")  # ids 0, 1, 2 of every vocabulary but bytes
FILE = "tokenizer.json"
KINDS = {"bytes": 256, "characters": 10_000, "words": 20_000, "bpe": 8_192}  # with the largest size, unless one is said
WORD = r"[a-z0-9]+|[^\sa-z0-9]"  # after lower-casing; in ASCII, where all regular expressions mean the same
_BREAK = "<br />"  # of a web page: a blank
_SMALLEST = 260


@dataclass(frozen=True)
class Vocabulary:
    """`name` says how it was made: bytes, characters, words-20000, bpe-8192. `pad` fills short rows.

    >>> Vocabulary.of_bytes().rows(["ab", "c"], 3).tolist()
    [[97, 98, 0], [99, 0, 0]]
    """

    name: str
    size: int
    tokenizer: Any = None
    words: Mapping[str, int] | None = None  # its table, where the tokenizer is one of words: Python is faster there
    pad: int = 0
    unknown: int = 1

    @classmethod
    def of_bytes(cls) -> "Vocabulary":
        return cls("bytes", 256)

    @classmethod
    def read(cls, folder: Path, size: int) -> "Vocabulary":
        """That of a model's folder; bytes where there is no tokenizer."""
        if not (folder / FILE).is_file():
            return cls.of_bytes()
        said = json.loads((folder / FILE).read_text("utf-8"))
        ours = (said.get("pre_tokenizer") or {}).get("pattern") == {"Regex": WORD}
        words = said["model"]["vocab"] if ours else None
        return cls("words" if ours else "saved", size, library().Tokenizer.from_file(str(folder / FILE)), words)

    def save(self, folder: Path) -> None:
        """Nothing for bytes: a model without a tokenizer reads bytes."""
        if self.tokenizer is not None:
            self.tokenizer.save(str(folder / FILE))

    @property
    def content(self) -> str:
        """Names the mapping from text to ids."""
        return "bytes" if self.tokenizer is None else digest([self.tokenizer.to_str().encode()])

    def rows(self, texts: Sequence[str], length: int) -> Tensor:
        """(texts, length) int32: each text cut or filled on the right; an empty one is one unknown word."""
        found = np.full((len(texts), length), self.pad, dtype=np.int32)
        for row, ids in zip(found, self._ids(texts)):
            cut = ids[:length] or [self.unknown]
            row[: len(cut)] = cut
        return torch.from_numpy(found)

    def _ids(self, texts: Sequence[str], chunk: int = 2048) -> Iterable[Sequence[int]]:
        if self.tokenizer is None:
            yield from (list(text.encode()) for text in texts)
        elif self.words is not None:
            yield from ([self.words.get(word, self.unknown) for word in words_in(text)] for text in texts)
        else:
            for start in range(0, len(texts), chunk):
                said = self.tokenizer.encode_batch_fast(list(texts[start : start + chunk]), add_special_tokens=False)
                yield from (one.ids for one in said)

    def stream(self, content: bytes) -> Tensor:
        """One row: uint8 of bytes themselves, int32 of any other tokens."""
        if self.tokenizer is None:
            return torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        lines = content.decode("utf-8", "replace").splitlines(keepends=True)
        return torch.from_numpy(np.concatenate([np.array(ids, dtype=np.int32) for ids in self._ids(lines)]))

    def n_bytes(self) -> Tensor | None:
        """(size,) bytes of text behind each id; None for words, which do not say what stood between them."""
        if self.tokenizer is None:
            return torch.ones(256, dtype=torch.int64)
        if self.words is not None:
            return None
        tokens = [self.tokenizer.id_to_token(i) or "" for i in range(self.size)]
        spelled = type(self.tokenizer.decoder).__name__ == "ByteLevel"  # one letter for each byte
        return torch.tensor([len(token) if spelled else len(token.encode()) for token in tokens])


def words_in(text: str) -> list[str]:
    """Lower-case words and marks.

    >>> words_in("It's over.<br />Bad!")
    ['it', "'", 's', 'over', '.', 'bad', '!']
    """
    # A sigma that ends a word has a small letter of its own for Python, but not for the tokenizer.
    return _WORD.findall(text.replace(_BREAK, " ").replace("Σ", "σ").lower())


_WORD = re.compile(WORD)


def made(kind: str, texts: Sequence[str]) -> Vocabulary:
    """The vocabulary of a kind such as bytes, characters, words, words-30000, bpe-4096, from the training texts.

    Of words those that occur twice or more are kept, the most frequent first; equal counts go by the alphabet.
    """
    match = re.fullmatch(r"([a-z]+)(?:-(\d+))?", kind)
    if match is None or match[1] not in KINDS:
        raise IsobasinError(f"vocabulary {kind!r} is unknown, expected one of {', '.join(KINDS)}, or words-30000")
    if match[1] == "bytes":
        return Vocabulary.of_bytes()
    size = int(match[2] or KINDS[match[1]])
    if size < _SMALLEST:
        raise IsobasinError(f"vocabulary {kind!r}: expected a size of at least {_SMALLEST}")
    return _MAKERS[match[1]](texts, size)


def library() -> Any:
    """The package `tokenizers`."""
    try:
        import tokenizers
    except ImportError as error:
        raise IsobasinError("words and byte pairs need the package tokenizers: pip install tokenizers") from error
    return tokenizers


def _words(texts: Sequence[str], size: int) -> Vocabulary:
    counts = Counter(word for text in texts for word in words_in(text))
    kept = sorted((word for word, n in counts.items() if n > 1), key=lambda word: (-counts[word], word))
    table = _table(kept, size)
    lib = library()
    found = lib.Tokenizer(lib.models.WordLevel(table, unk_token=SPECIAL[1]))
    found.normalizer = lib.normalizers.Sequence([lib.normalizers.Replace(_BREAK, " "), lib.normalizers.Lowercase()])
    found.pre_tokenizer = lib.pre_tokenizers.Split(lib.Regex(WORD), "removed", invert=True)
    return Vocabulary(f"words-{size}", len(table), found, table)


def _characters(texts: Sequence[str], size: int) -> Vocabulary:
    table = _table(sorted({letter for text in texts for letter in text}), size)
    lib = library()
    found = lib.Tokenizer(lib.models.WordLevel(table, unk_token=SPECIAL[1]))
    found.pre_tokenizer = lib.pre_tokenizers.Split(lib.Regex(r"[\s\S]"), "isolated")
    found.decoder = lib.decoders.Fuse()
    return Vocabulary("characters", len(table), found)


def _pairs(texts: Sequence[str], size: int) -> Vocabulary:
    lib = library()
    found = lib.Tokenizer(lib.models.BPE())
    found.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = lib.decoders.ByteLevel()
    alphabet = sorted(lib.pre_tokenizers.ByteLevel.alphabet())
    trainer = lib.trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(texts, trainer)
    return Vocabulary(f"bpe-{size}", found.get_vocab_size(), found)


def _table(kept: Sequence[str], size: int) -> dict[str, int]:
    return {token: i for i, token in enumerate([*SPECIAL, *kept][:size])}


_MAKERS: dict[str, Callable[[Sequence[str], int], Vocabulary]] = {
    "words": _words,
    "characters": _characters,
    "bpe": _pairs,
}
