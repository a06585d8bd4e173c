"""Unlabeled inputs for a model: anything a task is made of, without its labels, and arrays of pixels."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from isobasin.running import Inputs
from isobasin.tasks.images import read_images
from isobasin.tasks.pixels import open_reader
from isobasin.tasks.source import DataError, check_exists, chosen
from isobasin.tasks.subjects import image_shape, longest, vocabulary
from isobasin.tasks.task import int64
from isobasin.tasks.texts import checked_ids, is_ids, load_array, read_ids, read_text
from isobasin.tasks.tokenizing import needed, open_coder
from isobasin.tasks.windows import encode_start
from isobasin.weights import Weights

MAX_TOKENS = 2**15
MAX_IMAGES = 512


def unlabeled(data: Path, weights: Weights, *, length: int = 256, batch: int = 4, seed: int = 0) -> Iterator[Inputs]:
    """Batches of text, token ids, pictures or pixels; at most MAX_TOKENS tokens or MAX_IMAGES images.

    A .npy file holds token ids (length) or (rows × length), or finite pixels (images × channels × height × width).
    """
    if image_shape(weights):
        yield from _pixel_batches(data, weights, batch, seed)
        return
    if "ForSequenceClassification" in str(weights.config.get("architectures")):
        batch = 1  # without a padding token transformers takes one text at a time
    limit = min(length, longest(weights) or length)
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
    images, reader = read_images(data), open_reader([weights], data)
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
    ids = read_ids(data, vocabulary(weights))
    return _pieces(ids if ids.dim() == 2 else ids[None], limit)


def _text_rows(data: Path, weights: Weights, limit: int, seed: int) -> Tensor:
    """Pieces of the text in random order, each with the special tokens that the tokenizer puts around a text."""
    read_text(data, 2**16)  # a path that is wrong is said before a tokenizer that is missing
    coder = needed(open_coder([weights]), [weights], "give --data as a .npy file of token ids")
    encoded, text = encode_start(data, coder.encode, MAX_TOKENS)
    ids = checked_ids(encoded.ids, vocabulary(weights), data)
    front, back = map(int64, coder.frame(text.strip()[:2000]))
    back = back if weights.arch.family == "bert" else back[:0]  # a decoder's piece does not end the text
    pieces = _pieces(ids[None], max(1, limit - len(front) - len(back)))
    rows = torch.cat([front.expand(len(pieces), -1), pieces, back.expand(len(pieces), -1)], 1)[:, :limit]
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]


def _pieces(ids: Tensor, limit: int) -> Tensor:
    """Rows cut to what the model can read at once, MAX_TOKENS in all."""
    rows = ids.unfold(1, limit, limit).flatten(0, 1) if ids.shape[1] > limit else ids
    return rows[: max(1, MAX_TOKENS // max(1, rows.shape[1]))]
