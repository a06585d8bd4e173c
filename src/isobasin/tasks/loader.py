"""Data for given models: language modelling and classification from a file or folder, and unlabeled inputs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobasin.data import shipped
from isobasin.errors import IsobasinError
from isobasin.runtime import Inputs, image_shape, max_length, reads_targets, vocabulary_size
from isobasin.shapes import Float, Int
from isobasin.tasks.images import open_pixel_reader, read_images
from isobasin.tasks.seq2seq import seq2seq_task
from isobasin.tasks.source import DataError, check_exists, chosen, digest, exists, is_hub_id
from isobasin.tasks.task import (
    IGNORED,
    Batch,
    Request,
    Task,
    agreed,
    int64,
    label_names,
    n_classes,
    name_of,
    task_kind,
    window_length,
)
from isobasin.tasks.text import (
    checked_ids,
    class_numbers,
    is_ids,
    is_table,
    load_array,
    read_ids,
    read_table,
    read_text,
)
from isobasin.tasks.tokenizer import Encoded, Tokenizer, open_tokenizer, require_tokenizer
from isobasin.weights import ModelSource, Weights, load

MAX_TOKENS = 2**15
MAX_IMAGES = 512
MAX_CHARACTERS = 2**24
_SHIPPED = {"digits": "mnist", "shakespeare": "shakespeare"}  # names of the data inside the package
_MARGIN = 64  # tokens before a cut in the text that are not used
_MASKED_SHARE = 0.15  # of the ordinary tokens, which masked language modelling scores


def open_task(
    data: Path | str,
    models: Sequence[ModelSource] | ModelSource,
    *,
    kind: str = "auto",
    tokenizer: str | Path | None = None,
    max_samples: int | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    seed: int = 0,
    split: str = "test",
    labelled: bool = True,
) -> Task:
    """A task for these models (or one) from a file, a folder, or a hub id if `datasets` is installed.

    `digits` and `shakespeare`, where no file or folder has that name, are the data that ship with the package.

    The heads of the models determine the kind of task. Language models and masked language models read text, or a file
    of token ids (`.npy`, or `.bin` of uint16); text classifiers a table (CSV, JSONL, parquet); encoder-decoders a table
    of sources and targets; image classifiers the files of MNIST or CIFAR, or a folder per class. Data with splits are
    read from `split`. Without `max_samples` all data are used (of text the first 2²⁴ characters), otherwise the first
    windows of text, or a random subset of the samples in their order. A window has `seq_len` tokens: 256 unless a model
    accepts less. With `labelled=False` the labels of a classifier's data are not read and need not be there: a table
    without them, or an array of pixels (.npy), is enough to learn from the models' own predictions.
    """
    path = Path(data)
    if path.as_posix() in _SHIPPED and not exists(path):
        path = shipped(_SHIPPED[path.as_posix()])
    given = models if isinstance(models, list | tuple) else [models]
    loaded = tuple(map(load, given))
    kind = task_kind(loaded, kind)
    if not is_hub_id(path):
        check_exists(path)
    request = Request(path, loaded, tokenizer, max_samples, batch_size, seq_len, seed, split, labelled).checked()
    opener = _OPENERS[kind]
    try:
        return replace(opener(request), source=str(data))
    except OSError as error:  # no permission to list a folder, or a disk error
        raise DataError(path, f"can not be read ({error.strerror or error})") from error


# -- language modelling: text in windows that do not overlap -----------------------------------------------------------


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

    def runs(self, size: int) -> Iterator[list[tuple[int, int]]]:
        """Groups of consecutive windows of equal length, at most `size` each."""
        run: list[tuple[int, int]] = []
        for span in self.spans:
            if run and (len(run) == size or span[1] - span[0] != run[0][1] - run[0][0]):
                yield run
                run = []
            run.append(span)
        if run:
            yield run


def _lm_task(request: Request) -> Task:
    """Predict each token of a window from those before it: loss in nats per token, bits per byte of text."""
    tokenizer = None if is_ids(request.data) else require_tokenizer(request.models, request.tokenizer)
    windows, settings, content = _prepare(request, tokenizer, masked=False)

    def batches() -> Iterator[Batch]:
        for spans in windows.runs(settings["batch_size"]):
            ids = torch.stack([windows.inputs(span) for span in spans])
            targets = ids.roll(-1, 1)
            targets[:, -1] = IGNORED  # the last position has no target
            targets[:, : max(0, len(windows.front) - 1)] = IGNORED  # special tokens are not predicted
            first, counts = 0 if len(windows.front) else 1, windows.n_bytes
            n_bytes = None if counts is None else sum(int(counts[start + first : stop].sum()) for start, stop in spans)
            yield Batch({"input_ids": ids}, targets, n_bytes)

    return request.task("lm", len(windows.spans), settings, content, batches)


def _mlm_task(request: Request) -> Task:
    """Predict masked tokens of each window from all others."""
    tokenizer = open_tokenizer(request.models, request.tokenizer)
    if tokenizer is None or tokenizer.mask_id is None:
        lacks = f"{tokenizer.name} without a mask token (of bytes: d_vocab ≥ 257)" if tokenizer else "no tokenizer"
        raise IsobasinError(f"{name_of(request.models[0])}: {lacks}, so nothing can be masked; give --tokenizer")
    mask, special, d_vocab = tokenizer.mask_id, tokenizer.special, min(map(vocabulary_size, request.models))
    if mask >= d_vocab:
        raise IsobasinError(f"{tokenizer.name}: its mask token is {mask}, but the vocabulary has {d_vocab}")
    n_ordinary = min(tokenizer.n_ordinary, d_vocab)
    windows, settings, content = _prepare(request, None if is_ids(request.data) else tokenizer, masked=True)

    def batches() -> Iterator[Batch]:
        rng = torch.Generator().manual_seed(request.seed)  # window by window: the batch size makes no difference
        for spans in windows.runs(settings["batch_size"]):
            pairs = [_masked(windows.inputs(span), mask, n_ordinary, special, rng) for span in spans]
            yield Batch({"input_ids": torch.stack([x for x, _ in pairs])}, torch.stack([y for _, y in pairs]))

    return request.task("mlm", len(windows.spans), settings | {"masked": _MASKED_SHARE}, content, batches)


def _masked(
    ids: Int[Tensor, " time"], mask: int, n_ordinary: int, special: tuple[int, ...], rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Inputs and targets. Of the scored tokens 80 % are masked, 10 % random (below `n_ordinary`), 10 % unchanged."""
    ordinary = (~torch.isin(ids, ids.new_tensor(special))).nonzero().flatten()
    n = min(len(ordinary), max(1, round(_MASKED_SHARE * len(ordinary))))
    scored = ordinary[torch.randperm(len(ordinary), generator=rng)[:n]]
    choice = torch.rand(n, generator=rng)
    random_ids = torch.randint(n_ordinary, (n,), generator=rng)
    inputs, targets = ids.clone(), torch.full_like(ids, IGNORED)
    targets[scored] = ids[scored]
    inputs[scored] = torch.where(choice < 0.8, mask, torch.where(choice < 0.9, random_ids, ids[scored]))
    return inputs, targets


