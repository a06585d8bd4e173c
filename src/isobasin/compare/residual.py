"""How far aligned B is from A, beside how far rounding alone could have brought it.

The element that leads from B to A enlarges B's rounding by its condition, so no fixed tolerance is right. Instead B is
disturbed by the rounding of its stored type and sent through the same element: what comes out, with A's own rounding
beside it, is the floor. The residual is given in multiples of it, per tensor, and per row and column, so that a change
to one word's embedding is not lost among the others.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from isobasin.compare.normal_form import parts
from isobasin.compare.rounding import CHUNK, disturbed, units
from isobasin.match.canonical import ENDS, STREAM
from isobasin.match.slices import slices
from isobasin.symmetries import symmetry
from isobasin.transform import Transform
from isobasin.weights import Weights

TOLERANCE = 2.5  # multiples of the floor; copies of all families stay below 1.1, whatever the type
LINE_TOLERANCE = 3.0  # a single row or column varies more: times as much (seen: 3.3 in all)
EMPTY = 1e-5  # what a weight of zero may become, in units of rounding: float64 arithmetic leaves less
THIN = 8  # numbers below which a row says too little by itself
FEW = 64  # a tensor of fewer numbers is disturbed several times: one draw of three may be next to nothing
DRAWS = 8  # that often
OUTPUTS = "outputs"  # tensors that no space moves: the biases of heads


@dataclass(frozen=True)
class Residual:
    """One space: ‖A − aligned B‖ / ‖A‖, the same for rounding alone, and the worst tensor's ratio of the two.

    `tensor` is the one to look at: the worst matrix beyond rounding, or the worst of all where none is. A bias takes up
    what reaches it through a matrix, and a few of its numbers may stand out more than the matrix that has changed.
    """

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
    pair = _Beside(a, b, transform, again or transform, units(a, precision), units(b, precision), seed, device)
    found = []
    for space, names in _spaces(a).items():
        compared = {name: _compare(pair, name) for name in names}
        if compared:
            found.append(_joined(space, compared))
    return tuple(found)


def _spaces(a: Weights) -> dict[str, tuple[str, ...]]:
    """Tensors by the space they belong to: the biases, gains and shifts of a layer to that layer."""
    found = {STREAM if space == ENDS else space: names for space, names in parts(a.arch).items()}
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
    is_matrix: bool


def _compare(pair: "_Beside", name: str) -> _Part:
    sums = pair.sums(name)
    residual, floor = (float(x.sum()) for x in (sums.rows, sums.row_floors))
    ratio = _ratio(residual, floor)
    lines: tuple[int, ...] = ()
    arch = pair.a.arch
    shape = arch.shapes[name]
    for axis, (top, bottom) in enumerate(((sums.rows, sums.row_floors), (sums.columns, sums.column_floors))):
        if len(shape) < 2 or prod(shape) // max(1, shape[axis]) < THIN:
            continue
        each = _line_ratios(top, bottom)
        ratio = max(ratio, float(each.max()) / LINE_TOLERANCE)
        if axis == 0 and not arch.tensors[name].roles[0].axes[0].terms:
            lines = tuple(each.topk(min(4, len(each))).indices.tolist())
    return _Part(residual, floor, sums.size, ratio, lines, len(shape) > 1)


@dataclass(frozen=True)
class _Sums:
    """Squares of residual and floor of one tensor, by row and by column, and the square of A's."""

    rows: Tensor
    row_floors: Tensor
    columns: Tensor
    column_floors: Tensor
    size: float


@dataclass(frozen=True)
class _Beside:
    """A, aligned B, and B disturbed and aligned: tall tensors a few rows at a time."""

    a: Weights
    b: Weights
    transform: Transform
    again: Transform
    own: Mapping[str, float]
    theirs: Mapping[str, float]
    seed: int
    device: torch.device

    def sums(self, name: str) -> _Sums:
        own, theirs, found = self.own[name], self.theirs[name], []
        for t, h, noise in self._pieces(name):
            # One draw may be small by chance: the mean square of rounding where B is now stands beside it.
            floor = noise + (theirs * h).square() / 3 + (own * t).square() / 3 + (EMPTY * own) ** 2
            found.append((*_by_line((h - t).square()), *_by_line(floor), float(t.square().sum())))
        rows, columns, row_floors, column_floors, sizes = zip(*found)
        return _Sums(torch.cat(rows), torch.cat(row_floors), sum(columns), sum(column_floors), sum(sizes))

    def _pieces(self, name: str) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows of A, of moved B, and the square of what disturbing B does to them, in float64."""
        reference, start = self.a[name], 0
        for number, piece in enumerate(slices(self.b, symmetry(self.b.arch), name)):
            here = self.transform.apply(piece, device=self.device)[name]
            draws = [self._disturbed(piece, name, number, k) for k in range(DRAWS if here.numel() < FEW else 1)]
            sides = (reference[start : start + len(here)], here, *draws)
            start += len(here)
            step = max(1, CHUNK * len(here) // max(1, here.numel()))
            for few in zip(*(x.split(step) for x in sides)):
                t, h, *others = (x.to("cpu", torch.float64) for x in few)
                yield t, h, sum(((n - h).square() for n in others), torch.zeros_like(h)) / len(others)

    def _disturbed(self, piece: Weights, name: str, number: int, draw: int) -> Tensor:
        """B's rows with the rounding of their type, moved; other rows and other draws get other noise."""
        seed = self.seed + 7919 * number + 104_729 * draw
        return self.again.apply(disturbed(piece, self.theirs, seed=seed), device=self.device)[name]


def _by_line(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over each row, and over each column (of a vector: over all of it)."""
    flat = squares.flatten(2) if squares.dim() > 2 else squares.reshape(len(squares), -1, 1)
    return flat.sum((1, 2)), flat.sum((0, 2))


def _line_ratios(top: Tensor, bottom: Tensor) -> Tensor:
    """Per row or column; one that is nearly empty is held against a tenth of the mean floor."""
    least = 0.1 * float(bottom.mean())
    return (top / bottom.clamp(min=max(least, 1e-300))).sqrt()


def _ratio(residual: float, floor: float) -> float:
    return float((residual / max(floor, 1e-300)) ** 0.5) if residual else 0.0


def _joined(space: str, compared: Mapping[str, _Part]) -> Residual:
    every = compared.values()
    residual, floor, size = (sum(getattr(p, key) for p in every) for key in ("residual", "floor", "size"))
    suspects = {name: p for name, p in compared.items() if p.is_matrix and p.ratio > TOLERANCE} or compared
    worst = max(suspects, key=lambda name: suspects[name].ratio)
    scale = max(size, 1e-300)
    lines = {name: p.lines for name, p in compared.items() if p.lines}
    ratio = max(p.ratio for p in every)
    return Residual(space, (residual / scale) ** 0.5, (floor / scale) ** 0.5, ratio, worst, lines)
