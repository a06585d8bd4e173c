"""Language modelling tasks: text in windows that do not overlap, with the next token or masked tokens as targets."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.runtime import vocabulary_size
from isobasin.shapes import Int
from isobasin.tasks.source import DataError, digest
from isobasin.tasks.task import IGNORED, Batch, Request, Task, int64, name_of, window_length
from isobasin.tasks.text import checked_ids, is_ids, read_ids, read_text
from isobasin.tasks.tokenizer import Encoded, Tokenizer, open_tokenizer, require_tokenizer

MAX_CHARACTERS = 2**24
_MARGIN = 64  # tokens before a cut in the text that are not used


@dataclass(frozen=True)
class Windows:
    """Token ids, the span of each window in them, and the special tokens around every window."""

    ids: Tensor
    n_bytes: Tensor | None
    spans: Sequence[tuple[int, int]]
    front: Tensor
    back: Tensor

    def inputs(self, span: tuple[int, int]) -> Tensor:
        return torch.cat([self.front, self.ids[slice(*span)], self.back])


def lm_task(request: Request) -> Task:
    """Predict each token of a window from those before it: loss in nats per token, bits per byte of text."""
    tokenizer = None if is_ids(request.data) else require_tokenizer(request.models, request.tokenizer)
    windows, settings, content = _prepare(request, tokenizer, masked=False)
    size = int(settings["batch_size"])

    def batches() -> Iterator[Batch]:
        for spans in equal_runs(windows.spans, size):
            yield _lm_batch(windows, spans)

    return request.task("lm", len(windows.spans), settings, content, batches)


def _lm_batch(windows: Windows, spans: Sequence[tuple[int, int]]) -> Batch:
    ids = torch.stack([windows.inputs(span) for span in spans])
    targets = ids.roll(-1, 1)
    targets[:, -1] = IGNORED  # the last position has no target
    targets[:, : max(0, len(windows.front) - 1)] = IGNORED  # special tokens are not predicted
    first = 0 if len(windows.front) else 1
    counts = windows.n_bytes
    n_bytes = None if counts is None else sum(int(counts[start + first : stop].sum()) for start, stop in spans)
    return Batch({"input_ids": ids}, targets, n_bytes)


def mlm_task(request: Request) -> Task:
    """Predict masked tokens of each window from all others."""
    tokenizer = open_tokenizer(request.models, request.tokenizer)
    if tokenizer is None or tokenizer.mask_id is None:
        lacks = f"{tokenizer.name} without a mask token (of bytes: d_vocab ≥ 257)" if tokenizer else "no tokenizer"
        raise IsobasinError(f"{name_of(request.models[0])}: {lacks}, so nothing can be masked; give --tokenizer")
    d_vocab = min(map(vocabulary_size, request.models))
    if tokenizer.mask_id >= d_vocab:
        raise IsobasinError(
            f"{tokenizer.name}: its mask token is {tokenizer.mask_id}, but the vocabulary has {d_vocab}"
        )
    masking = Masking(tokenizer.mask_id, min(tokenizer.n_ordinary, d_vocab), tokenizer.special, request.seed)
    windows, settings, content = _prepare(request, None if is_ids(request.data) else tokenizer, masked=True)
    size = int(settings["batch_size"])

    def batches() -> Iterator[Batch]:
        mask = masking.start()
        for spans in equal_runs(windows.spans, size):
            pairs = [mask(windows.inputs(span)) for span in spans]
            yield Batch({"input_ids": torch.stack([x for x, _ in pairs])}, torch.stack([y for _, y in pairs]))

    return request.task("mlm", len(windows.spans), settings | {"masked": masking.share}, content, batches)


def equal_runs(spans: Sequence[tuple[int, int]], size: int) -> Iterator[list[tuple[int, int]]]:
    """Groups of consecutive windows of equal length, at most `size` each."""
    run: list[tuple[int, int]] = []
    for span in spans:
        if run and (len(run) == size or span[1] - span[0] != run[0][1] - run[0][0]):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _prepare(request: Request, tokenizer: Tokenizer | None, *, masked: bool) -> tuple[Windows, dict[str, Any], str]:
    length = window_length(request.models, request.seq_len)
    settings = request.settings("mlm" if masked else "lm") | {"seq_len": length}
    d_vocab = min(map(vocabulary_size, request.models))
    if tokenizer is None:  # the file holds token ids
        ids = read_ids(request.data, d_vocab)
        rows = ids if ids.dim() == 2 else ids[None]
        spans = row_windows(rows.shape, length, shortest=1 if masked else 2)[: request.max_samples]
        used = rows.flatten()[: spans[-1][1] if spans else 0]
        windows = Windows(used, None, spans, used[:0], used[:0])
        content = digest([used.numpy().tobytes()])
        settings |= {"tokenizer": None}
    else:
        windows, text = _text_windows(request, tokenizer, length, masked)
        checked_ids(windows.ids, d_vocab, request.data)
        content = digest([text.encode(), tokenizer.content.encode()])
        settings |= {"tokenizer": tokenizer.name, "characters": len(text)}
    if not windows.spans:
        raise DataError(request.data, "too little text: expected at least two tokens")
    return windows, settings, content


def _text_windows(request: Request, tokenizer: Tokenizer, length: int, masked: bool) -> tuple[Windows, str]:
    n_tokens = None if request.max_samples is None else request.max_samples * length
    encoded, text = encode_start(request.data, tokenizer.encode, n_tokens)
    front, back = map(int64, tokenizer.frame(text.strip()[:2000]))
    back = back if masked else back[:0]  # a window does not end the text
    body = length - len(front) - len(back)
    shortest = 1 if masked or len(front) else 2
    if body < shortest:
        raise IsobasinError(f"--seq-len {length}: no room beside the special tokens; give a larger one")
    spans = row_windows(torch.Size((1, len(encoded.ids))), body, shortest)[: request.max_samples]
    return Windows(encoded.ids, encoded.n_bytes, spans, front, back), text


def encode_start(data: Path, encode: Callable[[str], Encoded], n_tokens: int | None) -> tuple[Encoded, str]:
    """Encode the start of a text: at least `n_tokens` tokens if there are so many; MAX_CHARACTERS characters if None.

    The last tokens before a cut may differ from those of the whole text, so that _MARGIN more are read.
    """
    limit = MAX_CHARACTERS if n_tokens is None else 4 * (n_tokens + _MARGIN)
    while True:
        text = read_text(data, limit)
        found = encode(text)
        if n_tokens is None or len(text) < limit or len(found.ids) >= n_tokens + _MARGIN:
            return found, text
        limit *= 2


def row_windows(shape: torch.Size, length: int, shortest: int) -> list[tuple[int, int]]:
    """The spans of the windows of each row in the flattened rows, without those shorter than `shortest`."""
    n_rows, width = shape
    spans = (
        (row * width + start, row * width + min(start + length, width))
        for row in range(n_rows)
        for start in range(0, width, length)
    )
    return [(start, stop) for start, stop in spans if stop - start >= shortest]


@dataclass(frozen=True)
class Masking:
    """A share of the ordinary tokens is scored: 80 % of them are masked, 10 % replaced at random, 10 % unchanged.

    The choice is drawn window by window from one seed, so that it does not depend on the batch size.
    """

    mask_id: int
    n_ordinary: int  # replacements are drawn from the ids below this
    special: tuple[int, ...]
    seed: int
    share: float = 0.15

    def start(self) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """A function from a window to its inputs and targets, to be called for all windows in order."""
        rng = torch.Generator().manual_seed(self.seed)
        return lambda ids: self._mask(ids, rng)

    def _mask(self, ids: Int[Tensor, " time"], rng: torch.Generator) -> tuple[Tensor, Tensor]:
        ordinary = (~torch.isin(ids, ids.new_tensor(self.special))).nonzero().flatten()
        n = min(len(ordinary), max(1, round(self.share * len(ordinary))))
        scored = ordinary[torch.randperm(len(ordinary), generator=rng)[:n]]
        choice = torch.rand(n, generator=rng)
        random_ids = torch.randint(self.n_ordinary, (n,), generator=rng)
        inputs, targets = ids.clone(), torch.full_like(ids, IGNORED)
        targets[scored] = ids[scored]
        inputs[scored] = torch.where(choice < 0.8, self.mask_id, torch.where(choice < 0.9, random_ids, ids[scored]))
        return inputs, targets
