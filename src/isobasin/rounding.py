"""Rounding of stored weights, and models perturbed at random by it: the noise floor of every comparison."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.views import Tensors, View
from isobasin.weights import Weights

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CHUNK = 2**18  # numbers perturbed at once: larger pieces fragment the heap


class Rounding(NamedTuple):
    """The rounding of a type: relative to a stored number, and below `smallest` relative to that. `offset` is what is
    added to stored numbers."""

    unit: float
    smallest: float
    offset: float = 0.0

    def errors(self, x: Tensor) -> Tensor:
        """The largest rounding error of each number."""
        return (x - self.offset).abs().clamp_(min=self.smallest).mul_(self.unit)


def rounding(dtype: torch.dtype) -> Rounding:
    """Half a unit in the last place; at least float32's, because models are run in float32."""
    info = max(torch.finfo(dtype), torch.finfo(torch.float32), key=lambda each: each.eps)
    return Rounding(info.eps / 2, info.smallest_normal)


def rounding_unit(dtype: torch.dtype) -> float:
    return rounding(dtype).unit


def rounding_units(weights: Weights, precision: str = "stored") -> dict[str, Rounding]:
    """The rounding of every tensor: of its stored type, or of a requested coarser one."""
    least = Rounding(0.0, 0.0) if precision == "stored" else rounding(dtype_named(precision))
    stored = weights.dtypes.items()
    arch = weights.arch
    return {n: max(rounding(t), least)._replace(offset=arch.offset(n)) for n, t in stored if not arch.tensors[n].buffer}


def dtype_named(precision: str) -> torch.dtype:
    if precision not in PRECISIONS:
        raise IsobasinError(f"--precision {precision!r} is unknown, expected stored, {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def perturbed(
    weights: Weights,
    roundings: Mapping[str, Rounding],
    *,
    seed: int,
    dtype: torch.dtype | None = None,
    zeros: bool = True,
) -> Weights:
    """The model with simulated rounding: w + ξ · (largest rounding error of w), ξ uniform on [−1, 1].

    A zero may be a number too small for the type; without `zeros` it stays what it is. The result is in `dtype`, by
    default a type that represents the perturbation without further rounding.
    """

    def change(name: str, tensors: Tensors) -> Tensor:
        """The same noise each time a tensor is read on one kind of device."""
        tensor = tensors[name]
        on_cuda = tensor.device.type == "cuda"
        rng = torch.Generator(tensor.device if on_cuda else "cpu").manual_seed(crc32(f"{name} {seed}".encode()))
        chunk = max(1, tensor.numel()) if on_cuda else CHUNK
        # float32 can represent the noise of the narrow types; the noise of float32 itself needs float64.
        wide = torch.float32 if tensor.dtype.itemsize < 4 else torch.float64
        out = torch.empty(tensor.shape, dtype=dtype or wide, device=tensor.device)
        for part, into in zip(tensor.reshape(-1).split(chunk), out.view(-1).split(chunk)):
            noise = torch.rand(part.shape, generator=rng, device=rng.device).mul_(2).sub_(1).to(part.device, wide)
            errors = torch.copysign(roundings[name].errors(part.to(wide)), part)
            errors = errors if zeros else errors.where(part != 0, 0)
            into.copy_(noise.mul_(errors).add_(part))
        return out

    changes = {name: partial(change, name) for name in roundings}
    return replace(weights, tensors=View(weights, changes), checkpoint=None)
