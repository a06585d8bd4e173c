"""Residual of the weights: how far aligned B is from A, relative to what rounding of the stored types can cause.

Storing a weight in its type changes it by a relative error of at most u: 2⁻²⁴ for float32, 2⁻¹¹ for float16, 2⁻⁸ for
bfloat16. The transform that leads from B to A amplifies B's rounding by its condition number, so no fixed tolerance is
right. Instead B is perturbed at random by the rounding of its stored type and moved by the same transform. The change,
together with A's own rounding, is the noise floor. Residuals are given in multiples of it, per tensor and also per row
and column, so that a change to the embedding of one token is not hidden by the others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from zlib import crc32

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.symmetries import symmetry
from isobasin.symmetries.normal_form import block_tensors, slices
from isobasin.symmetries.transform import Transform
from isobasin.views import Tensors, View
from isobasin.weights import Weights

PRECISIONS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
RESIDUAL_THRESHOLD = 2.5  # multiples of the noise floor; measured: copies of all families and types stay below 1.1
LINE_FACTOR = 3.0  # a single row or column may exceed the threshold by this factor (measured: 3.3 floors in all)
ZERO_FLOOR = 1e-5  # noise floor of a weight that is zero, in units of rounding; float64 arithmetic stays below it
MIN_LINE_LENGTH = 8  # numbers; shorter rows and columns are not judged separately
SMALL_TENSOR = 64  # numbers; a smaller tensor is perturbed several times, as one draw may be almost zero by chance
SMALL_TENSOR_DRAWS = 8
CHUNK = 2**18  # numbers processed at once: larger pieces fragment the heap
OUTPUTS = "outputs"  # name for the tensors that no space moves: the biases of heads


def rounding_unit(dtype: torch.dtype) -> float:
    """Half a unit in the last place, relative; at least float32's, because models are run in float32."""
    return float(max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)) / 2


def rounding_units(weights: Weights, precision: str = "stored") -> dict[str, float]:
    """The rounding unit of every tensor: of its stored type, or of a requested coarser one."""
    least = 0.0 if precision == "stored" else rounding_unit(dtype_named(precision))
    stored = weights.dtypes.items()
    return {name: max(rounding_unit(t), least) for name, t in stored if not weights.arch.tensors[name].buffer}


def dtype_named(precision: str) -> torch.dtype:
    if precision not in PRECISIONS:
        raise IsobasinError(f"--precision {precision!r} is unknown, expected stored, {', '.join(PRECISIONS)}")
    return PRECISIONS[precision]


def coarsest_precision(*models: Weights, precision: str = "stored") -> str:
    """The name of the coarsest type among the weights, or of the requested one where that is coarser."""
    worst = max(u for model in models for u in rounding_units(model, precision).values())
    return next(name for name, dtype in PRECISIONS.items() if rounding_unit(dtype) >= worst)


def sufficient_precision(ratio: float, precision: str) -> str | None:
    """The name of a coarser type whose rounding would explain a residual of this ratio."""
    unit = rounding_unit(PRECISIONS[precision])
    coarser = {name: unit / rounding_unit(dtype) for name, dtype in PRECISIONS.items() if rounding_unit(dtype) > unit}
    return next((name for name, share in coarser.items() if ratio * share <= RESIDUAL_THRESHOLD), None)


def perturbed(weights: Weights, units: Mapping[str, float], *, seed: int, dtype: torch.dtype | None = None) -> Weights:
    """The model with simulated rounding: w (1 + u ξ), ξ uniform on [−1, 1].

    The result is in `dtype`, by default a type that represents the perturbation without further rounding.
    """

    def change(name: str, tensors: Tensors) -> Tensor:
        """The same noise each time a tensor is read."""
        tensor, rng = tensors[name], torch.Generator().manual_seed(crc32(f"{name} {seed}".encode()))
        # float32 can represent the noise of the narrow types; the noise of float32 itself needs float64.
        wide = torch.float32 if tensor.dtype.itemsize < 4 else torch.float64
        out = torch.empty(tensor.shape, dtype=dtype or wide, device=tensor.device)
        for part, into in zip(tensor.reshape(-1).split(CHUNK), out.view(-1).split(CHUNK)):
            noise = torch.rand(part.shape, generator=rng).mul_(2).sub_(1)
            into.copy_(noise.to(part.device, wide).mul_(units[name]).add_(1).mul_(part))
        return out

    changes = {name: partial(change, name) for name in units}
    return replace(weights, tensors=View(weights, changes), checkpoint=None)


@dataclass(frozen=True)
class Residual:
    """One space: ‖A − aligned B‖ / ‖A‖, the same for rounding alone, and the largest ratio of the two over its tensors.

    `tensor` is the matrix with the largest ratio above the threshold, or the worst tensor where no matrix exceeds it. A
    bias absorbs changes that reach it through a matrix, and may then deviate more than the matrix that was changed.
    """

    kind: str  # the label of the space
    layer: int | None
    distance: float
    rounding: float
    ratio: float
    tensor: str
    lines: Mapping[str, tuple[int, ...]]  # by tensor, the rows of an open axis (tokens, positions) that differ most

    def to_dict(self) -> dict[str, object]:
        return {
            "layer": self.layer,
            "space": self.kind,
            "distance": self.distance,
            "rounding": self.rounding,
            "ratio": self.ratio,
            "tensor": self.tensor,
        }


