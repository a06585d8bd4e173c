"""Which tensor goes into which file, and where in it: decided before the first byte is written."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from isobasin.checkpoint.dtypes import SAFETENSORS_NAMES
from isobasin.checkpoint.header import encode_header, nbytes
from isobasin.errors import CheckpointError

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Shard:
    """One file to be: its header, its size, and where each of its tensors begins, in the order on disk."""

    file: str
    header: bytes
    size: int
    offsets: Mapping[str, int]


def parse_size(size: int | str) -> int:
    """A number of bytes, given as such or in the words of Hugging Face.

    >>> parse_size("5GB"), parse_size("200 MiB"), parse_size(10)
    (5000000000, 209715200, 10)
    """
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Z]*)", str(size).strip().upper())
    if match is None or match[2] not in _UNITS or (n_bytes := int(float(match[1]) * _UNITS[match[2]])) < 1:
        raise CheckpointError(f"max_shard_size {size!r} is not a size: give bytes, or words such as 5GB or 200MB")
    return n_bytes


def plan_shards(tensors: Tensors, max_size: int) -> tuple[Shard, ...]:
    """Fill shards of at most `max_size` bytes of data in the given order; a larger tensor gets its own."""
    if not tensors:
        raise ValueError("a checkpoint without tensors")
    for name, (dtype, _) in tensors.items():
        if not name or name == "__metadata__" or dtype not in SAFETENSORS_NAMES:
            raise ValueError(f"tensor {name!r} of {dtype} has no place in a safetensors file")
    groups = _fill(tensors, max_size)
    if len(groups) == 1:
        return (_shard("model.safetensors", groups[0], tensors),)
    return tuple(
        _shard(f"model-{i:05d}-of-{len(groups):05d}.safetensors", names, tensors)
        for i, names in enumerate(groups, start=1)
    )


def index_of(shards: Sequence[Shard], tensors: Tensors) -> dict[str, object]:
    """The contents of `model.safetensors.index.json`."""
    total = sum(nbytes(*tensor) for tensor in tensors.values())
    weight_map = {name: shard.file for shard in shards for name in shard.offsets}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _fill(tensors: Tensors, max_size: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    room = max_size
    for name, tensor in tensors.items():
        size = nbytes(*tensor)
        if size > room and groups[-1]:
            groups.append([])
            room = max_size
        groups[-1].append(name)
        room -= size
    return groups


def _shard(file: str, names: list[str], tensors: Tensors) -> Shard:
    # Wide formats first, so that each tensor begins at a multiple of its item size: readers map the file.
    placed = sorted(names, key=lambda name: -tensors[name][0].itemsize)
    header, offsets = encode_header({name: tensors[name] for name in placed})
    return Shard(file, header, len(header) + sum(nbytes(*tensors[name]) for name in names), offsets)
