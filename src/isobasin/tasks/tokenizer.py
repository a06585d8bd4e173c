"""Text to token ids: the tokenizers of the models that are measured, and vocabularies for models trained here.

A vocabulary is bytes, or is made from the training text (characters, words, byte pairs) and saved as a tokenizer of the
`tokenizers` library beside the trained model.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.runtime import quiet_transformers, vocabulary_size
from isobasin.tasks.source import digest, read_bytes
from isobasin.tasks.task import int64, name_of
from isobasin.weights import Weights

TOKENIZER_FILE = "tokenizer.json"
N_BYTES = 256
_ADVICE = "give --tokenizer or a .npy file of token ids"
_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "added_tokens.json", "special_tokens_map.json")


# Token ids, and the number of bytes of text behind each (None if the tokenizer gives no offsets).
Encoded = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class ByteTokenizer:
    """Every byte is a token; the mask token is 256, if the vocabulary has it."""

    mask_id: int | None
    name: str = "bytes"
    n_ordinary: int = N_BYTES
    pad_id: int | None = 0
    special: tuple[int, ...] = ()
    content: str = "bytes"

    def encode(self, text: str) -> Encoded:
        ids = int64(np.frombuffer(text.encode(), np.uint8).astype(np.int64))
        return ids, ids.new_ones(len(ids))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens."""
        return bytes(i for i in ids if i < N_BYTES).decode("utf-8", "replace")

    def frame(self, text: str) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text: none."""
        return [], []

    def rows(self, texts: Sequence[str], limit: int, *, targets: bool = False) -> list[list[int]]:
        """The ids of each text, at most `limit`."""
        return [list(text.encode()[:limit]) for text in texts]


@dataclass(frozen=True)
class ModelTokenizer:
    """A tokenizer of transformers, or its tokenizer.json."""

    tokenizer: Any
    name: str
    content: str  # digest of its files

    @property
    def n_ordinary(self) -> int:
        return len(self.tokenizer)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, special ones by their names."""
        return str(self.tokenizer.decode(list(ids)))

    @property
    def mask_id(self) -> int | None:
        return self.tokenizer.mask_token_id

    @property
    def pad_id(self) -> int | None:
        return self.tokenizer.pad_token_id

    @property
    def special(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.all_special_ids)

    def encode(self, text: str) -> Encoded:
        """The whole text at once, without special tokens."""
        fast = bool(self.tokenizer.is_fast)
        encoded = self.tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=fast)
        ids = encoded["input_ids"]
        return int64(ids), self._bytes(text, ids, encoded["offset_mapping"]) if fast and ids else None

    def _bytes(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> Tensor:
        """Bytes from the end of the previous token to the end of this one.

        Offsets count characters, but a byte-level tokenizer may cut inside a character. Its tokens have one letter
        for each byte, and their lengths are used if they add up to the length of the text.
        """
        if type(self.tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel":
            spelled = int64([len(token) for token in self.tokenizer.convert_ids_to_tokens(ids)])
            if int(spelled.sum()) == len(text.encode()):
                return spelled
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
        before = np.concatenate([[0], sizes.cumsum()])  # bytes before each character
        ends = before[np.maximum.accumulate(np.array(offsets, dtype=np.int64)[:, 1])]
        return int64(np.diff(ends, prepend=0))

    def frame(self, text: str) -> tuple[list[int], list[int]]:
        """The special tokens that the tokenizer adds before and after a text."""
        bare = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        full = self.tokenizer(text, verbose=False)["input_ids"]
        n = len(full) - len(bare)
        start = next((i for i in range(n + 1) if full[i : i + len(bare)] == bare), None)
        if start is None or not bare:
            raise IsobasinError(f"{self.name}: finds no tokens in the text, or puts special ones inside it; {_ADVICE}")
        return full[:start], full[start + len(bare) :]

    def rows(self, texts: Sequence[str], limit: int, *, targets: bool = False) -> list[list[int]]:
        """The ids of each text with its special tokens, at most `limit`; those of targets may differ (mBART)."""
        if self.tokenizer.num_special_tokens_to_add() >= limit:
            raise IsobasinError(f"--seq-len {limit}: no room beside the special tokens; give a larger one")
        given = {"text_target" if targets else "text": list(texts)}
        encoded = self.tokenizer(**given, truncation=True, max_length=limit, padding=False, verbose=False)
        return encoded["input_ids"]


Tokenizer = ByteTokenizer | ModelTokenizer


def open_tokenizer(models: Sequence[Weights], tokenizer: str | Path | None = None) -> Tokenizer | None:
    """The given tokenizer, or that of the models' folders, or bytes for the project's own model; None if there is none.

    Models whose tokenizers map text to different ids are an error.
    """
    if tokenizer is not None:
        named = _load(Path(tokenizer) if Path(tokenizer).exists() else str(tokenizer))
        if named is None:
            raise IsobasinError(f"--tokenizer {tokenizer}: no tokenizer that transformers can load; {_ADVICE}")
        return named
    known = [(weights, found) for weights in models if (found := _tokenizer_of(weights)) is not None]
    for weights, found in known[1:]:
        if found.content != known[0][1].content and _mapping(found) != _mapping(known[0][1]):
            raise IsobasinError(
                f"{name_of(weights)}: its tokenizer maps words to other ids than that of {name_of(known[0][0])}; "
                "expected one tokenizer: give --tokenizer"
            )
    return known[0][1] if known else None


def require_tokenizer(
    models: Sequence[Weights], tokenizer: str | Path | None = None, *, advice: str = _ADVICE
) -> Tokenizer:
    """The same as `open_tokenizer`, but an error if there is none."""
    if (found := open_tokenizer(models, tokenizer)) is None:
        raise IsobasinError(f"{name_of(models[0])}: no tokenizer that transformers can load; {advice}")
    return found


def _tokenizer_of(weights: Weights) -> Tokenizer | None:
    if not weights.family.own:
        return None if weights.path is None else _load(weights.path)
    if weights.path and (weights.path / TOKENIZER_FILE).is_file():
        return _load(weights.path / TOKENIZER_FILE)
    d_vocab = vocabulary_size(weights)
    return ByteTokenizer(N_BYTES if d_vocab > N_BYTES else None) if d_vocab >= N_BYTES else None


def _mapping(tokenizer: Tokenizer) -> Any:
    return tokenizer.tokenizer.get_vocab() if isinstance(tokenizer, ModelTokenizer) else "bytes"


def _load(place: Path | str) -> ModelTokenizer | None:
    """A tokenizer.json, a folder, or a hub id in the cache; None if transformers can not load it."""
    transformers = quiet_transformers()
    try:
        if isinstance(place, Path) and place.is_file():
            found = transformers.PreTrainedTokenizerFast(tokenizer_file=str(place))
        else:
            options = {"local_files_only": True, "trust_remote_code": False}
            found = transformers.AutoTokenizer.from_pretrained(str(place), **options)
        # From a folder without tokenizer files transformers makes a tokenizer with special tokens only.
        if set(found.get_vocab().values()) <= set(found.all_special_ids):
            return None
    except Exception:  # transformers and tokenizers raise errors of many kinds for a damaged file
        return None
    return ModelTokenizer(found, type(found).__name__, _content(place, found))


def _content(place: Path | str, tokenizer: Any) -> str:
    files = [place] if isinstance(place, Path) and place.is_file() else []
    if isinstance(place, Path) and place.is_dir():
        files = sorted({file for pattern in _FILES for file in place.glob(pattern) if file.is_file()})
    vocab = repr(sorted(tokenizer.get_vocab().items())).encode()
    return digest([vocab, *(part for file in files for part in (os.fsencode(file.name), read_bytes(file)))])


# -- vocabularies of models that are trained here ----------------------------------------------------------------------

_SPECIAL = ("[PAD]", "[UNK]", "[MASK]")  # ids 0, 1, 2 of all vocabularies except bytes
PAD, UNKNOWN = 0, 1
VOCABULARIES = {"bytes": 256, "characters": 10_000, "words": 20_000, "bpe": 8_192}  # kinds and default sizes
_WORD_PATTERN = r"[a-z0-9]+|[^\sa-z0-9]"  # after lower-casing; ASCII only, so that all regular expression engines agree
_WORDS = re.compile(_WORD_PATTERN)
_BREAK = "<br />"  # HTML, read as a blank
_MIN_SIZE = 260


@dataclass(frozen=True)
class Vocabulary:
    """A mapping from text to token ids; `name` is its kind and size: bytes, characters, words-20000, bpe-8192."""

    name: str
    size: int
    tokenizer: Any = None
    words: Mapping[str, int] | None = None  # the table of a tokenizer of words: Python is faster there

    @classmethod
    def of_bytes(cls) -> "Vocabulary":
        return cls("bytes", 256)

    @classmethod
    def read(cls, folder: Path, size: int) -> "Vocabulary":
        """The vocabulary in the folder of a model; bytes if there is no tokenizer file."""
        if not (folder / TOKENIZER_FILE).is_file():
            return cls.of_bytes()
        try:
            found = json.loads((folder / TOKENIZER_FILE).read_text("utf-8"))
            ours = (found.get("pre_tokenizer") or {}).get("pattern") == {"Regex": _WORD_PATTERN}
            words = found["model"]["vocab"] if ours else None
            tokenizer = _tokenizers().Tokenizer.from_file(str(folder / TOKENIZER_FILE))
        except Exception as error:  # the library raises Exception itself for a damaged file
            raise IsobasinError(f"{folder / TOKENIZER_FILE}: no tokenizer ({error!s:.160}); make it again") from error
        return cls("words" if ours else "saved", size, tokenizer, words)

    def save(self, folder: Path) -> None:
        """Write the tokenizer file; none for bytes, because a model without a tokenizer reads bytes."""
        if self.tokenizer is not None:
            self.tokenizer.save(str(folder / TOKENIZER_FILE))

    @property
    def content(self) -> str:
        """A digest of the mapping from text to ids."""
        return "bytes" if self.tokenizer is None else digest([self.tokenizer.to_str().encode()])

    def rows(self, texts: Sequence[str], length: int) -> Tensor:
        """(texts, length) int32: each text is cut or padded on the right; an empty text becomes one unknown word."""
        found = np.full((len(texts), length), PAD, dtype=np.int32)
        for row, ids in zip(found, self._ids(texts)):
            cut = ids[:length] or [UNKNOWN]
            row[: len(cut)] = cut
        return torch.from_numpy(found)

    def _ids(self, texts: Sequence[str]) -> Iterable[Sequence[int]]:
        if self.tokenizer is None:
            yield from (list(text.encode()) for text in texts)
        elif self.words is not None:
            yield from ([self.words.get(word, UNKNOWN) for word in split_words(text)] for text in texts)
        else:
            for start in range(0, len(texts), 2048):
                found = self.tokenizer.encode_batch_fast(list(texts[start : start + 2048]), add_special_tokens=False)
                yield from (one.ids for one in found)

    def stream(self, content: bytes) -> Tensor:
        """The ids of a long text: uint8 for bytes, int32 for other vocabularies."""
        if self.tokenizer is None:
            return torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        lines = content.decode("utf-8", "replace").splitlines(keepends=True)
        return torch.from_numpy(np.concatenate([np.array(ids, dtype=np.int32) for ids in self._ids(lines)]))

    def n_bytes(self) -> Tensor | None:
        """(size,) bytes of text behind each id; None for words, which leave out the blanks between them."""
        if self.tokenizer is None:
            return torch.ones(256, dtype=torch.int64)
        if self.words is not None:
            return None
        tokens = [self.tokenizer.id_to_token(i) or "" for i in range(self.size)]
        spelled = type(self.tokenizer.decoder).__name__ == "ByteLevel"  # one letter for each byte
        return torch.tensor([len(token) if spelled else len(token.encode()) for token in tokens])


def split_words(text: str) -> list[str]:
    """Lower-case words and punctuation marks.

    >>> split_words("It's over.<br />Bad!")
    ['it', "'", 's', 'over', '.', 'bad', '!']
    """
    # Python lower-cases a sigma at the end of a word to another letter than the tokenizer does.
    return _WORDS.findall(text.replace(_BREAK, " ").replace("Σ", "σ").lower())


def make_vocabulary(kind: str, texts: Sequence[str]) -> Vocabulary:
    """Make a vocabulary (bytes, characters, words, words-30000, bpe-4096, …) from the training texts.

    Words that occur at least twice are kept, sorted by count and then alphabetically.
    """
    match = re.fullmatch(r"([a-z]+)(?:-(\d{1,7}))?", kind)
    if match is None or match[1] not in VOCABULARIES:
        kinds = ", ".join(VOCABULARIES)
        raise IsobasinError(f"vocabulary {kind!r} is unknown, expected one of {kinds}, or words-30000")
    if match[1] == "bytes":
        return Vocabulary.of_bytes()
    size = int(match[2] or VOCABULARIES[match[1]])
    if size < _MIN_SIZE:
        raise IsobasinError(f"vocabulary {kind!r}: expected a size of at least {_MIN_SIZE}")
    make = {"words": _words, "characters": _characters, "bpe": _byte_pairs}[match[1]]
    return make(texts, size)


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise IsobasinError("words and byte pairs need the package tokenizers: pip install tokenizers") from error
    return tokenizers


def _words(texts: Sequence[str], size: int) -> Vocabulary:
    counts = Counter(word for text in texts for word in split_words(text))
    kept = sorted((word for word, n in counts.items() if n > 1), key=lambda word: (-counts[word], word))
    lib, found, table = _word_level(kept, size)
    found.normalizer = lib.normalizers.Sequence([lib.normalizers.Replace(_BREAK, " "), lib.normalizers.Lowercase()])
    found.pre_tokenizer = lib.pre_tokenizers.Split(lib.Regex(_WORD_PATTERN), "removed", invert=True)
    return Vocabulary(f"words-{size}", len(table), found, table)


def _characters(texts: Sequence[str], size: int) -> Vocabulary:
    lib, found, table = _word_level(sorted({letter for text in texts for letter in text}), size)
    found.pre_tokenizer = lib.pre_tokenizers.Split(lib.Regex(r"[\s\S]"), "isolated")
    found.decoder = lib.decoders.Fuse()
    return Vocabulary("characters", len(table), found)


def _byte_pairs(texts: Sequence[str], size: int) -> Vocabulary:
    lib = _tokenizers()
    found = lib.Tokenizer(lib.models.BPE())
    found.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = lib.decoders.ByteLevel()
    alphabet = sorted(lib.pre_tokenizers.ByteLevel.alphabet())
    trainer = lib.trainers.BpeTrainer(
        vocab_size=size, special_tokens=list(_SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(texts, trainer)
    return Vocabulary(f"bpe-{size}", found.get_vocab_size(), found)


def _word_level(kept: Sequence[str], size: int) -> tuple[Any, Any, dict[str, int]]:
    """The library, a tokenizer of the special tokens and `kept`, and the table of its ids."""
    lib, table = _tokenizers(), {token: i for i, token in enumerate([*_SPECIAL, *kept][:size])}
    return lib, lib.Tokenizer(lib.models.WordLevel(table, unk_token=_SPECIAL[1])), table
