"""Labelled images: MNIST's IDX files, CIFAR's batches, a folder of pictures per class, `datasets`; pixels of models."""

import gzip
import io
import json
import math
import pickle
import re
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from isobasin.checkpoint.folder import read_object
from isobasin.errors import IsobasinError
from isobasin.runtime import image_shape, quiet_transformers
from isobasin.shapes import Float, Int
from isobasin.tasks.source import DataError, check_exists, is_dataset, load_split, read_bytes
from isobasin.tasks.task import agreed, name_of
from isobasin.tasks.text import folder_classes
from isobasin.weights import Weights

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Images:
    """Images and their classes: `pixels[i]` is uint8 (height, width, channels), decoded on access.

    `pixels` is one array (images, height, width, channels), or a sequence of files. `labels` are indices into the
    `classes` of the data; with `by_folder` these are names of folders, and their order is arbitrary.
    """

    pixels: "np.ndarray | PictureFiles | DatasetImages"
    labels: Int[np.ndarray, " images"]
    classes: tuple[str, ...] | None = None
    by_folder: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def contents(self, used: Sequence[int], reader: "PixelReader") -> Iterator[bytes]:
        """The bytes of the file of each image, or of its pixels; sizes are checked before anything is computed."""
        for i in used:
            if isinstance(self.pixels, PictureFiles):
                content = self.pixels.content(i)
                reader.check_size(self.pixels.size(i, content))
                yield content
            else:
                if isinstance(self.pixels, np.ndarray):
                    reader.check_size(self.pixels.shape[1:3])
                yield np.ascontiguousarray(self.pixels[i]).tobytes()

    def targets(self, n_classes: int, names: Mapping[str, int], data: Path) -> Int[np.ndarray, " images"]:
        """The class of each image in the numbering of the model."""
        found = self.labels
        if self.by_folder and self.classes:
            found = np.array(folder_classes(self.classes, n_classes, names, data), dtype=np.int64)[self.labels]
        elif self.classes and names and set(self.classes) <= set(names):
            found = np.array([names[name] for name in self.classes], dtype=np.int64)[self.labels]
        for i in np.flatnonzero((found < 0) | (found >= n_classes))[:1]:
            raise DataError(
                data, f"image {i + 1} has the label {found[i]}; the model's classes are 0 to {n_classes - 1}"
            )
        return found


def read_images(data: Path | str, split: str = "test") -> Images:
    """Images of a split ("test" or "train") from MNIST's IDX files, CIFAR's binary or python files, a folder with a
    subfolder per class, or a `datasets` folder.
    """
    data = Path(data)
    if is_dataset(data):
        return _from_dataset(data, split)
    check_exists(data)
    if pair := find_idx(data, split):
        return Images(*read_idx_pair(*pair))
    if files := find_cifar(data, split):
        return Images(*read_cifar(files))
    if data.is_dir() and (folders := class_folders(data, split)):
        files = [file for _, members in folders for file in members]
        labels = np.repeat(np.arange(len(folders)), [len(members) for _, members in folders])
        return Images(PictureFiles(tuple(files)), labels, tuple(name for name, _ in folders), by_folder=True)
    if data.is_file():
        raise DataError(data, "a file such as text, but this model reads images; give pictures, or pixels as .npy")
    raise DataError(
        data,
        f"no labelled images of the split {split!r} in it; expected MNIST's IDX files, CIFAR's batches, or a folder "
        f"per class with pictures ({', '.join(SUFFIXES[:4])}…)",
    )


def _from_dataset(data: Path, split: str) -> Images:
    found = load_split(data, split)
    kinds = {name: type(feature).__name__ for name, feature in found.features.items()}
    image = next((name for name, kind in kinds.items() if kind == "Image"), None)
    label = next((name for name in ("label", "labels", "fine_label", "class", "target") if name in kinds), None)
    if image is None or label is None:
        raise DataError(data, f"columns {', '.join(kinds)}; expected an image and a label")
    classes = tuple(found.features[label].names) if kinds[label] == "ClassLabel" else None
    labels = np.array(found[label][:], dtype=np.int64)
    if not len(labels):
        raise DataError(data, "no rows in it; expected images with labels")
    return Images(DatasetImages(found, image), labels, classes)


def scale_pixels(pixels: Tensor) -> Tensor:
    """Bytes to numbers from −1 to 1, (x/255 − ½)/½, as the project's own models read them."""
    return (pixels.float() / 255 - 0.5) / 0.5


