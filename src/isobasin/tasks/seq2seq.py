"""Pairs of a source and a target for encoder-decoders: the loss of the target's tokens, each from those before it.

The decoder reads a start token and the target without its last token (teacher forcing). The start token is that of
transformers: `decoder_start_token_id` of the config; of mBART the last token of the target, which names its language.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobasin.errors import IsobasinError, brief
from isobasin.runtime import feature_shape, vocabulary_size
from isobasin.tasks.source import DataError, chosen, digest
from isobasin.tasks.task import IGNORED, Batch, Request, Task, agreed, int64, name_of, window_length
from isobasin.tasks.text import checked_ids, is_table, read_columns
from isobasin.tasks.tokenizer import Tokenizer, require_tokenizer
from isobasin.weights import Weights

_SOURCE_COLUMNS = ("source", "input", "document", "article", "input_ids", "input_features")
_TARGET_COLUMNS = ("target", "output", "summary", "highlights", "labels")
_MASK_COLUMN = "attention_mask"
_ADVICE = "give --tokenizer, or token ids in columns input_ids and labels"


def seq2seq_task(request: Request) -> Task:
    """Predict each token of a target from its source and from the tokens before it: loss in nats per token.

    Sources are texts or token ids, or features of audio for a model that reads them; targets are texts or token ids.
    Texts are cut to `seq_len` tokens; sources are padded to the longest of their batch, and the padding is masked.
    """
    data, models = request.data, request.models
    start, pad = (agreed(models, f"config.json: {what}", read) for what, read in _TOKENS.items())
    length = window_length(models, request.seq_len)
    sources, targets = _pairs(data, request.split)
    used = chosen(len(targets), request.max_samples, request.seed)
    texts = any(isinstance(column[row], str) for column in (sources, targets) for row in used)
    coder = require_tokenizer(models, request.tokenizer, advice=_ADVICE) if texts else None
    vocabulary = min(map(vocabulary_size, models))
    features = agreed(models, "the shape of its features", feature_shape)
    read = [_ids(data, used, targets, "target", length, vocabulary, coder)]
    if features is None:
        read.append(_ids(data, used, sources, "source", length, vocabulary, coder))
    else:
        read.append([_features(data, row, sources[row], features) for row in used])
    wanted, given = read
    wanted = [_without_start(ids, targets[row], start) for row, ids in zip(used, wanted)]
    settings = request.settings("seq2seq") | {"seq_len": length, "tokenizer": coder.name if coder else None}
    size = int(settings["batch_size"])

    def batches() -> Iterator[Batch]:
        for first in range(0, len(used), size):
            rows = slice(first, first + size)
            inputs = _padded(given[rows], pad) if features is None else {"input_features": torch.stack(given[rows])}
            decoder = [ids.new_tensor([ids[-1] if start == "last" else start, *ids[:-1]]) for ids in wanted[rows]]
            inputs["decoder_input_ids"] = _padded(decoder, pad)["input_ids"]
            yield Batch(inputs, _padded(wanted[rows], IGNORED)["input_ids"])

    parts = [part.numpy().tobytes() for pair in zip(given, wanted) for part in pair]
    content = digest([*parts, str([start, pad]).encode()])
    return request.task("seq2seq", len(used), settings, content, batches)


def decoder_start(weights: Weights) -> int | str:
    """The token that the decoder reads first, or "last": the last one of the target."""
    usual = weights.family.inputs.decoder_start
    if usual == "last":
        return usual
    found = weights.config.get("decoder_start_token_id")
    return _token(weights, "decoder_start_token_id", usual if found is None else found)


def _pad(weights: Weights) -> int:
    """A token for places that are masked, or that no scored position reads."""
    found = weights.config.get("pad_token_id")
    return 0 if found is None else _token(weights, "pad_token_id", found)


_TOKENS = {"decoder_start_token_id": decoder_start, "pad_token_id": _pad}


def _token(weights: Weights, key: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < vocabulary_size(weights):
        raise IsobasinError(
            f"{name_of(weights)}: config.json: {key} is {brief(value)}, expected a token id from 0 to "
            f"{vocabulary_size(weights) - 1}; add it"
        )
    return value


# -- reading ----------------------------------------------------------------------------------------------------------


def _pairs(data: Path, split: str) -> tuple[Sequence[Any], Sequence[Any]]:
    """The sources and the targets of a table."""
    if data.exists() and not is_table(data):
        raise DataError(data, "no pairs: an encoder-decoder needs a table, CSV, JSONL or parquet")
    file, columns = read_columns(data, split, (*_SOURCE_COLUMNS, *_TARGET_COLUMNS, _MASK_COLUMN))
    names = {name.strip().lower(): name for name in columns}
    found = [next((names[n] for n in known if n in names), None) for known in (_SOURCE_COLUMNS, _TARGET_COLUMNS)]
    if None in found:
        known = " and ".join(f"one of {', '.join(each)}" for each in (_SOURCE_COLUMNS, _TARGET_COLUMNS))
        raise DataError(file, f"columns {', '.join(columns):.160}; expected {known}")
    sources, targets = (columns[name] for name in found if name is not None)
    if not len(targets):
        raise DataError(file, "no rows in it; expected pairs of a source and a target")
    for row, mask in enumerate(columns[names[_MASK_COLUMN]] if _MASK_COLUMN in names else (), 1):
        if not all(mask if isinstance(mask, list | tuple) else [mask]):
            raise DataError(file, f"row {row} is padded, as {_MASK_COLUMN} says; give token ids without padding")
    return sources, targets


def _ids(
    data: Path,
    rows: Sequence[int],
    column: Sequence[Any],
    what: str,
    length: int,
    vocabulary: int,
    coder: Tokenizer | None,
) -> list[Tensor]:
    """The token ids of these rows: texts through the tokenizer, at most `length`; lists of ids as they are."""
    texts = [row for row in rows if isinstance(column[row], str)]
    encoded: Mapping[int, list[int]] = {}
    if texts and coder is not None:
        encoded = dict(zip(texts, coder.rows([column[row] for row in texts], length, targets=what == "target")))
    found = []
    for row in rows:
        ids = encoded[row] if row in encoded else _given_ids(data, row, column[row], what, length)
        if not ids:
            raise DataError(data, f"row {row + 1} has a {what} without tokens; remove it")
        found.append(checked_ids(int64(ids), vocabulary, data))
    return found


def _given_ids(data: Path, row: int, value: Any, what: str, length: int) -> list[int]:
    """Token ids as they are in the file; padding of targets at their end is left out."""
    if not isinstance(value, list | tuple) or not all(type(one) is int and abs(one) < 2**63 for one in value):
        raise DataError(data, f"row {row + 1} has the {what} {brief(value)}; expected a text or a list of token ids")
    ids = list(value)
    while what == "target" and ids and ids[-1] == IGNORED:
        ids.pop()
    if len(ids) > length:
        raise DataError(data, f"row {row + 1} has a {what} of {len(ids)} tokens, --seq-len is {length}; cut it")
    return ids


def _features(data: Path, row: int, value: Any, shape: tuple[int, int]) -> Tensor:
    try:
        found = torch.as_tensor(value, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        found = torch.empty(0)
    if tuple(found.shape) != shape or not bool(torch.isfinite(found).all()):
        raise DataError(
            data,
            f"row {row + 1} has the source {brief(value)}; this model reads audio, expected a column input_features of "
            f"{shape[0]} × {shape[1]} finite numbers a row",
        )
    return found


def _without_start(ids: Tensor, value: Any, start: int | str) -> Tensor:
    """The tokens of a target to predict: a tokenizer may put the start token before a text (Whisper)."""
    return ids[1:] if isinstance(value, str) and len(ids) > 1 and int(ids[0]) == start else ids


def _padded(rows: Sequence[Tensor], pad: int) -> dict[str, Tensor]:
    """Rows padded on the right to one length, and their mask."""
    filled = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad)
    lengths = int64([len(row) for row in rows])
    return {"input_ids": filled, "attention_mask": (torch.arange(filled.shape[1]) < lengths[:, None]).long()}
