"""The header of a safetensors file. Every number in it is checked before it is used.

Layout: u64 length of the header, little endian; the header, a JSON object of entries
name -> {dtype, shape, data_offsets}, padded with spaces; the data. Offsets count from the end of the header.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isobasin.checkpoint.dtypes import SAFETENSORS_DTYPES, SAFETENSORS_NAMES, dtype_problem
from isobasin.checkpoint.folder import MAX_BYTES, parse_object
from isobasin.errors import CheckpointError

_PREFIX = 8
_MAX_AXES = 64  # what torch can index


@dataclass(frozen=True)
class TensorInfo:
    """Description of a tensor on disk; `offset` is where its bytes begin in the file (None if pickled)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    offset: int | None = None

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)


def nbytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Size of a tensor's data: itemsize · ∏ shape."""
    return dtype.itemsize * math.prod(shape)


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file in the order of their data, from its header and its size alone."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_PREFIX), "little")
        if size < _PREFIX or length > size - _PREFIX:
            raise _damaged(file, f"says that its header has {length} bytes, but the file has {size}")
        if length > MAX_BYTES:
            raise _damaged(file, f"says that its header has {length} bytes, expected at most {MAX_BYTES}")
        text = stream.read(length)
    if not text.startswith(b"{"):
        raise _damaged(file, "has a header that does not begin with '{'")
    entries = parse_object(text, f"the header of {file}", unique=True)
    _check_metadata(entries.pop("__metadata__", {}), file)
    spans = [(_span(name, entry, file), name) for name, entry in entries.items()]
    spans.sort(key=lambda pair: pair[0])  # stable: empty tensors keep their order
    _check_cover(spans, size - _PREFIX - length, file)
    return {name: _info(name, entries[name], file, _PREFIX + length) for _, name in spans}


def encode_header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    """The header of a file that holds `tensors` in this order, and the offset at which each tensor begins."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + nbytes(dtype, shape)
        entries[name] = {"dtype": SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8
    start = _PREFIX + len(text)
    offsets = {name: start + entries[name]["data_offsets"][0] for name in tensors}
    return len(text).to_bytes(_PREFIX, "little") + text, offsets


def check_name(name: str, file: Path) -> None:
    """Raise unless the name is printable and not empty: it is used in messages and in new files."""
    if not name or not name.isprintable():
        raise _damaged(file, f"holds a tensor named {name!r}, expected a printable name")


def _check_metadata(metadata: Any, file: Path) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(file, "has a __metadata__ that is not an object of strings")


def _span(name: str, entry: Any, file: Path) -> tuple[int, int]:
    check_name(name, file)
    offsets: Any = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(file, f"gives tensor {name!r} the data_offsets {offsets!r:.80}, expected [begin, end]")
    return offsets[0], offsets[1]


def _check_cover(spans: list[tuple[tuple[int, int], str]], size: int, file: Path) -> None:
    """Raise unless the tensors follow each other without overlap or hole up to the end of the file."""
    cursor = 0
    for (begin, end), name in spans:
        if begin != cursor:
            kind = "overlaps the tensor before it" if begin < cursor else "leaves a hole before it"
            raise _damaged(file, f"has tensor {name!r} at byte {begin}, expected {cursor}: it {kind}")
        cursor = end
    if cursor != size:
        kind = "is truncated" if cursor > size else "has bytes that belong to no tensor"
        raise _damaged(file, f"{kind}: its header describes {cursor} bytes of data, the file holds {size}")


def _info(name: str, entry: dict[str, Any], file: Path, start: int) -> TensorInfo:
    found: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    begin, end = entry["data_offsets"]
    if not isinstance(found, str) or found not in SAFETENSORS_DTYPES:
        raise CheckpointError(f"tensor {name!r} in {file} {dtype_problem(f'{found!s:.40}')}")
    if not _is_sizes(shape) or len(shape) > _MAX_AXES or math.prod(n or 1 for n in shape) >= 2**63:
        raise _damaged(file, f"gives tensor {name!r} the shape {shape!r:.80}, expected a list of sizes")
    info = TensorInfo(SAFETENSORS_DTYPES[found], tuple(shape), file, start + begin)
    if info.nbytes != end - begin:
        raise _damaged(file, f"gives tensor {name!r} {end - begin} bytes, but {found} of {shape} needs {info.nbytes}")
    return info


def _is_sizes(value: Any) -> bool:
    # `type`, not isinstance: true and false are integers to Python, but no sizes.
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _damaged(file: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{file} {what}; the file is damaged or incomplete: re-download it")