def scaled(pixels: np.ndarray) -> Float[Tensor, "images channels height width"]:
    """The same for bytes (images, height, width, channels)."""
    return scale_pixels(torch.from_numpy(np.array(pixels)).permute(0, 3, 1, 2))  # a copy: a file can be read-only


# -- pixels for a model ------------------------------------------------------------------------------------------------

PROCESSOR = "preprocessor_config.json"


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
        if self.processor is None:
            return scaled(np.stack(converted))
        try:
            outputs = self.processor(images=converted, return_tensors="pt", input_data_format="channels_last")
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
    pillow()
    try:
        options = {"local_files_only": True, "trust_remote_code": False}
        processor = quiet_transformers().AutoImageProcessor.from_pretrained(str(weights.path), **options)
    except Exception as error:  # transformers raises errors of many kinds for a damaged file
        raise IsobasinError(
            f"{name_of(weights)}: transformers makes no image processor of its {PROCESSOR} ({error!s:.160}); correct it"
        ) from error
    name, content = str(settings.get("image_processor_type", PROCESSOR)), json.dumps(settings, sort_keys=True)
    return PixelReader(shape, data, processor, name, content)


def _processor_settings(weights: Weights) -> dict[str, Any] | None:
    if weights.family.own or weights.path is None or not (weights.path / PROCESSOR).is_file():
        return None
    return read_object(weights.path / PROCESSOR)


# -- picture files -----------------------------------------------------------------------------------------------------


SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MAX_PIXELS = 64 * 10**6
_SMALL = 2**22  # pixels that a file of any size may have
_PIXELS_PER_BYTE = 32  # of a larger picture: a photograph has fewer, and memory is bounded by the size of the file
_SPLIT_FOLDERS = {"test": ("test", "val", "validation"), "train": ("train",)}


@dataclass(frozen=True)
class PictureFiles:
    """Picture files on disk, decoded on access to uint8 (height, width, channels)."""

    files: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> np.ndarray:
        picture = _opened(self.content(i), self.files[i])
        try:
            return _array(picture)
        except Exception as error:  # decoders of Pillow raise errors of many kinds
            raise DataError(self.files[i], f"a damaged picture ({error!s:.160}); remove or replace it") from error

    def content(self, i: int) -> bytes:
        return read_bytes(self.files[i])

    def size(self, i: int, content: bytes) -> tuple[int, int]:
        """Height and width from the header of the file, without decoding it."""
        picture = _opened(content, self.files[i])
        return picture.height, picture.width


@dataclass(frozen=True)
class DatasetImages:
    """The image column of a `datasets` split, decoded on access to uint8 (height, width, channels)."""

    rows: Any
    column: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> np.ndarray:
        picture = self.rows[i][self.column]
        _check_pixels(picture, f"row {i + 1}")
        return _array(picture)


def class_folders(data: Path, split: str) -> list[tuple[str, list[Path]]]:
    """Classes and their picture files, sorted by name; of a folder with subfolders for splits, those of `split`."""
    if (listed := data / "val" / "val_annotations.txt").is_file() and split == "test":
        return _listed(listed)
    inner = next((data / name for name in _SPLIT_FOLDERS.get(split, (split,)) if (data / name).is_dir()), data)
    if inner is not data and _pictures(inner):
        inner = data  # a class may be called "test"
    folders = sorted(f for f in inner.iterdir() if f.is_dir() and not f.name.startswith("."))
    found = [(folder.name, _pictures(folder) or _pictures(folder / "images")) for folder in folders]
    return [(name, files) for name, files in found if files]


def _listed(file: Path) -> list[tuple[str, list[Path]]]:
    """The validation pictures of Tiny ImageNet, whose test set has no labels: one folder and a table of classes."""
    classes: dict[str, list[Path]] = {}
    for row in read_bytes(file).decode("utf-8", "replace").splitlines():
        name, _, rest = row.partition("\t")
        classes.setdefault(rest.partition("\t")[0], []).append(file.parent / "images" / Path(name).name)
    return sorted((name, sorted(files)) for name, files in classes.items() if name)


def _pictures(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = (f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))
    return sorted(f for f in files if f.is_file())


def pillow() -> Any:
    """The module `PIL.Image`, needed for picture files and image processors only."""
    try:
        from PIL import Image
    except ImportError as error:
        raise IsobasinError("picture files need Pillow: pip install pillow") from error
    return Image


