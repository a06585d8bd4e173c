"""The alignment problem: two comparable models, the part of their symmetry that may move, and what is minimised.

The objective is ‖A − g·B‖² between the normal forms of A and B; matching with activations adds a term per space. It
splits into blocks: the tensors of one layer's heads or units, and those of the stream alone (embeddings and head).
While the stream is held, blocks do not depend on each other.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from isobasin.alignment.heads import HeadMatcher
from isobasin.arch import Architecture, Placement
from isobasin.groups import Element, Overlap
from isobasin.shapes import Float
from isobasin.symmetries.action import Action
from isobasin.symmetries.coordinate import Coordinate
from isobasin.symmetries.norm_coordinates import NormCoordinate
from isobasin.symmetries.normal_form import NormalForm, unheld_norms, with_unit_shift
from isobasin.symmetries.symmetry import Symmetry, symmetry
from isobasin.symmetries.transform import Transform
from isobasin.views import AsFloat64, Tensors
from isobasin.weights import Weights

Elements = Mapping[str, Element]
WIDE = 2**24  # numbers in a block above which a moving stream is swept in float32, and with few sweeps
CHUNK = 2**21  # numbers of each side that are in float64 at once


# -- the activation term ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationTerm:
    """How well the coordinates of A and g·B go together on data, as a term of the objective.

    For every space the objective gains 2κ (n − Σᵢⱼ tᵢⱼ gᵢⱼ): t the table of correlations, g the element's rotation, or
    its permutation with signs, n its size. Up to a constant this is κ E‖x_A − g x_B‖² for activations of unit variance.
    κ (`worth`) is the matcher's `activation_weight` times the mean square of a coordinate's weights: at 1, activations
    count as much as the weights do. Empty for matching by weights alone.
    """

    tables: Mapping[str, Tensor] = field(default_factory=dict)
    worth: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(tables: Mapping[str, Tensor], weight: float, a: NormalForm, b: NormalForm) -> "ActivationTerm":
        """Only for spaces that move; each worth `weight` times the mean square of its coordinates in A and B."""
        moving = {name: t for name, t in tables.items() if name in b.part.groups}
        if not moving:
            return ActivationTerm()
        arch = b.weights.arch
        squares = {name: (_square(a, name) + _square(b, name)) / 2 for name in arch.blocks}
        touched = {n: {space for t in names for space in arch.spaces_of(t)} for n, names in arch.blocks.items()}
        squares |= {stream: sum(squares[n] for n in touched if stream in touched[n]) for stream in arch.streams}
        return ActivationTerm(moving, {name: weight * squares[name] / len(t) for name, t in moving.items()})

    def benefit(self, name: str, like: Tensor) -> Tensor | None:
        """κ t, to be added to what an element gains by moving coordinates onto each other."""
        return self.worth[name] * self.tables[name].to(like) if name in self.tables else None

    def missing(self, name: str, element: Element) -> float:
        """2κ (n − Σ t g): zero where every coordinate meets its like."""
        if name not in self.tables:
            return 0.0
        table = self.tables[name]
        return 2 * self.worth[name] * (len(table) - float((table.cpu() * element.signed_matrix()).sum()))


def _square(model: NormalForm, name: str) -> float:
    return float(sum(t.square().sum(dtype=torch.float64) for part in model.pieces(name) for t in part.values()))


# -- the problem ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlignmentProblem:
    """Bring B closest to A with the elements and free coordinates of `part`; `matcher` pairs heads."""

    a: Weights
    b: Weights
    part: Symmetry
    matcher: HeadMatcher
    device: torch.device
    exact: bool = False  # in float64, however wide the model is

    @property
    def arch(self) -> Architecture:
        return self.b.arch

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """The streams that move."""
        return tuple(name for name in self.arch.streams if name in self.part.groups)

    @cached_property
    def between_streams(self) -> frozenset[str]:
        """Tensors that map one stream to another: what is best for one stream depends on the others."""
        return frozenset(n for n in self.arch.tensors if len(set(self.arch.spaces_of(n)) & set(self.arch.streams)) > 1)

    @cached_property
    def blocks_are_separate(self) -> bool:
        """Whether no tensor lies on two spaces that are no streams: then blocks can be matched at the same time."""
        streams = set(self.arch.streams)
        return all(len(set(self.arch.spaces_of(name)) - streams) <= 1 for name in self.arch.tensors)

    @cached_property
    def moves_stream(self) -> bool:
        return self.part.moves_stream

    @cached_property
    def wide(self) -> bool:
        """Whether a sweep of a moving stream is so expensive that float32 and few sweeps must do."""
        sizes = [sum(torch.Size(self.arch.shapes[n]).numel() for n in names) for names in self.arch.blocks.values()]
        return self.moves_stream and max(sizes) > WIDE

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.wide and not self.exact else torch.float64

    @cached_property
    def coordinates(self) -> dict[str, Coordinate]:
        """The free coordinates of the part that both models have free."""
        a, b = (AsFloat64(with_unit_shift(w, self.unit_shifts), self.device) for w in (self.a, self.b))
        return {name: c for name, c in self.part.coordinates.items() if c.usable(a) and c.usable(b)}

    @cached_property
    def unit_shifts(self) -> dict[str, NormCoordinate]:
        """Norms whose readers hold constants in one of the two models alone: both normal forms get a shift of one."""
        return {name: c for name, c in unheld_norms(self.a, self.b).items() if name in self.part.coordinates}

    @cached_property
    def form_a(self) -> NormalForm:
        return self._normal_form(self.a)

    @cached_property
    def form_b(self) -> NormalForm:
        return self._normal_form(self.b)

    def _normal_form(self, weights: Weights) -> NormalForm:
        return NormalForm(weights, self.part, self.dtype, self.device, self.coordinates, unit_shifts=self.unit_shifts)

    @property
    def held(self) -> bool:
        """Whether both models stay in memory."""
        return self.form_a.held and self.form_b.held

    @cached_property
    def activation_term(self) -> ActivationTerm:
        return ActivationTerm.of(self.matcher.correlations, self.matcher.activation_weight, self.form_a, self.form_b)

    @property
    def identity(self) -> dict[str, Element]:
        return {name: group.identity() for name, group in self.part.groups.items()}

    @property
    def blocks(self) -> list[str]:
        """The spaces whose tensors take part: all of them where the stream moves, else those that move themselves."""
        every = [name for name, tensors in self.arch.blocks.items() if tensors]
        return [name for name in every if self.moves_stream or name in self.part.groups]

    @cached_property
    def orders_experts(self) -> tuple[str, ...]:
        """The spaces of experts that may be permuted."""
        return tuple(name for name in self.arch.expert_spaces if name in self.part.groups)

    def with_expert_order(self, order: Elements) -> "AlignmentProblem":
        """The same problem with B's experts in this order, which stays."""
        if not self.orders_experts:
            return self
        groups = {name: group for name, group in self.part.groups.items() if name not in self.orders_experts}
        moved = Transform(self.arch.family, dict(self.arch.spaces), order).apply(self.b)
        other = replace(self, b=moved, part=replace(self.part, groups=groups))
        other.__dict__.update(form_a=self.form_a)
        return other

    def with_matcher(self, matcher: HeadMatcher) -> "AlignmentProblem":
        """The same problem with another matcher of heads, and the same normal forms."""
        other = replace(self, matcher=matcher)
        other.__dict__.update(form_a=self.form_a, form_b=self.form_b, activation_term=self.activation_term)
        return other

    @property
    def layers(self) -> dict[int | None, list[str]]:
        """The spaces that move, by layer."""
        found: dict[int | None, list[str]] = {}
        for name in self.part.groups:
            found.setdefault(self.arch.spaces[name].layer, []).append(name)
        return found

    def independent_parts(self) -> "Iterator[AlignmentProblem]":
        """Problems that do not depend on each other: one where the stream moves, one per layer where it is held."""
        if self.moves_stream:
            yield self
            return
        for names in self.layers.values():
            yield replace(self, part=symmetry(self.arch).restricted(names))

    def pieces(self, space: str) -> Iterator[tuple[Tensors, Tensors]]:
        """The tensors of a block of A and of B in normal form; tall ones a few rows at a time."""
        return zip(self.form_a.pieces(space), self.form_b.pieces(space), strict=True)

    def act(self, elements: Elements) -> Action:
        return Action(self.arch, elements, in_type=True)

    def objective(self, space: str, element: Element, a: Tensors, b: Tensors) -> float:
        """What the block of this space adds to the objective, `b` moved by the other spaces already."""
        square = squared_distance(a, self.act({space: element}), b)
        return square + self.activation_term.missing(space, element)

    def without_scales(self, elements: Elements) -> dict[str, Element]:
        """The same elements between the models as they are: normal forms have their units balanced."""
        return {
            name: self.form_a.balance(name).inverse() @ g @ self.form_b.balance(name)
            if self.arch.spaces[name].scales
            else g
            for name, g in elements.items()
        }


