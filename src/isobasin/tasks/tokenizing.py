"""Text to token ids: bytes for the project's own model, a tokenizer of transformers for the rest."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.tasks.source import digest, read_bytes
from isobasin.tasks.subjects import is_own, name_of, vocabulary
from isobasin.tasks.task import int64
from isobasin.weights import Weights

ADVICE = "give --tokenizer or a .npy file of token ids"
N_BYTES = 256
_FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "added_tokens.json", "special_tokens_map.json")


@dataclass(frozen=True)
class Encoded:
    """Token ids, and the bytes of text each of them covers (None where the tokenizer does not say)."""

    ids: Tensor
    n_bytes: Tensor | None


@dataclass(frozen=True)
class Bytes:
    """Every byte a token; the mask is the first id behind them, where the vocabulary has it."""

    d_vocab: int
    name: str = "bytes"
    n_ordinary: int = N_BYTES
    pad_id: int | None = 0
    special: tuple[int, ...] = ()
    content: str = "bytes"

    @property
    def mask_id(self) -> int | None:
        return N_BYTES if self.d_vocab > N_BYTES else None

    def encode(self, text: str) -> Encoded:
        ids = int64(np.frombuffer(text.encode(), np.uint8).astype(np.int64))
        return Encoded(ids, ids.new_ones(len(ids)))

    def frame(self, text: str) -> tuple[list[int], list[int]]:
        """What stands in front of a text and behind it: nothing."""
        return [], []

    def rows(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        """Each text by itself, cut to the limit."""
        return [list(text.encode()[:limit]) for text in texts]


@dataclass(frozen=True)
class Tokens:
    """A tokenizer of transformers, or its tokenizer.json."""

    tokenizer: Any
    name: str
    content: str  # digest of its files

    @property
    def n_ordinary(self) -> int:
        return len(self.tokenizer)

    @property
    def mask_id(self) -> int | None:
        return _maybe(self.tokenizer.mask_token_id)

    @property
    def pad_id(self) -> int | None:
        return _maybe(self.tokenizer.pad_token_id)

    @property
    def special(self) -> tuple[int, ...]:
        return tuple(self.tokenizer.all_special_ids)

    def encode(self, text: str) -> Encoded:
        """The whole text at once, without special tokens."""
        fast = bool(self.tokenizer.is_fast)
        said = self.tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=fast)
        ids = said["input_ids"]
        return Encoded(int64(ids), self._bytes(text, ids, said["offset_mapping"]) if fast and ids else None)

    def _bytes(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> Tensor:
        """Bytes from the end of the token before to the end of this one; what lies between goes to the later token.

        A byte-level tokenizer cuts inside characters, which offsets can not say; but its tokens are spelled with one
        letter for each byte, and they are believed if they add up to the text.
        """
        if type(self.tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel":
            spelled = int64([len(token) for token in self.tokenizer.convert_ids_to_tokens(ids)])
            if int(spelled.sum()) == len(text.encode()):
                return spelled
        points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        sizes = 1 + (points > 0x7F).astype(np.int64) + (points > 0x7FF) + (points > 0xFFFF)
        place = np.concatenate([[0], sizes.cumsum()])  # bytes in front of each character
        ends = place[np.maximum.accumulate(np.array(offsets, dtype=np.int64)[:, 1])]
        return int64(np.diff(ends, prepend=0))

    def frame(self, text: str) -> tuple[list[int], list[int]]:
        """The special tokens the tokenizer puts in front of a text and behind it."""
        bare = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        full = self.tokenizer(text, verbose=False)["input_ids"]
        n = len(full) - len(bare)
        start = next((i for i in range(n + 1) if full[i : i + len(bare)] == bare), None)
        if start is None or not bare:
            raise IsobasinError(f"{self.name}: finds no tokens in the text, or puts special ones inside it; {ADVICE}")
        return full[:start], full[start + len(bare) :]

    def rows(self, texts: Sequence[str], limit: int) -> list[list[int]]:
        """Each text by itself with its special tokens, cut to the limit."""
        if self.tokenizer.num_special_tokens_to_add() >= limit:
            raise IsobasinError(f"--seq-len {limit}: no room beside the special tokens; give a larger one")
        said = self.tokenizer(list(texts), truncation=True, max_length=limit, padding=False, verbose=False)
        found: list[list[int]] = said["input_ids"]
        return found


Coder = Bytes | Tokens


def _maybe(token: Any) -> int | None:
    return None if token is None else int(token)


def open_coder(models: Sequence[Weights], tokenizer: str | Path | None = None) -> Coder | None:
    """The tokenizer named, or that of the models' folders, or bytes for our own model; None if there is none.

    Two models whose tokenizers map differently do not read the same text.
    """
    if tokenizer is not None:
        found = _tokens(Path(tokenizer) if Path(tokenizer).exists() else str(tokenizer))
        if found is None:
            raise IsobasinError(f"--tokenizer {tokenizer}: no tokenizer that transformers can load; {ADVICE}")
        return found
    coders = [(weights, _own_tokens(weights)) for weights in models]
    known = [(weights, coder) for weights, coder in coders if coder is not None]
    for weights, coder in known[1:]:
        if coder.content != known[0][1].content and _mapping(coder) != _mapping(known[0][1]):
            raise IsobasinError(
                f"{name_of(weights)}: its tokenizer maps words to other ids than that of {name_of(known[0][0])}; "
                "expected one tokenizer: give --tokenizer"
            )
    return known[0][1] if known else None


def needed(coder: Coder | None, models: Sequence[Weights], advice: str = ADVICE) -> Coder:
    """The same, where text can not be read without one."""
    if coder is None:
        raise IsobasinError(f"{name_of(models[0])}: no tokenizer that transformers can load; {advice}")
    return coder


def _own_tokens(weights: Weights) -> Coder | None:
    if not is_own(weights):
        return None if weights.path is None else _tokens(weights.path)
    if weights.path and (weights.path / "tokenizer.json").is_file():
        return _tokens(weights.path / "tokenizer.json")
    d_vocab = vocabulary(weights)
    return Bytes(d_vocab) if d_vocab >= N_BYTES else None


def _mapping(coder: Coder) -> Any:
    return coder.tokenizer.get_vocab() if isinstance(coder, Tokens) else "bytes"


def _tokens(place: Path | str) -> Tokens | None:
    """A tokenizer.json, a folder, or a hub id in the cache; None if transformers makes nothing of it."""
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    try:
        if isinstance(place, Path) and place.is_file():
            found = transformers.PreTrainedTokenizerFast(tokenizer_file=str(place))
        else:
            options = {"local_files_only": True, "trust_remote_code": False}
            found = transformers.AutoTokenizer.from_pretrained(str(place), **options)
        # Of a folder without a tokenizer's files transformers makes one that knows special tokens only.
        if set(found.get_vocab().values()) <= set(found.all_special_ids):
            return None
    except Exception:  # whatever a damaged file makes transformers or tokenizers raise
        return None
    return Tokens(found, type(found).__name__, _content(place, found))


def _content(place: Path | str, tokenizer: Any) -> str:
    files = [place] if isinstance(place, Path) and place.is_file() else []
    if isinstance(place, Path) and place.is_dir():
        files = sorted({file for pattern in _FILES for file in place.glob(pattern) if file.is_file()})
    vocab = repr(sorted(tokenizer.get_vocab().items())).encode()
    return digest([vocab, *(part for file in files for part in (file.name.encode(), read_bytes(file)))])