def _opened(content: bytes, file: Path) -> "Image":
    image = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image.DecompressionBombWarning)  # the size is checked below
            picture: Image = image.open(io.BytesIO(content))
    except image.DecompressionBombError as error:
        raise DataError(file, f"an absurdly large picture ({error!s:.80})") from error
    except Exception as error:  # its plugins raise errors of many kinds
        raise DataError(file, "not a picture that Pillow can read; remove or replace it") from error
    _check_pixels(picture, str(file), max(_SMALL, _PIXELS_PER_BYTE * len(content)))
    return picture


def _check_pixels(picture: "Image", where: str, limit: int = MAX_PIXELS) -> None:
    size, limit = f"{picture.width} × {picture.height}", min(limit, MAX_PIXELS)
    if picture.width * picture.height > limit:
        raise DataError(where, f"an absurdly large picture, {size}; expected at most {limit:,} pixels")


def _array(picture: "Image") -> np.ndarray:
    """uint8 (height, width, channels): 1 channel for grey, 3 for colour; transparency is dropped."""
    grey = picture.mode in ("1", "L", "LA", "I", "F") or picture.mode.startswith("I;16")
    array = np.asarray(picture.convert("L" if grey else "RGB"))
    return array[:, :, None] if grey else array


# -- IDX files of MNIST ------------------------------------------------------------------------------------------------


_IDX_PREFIX = {"test": "t10k|test", "train": "train"}
_MAX_IDX_BYTES = 2**34
_MAX_GZIP_RATIO = 100  # MNIST is compressed to a fifth; memory is bounded by the size of the file


def find_idx(data: Path, split: str) -> tuple[Path, Path] | None:
    """The files of images and labels of a split, in the folder or in `raw`; or a file of images and its labels."""
    if data.is_file():
        return (data, _idx_labels(data)) if re.search(r"images[.-]idx[34]-ubyte", data.name) else None
    pattern = re.compile(rf"(.*[-_])?({_IDX_PREFIX.get(split, split)})[-_]images[.-]idx[34]-ubyte(\.gz)?")
    for folder in (data, data / "raw", data / "MNIST" / "raw"):
        if folder.is_dir():
            # the plain file before the gzipped one
            found = sorted((f for f in folder.iterdir() if pattern.fullmatch(f.name)), key=lambda f: (f.suffix, f.name))
            if found:
                return found[0], _idx_labels(found[0])
    return None


