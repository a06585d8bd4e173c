"""A folder of weights as a lazy mapping from tensor names to tensors."""

import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from isobasin.checkpoint.folder import find_folder, find_weights, is_adapter, read_object
from isobasin.checkpoint.header import (
    SAFETENSORS_NAMES,
    TensorInfo,
    check_finite,
    check_name,
    dtype_problem,
    nbytes,
    read_header,
)
from isobasin.errors import CheckpointError

_QUANTISED_KEYS = ("quantization_config", "compression_config")
_ZIP_MAGIC = b"PK\x03\x04"


class PickledFiles:
    """The state dicts of old `pytorch_model.bin` files, read by the restricted loader of torch, never by pickle.

    Files in zip format (torch ≥ 1.6) are memory-mapped. The older format can only be read
    whole; of those files only the last one is kept, so that memory is bounded by one file.
    """

    def __init__(self) -> None:
        self._mapped: dict[Path, dict[str, torch.Tensor]] = {}
        self._whole: dict[Path, dict[str, torch.Tensor]] = {}

    def infos(self, file: Path) -> dict[str, TensorInfo]:
        return {
            name: TensorInfo(tensor.dtype, tuple(tensor.shape), file) for name, tensor in self.tensors(file).items()
        }

    def tensors(self, file: Path) -> dict[str, torch.Tensor]:
        """The tensors in `file`. They share memory with this object: clone them before returning them."""
        kept = self._mapped if _is_zip(file) else self._whole
        if file not in kept:
            self._whole.clear()
            kept[file] = _load(file)
        return kept[file]