def residuals(
    a: Weights,
    b: Weights,
    transform: Transform,
    *,
    precision: str,
    seed: int,
    device: torch.device,
    perturbed_transform: Transform | None = None,
) -> tuple[Residual, ...]:
    """The residual of every space that has a tensor, in the order of the model.

    `perturbed_transform` is the transform found for perturbed B: the noise floor then also includes the uncertainty of
    the transform itself.
    """
    units_a, units_b = (rounding_units(model, precision) for model in (a, b))
    pair = _AlignedPair(a, b, transform, perturbed_transform or transform, units_a, units_b, seed, device)
    blocks = block_tensors(a.arch)
    moved = {name for names in blocks.values() for name in names}
    blocks[OUTPUTS] = tuple(n for n, p in a.arch.tensors.items() if not p.buffer and n not in moved)
    found = []
    for name, names in blocks.items():
        space = a.arch.spaces.get(name)
        kind, layer = (space.label, space.layer) if space else (name, None)
        if names:
            found.append(_space_residual(kind, layer, {n: _tensor_residual(pair, n) for n in names}))
    return tuple(found)


@dataclass(frozen=True)
class _TensorResidual:
    """One tensor: squares of residual, noise floor and A; the largest ratio; the rows of an open axis with the largest
    ratios."""

    residual: float
    floor: float
    size: float
    ratio: float
    lines: tuple[int, ...]
    is_matrix: bool


def _tensor_residual(pair: "_AlignedPair", name: str) -> _TensorResidual:
    by_line, size = pair.squares(name)
    residual, floor = (float(x.sum()) for x in by_line[0])
    ratio = float((residual / max(floor, 1e-300)) ** 0.5) if residual else 0.0
    lines: tuple[int, ...] = ()
    shape, pattern = pair.a.arch.shapes[name], pair.a.arch.tensors[name]
    for axis, (squares, floors) in enumerate(by_line):
        if len(shape) < 2 or prod(shape) // max(1, shape[axis]) < MIN_LINE_LENGTH:
            continue
        # The noise floor of a nearly empty row or column is at least a tenth of the mean.
        ratios = (squares / floors.clamp(min=max(0.1 * float(floors.mean()), 1e-300))).sqrt()
        ratio = max(ratio, float(ratios.max()) / LINE_FACTOR)
        if axis == 0 and not pattern.roles[0].axes[0].terms:
            lines = tuple(ratios.topk(min(4, len(ratios))).indices.tolist())
    return _TensorResidual(residual, floor, size, ratio, lines, len(shape) > 1)


def _space_residual(kind: str, layer: int | None, found: Mapping[str, _TensorResidual]) -> Residual:
    every = found.values()
    residual, floor, size = (sum(getattr(p, key) for p in every) for key in ("residual", "floor", "size"))
    suspects = {name: p for name, p in found.items() if p.is_matrix and p.ratio > RESIDUAL_THRESHOLD} or found
    worst = max(suspects, key=lambda name: suspects[name].ratio)
    scale = max(size, 1e-300)
    lines = {name: p.lines for name, p in found.items() if p.lines}
    ratio = max(p.ratio for p in every)
    return Residual(kind, layer, (residual / scale) ** 0.5, (floor / scale) ** 0.5, ratio, worst, lines)


@dataclass(frozen=True)
class _AlignedPair:
    """A, aligned B, and B perturbed and then aligned; tall tensors are read a few rows at a time."""

    a: Weights
    b: Weights
    transform: Transform
    perturbed_transform: Transform
    units_a: Mapping[str, float]
    units_b: Mapping[str, float]
    seed: int
    device: torch.device

    def squares(self, name: str) -> tuple[list[tuple[Tensor, Tensor]], float]:
        """Squares of residual and noise floor by row, the same by column, and the square of A's tensor."""
        unit_a, unit_b, found = self.units_a[name], self.units_b[name], []
        for t, h, noise in self._pieces(name):
            # One draw may be small by chance, so the mean square of the rounding of moved B is added.
            floor = noise + (unit_b * h).square() / 3 + (unit_a * t).square() / 3 + (ZERO_FLOOR * unit_a) ** 2
            found.append((*_by_line((h - t).square()), *_by_line(floor), float(t.square().sum())))
        rows, columns, row_floors, column_floors, sizes = zip(*found)
        return [(torch.cat(rows), torch.cat(row_floors)), (sum(columns), sum(column_floors))], sum(sizes)

    def _pieces(self, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows of A, of moved B, and the squared effect of the perturbation of B on them, in float64."""
        reference, start = self.a[name], 0
        for number, piece in enumerate(slices(self.b, symmetry(self.b.arch), name)):
            here = self.transform.apply(piece, device=self.device)[name]
            n_draws = SMALL_TENSOR_DRAWS if here.numel() < SMALL_TENSOR else 1
            sides = (
                reference[start : start + len(here)],
                here,
                *(self._perturbed(piece, name, number, k) for k in range(n_draws)),
            )
            start += len(here)
            step = max(1, CHUNK * len(here) // max(1, here.numel()))
            for few in zip(*(x.split(step) for x in sides)):
                t, h, *others = (x.to("cpu", torch.float64) for x in few)
                yield t, h, sum(((n - h).square() for n in others), torch.zeros_like(h)) / len(others)

    def _perturbed(self, piece: Weights, name: str, number: int, draw: int) -> Tensor:
        """Perturbed rows of B, moved; each piece and each draw has its own noise."""
        seed = self.seed + 7919 * number + 104_729 * draw
        return self.perturbed_transform.apply(perturbed(piece, self.units_b, seed=seed), device=self.device)[name]


def _by_line(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over each row, and over each column (of a vector: over all of it)."""
    flat = squares.flatten(2) if squares.dim() > 2 else squares.reshape(len(squares), -1, 1)
    return flat.sum((1, 2)), flat.sum((0, 2))