def _idx_labels(images: Path) -> Path:
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
    """An array of bytes. Layout: two zeros, the type (8: bytes), the number of axes, their sizes, the data."""
    try:
        zipped = file.suffix == ".gz"
        limit = min(_MAX_IDX_BYTES, file.stat().st_size * (_MAX_GZIP_RATIO if zipped else 1))
        with gzip.open(file) if zipped else file.open("rb") as stream:
            start = stream.read(4)
            if len(start) < 4 or start[:3] != b"\0\0\x08" or not 1 <= start[3] <= 4:
                raise DataError(file, f"starts with {start!r}; expected an IDX file of bytes")
            head = stream.read(4 * start[3])
            shape = struct.unpack(f">{len(head) // 4}I", head[: len(head) // 4 * 4])
            size = math.prod(shape)
            if len(shape) != start[3] or size > limit:
                raise DataError(file, f"an IDX file of axes {shape}, which it does not hold; download it again")
            content = stream.read(size + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(file, f"can not be read ({error})") from error
    if len(content) != size:
        raise DataError(file, f"{len(content):,} bytes or more, its head says {size:,} {shape}; download it again")
    return np.frombuffer(content, np.uint8).reshape(shape)


# -- batches of CIFAR-10 and CIFAR-100 ---------------------------------------------------------------------------------


_CIFAR_FOLDERS = ("", "cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary")
_CIFAR_FILES = {
    "test": ("test_batch", "test_batch.bin", "test", "test.bin"),
    "train": ("data_batch_[1-9]", "data_batch_[1-9].bin", "train", "train.bin"),
}
_CIFAR_CLASSES = {"batches.meta": b"label_names", "meta": b"fine_label_names"}
_CIFAR_CLASSES_TEXT = ("batches.meta.txt", "fine_label_names.txt")
_CIFAR_PIXELS = 3 * 32 * 32


def find_cifar(data: Path, split: str) -> list[Path]:
    """The files of a split, sorted; `data` may also be one of the files. Empty if there are none."""
    if data.is_file():
        known = any(data.match(pattern) for patterns in _CIFAR_FILES.values() for pattern in patterns)
        return [data] if known else []
    for folder in (data / name for name in _CIFAR_FOLDERS):
        for pattern in _CIFAR_FILES.get(split, ()):
            if found := sorted(file for file in folder.glob(pattern) if file.is_file()):
                return found
    return []


def read_cifar(files: list[Path]) -> tuple[np.ndarray, np.ndarray, tuple[str, ...] | None]:
    """Pixels uint8 (images, 32, 32, 3), labels int64 (the fine ones of CIFAR-100), and the names of the classes."""
    parts = [_binary_cifar(file) if file.suffix == ".bin" else _pickled_cifar(file) for file in files]
    pixels = np.concatenate([pixels for pixels, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    planes = pixels.reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels, _cifar_classes(files[0].parent)


def _binary_cifar(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Records of one label (CIFAR-100: a coarse and a fine one) and 3,072 bytes."""
    content = np.frombuffer(read_bytes(file), np.uint8)
    n_labels = 2 if file.name in ("test.bin", "train.bin") else 1
    if not len(content) or len(content) % (n_labels + _CIFAR_PIXELS):
        raise DataError(
            file, f"{len(content):,} bytes, expected records of {n_labels + _CIFAR_PIXELS} bytes; download it again"
        )
    records = content.reshape(-1, n_labels + _CIFAR_PIXELS)
    return records[:, n_labels:], records[:, n_labels - 1].astype(np.int64)


def _pickled_cifar(file: Path) -> tuple[np.ndarray, np.ndarray]:
    found = load_pickle(file)
    table = found if isinstance(found, dict) else {}
    pixels = _either(table, b"data")
    labels = next((x for key in (b"fine_labels", b"labels") if (x := _either(table, key)) is not None), None)
    right = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.ndim == 2
    listed = labels.tolist() if isinstance(labels, np.ndarray) else labels
    if not right or pixels.shape[1] != _CIFAR_PIXELS or not isinstance(listed, list) or not listed:
        raise DataError(file, "expected a CIFAR batch: data, bytes (images × 3072), and labels")
    whole = all(isinstance(x, int | np.integer) and 0 <= x < 2**31 for x in listed)
    if len(listed) != len(pixels) or not whole:
        raise DataError(file, f"{len(pixels)} images with {len(listed)} labels; expected a whole number for each")
    return pixels, np.array(listed, dtype=np.int64)


def _either(table: dict[Any, Any], key: bytes) -> Any:
    return table.get(key, table.get(key.decode()))


def _cifar_classes(folder: Path) -> tuple[str, ...] | None:
    for name in _CIFAR_CLASSES_TEXT:
        if (folder / name).is_file():
            return tuple(read_bytes(folder / name).decode("utf-8", "replace").split())
    for name, key in _CIFAR_CLASSES.items():
        if (folder / name).is_file():
            found = load_pickle(folder / name)
            names = _either(found, key) if isinstance(found, dict) else None
            if isinstance(names, list) and all(isinstance(x, bytes | str) for x in names):
                return tuple(x.decode("utf-8", "replace") if isinstance(x, bytes) else x for x in names)
    return None


# -- restricted pickles ------------------------------------------------------------------------------------------------


_CONTAINERS = {"list": list, "dict": dict, "tuple": tuple, "set": set, "frozenset": frozenset}


class _ArrayType:
    """In place of `numpy.ndarray`, which a pickle could call with any size."""


class _ArraysOnly(pickle.Unpickler):
    """Refuses every global except those that construct arrays, dtypes and containers.

    The functions are created at each call, because a pickle could set attributes of a shared one.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module in ("builtins", "__builtin__") and name in _CONTAINERS:
            return _CONTAINERS[name]
        if module in ("builtins", "__builtin__") and name == "bytearray":
            return lambda *given: bytearray(b"".join(_bytes(x) for x in given[:1]))  # not of a number: its size
        if module == "numpy" and name in ("ndarray", "dtype"):
            return _ArrayType if name == "ndarray" else np.dtype
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return lambda *_: np.zeros(0)  # empty: its state, which follows, holds the numbers
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return lambda buffer, dtype, shape, order: np.frombuffer(buffer, dtype).reshape(shape, order=order)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return lambda text, _: text.encode("latin1")
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which is no array")


def _bytes(value: bytes | str) -> bytes:
    return value.encode("latin1") if isinstance(value, str) else bytes(memoryview(value))


def load_pickle(file: Path) -> Any:
    """Arrays and containers from an untrusted pickle; anything else is refused before it is constructed."""
    try:
        return _ArraysOnly(io.BytesIO(read_bytes(file)), encoding="bytes").load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(file, f"a pickle that is refused ({type(error).__name__}: {error!s:.120})") from error