def _prepare(request: Request, tokenizer: Tokenizer | None, *, masked: bool) -> tuple[Windows, dict[str, Any], str]:
    """The windows of the data, the settings of the task, and a digest of what was read."""
    length = window_length(request.models, request.seq_len)
    settings = request.settings("mlm" if masked else "lm") | {"seq_len": length}
    d_vocab = min(map(vocabulary_size, request.models))
    if tokenizer is None:  # the file holds token ids
        ids = torch.atleast_2d(read_ids(request.data, d_vocab))
        spans = _row_windows(ids.shape, length, shortest=1 if masked else 2)[: request.max_samples]
        used = ids.flatten()[: spans[-1][1] if spans else 0]
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
    (ids, n_bytes), text = _encode_start(request.data, tokenizer.encode, n_tokens)
    front, back = map(int64, tokenizer.frame(text.strip()[:2000]))
    back = back if masked else back[:0]  # a window does not end the text
    body = length - len(front) - len(back)
    shortest = 1 if masked or len(front) else 2
    if body < shortest:
        raise IsobasinError(f"--seq-len {length}: no room beside the special tokens; give a larger one")
    spans = _row_windows(torch.Size((1, len(ids))), body, shortest)[: request.max_samples]
    return Windows(ids, n_bytes, spans, front, back), text


def _encode_start(data: Path, encode: Callable[[str], Encoded], n_tokens: int | None) -> tuple[Encoded, str]:
    """Encode the start of a text: at least `n_tokens` tokens if there are so many; MAX_CHARACTERS characters if None.

    The last tokens before a cut may differ from those of the whole text, so that _MARGIN more are read.
    """
    limit = MAX_CHARACTERS if n_tokens is None else 4 * (n_tokens + _MARGIN)
    while True:
        text = read_text(data, limit)
        found = encode(text)
        if n_tokens is None or len(text) < limit or len(found[0]) >= n_tokens + _MARGIN:
            return found, text
        limit *= 2


def _row_windows(shape: torch.Size, length: int, shortest: int) -> list[tuple[int, int]]:
    """The spans of the windows of each row in the flattened rows, without those shorter than `shortest`."""
    n_rows, width = shape
    spans = (
        (row * width + start, row * width + min(start + length, width))
        for row in range(n_rows)
        for start in range(0, width, length)
    )
    return [(start, stop) for start, stop in spans if stop - start >= shortest]


# -- classification ----------------------------------------------------------------------------------------------------


