"""Number formats: their names in files and configurations, and the policy `keep|float32|bfloat16|float16`."""

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


def dtype_problem(found: str) -> str:
    """What to tell about a number format that is not in the table: `F8_E4M3`, `torch.qint8`, `C64`, ..."""
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
    """A new configuration that names `dtype`, under whichever of its keys is in use ("keep" changes nothing).

    >>> with_dtype({"torch_dtype": "float32"}, torch.float16)
    {'torch_dtype': 'float16'}
    """
    if dtype == "keep":
        return dict(config)
    if isinstance(dtype, str):
        dtype = output_dtype(dtype, torch.float32)
    keys = [key for key in _CONFIG_KEYS if key in config] or ["dtype"]
    return {**config, **dict.fromkeys(keys, dtype_name(dtype))}
