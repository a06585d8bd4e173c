"""What storing a model in its type may change: every weight by up to half a unit in its last place.

A relative error of at most u per weight, u = 2⁻²⁴ for float32, 2⁻¹¹ for float16, 2⁻⁸ for bfloat16. How far that moves
a weight of the aligned model, or an output, depends on the element and on the model; it is not derived but measured,
on models whose weights were disturbed by this much at random.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from zlib import crc32

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.views import Tensors
from isobasin.weights import Weights

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CHUNK = 2**18  # numbers disturbed at once: larger ones leave holes in the heap


def unit(dtype: torch.dtype) -> float:
    """Half a unit in the last place, relative; never below float32's, in which models are run."""
    return float(max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)) / 2


def units(weights: Weights, precision: str = "stored") -> dict[str, float]:
    """The rounding of every weight: of its stored type, or of a coarser one that was asked for."""
    least = 0.0 if precision == "stored" else unit(dtype_named(precision))
    return {
        name: max(unit(dtype), least) for name, dtype in weights.dtypes.items() if not weights.arch.tensors[name].buffer
    }


def dtype_named(precision: str) -> torch.dtype:
    if precision not in PRECISIONS:
        raise IsobasinError(f"--precision {precision!r} is unknown, expected stored, {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def coarsest(*models: Weights, precision: str = "stored") -> str:
    """The name of the coarsest type among the weights, or of the one asked for where that is coarser."""
    worst = max(u for model in models for u in units(model, precision).values())
    return next(name for name, dtype in PRECISIONS.items() if unit(dtype) >= worst)


def disturbed(weights: Weights, sizes: Mapping[str, float], *, seed: int, dtype: torch.dtype | None = None) -> Weights:
    """The model as if stored anew: w (1 + u ξ), ξ uniform on [−1, 1], in `dtype` or in a type that shows all of it."""
    return replace(weights, tensors=_Disturbed(weights, sizes, seed, dtype), checkpoint=None)


class _Disturbed(Mapping[str, Tensor]):
    """The same noise whenever a tensor is asked for."""

    def __init__(self, weights: Tensors, sizes: Mapping[str, float], seed: int, dtype: torch.dtype | None) -> None:
        self._weights, self._sizes, self._seed, self._dtype = weights, sizes, seed, dtype

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights[name]
        if name not in self._sizes:
            return tensor
        rng = torch.Generator().manual_seed(crc32(f"{name} {self._seed}".encode()))
        # float32 shows the noise of the narrow types; that of float32 itself needs more digits.
        wide = torch.float32 if tensor.dtype.itemsize < 4 else torch.float64
        out = torch.empty(tensor.shape, dtype=self._dtype or wide, device=tensor.device)
        for part, into in zip(tensor.reshape(-1).split(CHUNK), out.view(-1).split(CHUNK)):
            noise = torch.rand(part.shape, generator=rng).mul_(2).sub_(1)
            into.copy_(noise.to(part.device, wide).mul_(self._sizes[name]).add_(1).mul_(part))
        return out

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
