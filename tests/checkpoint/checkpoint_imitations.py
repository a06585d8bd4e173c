"""Checkpoint folders made for the tests, good and bad."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG = {"model_type": "imitation", "dtype": "float32"}

EVERY_KIND = {
    "f32": torch.arange(12, dtype=torch.float32).reshape(3, 4) / 7,
    "bf16": torch.arange(10, dtype=torch.bfloat16).reshape(5, 2) / 7,
    "f16": torch.arange(6, dtype=torch.float16) / 7,
    "f64": torch.arange(4, dtype=torch.float64).reshape(2, 1, 2) / 7,
    "i64": torch.tensor([-(2**62), 0, 2**62]),
    "u8": torch.tensor([0, 255, 7], dtype=torch.uint8),
    "flags": torch.tensor([True, False, True]),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(2.5),
}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes: unlike `==`, tells 0 from -0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def make_folder(path: Path, tensors: Mapping[str, torch.Tensor] = EVERY_KIND) -> Path:
    """A single-file checkpoint, written by the safetensors library itself."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    save_file(dict(tensors), path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_sharded(
    path: Path, shards: Mapping[str, Mapping[str, torch.Tensor]], weight_map: Mapping[str, Any] | None = None
) -> Path:
    """A sharded checkpoint; `weight_map` replaces the true one."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    for file, tensors in shards.items():
        save_file(dict(tensors), path / file)
    true_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {}, "weight_map": true_map if weight_map is None else weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def make_pickled(path: Path, state: object, *, zipped: bool = True) -> Path:
    """A checkpoint as `pytorch_model.bin`, in the format of today or in the one before torch 1.6."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    torch.save(state, path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    return path


def raw_file(header: object, data: bytes, *, length: int | None = None) -> bytes:
    """A safetensors file with any header, and if wanted a lie about its length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def make_raw(path: Path, content: bytes) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(content)
    return path
