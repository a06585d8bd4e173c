"""Pictures to train on, as bytes (N, channels, height, width): they are scaled when a batch is made."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isobasin.tasks.images import Images, read_images
from isobasin.tasks.pictures import PictureFiles, pillow
from isobasin.tasks.source import DataError

_LARGEST = 224  # of pictures that differ in size, unless one is asked for


def read_pictures(place: Path | str, split: str, side: int | None) -> tuple[Tensor, Tensor, Images]:
    """Pixels uint8, classes int64, and what was read; `side` resizes, as do pictures that differ in size."""
    images = read_images(place, split)
    pixels = images.pixels
    if not isinstance(pixels, np.ndarray):
        sizes = {pixels[i].shape[:2] for i in range(min(len(pixels), 64))}
        same = len(sizes) == 1 and sizes == {(size[0],) * 2 for size in sizes}
        side = side or (next(iter(sizes))[0] if same else _LARGEST)
    if side is not None and not (isinstance(pixels, np.ndarray) and pixels.shape[1:3] == (side, side)):
        channels = 1 if isinstance(pixels, np.ndarray) and pixels.shape[3] == 1 else 3
        pixels = np.stack([resized(pixels[i], side, channels) for i in range(len(pixels))])
    assert isinstance(pixels, np.ndarray)
    if pixels.shape[1] != pixels.shape[2]:
        raise DataError(place, f"pictures of {pixels.shape[1]} × {pixels.shape[2]}; a square is expected: give a side")
    planes = torch.from_numpy(np.array(pixels)).permute(0, 3, 1, 2).contiguous()
    return planes, torch.as_tensor(images.labels, dtype=torch.int64), images


def resized(picture: np.ndarray, side: int, channels: int) -> np.ndarray:
    """The middle square, as `side` × `side` pixels."""
    image = pillow()
    wide = picture if picture.shape[2] == channels else picture.repeat(channels, axis=2)
    if wide.shape[:2] == (side, side):
        return wide
    found = image.fromarray(wide[:, :, 0] if channels == 1 else wide)
    short = min(found.size)
    left, top = (found.width - short) // 2, (found.height - short) // 2
    square = found.resize((side, side), image.Resampling.BILINEAR, box=(left, top, left + short, top + short))
    return np.asarray(square).reshape(side, side, channels)


def picture_files(images: Images) -> tuple[Path, ...]:
    return images.pixels.files if isinstance(images.pixels, PictureFiles) else ()
