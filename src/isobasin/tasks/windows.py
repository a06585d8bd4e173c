"""Language modelling: text in windows that do not overlap, every token but the first of a window predicted."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.tasks.masking import Masking
from isobasin.tasks.request import Request
from isobasin.tasks.source import DataError, digest
from isobasin.tasks.subjects import name_of, vocabulary, window_length
from isobasin.tasks.task import IGNORED, Batch, Prepared, int64
from isobasin.tasks.texts import checked_ids, is_ids, read_ids, read_text
from isobasin.tasks.tokenizing import Coder, Encoded, needed, open_coder

MAX_CHARACTERS = 2**24
_MARGIN = 64  # tokens in front of a cut in the text that are not trusted


@dataclass(frozen=True)
class Stream:
    """Token ids one after another, where each window lies in them, and what stands around every window."""

    ids: Tensor
    n_bytes: Tensor | None
    spans: Sequence[tuple[int, int]]
    front: Tensor
    back: Tensor

    def inputs(self, span: tuple[int, int]) -> Tensor:
        return torch.cat([self.front, self.ids[slice(*span)], self.back])


def lm_task(request: Request) -> Prepared:
    """Each window predicts its tokens from those before: loss in nats per token, bits per byte of text."""
    coder = None
    if not is_ids(request.data):
        coder = needed(open_coder(request.models, request.tokenizer), request.models)
    stream, settings, content = _prepare(request, coder, masked=False)
    size = int(settings["batch_size"])

    def batches() -> Iterator[Batch]:
        for spans in equal_runs(stream.spans, size):
            yield _lm_batch(stream, spans)

    return Prepared(len(stream.spans), settings, content, batches)


def _lm_batch(stream: Stream, spans: Sequence[tuple[int, int]]) -> Batch:
    ids = torch.stack([stream.inputs(span) for span in spans])
    targets = ids.roll(-1, 1)
    targets[:, -1] = IGNORED  # nothing follows
    targets[:, : max(0, len(stream.front) - 1)] = IGNORED  # of several tokens in front, none is predicted
    first = 0 if len(stream.front) else 1
    counts = stream.n_bytes
    n_bytes = None if counts is None else sum(int(counts[start + first : stop].sum()) for start, stop in spans)
    return Batch({"input_ids": ids}, targets, n_bytes)


def mlm_task(request: Request) -> Prepared:
    """Some tokens of each window are hidden, and predicted from all the others."""
    coder = open_coder(request.models, request.tokenizer)
    if coder is None or coder.mask_id is None:
        has = "no tokenizer" if coder is None else f"{coder.name} without a mask token (of bytes: d_vocab ≥ 257)"
        raise IsobasinError(f"{name_of(request.models[0])}: {has}, so nothing can be masked; give --tokenizer")
    d_vocab = min(map(vocabulary, request.models))
    if coder.mask_id >= d_vocab:
        raise IsobasinError(f"{coder.name}: its mask token is {coder.mask_id}, but the vocabulary has {d_vocab}")
    masking = Masking(coder.mask_id, min(coder.n_ordinary, d_vocab), coder.special, request.seed)
    stream, settings, content = _prepare(request, None if is_ids(request.data) else coder, masked=True)
    size = int(settings["batch_size"])

    def batches() -> Iterator[Batch]:
        hide = masking.start()
        for spans in equal_runs(stream.spans, size):
            pairs = [hide(stream.inputs(span)) for span in spans]
            yield Batch({"input_ids": torch.stack([x for x, _ in pairs])}, torch.stack([y for _, y in pairs]))

    return Prepared(len(stream.spans), settings | {"masked": masking.share}, content, batches)


def equal_runs(spans: Sequence[tuple[int, int]], size: int) -> Iterator[list[tuple[int, int]]]:
    """Consecutive windows of one length, at most `size` together."""
    run: list[tuple[int, int]] = []
    for span in spans:
        if run and (len(run) == size or span[1] - span[0] != run[0][1] - run[0][0]):
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _prepare(request: Request, coder: Coder | None, *, masked: bool) -> tuple[Stream, dict[str, Any], str]:
    length = window_length(request.models, request.seq_len)
    settings = request.settings("mlm" if masked else "lm") | {"seq_len": length}
    d_vocab = min(map(vocabulary, request.models))
    if coder is None:  # token ids are taken as they are
        ids = read_ids(request.data, d_vocab)
        rows = ids if ids.dim() == 2 else ids[None]
        spans = row_windows(rows.shape, length, shortest=1 if masked else 2)[: request.max_samples]
        used = rows.flatten()[: spans[-1][1] if spans else 0]
        stream = Stream(used, None, spans, used[:0], used[:0])
        content = digest([used.numpy().tobytes()])
        settings |= {"tokenizer": None}
    else:
        stream, text = _text_stream(request, coder, length, masked)
        checked_ids(stream.ids, d_vocab, request.data)
        content = digest([text.encode(), coder.content.encode()])
        settings |= {"tokenizer": coder.name, "characters": len(text)}
    if not stream.spans:
        raise DataError(request.data, "too little text: expected at least two tokens")
    return stream, settings, content


def _text_stream(request: Request, coder: Coder, length: int, masked: bool) -> tuple[Stream, str]:
    wanted = None if request.max_samples is None else request.max_samples * length
    encoded, text = encode_start(request.data, coder.encode, wanted)
    front, back = map(int64, coder.frame(text.strip()[:2000]))
    back = back if masked else back[:0]  # the end of a window is not the end of the text
    body = length - len(front) - len(back)
    shortest = 1 if masked or len(front) else 2
    if body < shortest:
        raise IsobasinError(f"--seq-len {length}: no room beside the special tokens; give a larger one")
    spans = row_windows(torch.Size((1, len(encoded.ids))), body, shortest)[: request.max_samples]
    return Stream(encoded.ids, encoded.n_bytes, spans, front, back), text


def encode_start(data: Path, encode: Callable[[str], Encoded], wanted: int | None) -> tuple[Encoded, str]:
    """As much of the text as gives the wanted number of tokens, and the tokens; MAX_CHARACTERS if none is wanted.

    The last tokens before a cut may come out otherwise than in the whole text: enough is read that none is used.
    """
    limit = MAX_CHARACTERS if wanted is None else 4 * (wanted + _MARGIN)
    while True:
        text = read_text(data, limit)
        found = encode(text)
        if wanted is None or len(text) < limit or len(found.ids) >= wanted + _MARGIN:
            return found, text
        limit *= 2


def row_windows(shape: torch.Size, length: int, shortest: int) -> list[tuple[int, int]]:
    """Where the windows of each row lie in all rows laid end to end; what is too short to score is left out."""
    n_rows, width = shape
    spans = (
        (row * width + start, row * width + min(start + length, width))
        for row in range(n_rows)
        for start in range(0, width, length)
    )
    return [(start, stop) for start, stop in spans if stop - start >= shortest]
