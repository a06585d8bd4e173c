"""How far aligned B is from A, beside how far rounding alone could have brought it.

The element that leads from B to A enlarges B's rounding by its condition, so no fixed tolerance is right. Instead B is
disturbed by the rounding of its stored type and sent through the same element: what comes out, with A's own rounding
beside it, is the floor. The residual is given in multiples of it, per tensor, and per row and column, so that a change
to one word's embedding is not lost among the others.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.equivalence.rounding import disturbed, units
from isobasin.match.canonical import ENDS, STREAM, blocks
from isobasin.transform import Transform
from isobasin.weights import Weights

TOLERANCE = 2.5  # multiples of the floor; copies of all families stay below 1.1, whatever the type
LINE_TOLERANCE = 3.0  # a single row or column varies more: times as much (seen: 3.3 in all)
EMPTY = 1e-5  # what a weight of zero may become, in units of rounding: float64 arithmetic leaves less
THIN = 8  # numbers below which a row says too little by itself
OUTPUTS = "outputs"  # tensors that no space moves: the biases of heads


@dataclass(frozen=True)
class Residual:
    """One space: ‖A − aligned B‖ / ‖A‖, the same for rounding alone, and the worst tensor in multiples of it."""

    space: str
    distance: float
    rounding: float
    ratio: float
    tensor: str
    lines: Mapping[str, tuple[int, ...]]  # rows of open axes (words, positions) that differ most

    @property
    def layer(self) -> int | None:
        found = re.fullmatch(r"(?:heads|ff)(\d+)", self.space)
        return int(found[1]) if found else None

    @property
    def kind(self) -> str:
        return self.space.rstrip("0123456789") if self.layer is not None else self.space

    @property
    def facts(self) -> dict[str, object]:
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
    again: Transform | None = None,
) -> tuple[Residual, ...]:
    """The residual of every space that holds a tensor, in the order of the model.

    `again` is the element found for the disturbed B: the floor then also holds how uncertain the element itself is.
    """
    moved = transform.apply(b, device=device)
    shaken = (again or transform).apply(disturbed(b, units(b, precision), seed=seed), device=device)
    own, theirs = units(a, precision), units(b, precision)
    found = []
    for space, names in _spaces(a).items():
        parts = {name: _compare(a, moved, shaken, own[name], theirs[name], name) for name in names}
        if parts:
            found.append(_joined(space, parts))
    return tuple(found)


def _spaces(a: Weights) -> dict[str, tuple[str, ...]]:
    found = {STREAM if space == ENDS else space: names for space, names in blocks(a.arch).items()}
    seen = {name for names in found.values() for name in names}
    return {**found, OUTPUTS: tuple(n for n, p in a.arch.tensors.items() if not p.buffer and n not in seen)}


@dataclass(frozen=True)
class _Part:
    """One tensor: squares of residual, floor and A; the largest ratio; which rows of an open axis stand out."""

    residual: float
    floor: float
    size: float
    ratio: float
    lines: tuple[int, ...]


def _compare(a: Weights, moved: Weights, shaken: Weights, own: float, theirs: float, name: str) -> _Part:
    reference = a[name]
    wide = torch.float32 if reference.dtype.itemsize < 4 else torch.float64
    noise = shaken[name].to("cpu", wide, copy=True)  # narrowed before the next one is made: embeddings are large
    here = moved[name].to("cpu", wide, copy=True)
    noise.sub_(here)
    # One draw may be small by chance: the mean square of rounding where B is now stands beside it.
    noise.square_().addcmul_(here, here, value=theirs**2 / 3)
    there = reference.to(wide)
    noise.addcmul_(there, there, value=own**2 / 3).add_((EMPTY * own) ** 2)
    size = float(there.square().sum(dtype=torch.float64))
    here.sub_(there).square_()
    residual, floor = float(here.sum(dtype=torch.float64)), float(noise.sum(dtype=torch.float64))
    ratio = _ratio(residual, floor)
    lines: tuple[int, ...] = ()
    for axis in range(min(2, here.dim()) if here.dim() > 1 else 0):
        if here.numel() // max(1, here.shape[axis]) < THIN:
            continue
        each = _line_ratios(here, noise, axis)
        ratio = max(ratio, float(each.max()) / LINE_TOLERANCE)
        if axis == 0 and not a.arch.tensors[name].roles[0].axes[0].terms:
            lines = tuple(each.topk(min(4, len(each))).indices.tolist())
    return _Part(residual, floor, size, ratio, lines)


def _line_ratios(residual: Tensor, floor: Tensor, axis: int) -> Tensor:
    """Per row or column; one that is nearly empty is held against a tenth of the mean floor."""
    others = [k for k in range(residual.dim()) if k != axis]
    top, bottom = residual.sum(others, dtype=torch.float64), floor.sum(others, dtype=torch.float64)
    least = 0.1 * float(bottom.mean())
    return (top / bottom.clamp(min=max(least, 1e-300))).sqrt()


def _ratio(residual: float, floor: float) -> float:
    return float((residual / max(floor, 1e-300)) ** 0.5) if residual else 0.0


def _joined(space: str, parts: Mapping[str, _Part]) -> Residual:
    residual, floor, size = (sum(getattr(p, key) for p in parts.values()) for key in ("residual", "floor", "size"))
    worst = max(parts, key=lambda name: parts[name].ratio)
    scale = max(size, 1e-300)
    lines = {name: p.lines for name, p in parts.items() if p.lines}
    return Residual(space, (residual / scale) ** 0.5, (floor / scale) ** 0.5, parts[worst].ratio, worst, lines)
