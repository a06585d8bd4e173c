"""Classification tasks: labelled texts, padded to the longest of their batch, and labelled images."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.runtime import image_shape, quiet_transformers, vocabulary_size
from isobasin.shapes import Float
from isobasin.tasks.images import Images, PictureFiles, pillow, read_images, scaled
from isobasin.tasks.source import DataError, chosen, digest, read_bytes
from isobasin.tasks.task import Batch, Request, Task, agreed, int64, label_names, n_classes, name_of, window_length
from isobasin.tasks.text import checked_ids, class_numbers, is_table, read_table
from isobasin.tasks.tokenizer import Tokenizer, require_tokenizer
from isobasin.weights import Weights

PROCESSOR = "preprocessor_config.json"


# -- texts -------------------------------------------------------------------------------------------------------------


def text_task(request: Request) -> Task:
    """Predict the class of each text; texts are cut to `seq_len` tokens."""
    if request.data.exists() and not is_table(request.data):
        raise DataError(request.data, "no labels: a text classifier needs a table, CSV, JSONL or parquet")
    model, tokenizer = request.models[0], require_tokenizer(request.models, request.tokenizer)
    table, count = read_table(request.data, split=request.split), agreed(request.models, "classes", n_classes)
    numbers = class_numbers(table.labels, count, label_names(request.models), request.data)
    rows = chosen(len(table), request.max_samples, request.seed)
    texts, targets = [table.texts[i] for i in rows], int64(numbers)[rows]
    length = window_length(request.models, request.seq_len)
    ids = _checked_rows(tokenizer.rows(texts, length), rows, request)
    settings = request.settings("text") | {"seq_len": length, "tokenizer": tokenizer.name}
    pad = pad_id(model, tokenizer)
    size = 1 if pad is None else int(settings["batch_size"])  # without padding, transformers accepts one text at a time

    def batches() -> Iterator[Batch]:
        for start in range(0, len(ids), size):
            part = slice(start, start + size)
            yield Batch(padded(ids[part], pad or 0, model), targets[part])

    content = digest([*(text.encode() for text in texts), targets.numpy().tobytes(), tokenizer.content.encode()])
    return request.task("text", len(ids), settings | {"batch_size": size}, content, batches)


def _checked_rows(ids: list[list[int]], rows: Sequence[int], request: Request) -> list[list[int]]:
    d_vocab = min(map(vocabulary_size, request.models))
    for row, one in zip(rows, ids):
        if not one:
            raise DataError(request.data, f"row {row + 1} has no token that the tokenizer knows; remove it")
        checked_ids(int64(one), d_vocab, request.data)
    return ids


def pad_id(weights: Weights, tokenizer: Tokenizer) -> int | None:
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


def padded(ids: Sequence[Sequence[int]], pad: int, weights: Weights) -> dict[str, Tensor]:
    """Rows padded on the right to one length, and their mask (true at tokens)."""
    width = max(map(len, ids))
    filled = int64([[*row, *[pad] * (width - len(row))] for row in ids])
    mask = torch.arange(width)[None] < int64([[len(row)] for row in ids])
    inputs = {"input_ids": filled, "attention_mask": mask if weights.family.own else mask.long()}
    if weights.family.inputs.token_types:
        inputs["token_type_ids"] = torch.zeros_like(filled)  # one sentence
    return inputs


# -- images ------------------------------------------------------------------------------------------------------------


def image_task(request: Request) -> Task:
    """Predict the class of each image; images are decoded batch by batch."""
    if request.data.suffix == ".npy":
        raise DataError(request.data, "an array has no labels: give MNIST's or CIFAR's files, or a folder per class")
    images = read_images(request.data, request.split)
    count = agreed(request.models, "classes", n_classes)
    targets = int64(images.targets(count, label_names(request.models), request.data))
    reader = open_pixel_reader(request.models, request.data)
    used = chosen(len(images), request.max_samples, request.seed)
    content = digest([*_contents(images, used, reader), targets[used].numpy().tobytes(), reader.content.encode()])
    settings = request.settings("image") | {"image_size": list(reader.shape), "processor": reader.name}
    size = int(settings["batch_size"])

    def batches() -> Iterator[Batch]:
        for start in range(0, len(used), size):
            part = used[start : start + size]
            yield Batch({"pixel_values": reader.read([images.pixels[i] for i in part])}, targets[part])

    return request.task("image", len(used), settings, content, batches)


@dataclass(frozen=True)
class PixelReader:
    """Converts images (height, width, channels) to the pixels (channels, height, width) that the model reads.

    Without a processor an image must have the size that the model reads: how to resize it is unknown.
    """

    shape: tuple[int, int, int]
    data: Path
    processor: Any = None
    name: str = "(x/255 - 0.5)/0.5"
    content: str = "scaled"

    def check_size(self, size: tuple[int, int]) -> None:
        if self.processor is None and size != self.shape[1:]:
            raise DataError(
                self.data,
                f"a picture of {size[0]} × {size[1]}, but the model reads {self.shape[1]} × {self.shape[2]} and has no "
                f"{PROCESSOR}; resize the pictures",
            )

    def read(self, pictures: Sequence[np.ndarray]) -> Float[Tensor, "images channels height width"]:
        for picture in pictures:
            self.check_size((picture.shape[0], picture.shape[1]))
        converted = [_with_channels(picture, self.shape[0], self.data) for picture in pictures]
        return scaled(np.stack(converted)) if self.processor is None else self._processed(converted)

    def _processed(self, pictures: list[np.ndarray]) -> Tensor:
        try:
            outputs = self.processor(images=pictures, return_tensors="pt", input_data_format="channels_last")
            pixels: Tensor = outputs["pixel_values"].to(torch.float32)
        except Exception as error:  # a processor raises errors of many kinds for inconsistent settings
            raise IsobasinError(
                f"{PROCESSOR}: the image processor fails ({type(error).__name__}: {error!s:.160}); correct it"
            ) from error
        if tuple(pixels.shape[1:]) != self.shape:
            raise IsobasinError(
                f"{PROCESSOR}: makes pixels {tuple(pixels.shape[1:])}, the model reads {self.shape}; correct its size"
            )
        return pixels


def _with_channels(picture: np.ndarray, channels: int, data: Path) -> np.ndarray:
    """The image in grey for one channel, or in colour for three."""
    found = picture.shape[2]
    if found == channels:
        return picture
    if (found, channels) == (1, 3):
        return picture.repeat(3, axis=2)
    if (found, channels) == (3, 1):
        return np.asarray(pillow().fromarray(picture).convert("L"))[:, :, None]
    raise DataError(data, f"pictures of {found} channels, but the model reads {channels}")


def open_pixel_reader(models: Sequence[Weights], data: Path) -> PixelReader:
    """The image processor in the folders of the models, or plain scaling; the processors must agree."""
    shape = agreed(models, "images", image_shape)
    found = [(weights, settings) for weights in models if (settings := _processor_settings(weights)) is not None]
    for weights, settings in found[1:]:
        if settings != found[0][1]:
            raise IsobasinError(
                f"{name_of(weights)}: its {PROCESSOR} differs from that of {name_of(found[0][0])}; expected one way "
                "to read pictures: copy one over the other"
            )
    if not found:
        return PixelReader(shape, data)
    weights, settings = found[0]
    name, content = str(settings.get("image_processor_type", PROCESSOR)), json.dumps(settings, sort_keys=True)
    return PixelReader(shape, data, _processor(weights), name, content)


def _processor_settings(weights: Weights) -> dict[str, Any] | None:
    if weights.family.own or weights.path is None or not (weights.path / PROCESSOR).is_file():
        return None
    try:
        found = json.loads(read_bytes(weights.path / PROCESSOR))
    except ValueError as error:
        raise IsobasinError(f"{weights.path / PROCESSOR}: not JSON ({error}); correct it") from error
    return found if isinstance(found, dict) else {}


def _processor(weights: Weights) -> Any:
    transformers = quiet_transformers()
    pillow()
    try:
        options = {"local_files_only": True, "trust_remote_code": False}
        return transformers.AutoImageProcessor.from_pretrained(str(weights.path), **options)
    except Exception as error:  # transformers raises errors of many kinds for a damaged file
        raise IsobasinError(
            f"{name_of(weights)}: transformers makes no image processor of its {PROCESSOR} ({error!s:.160}); correct it"
        ) from error


def _contents(images: Images, used: Sequence[int], reader: PixelReader) -> Iterator[bytes]:
    """The stored bytes of each image; its size is checked before anything is computed."""
    for i in used:
        content = images.content(i)
        if isinstance(images.pixels, PictureFiles):
            reader.check_size(images.pixels.size(i, content))
        elif isinstance(images.pixels, np.ndarray):
            reader.check_size(images.pixels.shape[1:3])
        yield content