def squared_distance(a: Tensors, action: Action, b: Tensors) -> float:
    """‖A − g·B‖² over the tensors of `b`."""
    return sum(float((a[name] - action.tensor(name, t)).square_().sum(dtype=torch.float64)) for name, t in b.items())


# -- overlaps, read off the patterns ------------------------------------------------------------------------------


def overlap(
    arch: Architecture,
    space: str,
    a: Tensors,
    b: Tensors,
    names: Iterable[str],
    element: Element,
    *,
    double: bool = False,
) -> Overlap:
    """How A and B overlap on a space, summed over the tensors named; `b` is B moved by its other spaces already.

    A tensor with two axes in this space is linearised: on each axis in turn, with `element` acting on the other.
    `double` sums in float64 whatever the tensors are: in trained models a few directions hold most of the stream, and
    once it is rotated the rounding of their sums, on every axis then, is larger than what the weak directions hold.
    """
    action = Action(arch, {space: element}, in_type=True)
    total = Overlap.empty(element.n, next(iter(b.values())))
    for name in names:
        words, places = arch.tensors[name].roles[0].axes, list(arch.placements(name, space))
        for place in places:
            moved = b[name]
            for other in sorted({p.axis for p in places} - {place.axis}):
                moved = action.act(moved, other, words[other])
            total = total + _block_overlap(a[name], moved, place, total, double)
    return total


def _block_overlap(a: Tensor, b: Tensor, place: Placement, like: Overlap, double: bool) -> Overlap:
    blocks = (x.narrow(place.axis, place.start, place.size).movedim(place.axis, 0) for x in (a, b))
    rows_a, rows_b = (x.reshape(place.size, -1) for x in blocks)
    kind = "permuted" if place.term.permutation_part else "dual" if place.term.dual else "primal"
    fields = vars(Overlap.empty(place.size, like.primal)) | {kind: _product(rows_a, rows_b, double)}
    if kind != "permuted":
        fields[f"{kind}_size"] = rows_b.square().sum(1)
    return Overlap(**fields)


def _product(x: Float[Tensor, "n k"], y: Float[Tensor, "n k"], double: bool) -> Float[Tensor, "n n"]:
    """X Yᵀ, if asked in float64 and then a few columns at a time."""
    if not double or x.dtype == torch.float64:
        return x @ y.mT
    step = max(1, CHUNK // max(1, len(x)))
    total = torch.zeros(len(x), len(y), dtype=torch.float64, device=x.device)
    for some_x, some_y in zip(x.split(step, dim=1), y.split(step, dim=1)):
        total.addmm_(some_x.to(torch.float64), some_y.to(torch.float64).mT)
    return total