def _is_zip(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC


def _load(file: Path) -> dict[str, torch.Tensor]:
    try:
        _check_stored(file)
        found = torch.load(str(file), map_location="cpu", weights_only=True, mmap=_is_zip(file))
    except Exception as error:  # a damaged or hostile pickle can raise anything
        raise CheckpointError(
            f"{file} can not be read safely ({_reason(error)}): "
            "re-download it, or convert it to safetensors where it is trusted"
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}, expected a dictionary of tensors")
    size = file.stat().st_size
    return {name: _checked(name, value, file, size) for name, value in found.items()}


def _check_stored(file: Path) -> None:
    """torch stores without compression. A compressed entry could expand to a thousand times the size of the file."""
    if not _is_zip(file):
        return
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("it is compressed, expected what torch.save writes")
    if sum(entry.file_size for entry in entries) > file.stat().st_size:
        raise ValueError("its entries claim to be larger than the file")


def _reason(error: Exception) -> str:
    """The most specific line of torch's message, at most 160 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    specific = [line for line in lines if "Unsupported" in line or "GLOBAL" in line]
    return f"{[*specific, *lines, type(error).__name__][0]:.160}"


def _checked(name: object, value: object, file: Path, size: int) -> torch.Tensor:
    if not isinstance(name, str):
        raise CheckpointError(f"{file} has a key {name!r:.80}, expected names of tensors: is it a state dict?")
    check_name(name, file)
    # Exactly these types: a subclass could define its own behaviour.
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(
            f"{name!r} in {file} is a {type(value).__name__}, expected a tensor: save only model.state_dict()"
        )
    assert isinstance(value, torch.Tensor)
    if value.is_quantized or value.dtype not in SAFETENSORS_NAMES:
        raise CheckpointError(f"tensor {name!r} in {file} {dtype_problem(str(value.dtype))}")
    if value.layout is not torch.strided or value.device.type != "cpu":
        raise CheckpointError(f"tensor {name!r} in {file} is {value.layout} on {value.device}: store it densely")
    # With strides of zero a small file can claim terabytes, which the copy made on reading would allocate.
    if nbytes(value.dtype, tuple(value.shape)) > size:
        raise CheckpointError(f"tensor {name!r} in {file} claims to be larger than its file: re-download it")
    return value.detach()


class Checkpoint(Mapping[str, torch.Tensor]):
    """Tensors by their names on disk, read on access; a returned tensor is a copy that the caller owns.

    A file is opened for each read, so nothing has to be closed; a file that changed since the checkpoint was
    opened is an error. Iteration follows the order of the data on disk.
    """

    def __init__(
        self, path: Path, config: dict[str, Any], infos: Mapping[str, TensorInfo], pickles: PickledFiles
    ) -> None:
        self.path, self.config, self.infos = path, config, MappingProxyType(dict(infos))
        self._pickles = pickles
        self._finite: set[str] = set()  # names of tensors that were looked at as a whole
        self._stamps = {file: _stamp(file.stat()) for file in {info.file for info in infos.values()}}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    # The versions that Mapping provides of these three would read tensors.
    def __contains__(self, name: object) -> bool:
        return name in self.infos

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        size = sum(info.nbytes for info in self.infos.values())
        return f"Checkpoint({str(self.path)!r}: {len(self)} tensors, {size / 1e6:.1f} MB)"

    def read(self, name: str, *, finite: bool = True) -> torch.Tensor:
        """The tensor `name`. NaN or infinite values are an error unless `finite` is False.

        Only buffers may be infinite: a mask value of -1e9 is -inf in float16.
        """
        shape = self.infos[name].shape
        tensor = self.flat(name, 0, math.prod(shape)).reshape(shape)
        if finite and name not in self._finite:
            self.check(name, tensor)
            self._finite.add(name)
        return tensor

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The block `start:stop` of the leading axis of tensor `name`; the other rows are not read."""
        shape = self.infos[name].shape
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"rows {start}:{stop} of tensor {name!r} with shape {shape}")
        n_columns = math.prod(shape[1:])
        block = self.flat(name, start * n_columns, stop * n_columns).reshape(stop - start, *shape[1:])
        if name not in self._finite:
            self.check(name, block)
        return block

    def flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The numbers `start:stop` of the flattened tensor `name`, for blocks that do not follow the rows.

        Values are not checked: the caller checks them, or the result that it computes from them.
        """
        info = self.infos[name]
        if not 0 <= start <= stop <= math.prod(info.shape):
            raise ValueError(f"numbers {start}:{stop} of tensor {name!r} with shape {info.shape}")
        with _read_errors(info.file):
            if info.offset is None:
                self._check_stamp(info.file, info.file.stat())
                return self._pickles.tensors(info.file)[name].reshape(-1)[start:stop].clone()
            data = torch.empty((stop - start) * info.dtype.itemsize, dtype=torch.uint8)
            with info.file.open("rb", buffering=0) as stream:
                self._check_stamp(info.file, os.fstat(stream.fileno()))
                stream.seek(info.offset + start * info.dtype.itemsize)
                _fill(data.numpy().data, stream.readinto, info.file)
            return data.view(info.dtype)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise an error that names the file, if a `tensor` read from it holds NaN or infinite values."""
        check_finite(tensor, name, f"found in {self.infos[name].file}, repair or re-download it")

    def _check_stamp(self, file: Path, found: os.stat_result) -> None:
        if _stamp(found) != self._stamps[file]:
            raise CheckpointError(f"{file} changed while it was in use: open the checkpoint again")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder, or a hub id through the local cache; no tensor is read yet."""
    folder = find_folder(path)
    if is_adapter(folder):
        raise CheckpointError(f"{path} is a LoRA adapter and no model: give it with its base, as base+adapter")
    if (folder / "open_clip_config.json").is_file() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a model of open_clip, whose names are not read: take the same weights in the form of "
            "transformers (CLIPModel; most models of laion and openai have it), or convert them to it"
        )
    config = read_object(folder / "config.json")
    for key in _QUANTISED_KEYS:
        if config.get(key) is not None:
            raise CheckpointError(f"{folder / 'config.json'} has a {key}: dequantise the model first")
    files, where = find_weights(folder)
    pickles = PickledFiles()
    infos = _merge(files, pickles)
    # A tensor in a shard that the index does not name is accepted, because transformers loads it too.
    for name, file in where.items():
        if name not in infos or infos[name].file != file:
            raise CheckpointError(f"tensor {name!r} is not in {file}, where the index puts it: re-download it")
    if not infos:
        raise CheckpointError(f"{files[0]} holds no tensors, expected weights: re-download it")
    return Checkpoint(folder, config, infos, pickles)


def _merge(files: list[Path], pickles: PickledFiles) -> dict[str, TensorInfo]:
    merged: dict[str, TensorInfo] = {}
    for file in files:
        with _read_errors(file):
            infos = read_header(file) if file.suffix == ".safetensors" else pickles.infos(file)
        if twice := infos.keys() & merged.keys():
            name = min(twice)
            raise CheckpointError(f"tensor {name!r} lies in two shards, {merged[name].file} and {file}: remove one")
        merged.update(infos)
    return merged


@contextmanager
def _read_errors(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file} can not be read: {error.strerror}") from error


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _fill(target: memoryview, readinto: Callable[[memoryview], int | None], file: Path) -> None:
    """Read until `target` is full: one system call returns at most 2 GB."""
    done = 0
    while done < len(target):
        count = readinto(target[done:])
        if not count:
            raise CheckpointError(f"{file} ended {len(target) - done} bytes too early: re-download it")
        done += count