def _text_task(request: Request) -> Task:
    """Predict the class of each text; texts are cut to `seq_len` tokens, and padded to the longest of their batch."""
    if request.data.exists() and not is_table(request.data):
        what = "no labels" if request.labelled else "no separate texts"
        raise DataError(request.data, f"{what}: a text classifier needs a table, CSV, JSONL or parquet")
    model, tokenizer = request.models[0], require_tokenizer(request.models, request.tokenizer)
    table = read_table(request.data, split=request.split, labelled=request.labelled)
    count = agreed(request.models, "classes", n_classes)
    rows = chosen(len(table), request.max_samples, request.seed)
    texts, targets = [table.texts[i] for i in rows], torch.full((len(rows),), IGNORED)
    if request.labelled:
        targets = int64(class_numbers(table.labels, count, label_names(request.models), request.data))[rows]
    length = window_length(request.models, request.seq_len)
    ids = tokenizer.rows(texts, length)
    for row, one in zip(rows, ids):
        if not one:
            raise DataError(request.data, f"row {row + 1} has no token that the tokenizer knows; remove it")
        checked_ids(int64(one), min(map(vocabulary_size, request.models)), request.data)
    settings = request.settings("text") | {"seq_len": length, "tokenizer": tokenizer.name}
    pad = _pad_id(model, tokenizer)
    size = 1 if pad is None else int(settings["batch_size"])  # without padding, transformers accepts one text at a time

    def batches() -> Iterator[Batch]:
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            yield Batch(_padded(ids[part], pad or 0, model), targets[part])

    content = digest([*(text.encode() for text in texts), targets.numpy().tobytes(), tokenizer.content.encode()])
    return request.task("text", len(ids), settings | {"batch_size": size}, content, batches)


def _pad_id(weights: Weights, tokenizer: Tokenizer) -> int | None:
    """The padding token; None if this model does not accept padded batches.

    The classifier of a decoder finds the last token by the padding token of its config. An encoder and the project's
    own model read the mask, so that any token can be used.
    """
    if weights.family.own:
        return 0
    named = weights.config.get("pad_token_id")
    if isinstance(named, int) and named >= 0:
        return named
    return (tokenizer.pad_id or 0) if weights.family.inputs.bidirectional else None


def _padded(ids: Sequence[Sequence[int]], pad: int, weights: Weights) -> dict[str, Tensor]:
    """Rows padded on the right to one length, and their mask (true at tokens)."""
    width = max(map(len, ids))
    filled = int64([[*row, *[pad] * (width - len(row))] for row in ids])
    mask = torch.arange(width)[None] < int64([[len(row)] for row in ids])
    inputs = {"input_ids": filled, "attention_mask": mask if weights.family.own else mask.long()}
    if weights.family.inputs.token_types:
        inputs["token_type_ids"] = torch.zeros_like(filled)  # one sentence
    return inputs


def _image_task(request: Request) -> Task:
    """Predict the class of each image; images are decoded batch by batch."""
    if request.data.suffix == ".npy":
        if not request.labelled:
            return _pixel_task(request)
        raise DataError(request.data, "an array has no labels: give MNIST's or CIFAR's files, or a folder per class")
    images = read_images(request.data, request.split)
    count, targets = agreed(request.models, "classes", n_classes), torch.full((len(images),), IGNORED)
    if request.labelled:
        targets = int64(images.targets(count, label_names(request.models), request.data))
    reader = open_pixel_reader(request.models, request.data)
    used = chosen(len(images), request.max_samples, request.seed)
    content = digest([*images.contents(used, reader), targets[used].numpy().tobytes(), reader.content.encode()])
    settings = request.settings("image") | {"image_size": list(reader.shape), "processor": reader.name}
    size = int(settings["batch_size"])

    def batches() -> Iterator[Batch]:
        for start in range(0, len(used), size):
            part = used[start : start + size]
            yield Batch({"pixel_values": reader.read([images.pixels[i] for i in part])}, targets[part])

    return request.task("image", len(used), settings, content, batches)


def _pixel_task(request: Request) -> Task:
    """An array of pixels, without labels."""
    pixels = read_pixels(request.data, agreed(request.models, "image size", _image_shape))
    used = pixels[chosen(len(pixels), request.max_samples, request.seed)].to(torch.float32)
    settings = request.settings("image")

    def batches() -> Iterator[Batch]:
        for part in used.split(int(settings["batch_size"])):
            yield Batch({"pixel_values": part}, torch.full((len(part),), IGNORED))

    return request.task("image", len(used), settings, digest([used.numpy().tobytes()]), batches)


def _image_shape(weights: Weights) -> tuple[int, int, int]:
    found = image_shape(weights)
    if found is None:
        raise IsobasinError(f"{name_of(weights)}: reads no images; give data of another kind")
    return found


