"""A folder of weights as a lazy mapping from tensor names to tensors."""

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from isobasin.checkpoint.documents import read_object
from isobasin.checkpoint.finite import check_finite
from isobasin.checkpoint.header import TensorInfo, read_header
from isobasin.checkpoint.location import find_folder, find_weights
from isobasin.checkpoint.pickled import PickledFiles
from isobasin.errors import CheckpointError

_QUANTISED_KEYS = ("quantization_config", "compression_config")


class Checkpoint(Mapping[str, torch.Tensor]):
    """Tensors by their names on disk, read when asked for; every tensor handed out is the caller's own.

    A file is opened anew for each read, so nothing needs closing; one that changed since the checkpoint was
    opened is an error. Iteration goes in the order in which the data lie on disk.
    """

    path: Path
    config: dict[str, Any]
    infos: Mapping[str, TensorInfo]

    def __init__(
        self, path: Path, config: dict[str, Any], infos: Mapping[str, TensorInfo], pickles: PickledFiles
    ) -> None:
        self.path, self.config, self.infos = path, config, MappingProxyType(dict(infos))
        self._pickles = pickles
        self._stamps = {file: _stamp(file.stat()) for file in {info.file for info in infos.values()}}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    # A Mapping's own versions of these three would read tensors.
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

        Only buffers have reason to be infinite: a mask value of -1e9 is -inf in float16.
        """
        shape = self.infos[name].shape
        return self._block(name, 0, shape[0] if shape else None, finite)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The block `start:stop` of the leading axis of tensor `name`; the other rows are not read."""
        shape = self.infos[name].shape
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"rows {start}:{stop} of tensor {name!r} with shape {shape}")
        return self._block(name, start, stop, True)

    def flat(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The numbers `start:stop` of tensor `name`, its rows one after another; NaN and infinite ones too.

        For blocks that do not follow the rows; whoever asks looks for what is not finite in what is made of them.
        """
        if not 0 <= start <= stop <= math.prod(self.infos[name].shape):
            raise ValueError(f"numbers {start}:{stop} of tensor {name!r} with shape {self.infos[name].shape}")
        if self.infos[name].offset is None:
            return self._guarded(name, lambda: self._unpickled(name, 0, None).reshape(-1)[start:stop])
        return self._guarded(name, lambda: self._bytes(name, start, stop))

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """An error that names the file, where a `tensor` read from it holds NaN or infinite values."""
        check_finite(tensor, name, f"found in {self.infos[name].file}, repair or re-download it")

    def _block(self, name: str, start: int, stop: int | None, finite: bool) -> torch.Tensor:
        read = self._unpickled if self.infos[name].offset is None else self._raw
        block = self._guarded(name, lambda: read(name, start, stop))
        if finite:
            self.check(name, block)
        return block

    def _guarded(self, name: str, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            return read()
        except OSError as error:
            raise CheckpointError(f"{self.infos[name].file} can not be read: {error.strerror}") from error

    def _raw(self, name: str, start: int, stop: int | None) -> torch.Tensor:
        shape = self.infos[name].shape
        wanted = shape if stop is None else (stop - start, *shape[1:])
        first = start * math.prod(shape[1:])
        return self._bytes(name, first, first + math.prod(wanted)).reshape(wanted)

    def _bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        info = self.infos[name]
        assert info.offset is not None
        data = torch.empty((stop - start) * info.dtype.itemsize, dtype=torch.uint8)
        with info.file.open("rb", buffering=0) as stream:
            self._check_stamp(info.file, os.fstat(stream.fileno()))
            stream.seek(info.offset + start * info.dtype.itemsize)
            _fill(data.numpy().data, stream.readinto, info.file)
        return data.view(info.dtype)

    def _unpickled(self, name: str, start: int, stop: int | None) -> torch.Tensor:
        file = self.infos[name].file
        self._check_stamp(file, file.stat())
        tensor = self._pickles.tensors(file)[name]
        return (tensor if stop is None else tensor[start:stop]).clone(memory_format=torch.contiguous_format)

    def _check_stamp(self, file: Path, found: os.stat_result) -> None:
        if _stamp(found) != self._stamps[file]:
            raise CheckpointError(f"{file} changed while it was in use: open the checkpoint again")


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder, or a hub id through the local cache; no tensor is read yet.

    >>> open_checkpoint("runs/seed0")["model.norm.weight"].shape        # doctest: +SKIP
    torch.Size([256])
    """
    folder = find_folder(path)
    config = read_object(folder / "config.json")
    for key in _QUANTISED_KEYS:
        if config.get(key) is not None:
            raise CheckpointError(f"{folder / 'config.json'} has a {key}: dequantise the model first")
    files, where = find_weights(folder)
    pickles = PickledFiles()
    infos = _merge(files, pickles)
    _check_index(where, infos)
    if not infos:
        raise CheckpointError(f"{files[0]} holds no tensors, expected weights: re-download it")
    return Checkpoint(folder, config, infos, pickles)


def _merge(files: list[Path], pickles: PickledFiles) -> dict[str, TensorInfo]:
    merged: dict[str, TensorInfo] = {}
    for file in files:
        try:
            infos = read_header(file) if file.suffix == ".safetensors" else pickles.infos(file)
        except OSError as error:
            raise CheckpointError(f"{file} can not be read: {error.strerror}") from error
        if twice := infos.keys() & merged.keys():
            name = min(twice)
            raise CheckpointError(f"tensor {name!r} lies in two shards, {merged[name].file} and {file}: remove one")
        merged.update(infos)
    return merged


def _check_index(where: Mapping[str, Path], infos: Mapping[str, TensorInfo]) -> None:
    """Each tensor of the index lies in the file it names.

    A tensor that lies in a shard and not in the index is accepted: transformers loads it too, so leaving it
    out would give another function. Whether it belongs to the model is for the architecture to say.
    """
    for name, file in where.items():
        if name not in infos or infos[name].file != file:
            raise CheckpointError(f"tensor {name!r} is not in {file}, where the index puts it: re-download it")


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _fill(target: memoryview, readinto: Callable[[memoryview], int | None], file: Path) -> None:
    """Read until `target` is full: the kernel hands out at most 2 GB at a time."""
    done = 0
    while done < len(target):
        count = readinto(target[done:])
        if not count:
            raise CheckpointError(f"{file} ended {len(target) - done} bytes too early: re-download it")
        done += count
