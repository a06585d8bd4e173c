"""MNIST's own format: IDX files, plain or gzipped."""

import gzip
import math
import re
import struct
import zlib
from pathlib import Path

import numpy as np

from isobasin.tasks.source import DataError

_PREFIX = {"test": "t10k|test", "train": "train"}
_MAX_BYTES = 2**34


def find_idx(data: Path, split: str) -> tuple[Path, Path] | None:
    """The two files of a split, in the folder itself or in `raw`; or an image file's labels beside it."""
    if data.is_file():
        return (data, _labels_of(data)) if re.search(r"images[.-]idx[34]-ubyte", data.name) else None
    pattern = re.compile(rf"(.*[-_])?({_PREFIX.get(split, split)})[-_]images[.-]idx[34]-ubyte(\.gz)?")
    for folder in (data, data / "raw", data / "MNIST" / "raw"):
        if folder.is_dir():
            # the plain file before the gzipped one
            found = sorted((f for f in folder.iterdir() if pattern.fullmatch(f.name)), key=lambda f: (f.suffix, f.name))
            if found:
                return found[0], _labels_of(found[0])
    return None


def _labels_of(images: Path) -> Path:
    name = re.sub(r"images([.-])idx\d", r"labels\1idx1", images.name)
    either = [images.with_name(name), images.with_name(name.removesuffix(".gz")), images.with_name(f"{name}.gz")]
    return next((file for file in either if file.exists()), either[0])


def read_idx_pair(images: Path, labels: Path) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 (images, height, width, channels) and labels int64."""
    pixels, numbers = read_idx(images), read_idx(labels)
    if pixels.ndim not in (3, 4) or numbers.ndim != 1:
        raise DataError(images, f"axes {pixels.shape} with labels {numbers.shape}; expected images and one label each")
    if len(pixels) != len(numbers) or not len(pixels):
        raise DataError(images, f"{len(pixels)} images, but {len(numbers)} labels in {labels.name}")
    return pixels if pixels.ndim == 4 else pixels[..., None], numbers.astype(np.int64)


def read_idx(file: Path) -> np.ndarray:
    """An array of bytes: two zeros, the type (8: bytes), the number of axes, their sizes, the content."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            start = stream.read(4)
            if len(start) < 4 or start[:3] != b"\0\0\x08" or not 1 <= start[3] <= 4:
                raise DataError(file, f"starts with {start!r}; expected an IDX file of bytes")
            head = stream.read(4 * start[3])
            shape = struct.unpack(f">{len(head) // 4}I", head[: len(head) // 4 * 4])
            size = math.prod(shape)
            if len(shape) != start[3] or size > _MAX_BYTES:
                raise DataError(file, f"an IDX file of axes {shape}; its head is damaged")
            content = stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(file, f"can not be read ({error})") from error
    if len(content) != size:
        raise DataError(file, f"{len(content):,} bytes or more, its head says {size:,} {shape}; download it again")
    return np.frombuffer(content, np.uint8).reshape(shape)
