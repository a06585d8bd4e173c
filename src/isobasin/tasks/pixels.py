"""Pictures to what a model reads: its own image processor, or plain scaling of pictures of the right size."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.shapes import Float
from isobasin.tasks.images import Images, read_images
from isobasin.tasks.pictures import PictureFiles, pillow
from isobasin.tasks.request import Request
from isobasin.tasks.source import DataError, chosen, digest, read_bytes
from isobasin.tasks.subjects import image_shape, is_own, label_names, n_classes, name_of, same
from isobasin.tasks.task import Batch, Prepared, int64
from isobasin.weights import Weights

PROCESSOR = "preprocessor_config.json"


def scaled(pixels: np.ndarray) -> Float[Tensor, "images channels height width"]:
    """(x/255 − ½)/½ of bytes (images, height, width, channels): numbers from −1 to 1, as our own models read them."""
    x = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).to(torch.float32)
    return (x / 255 - 0.5) / 0.5


def image_task(request: Request) -> Prepared:
    """A class for each picture, decoded when its batch is asked for."""
    if request.data.suffix == ".npy":
        raise DataError(request.data, "an array has no labels: give MNIST's or CIFAR's files, or a folder per class")
    images = read_images(request.data, request.split)
    count = same(request.models, "classes", n_classes)
    targets = int64(images.targets(count, label_names(request.models), request.data))
    reader = open_reader(request.models, request.data)
    used = chosen(len(images), request.max_samples, request.seed)
    content = digest([*_contents(images, used, reader), targets[used].numpy().tobytes(), reader.content.encode()])
    settings = request.settings("image") | {"image_size": list(reader.shape), "processor": reader.name}
    size = int(settings["batch_size"])

    def batches() -> Iterator[Batch]:
        for start in range(0, len(used), size):
            some = used[start : start + size]
            yield Batch({"pixel_values": reader.read([images.pixels[i] for i in some])}, targets[some])

    return Prepared(len(used), settings, content, batches)


@dataclass(frozen=True)
class Reader:
    """Pictures (height, width, channels) of any channels to pixels for the model, of shape (channels, height, width).

    Without a processor a picture must have the model's size: which way of resizing it was trained with, nobody says.
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
            said = self.processor(images=pictures, return_tensors="pt", input_data_format="channels_last")
            pixels: Tensor = said["pixel_values"].to(torch.float32)
        except Exception as error:  # settings that contradict each other can make a processor raise anything
            raise IsobasinError(
                f"{PROCESSOR}: the image processor fails ({type(error).__name__}: {error!s:.160}); correct it"
            ) from error
        if tuple(pixels.shape[1:]) != self.shape:
            raise IsobasinError(
                f"{PROCESSOR}: makes pixels {tuple(pixels.shape[1:])}, the model reads {self.shape}; correct its size"
            )
        return pixels


def _with_channels(picture: np.ndarray, channels: int, data: Path) -> np.ndarray:
    """Grey for one channel, three colours for three."""
    found = picture.shape[2]
    if found == channels:
        return picture
    if (found, channels) == (1, 3):
        return picture.repeat(3, axis=2)
    if (found, channels) == (3, 1):
        return np.asarray(pillow().fromarray(picture).convert("L"))[:, :, None]
    raise DataError(data, f"pictures of {found} channels, but the model reads {channels}")


def open_reader(models: Sequence[Weights], data: Path) -> Reader:
    """The image processor of the models' folders, or plain scaling; two processors must agree."""
    shape = same(models, "images", image_shape)
    found = [(weights, settings) for weights in models if (settings := _settings(weights)) is not None]
    for weights, settings in found[1:]:
        if settings != found[0][1]:
            raise IsobasinError(
                f"{name_of(weights)}: its {PROCESSOR} differs from that of {name_of(found[0][0])}; expected one way "
                "to read pictures: copy one over the other"
            )
    if not found:
        return Reader(shape, data)
    weights, settings = found[0]
    name, content = str(settings.get("image_processor_type", PROCESSOR)), json.dumps(settings, sort_keys=True)
    return Reader(shape, data, _processor(weights), name, content)


def _settings(weights: Weights) -> dict[str, Any] | None:
    if is_own(weights) or weights.path is None or not (weights.path / PROCESSOR).is_file():
        return None
    try:
        found = json.loads(read_bytes(weights.path / PROCESSOR))
    except ValueError as error:
        raise IsobasinError(f"{weights.path / PROCESSOR}: not JSON ({error}); correct it") from error
    return found if isinstance(found, dict) else {}


def _processor(weights: Weights) -> Any:
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    pillow()
    try:
        options = {"local_files_only": True, "trust_remote_code": False}
        return transformers.AutoImageProcessor.from_pretrained(str(weights.path), **options)
    except Exception as error:  # whatever a damaged file makes transformers raise
        raise IsobasinError(
            f"{name_of(weights)}: transformers makes no image processor of its {PROCESSOR} ({error!s:.160}); correct it"
        ) from error


def _contents(images: Images, used: Sequence[int], reader: Reader) -> Iterator[bytes]:
    """The stored bytes of each picture; its size is looked at on the way, before anything is computed."""
    for i in used:
        content = images.content(i)
        if isinstance(images.pixels, PictureFiles):
            reader.check_size(images.pixels.size(i, content))
        elif isinstance(images.pixels, np.ndarray):
            reader.check_size(images.pixels.shape[1:3])
        yield content
