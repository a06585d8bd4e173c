"""CIFAR-10 and CIFAR-100 in their two layouts: binary records, and pickles that are read without trusting them."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from isobasin.tasks.source import DataError, read_bytes

_PLACES = ("", "cifar-10-batches-py", "cifar-10-batches-bin", "cifar-100-python", "cifar-100-binary")
_PATTERNS = {
    "test": ("test_batch", "test_batch.bin", "test", "test.bin"),
    "train": ("data_batch_[1-9]", "data_batch_[1-9].bin", "train", "train.bin"),
}
_META = {"batches.meta": b"label_names", "meta": b"fine_label_names"}
_META_TEXT = ("batches.meta.txt", "fine_label_names.txt")
_PIXELS = 3 * 32 * 32


def find_cifar(data: Path, split: str) -> list[Path]:
    """The files of a split, in their order; a single file may be named itself. Empty where there are none."""
    if data.is_file():
        known = any(data.match(pattern) for patterns in _PATTERNS.values() for pattern in patterns)
        return [data] if known else []
    for folder in (data / place for place in _PLACES):
        for pattern in _PATTERNS.get(split, ()):
            if found := sorted(file for file in folder.glob(pattern) if file.is_file()):
                return found
    return []


def read_cifar(files: list[Path]) -> tuple[np.ndarray, np.ndarray, tuple[str, ...] | None]:
    """Pixels uint8 (images, 32, 32, 3), labels int64 (the fine ones of CIFAR-100), and the classes' names."""
    parts = [_binary(file) if file.suffix == ".bin" else _pickled(file) for file in files]
    pixels = np.concatenate([pixels for pixels, _ in parts])
    labels = np.concatenate([labels for _, labels in parts])
    planes = pixels.reshape(-1, 3, 32, 32)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels, _names(files[0].parent)


def _binary(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Records of one label (CIFAR-100: the coarse and the fine one) and 3,072 bytes."""
    content = np.frombuffer(read_bytes(file), np.uint8)
    n_labels = 2 if file.name in ("test.bin", "train.bin") else 1
    if not len(content) or len(content) % (n_labels + _PIXELS):
        raise DataError(
            file, f"{len(content):,} bytes, expected records of {n_labels + _PIXELS} bytes; download it again"
        )
    records = content.reshape(-1, n_labels + _PIXELS)
    return records[:, n_labels:], records[:, n_labels - 1].astype(np.int64)


def _pickled(file: Path) -> tuple[np.ndarray, np.ndarray]:
    found = load_pickle(file)
    table = found if isinstance(found, dict) else {}
    pixels = _either(table, b"data")
    labels = next((x for key in (b"fine_labels", b"labels") if (x := _either(table, key)) is not None), None)
    right = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.ndim == 2
    if not right or pixels.shape[1] != _PIXELS or not isinstance(labels, list | np.ndarray) or not len(labels):
        raise DataError(file, "expected a CIFAR batch: data, bytes (images × 3072), and labels")
    if len(labels) != len(pixels) or not all(isinstance(x, int | np.integer) for x in labels):
        raise DataError(file, f"{len(pixels)} images with {len(labels)} labels; expected a whole number for each")
    return pixels, np.array(labels, dtype=np.int64)


def _either(table: dict[Any, Any], key: bytes) -> Any:
    return table.get(key, table.get(key.decode()))


def _names(folder: Path) -> tuple[str, ...] | None:
    for name in _META_TEXT:
        if (folder / name).is_file():
            return tuple(read_bytes(folder / name).decode("utf-8", "replace").split())
    for name, key in _META.items():
        if (folder / name).is_file():
            found = load_pickle(folder / name)
            names = _either(found, key) if isinstance(found, dict) else None
            if isinstance(names, list):
                return tuple(x.decode("utf-8", "replace") if isinstance(x, bytes) else str(x) for x in names)
    return None


# -- pickles from strangers ------------------------------------------------------------------------------------------

_CONTAINERS = {"list": list, "dict": dict, "tuple": tuple, "set": set, "frozenset": frozenset, "bytearray": bytearray}
_NUMPY = {"ndarray": np.ndarray, "dtype": np.dtype}
_RECONSTRUCT = np.zeros(0).__reduce__()[0]  # its module's name differs between numpy 1 and 2


class _ArraysOnly(pickle.Unpickler):
    """A pickle is a program. This one may call nothing but what makes arrays, their types and containers.

    The functions here are made anew each time: a pickle could set attributes of one that stays.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module in ("builtins", "__builtin__") and name in _CONTAINERS:
            return _CONTAINERS[name]
        if module == "numpy" and name in _NUMPY:
            return _NUMPY[name]
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return _RECONSTRUCT
        if module in ("numpy.core.numeric", "numpy._core.numeric") and name == "_frombuffer":
            return lambda buffer, dtype, shape, order: np.frombuffer(buffer, dtype).reshape(shape, order=order)
        if (module, name) == ("_codecs", "encode"):  # how Python 3 writes bytes for Python 2
            return lambda text, _: text.encode("latin1")
        raise pickle.UnpicklingError(f"asks for {module}.{name}, which is no array")


def load_pickle(file: Path) -> Any:
    """Arrays and containers from a pickle; anything else in it is refused before it is made."""
    try:
        return _ArraysOnly(io.BytesIO(read_bytes(file)), encoding="bytes").load()
    except DataError:
        raise
    except Exception as error:  # a damaged program can fail in any way
        raise DataError(file, f"a pickle that is refused ({type(error).__name__}: {error!s:.120})") from error
