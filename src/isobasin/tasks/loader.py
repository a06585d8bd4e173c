"""Data for given models: a task from a file or folder, and batches of unlabeled inputs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from isobasin.runtime import Inputs, image_shape, max_length, vocabulary_size
from isobasin.tasks.classification import image_task, open_pixel_reader, text_task
from isobasin.tasks.images import read_images
from isobasin.tasks.language import encode_start, lm_task, mlm_task
from isobasin.tasks.source import DataError, check_exists, chosen, is_hub_id
from isobasin.tasks.task import Request, Task, int64, task_kind
from isobasin.tasks.text import checked_ids, is_ids, load_array, read_ids, read_text
from isobasin.tasks.tokenizer import require_tokenizer
from isobasin.weights import Weights

MAX_TOKENS = 2**15
MAX_IMAGES = 512
_TASKS = {"lm": lm_task, "mlm": mlm_task, "text": text_task, "image": image_task}


def open_task(
    data: Path | str,
    models: Sequence[Weights],
    *,
    kind: str = "auto",
    tokenizer: str | Path | None = None,
    max_samples: int | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    seed: int = 0,
    split: str = "test",
) -> Task:
    """A task for these models from a file, a folder, or a hub id if `datasets` is installed.

    The heads of the models determine the kind of task. Language models and masked language models read text, or a file
    of token ids (`.npy`, or `.bin` of uint16); text classifiers a table (CSV, JSONL, parquet); image classifiers the
    files of MNIST or CIFAR, or a folder per class. Data with splits are read from `split`. Without `max_samples` all
    data are used (of text the first 2²⁴ characters), otherwise the first windows of text, or a random subset of the
    labelled samples in their order. A window has `seq_len` tokens: 256 unless a model accepts less.

    >>> open_task("tinyshakespeare/input.txt", [a, b], max_samples=100)  # doctest: +SKIP
    """
    path = Path(data)
    kind = task_kind(models, kind)
    if not is_hub_id(path):
        check_exists(path)
    request = Request(path, tuple(models), tokenizer, max_samples, batch_size, seq_len, seed, split).checked()
    try:
        task = _TASKS[kind](request)
    except OSError as error:  # no permission to list a folder, or a disk error
        raise DataError(path, f"can not be read ({error.strerror or error})") from error
    return replace(task, source=str(data))


def unlabeled(data: Path, weights: Weights, *, length: int = 256, batch: int = 4, seed: int = 0) -> Iterator[Inputs]:
    """Batches of inputs without targets: at most MAX_TOKENS tokens or MAX_IMAGES images.

    A .npy file holds token ids (length) or (rows × length), or finite pixels (images × channels × height × width).
    """
    if image_shape(weights):
        yield from _pixel_batches(data, weights, batch, seed)
        return
    if "ForSequenceClassification" in str(weights.config.get("architectures")):
        batch = 1  # without a padding token transformers accepts one text at a time
    limit = min(length, max_length(weights) or length)
    rows = _id_rows(data, weights, limit) if is_ids(data) else _text_rows(data, weights, limit, seed)
    for start in range(0, len(rows), batch):
        yield {"input_ids": rows[start : start + batch]}


def _pixel_batches(data: Path, weights: Weights, batch: int, seed: int) -> Iterator[Inputs]:
    if data.suffix == ".npy":
        check_exists(data)
        pixels = _checked_pixels(data, load_array(data), weights)
        for start in range(0, min(len(pixels), MAX_IMAGES), batch):
            yield {"pixel_values": pixels[start : min(start + batch, MAX_IMAGES)].to(torch.float32)}
        return
    images, reader = read_images(data), open_pixel_reader([weights], data)
    used = chosen(len(images), MAX_IMAGES, seed)
    for start in range(0, len(used), batch):
        yield {"pixel_values": reader.read([images.pixels[i] for i in used[start : start + batch]])}


def _checked_pixels(data: Path, array: Tensor, weights: Weights) -> Tensor:
    image = image_shape(weights)
    assert image is not None
    if not array.is_floating_point() or tuple(array.shape[1:]) != image:
        raise DataError(
            data,
            f"an array of {array.dtype} with shape {tuple(array.shape)}; this model expects pixels "
            f"(images × {' × '.join(map(str, image))}, floating)",
        )
    if not bool(torch.isfinite(array).all()):
        raise DataError(data, "holds NaN or infinite pixels; expected finite ones")
    return array


def _id_rows(data: Path, weights: Weights, limit: int) -> Tensor:
    ids = read_ids(data, vocabulary_size(weights))
    return _pieces(ids if ids.dim() == 2 else ids[None], limit)


def _text_rows(data: Path, weights: Weights, limit: int, seed: int) -> Tensor:
    """Pieces of the text in random order, each with the special tokens that the tokenizer adds to a text."""
    read_text(data, 2**16)  # an error about the path comes before one about the tokenizer
    tokenizer = require_tokenizer([weights], advice="give --data as a .npy file of token ids")
    encoded, text = encode_start(data, tokenizer.encode, MAX_TOKENS)
    ids = checked_ids(encoded.ids, vocabulary_size(weights), data)
    front, back = map(int64, tokenizer.frame(text.strip()[:2000]))
    back = back if weights.family.inputs.bidirectional else back[:0]  # of a decoder, a piece does not end the text
    pieces = _pieces(ids[None], max(1, limit - len(front) - len(back)))
    rows = torch.cat([front.expand(len(pieces), -1), pieces, back.expand(len(pieces), -1)], 1)[:, :limit]
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def _pieces(ids: Tensor, limit: int) -> Tensor:
    """Rows of at most `limit` tokens, MAX_TOKENS in all."""
    rows = ids.unfold(1, limit, limit).flatten(0, 1) if ids.shape[1] > limit else ids
    return rows[: max(1, MAX_TOKENS // max(1, rows.shape[1]))]
