"""Number formats: names in files and configurations, the policy `keep|float32|bfloat16|float16`, finite values."""

import math
from collections.abc import Mapping
from typing import Any

import torch

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
    """The dtype a tensor of `dtype` is written in; only floating tensors are ever converted.

    >>> output_dtype("bfloat16", torch.float32), output_dtype("bfloat16", torch.int64)
    (torch.bfloat16, torch.int64)
    """
    if policy not in DTYPE_POLICIES:
        raise CheckpointError(f"dtype {policy!r} is unknown: give one of {', '.join(DTYPE_POLICIES)}")
    if policy == "keep" or not dtype.is_floating_point:
        return dtype
    target = getattr(torch, policy)
    assert isinstance(target, torch.dtype)
    return target


def with_dtype(config: Mapping[str, Any], dtype: str | torch.dtype) -> dict[str, Any]:
    """A copy of `config` that names `dtype` under the keys that it uses ("keep" changes nothing).

    >>> with_dtype({"torch_dtype": "float32"}, torch.float16)
    {'torch_dtype': 'float16'}
    """
    if dtype == "keep":
        return dict(config)
    if isinstance(dtype, str):
        dtype = output_dtype(dtype, torch.float32)
    keys = [key for key in _CONFIG_KEYS if key in config] or ["dtype"]
    return {**config, **dict.fromkeys(keys, dtype_name(dtype))}


def check_finite(tensor: torch.Tensor, name: str, advice: str) -> None:
    """Raise `CheckpointError` if a floating `tensor` has NaN or infinite values; it is checked block by block."""
    if not tensor.is_floating_point():
        return
    blocks = torch.split(tensor.detach().reshape(-1), _BLOCK)
    if all(_is_finite(block) for block in blocks):
        return
    n_nan = sum(int(block.isnan().sum()) for block in blocks)
    n_inf = sum(int(block.isinf().sum()) for block in blocks)
    raise CheckpointError(f"tensor {name!r} holds {n_nan} NaN and {n_inf} infinite values: {advice}")


def _is_finite(block: torch.Tensor) -> bool:
    # min and max propagate NaN, and one pass over both is ten times faster than torch.isfinite.
    if block.numel() == 0:
        return True
    low, high = block.aminmax()
    return math.isfinite(low.item()) and math.isfinite(high.item())
