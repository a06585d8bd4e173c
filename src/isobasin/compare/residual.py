"""Residual of the weights: how far aligned B is from A, relative to what rounding of the stored types can cause.

Storing a weight in its type changes it by a relative error of at most u: 2⁻²⁴ for float32, 2⁻¹¹ for float16, 2⁻⁸ for
bfloat16. The transform that leads from B to A amplifies B's rounding by its condition number, so no fixed tolerance is
right. Instead B is perturbed at random by the rounding of its stored type and moved by the same transform. The change,
together with A's own rounding, is the noise floor. Residuals are given in multiples of it, per tensor and also per row,
column and entry, each relative to its own noise floor: behind a norm the size of an embedding row does not matter, and
neither a change of one token nor a change of a very small row may be hidden by the others.

How large a multiple is allowed follows from the distribution of the noise (`limits`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from math import inf

import torch
from torch import Tensor

from isobasin.compare.limits import Entries, Judged, Lines, log_odds
from isobasin.rounding import PRECISIONS, Rounding, perturbed, rounding_unit, rounding_units
from isobasin.symmetries import symmetry
from isobasin.symmetries.normal_form import block_tensors, slices
from isobasin.symmetries.transform import Transform
from isobasin.weights import Weights

# Relative error of a moved weight that arithmetic causes: in float64, and in float32 where all weights have 16 bits.
ARITHMETIC = {torch.float64: 2.0**-48, torch.float32: 2.0**-19}
NARROW = 2.0**-12  # the rounding of float16; that of bfloat16 is larger
MAX_LOST = 0.05  # the share of a row that the smallest numbers of a type may cost without being noticed
DRAWS, FEW_DRAWS = 8, 4  # perturbed copies of a tensor, and of one that is large
FIRST_DRAWS = 2  # the same, of matrices that may be clearly within rounding
LARGE_TENSOR = 2**20  # numbers
KEPT_BYTES = 24  # of a perturbed copy that is kept while the residuals of its block are computed: a few float64 numbers
CHUNK, DEVICE_CHUNK = 2**18, 2**24  # numbers processed at once: larger pieces fragment the heap of the host
NOT_ZERO = 1e-10  # numbers of a table that is not next to zero
MAX_ROWS = 4  # rows of a table that are named as those that differ most
OUTPUTS = "outputs"  # name for the tensors that no space moves: the biases of heads


def coarsest_precision(*models: Weights, precision: str = "stored") -> str:
    """The name of the coarsest type among the weights, or of the requested one where that is coarser."""
    return _coarser_than(max(r.unit for model in models for r in rounding_units(model, precision).values()))


def precision_as_run(*models: Weights, precision: str) -> str:
    """The name of the coarsest among this precision and the types in which transformers runs the models."""
    return _coarser_than(max(rounding_unit(t) for t in (PRECISIONS[precision], *(m.dtype_run for m in models))))


def _coarser_than(unit: float) -> str:
    return next(name for name, dtype in PRECISIONS.items() if rounding_unit(dtype) >= unit)


def sufficient_precision(excess: float, precision: str) -> str | None:
    """The name of a coarser type whose rounding would explain a residual that exceeds its limit by this factor."""
    unit = rounding_unit(PRECISIONS[precision])
    coarser = {name: unit / rounding_unit(dtype) for name, dtype in PRECISIONS.items() if rounding_unit(dtype) > unit}
    return next((name for name, share in coarser.items() if excess * share <= 1), None)


@dataclass(frozen=True)
class Residual:
    """One space: ‖A − aligned B‖ / ‖A‖, the same for rounding alone; of the line (tensor, row, column or entry) that is
    worst relative to its limit, the residual in multiples of its noise floor, and the limit.

    `tensor` is the worst matrix above its limit, or the worst tensor where no matrix exceeds it. A bias absorbs changes
    that reach it through a matrix, and may then deviate more than the matrix that was changed.
    """

    kind: str  # the label of the space
    layer: int | None
    distance: float
    rounding: float
    ratio: float
    allowed: float
    tensor: str
    lines: Mapping[str, tuple[int, ...]]  # by tensor, the rows of an open axis (tokens, positions) that differ most

    @property
    def excess(self) -> float:
        """The ratio relative to its limit: above 1, rounding does not explain the residual."""
        return self.ratio / self.allowed

    def to_dict(self) -> dict[str, object]:
        return {
            "layer": self.layer,
            "space": self.kind,
            "distance": self.distance,
            "rounding": self.rounding,
            "ratio": self.ratio,
            "allowed_ratio": self.allowed,
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
    refits: Sequence[tuple[Weights, Transform]] = (),
    most: float = inf,
) -> tuple[Residual, ...]:
    """The residual of every space that has a tensor, in the order of the model; none at all if a tensor exceeds its
    limit by more than the factor `most`.

    `refits` are perturbed copies of B, each with the transform found for it: the noise floor then also includes the
    uncertainty of the transform itself.
    """
    units_a, units_b = (rounding_units(model, precision) for model in (a, b))
    blocks = block_tensors(a.arch)
    moved = {name for names in blocks.values() for name in names}
    blocks[OUTPUTS] = tuple(n for n, p in a.arch.tensors.items() if not p.buffer and n not in moved)
    found, first = [], None if transform.exact or refits else FIRST_DRAWS
    for name, names in blocks.items():
        space = a.arch.spaces.get(name)
        kind, layer = (space.label, space.layer) if space else (name, None)
        numbers = sum(torch.Size(a.arch.shapes[n]).numel() for n in names)
        kept = KEPT_BYTES * DRAWS * numbers <= a.memory
        pair = _AlignedPair(a, b, transform, tuple(refits), units_a, units_b, seed, device, kept)
        if not names:
            continue
        of_block: dict[str, _TensorResidual] = {}
        for tensor in names:
            n_draws = first if len(a.arch.shapes[tensor]) > 1 else None
            of_block[tensor] = _tensor_residual(pair, tensor, n_draws=n_draws)
            if n_draws and not of_block[tensor].is_certain:
                of_block[tensor] = _tensor_residual(pair, tensor)
            first = first if of_block[tensor].excess <= 1 else None  # elsewhere little will be certain
            if of_block[tensor].excess > most:
                return ()
        found.append(_space_residual(kind, layer, of_block))
    return tuple(found)


def _space_residual(kind: str, layer: int | None, found: "Mapping[str, _TensorResidual]") -> Residual:
    every = found.values()
    residual, floor, size = (sum(getattr(p, key) for p in every) for key in ("residual", "floor", "size"))
    suspects = {name: p for name, p in found.items() if p.is_matrix and p.ratio > p.allowed} or found
    named = max(suspects, key=lambda name: suspects[name].excess)
    scale, worst = max(size, 1e-300), max(every, key=lambda p: p.excess)
    lines = {name: p.lines for name, p in found.items() if p.lines}
    distances = (residual / scale) ** 0.5, (floor / scale) ** 0.5
    return Residual(kind, layer, *distances, worst.ratio, worst.allowed, named, lines)


@dataclass(frozen=True)
class _TensorResidual:
    """One tensor: squares of residual, noise floor and A; the worst line's ratio and its limit; rows of an open axis
    that are above theirs, worst first; whether no more draws of the noise are needed."""

    residual: float
    floor: float
    size: float
    ratio: float
    allowed: float
    lines: tuple[int, ...]
    is_matrix: bool
    is_certain: bool

    @property
    def excess(self) -> float:
        return self.ratio / self.allowed


def _tensor_residual(pair: "_AlignedPair", name: str, n_draws: int | None = None) -> _TensorResidual:
    """From so many perturbed copies; by default from those that the size of the tensor asks for."""
    shape, x = pair.a.arch.shapes[name], log_odds(pair.a.n_params)
    rows, columns, entries, sizes = pair.lines(name, x, n_draws)
    is_open = len(shape) > 1 and not pair.a.arch.tensors[name].roles[0].axes[0].terms
    if is_open and not _adds_to_others(pair.a, name):
        rows = _without_lost(rows, sizes, (pair.units_a[name], pair.units_b[name]))
    judged = [lines.judged(x) for lines in (rows, columns, rows.total())]
    certain = all(each.is_certain for each in (*judged, entries))
    # Single entries decide only where no line does: the worst of them says little about where two models part.
    if max(float(each.excess.max()) for each in judged) <= 1:
        judged.append(entries)
    ratio, allowed = max((each.worst for each in judged), key=lambda worst: worst[0] / worst[1])
    by_row = torch.maximum(judged[0].excess, entries.excess)
    most = by_row.topk(min(MAX_ROWS, len(by_row))) if is_open else None
    beyond = tuple(most.indices[most.values > 1].tolist()) if most else ()
    residual, noise, *_ = rows.sums.sum(1).tolist()
    return _TensorResidual(residual, noise, float(sizes.sum()), ratio, allowed, beyond, len(shape) > 1, certain)


def _adds_to_others(weights: Weights, name: str) -> bool:
    """Whether the rows of a table are added to those of another one that is not next to zero: then a row that is lost
    leaves nothing but the others. Tables of relative positions are added to scores."""
    if name in weights.arch.tables:
        return True
    parts = [{part for part, _, _ in each.give + each.take} for each in weights.arch.sums]
    others = {part for each in parts if name in each for part in each} - {name}
    return any(float(weights[other].abs().max()) > NOT_ZERO for other in others)


def _without_lost(rows: Lines, sizes: Tensor, roundings: Sequence[Rounding]) -> Lines:
    """Rows below the smallest numbers of a type are lost in it: they agree within relative rounding, or not at all."""
    least = max(r.unit * r.smallest for r in roundings)
    lost = MAX_LOST**2 * sizes < rows.length * least**2
    relative = sum(r.unit**2 for r in roundings) / 3 * sizes
    residual, noise, known, squares = rows.sums
    noise, known = (torch.where(lost, relative, each) for each in (noise, known))
    return replace(rows, sums=torch.stack([residual, noise, known, squares]))


@dataclass(frozen=True)
class _AlignedPair:
    """A, aligned B, and B perturbed and then aligned; tall tensors are read a few rows at a time."""

    a: Weights
    b: Weights
    transform: Transform
    refits: tuple[tuple[Weights, Transform], ...]
    units_a: Mapping[str, Rounding]
    units_b: Mapping[str, Rounding]
    seed: int
    device: torch.device
    kept: bool  # whether perturbed copies stay in memory: one tensor depends on others of its block

    def lines(self, name: str, x: float, n_draws: int | None) -> tuple[Lines, Lines, Judged, Tensor]:
        """The rows of a tensor, its columns, the worst entry of each row, and the squares of A's rows."""
        found = []
        for t, h, draws in self._pieces(name, n_draws):
            known = self.units_a[name].errors(t).square() / 3
            known += self._arithmetic(t, h).square() if len(draws) else self.units_b[name].errors(h).square() / 3
            here = Entries((h - t).square(), known, draws)
            found.append((here.lines(0), here.lines(1), here.judged(x), t.square().sum((1, 2))))
        rows, columns, entries, sizes = zip(*found)
        return Lines.joined(rows), reduce(Lines.extended_by, columns), Judged.joined(entries), torch.cat(sizes)

    def _pieces(self, name: str, n_draws: int | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Rows of A, of moved B, and what perturbations of B change in them, with three axes and in float64. Where
        nothing is mixed, the noise is known without perturbations."""
        reference, start, exact = self.a[name], 0, self.transform.exact and not self.refits
        n_draws = n_draws or (FEW_DRAWS if reference.numel() > LARGE_TENSOR else DRAWS)
        n_draws = 0 if exact else n_draws
        refits = (slices(copy, symmetry(copy.arch), name) for copy, _ in self.refits)
        for number, (piece, *copies) in enumerate(zip(slices(self.b, symmetry(self.b.arch), name), *refits)):
            here = self._apply(piece)[name]
            if self.refits:
                moved = [self._refitted(copy, k)[name] for k, copy in enumerate(copies)]
            else:
                moved = [self._perturbed(piece, name, number, k) for k in range(n_draws)]
            reference, here, *moved = map(torch.atleast_1d, (reference, here, *moved))  # of a single number
            sides = (reference[start : start + len(here)], here, *moved)
            start += len(here)
            chunk = CHUNK if self.device.type == "cpu" else DEVICE_CHUNK
            # of about the same number of rows: the columns of a last few rows would have too few draws
            n_parts = min(len(here), -(-here.numel() // chunk)) or 1
            for few in zip(*(side.tensor_split(n_parts) for side in sides)):
                t, h, *others = (_by_axes(side.to(self.device, torch.float64)) for side in few)
                yield t, h, torch.stack([n - h for n in others]) if others else h.new_zeros(0, *h.shape)

    def _perturbed(self, piece: Weights, name: str, number: int, draw: int) -> Tensor:
        """Perturbed rows of B, moved; each piece and each draw has its own noise."""
        if piece is self.b:
            return self._moved_copies[draw][name]
        seed = self.seed + 7919 * number + 104_729 * draw
        return self._apply(perturbed(piece, self.units_b, seed=seed))[name]

    def _refitted(self, piece: Weights, k: int) -> Weights:
        copy, transform = self.refits[k]
        return self._moved_refits[k] if piece is copy else transform.apply(piece, device=self.device)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type in which B is moved."""
        narrow = all(r.unit >= NARROW for units in (self.units_a, self.units_b) for r in units.values())
        return torch.float32 if narrow and not self.refits else torch.float64

    def _apply(self, weights: Weights, *, kept: bool = False) -> Weights:
        return self.transform.apply(weights, device=self.device, kept=kept, dtype=self.dtype)

    def _arithmetic(self, t: Tensor, h: Tensor) -> Tensor:
        """The error of the arithmetic: relative to the row and to the column of an entry."""
        size = torch.maximum(t.abs(), h.abs())
        least = torch.minimum(size.amax((1, 2), keepdim=True), size.amax((0, 2), keepdim=True))
        return ARITHMETIC[self.dtype] * least

    @cached_property
    def _moved_refits(self) -> list[Weights]:
        return [transform.apply(copy, device=self.device, kept=self.kept) for copy, transform in self.refits]

    @cached_property
    def _moved_copies(self) -> list[Weights]:
        """B perturbed and moved, once for each draw."""
        seeds = [self.seed + 104_729 * draw for draw in range(DRAWS)]
        copies = [perturbed(self.b, self.units_b, seed=seed) for seed in seeds]
        return [self._apply(copy, kept=self.kept) for copy in copies]


def _by_axes(x: Tensor) -> Tensor:
    """Rows, columns and the rest; a vector is one column."""
    return x.flatten(2) if x.dim() > 2 else x.reshape(len(x), -1, 1)