_OPENERS = {
    "lm": _lm_task,
    "mlm": _mlm_task,
    "seq2seq": seq2seq_task,
    "text": _text_task,
    "image": _image_task,
}


# -- inputs without targets --------------------------------------------------------------------------------------------


def unlabeled(data: Path, weights: Weights, *, length: int = 256, batch: int = 4, seed: int = 0) -> Iterator[Inputs]:
    """Batches of inputs without targets: at most MAX_TOKENS tokens or MAX_IMAGES images.

    A .npy file holds token ids (length) or (rows × length), or finite pixels (images × channels × height × width). An
    encoder-decoder reads pairs of a source and a target; of other data both stacks read the same tokens.
    """
    if weights.family.parts:
        raise IsobasinError(
            f"--data: a {weights.family.name} model reads pairs of an image and a text, and data files hold one of "
            "them; match by weights, or pass batches of inputs in Python"
        )
    if image := image_shape(weights):
        yield from _pixel_batches(data, weights, image, batch, seed)
        return
    if reads_targets(weights) and is_table(data):
        yield from _pair_batches(data, weights, seed)
        return
    if weights.family.inputs.features:
        raise IsobasinError(
            f"--data: a {weights.family.name} model reads audio, expected a table with columns input_features and "
            "labels; match by weights, or pass batches of inputs in Python"
        )
    if "ForSequenceClassification" in str(weights.config.get("architectures")):
        batch = 1  # without a padding token transformers accepts one text at a time
    limit = min(length, max_length(weights) or length)
    if is_ids(data):
        rows = _pieces(torch.atleast_2d(read_ids(data, vocabulary_size(weights))), limit)
    else:
        rows = _text_rows(data, weights, limit, seed)
    for start in range(0, len(rows), batch):
        ids = rows[start : start + batch]
        yield {"input_ids": ids} | ({"decoder_input_ids": ids} if reads_targets(weights) else {})


def _pair_batches(data: Path, weights: Weights, seed: int) -> Iterator[Inputs]:
    """Pair by pair: padding of a batch would count as tokens."""
    n_tokens = 0
    for one in seq2seq_task(Request(data, (weights,), batch_size=1, seed=seed)):
        n_tokens += len(one.targets[0])
        yield one.inputs
        if n_tokens >= MAX_TOKENS:
            return


def _pixel_batches(
    data: Path, weights: Weights, image: tuple[int, int, int], batch: int, seed: int
) -> Iterator[Inputs]:
    if data.suffix == ".npy":
        pixels = read_pixels(data, image)[:MAX_IMAGES]
        for start in range(0, len(pixels), batch):
            yield {"pixel_values": pixels[start : start + batch].to(torch.float32)}
        return
    images, reader = read_images(data), open_pixel_reader([weights], data)
    used = chosen(len(images), MAX_IMAGES, seed)
    for start in range(0, len(used), batch):
        yield {"pixel_values": reader.read([images.pixels[i] for i in used[start : start + batch]])}


def read_pixels(data: Path, image: tuple[int, int, int]) -> Float[Tensor, "images channels height width"]:
    """An array of finite pixels of this shape from a .npy file."""
    check_exists(data)
    array = load_array(data)
    if not array.is_floating_point() or tuple(array.shape[1:]) != image:
        raise DataError(
            data,
            f"an array of {array.dtype} with shape {tuple(array.shape)}; this model expects pixels "
            f"(images × {' × '.join(map(str, image))}, floating)",
        )
    if not bool(torch.isfinite(array).all()):
        raise DataError(data, "holds NaN or infinite pixels; expected finite ones")
    return array


def _text_rows(data: Path, weights: Weights, limit: int, seed: int) -> Tensor:
    """Pieces of the text in random order, each with the special tokens that the tokenizer adds to a text."""
    read_text(data, 2**16)  # an error about the path comes before one about the tokenizer
    tokenizer = require_tokenizer([weights], advice="give --data as a .npy file of token ids")
    (ids, _), text = _encode_start(data, tokenizer.encode, MAX_TOKENS)
    ids = checked_ids(ids, vocabulary_size(weights), data)
    front, back = map(int64, tokenizer.frame(text.strip()[:2000]))
    back = back if weights.family.inputs.bidirectional else back[:0]  # of a decoder, a piece does not end the text
    pieces = _pieces(ids[None], max(1, limit - len(front) - len(back)))
    rows = torch.cat([front.expand(len(pieces), -1), pieces, back.expand(len(pieces), -1)], 1)[:, :limit]
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def _pieces(ids: Tensor, limit: int) -> Tensor:
    """Rows of at most `limit` tokens, MAX_TOKENS in all."""
    rows = ids.unfold(1, limit, limit).flatten(0, 1) if ids.shape[1] > limit else ids
    return rows[: max(1, MAX_TOKENS // max(1, rows.shape[1]))]
