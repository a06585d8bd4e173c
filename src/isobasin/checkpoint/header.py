"""The safetensors format: number formats and their conversion, and the header, which is checked before it is used.

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

from isobasin.checkpoint.folder import MAX_BYTES, parse_object
from isobasin.errors import CheckpointError

# The names that the safetensors format gives to the formats this package reads and writes.
SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
SAFETENSORS_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
DTYPE_POLICIES = ("keep", "float32", "bfloat16", "float16")
_CONFIG_KEYS = ("dtype", "torch_dtype")
MAX_LOST = 0.05  # the share of a row that the smallest numbers of a type may cost
_BLOCK = 1 << 18  # numbers that are checked at once


def dtype_problem(found: str) -> str:
    """The end of a message about a number format that is not supported: `F8_E4M3`, `torch.qint8`, `C64`, ..."""
    if found.upper().startswith(("F8", "F4", "F6", "TORCH.FLOAT8", "TORCH.FLOAT4", "TORCH.Q")):
        return f"is quantised ({found}): dequantise the model first"
    return f"has number format {found}, expected one of {', '.join(SAFETENSORS_DTYPES)}: convert it first"


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype as configurations spell it: `torch.bfloat16` is "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def output_dtype(policy: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype a tensor of `dtype` is written in; only floating tensors are ever converted."""
    if policy not in DTYPE_POLICIES:
        raise CheckpointError(f"dtype {policy!r} is unknown: give one of {', '.join(DTYPE_POLICIES)}")
    if policy == "keep" or not dtype.is_floating_point:
        return dtype
    target = getattr(torch, policy)
    assert isinstance(target, torch.dtype)
    return target


def with_dtype(config: Mapping[str, Any], dtype: str | torch.dtype) -> dict[str, Any]:
    """A copy of `config` that names `dtype` under the keys that it uses ("keep" changes nothing), also in the configs
    of parts that it holds."""
    if dtype == "keep":
        return dict(config)
    if isinstance(dtype, str):
        dtype = output_dtype(dtype, torch.float32)
    keys = [key for key in _CONFIG_KEYS if key in config] or ["dtype"]
    parts = {
        name: {**part, **{key: dtype_name(dtype) for key in _CONFIG_KEYS if part.get(key) is not None}}
        for name, part in config.items()
        if name.endswith("_config") and isinstance(part, Mapping)
    }
    return {**config, **parts, **dict.fromkeys(keys, dtype_name(dtype))}


def check_finite(tensor: torch.Tensor, name: str, advice: str) -> None:
    """Raise `CheckpointError` if a floating `tensor` has NaN or infinite values; it is checked block by block."""
    if not tensor.is_floating_point():
        return
    blocks = torch.split(tensor.detach().reshape(-1), _BLOCK)
    # A sum has NaN or infinity where any number has; it takes one fast pass. It may also overflow: then look closer.
    if all(math.isfinite(block.sum(dtype=torch.float32).item()) for block in blocks):
        return
    if all(math.isfinite(x.item()) for block in blocks for x in block.aminmax()):
        return
    n_nan = sum(int(block.isnan().sum()) for block in blocks)
    n_inf = sum(int(block.isinf().sum()) for block in blocks)
    raise CheckpointError(f"tensor {name!r} holds {n_nan} NaN and {n_inf} infinite values: {advice}")


def check_kept(tensor: torch.Tensor, dtype: torch.dtype, name: str) -> None:
    """Raise `CheckpointError` if a narrower type loses numbers that are too small for it: a noticeable part of the
    tensor, or of one of its rows, as behind a norm the size of a row does not matter."""
    if torch.finfo(dtype).smallest_normal <= torch.finfo(tensor.dtype).smallest_normal or not tensor.numel():
        return
    rows = tensor.detach().reshape(len(tensor) if tensor.dim() > 1 else 1, -1)
    for some in rows.split(max(1, _BLOCK // max(1, rows.shape[1]))):
        wide = some.to(torch.float64)
        lost, size = ((x * x).sum(1) for x in (wide - some.to(dtype).to(torch.float64), wide))
        if bool((lost > MAX_LOST**2 * size).any()):
            raise CheckpointError(
                f"tensor {name!r} holds numbers too small for {dtype_name(dtype)}, of which "
                f"{torch.finfo(dtype).smallest_normal:.0e} is the smallest: choose bfloat16 or float32"
            )


# -- header ------------------------------------------------------------------------------------------------------------

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
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(file, "has a __metadata__ that is not an object of strings")
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
