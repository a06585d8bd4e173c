"""Labelled text: each text by itself, padded to the longest of its batch."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from isobasin.tasks.labels import class_numbers
from isobasin.tasks.request import Request
from isobasin.tasks.source import DataError, chosen, digest
from isobasin.tasks.subjects import is_own, label_names, n_classes, same, vocabulary, window_length
from isobasin.tasks.tables import is_table, read_table
from isobasin.tasks.task import Batch, Prepared, int64
from isobasin.tasks.texts import checked_ids
from isobasin.tasks.tokenizing import Coder, needed, open_coder
from isobasin.weights import Weights


def text_task(request: Request) -> Prepared:
    """A class for each text, longer ones cut to `seq_len` tokens."""
    if request.data.exists() and not is_table(request.data):
        raise DataError(request.data, "no labels: a text classifier needs a table, CSV, JSONL or parquet")
    model, coder = request.models[0], needed(open_coder(request.models, request.tokenizer), request.models)
    table, count = read_table(request.data, split=request.split), same(request.models, "classes", n_classes)
    numbers = class_numbers(table.labels, count, label_names(request.models), request.data)
    rows = chosen(len(table), request.max_samples, request.seed)
    texts, targets = [table.texts[i] for i in rows], int64(numbers)[rows]
    length = window_length(request.models, request.seq_len)
    ids = _checked(coder.rows(texts, length), rows, request)
    settings = request.settings("text") | {"seq_len": length, "tokenizer": coder.name}
    pad = pad_id(model, coder)
    size = 1 if pad is None else int(settings["batch_size"])  # transformers takes one at a time without padding

    def batches() -> Iterator[Batch]:
        for start in range(0, len(ids), size):
            some = slice(start, start + size)
            yield Batch(padded(ids[some], pad or 0, model), targets[some])

    content = digest([*(text.encode() for text in texts), targets.numpy().tobytes(), coder.content.encode()])
    return Prepared(len(ids), settings | {"batch_size": size}, content, batches)


def _checked(ids: list[list[int]], rows: Sequence[int], request: Request) -> list[list[int]]:
    d_vocab = min(map(vocabulary, request.models))
    for row, one in zip(rows, ids):
        if not one:
            raise DataError(request.data, f"row {row + 1} has no token that the tokenizer knows; remove it")
        checked_ids(int64(one), d_vocab, request.data)
    return ids


def pad_id(weights: Weights, coder: Coder) -> int | None:
    """What fills a batch; None if this model can not be given a filled one.

    A decoder's classifier looks for its config's padding token to find the last word; an encoder and our own model
    read the mask, and any token will do.
    """
    if is_own(weights):
        return 0
    named = weights.config.get("pad_token_id")
    if isinstance(named, int) and named >= 0:
        return named
    return (coder.pad_id or 0) if weights.arch.family == "bert" else None


def padded(ids: Sequence[Sequence[int]], pad: int, weights: Weights) -> dict[str, Tensor]:
    """Rows of one length, filled on the right, with the mask that says so (true where there is a token)."""
    width = max(map(len, ids))
    filled = int64([[*row, *[pad] * (width - len(row))] for row in ids])
    mask = torch.arange(width)[None] < int64([[len(row)] for row in ids])
    inputs = {"input_ids": filled, "attention_mask": mask if is_own(weights) else mask.long()}
    if weights.arch.family == "bert":
        inputs["token_type_ids"] = torch.zeros_like(filled)  # one sentence: all of the first kind
    return inputs
