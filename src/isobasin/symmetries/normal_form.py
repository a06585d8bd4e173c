"""The normal form of a model: the same function, without the choices that its function does not see.

Two models can be compared coordinate by coordinate only in one form. Every free coordinate is set to a fixed value
(gains one, shifts folded, unseen biases zero), and the units of a space with scales are balanced: their rows and
columns have one size. Two conventions are needed, and `NormalForm` names them:

* `"alignment"`: for distances between two models of a scope. The mean of a reader behind a gain that stays as it is
  (BERT's, or that of a norm outside the scope) is where the reader is smallest: a zero mean would make the reader large
  for every small gain, and distances would be measured along directions that the function does not see. Heads are left
  as they are, since the matcher of heads sees every factor.
* `"comparison"`: for one model on its own (fingerprints, canonical points, similarities). Means are zero, a value that
  no group element moves; a shift in front of a reader without a bias is one; heads are balanced too (Q and K of a head
  have the same Gram matrix, and V and O), the form of least norm under the factors of the heads. Vectors of the stream
  (output biases, gains that do not fold) belong to the block of their layer.

Behind folded gains and with biases everywhere the free coordinates of the two are the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.groups import Element, Monomial
from isobasin.groups.monomial import balance
from isobasin.symmetries.action import Action
from isobasin.symmetries.attention import attention_matrices
from isobasin.symmetries.coordinate import Coordinate, Stage
from isobasin.symmetries.head_balance import balance_heads, smallest_singular_value
from isobasin.symmetries.norm_coordinates import NormCoordinate
from isobasin.symmetries.symmetry import Symmetry, symmetry
from isobasin.symmetries.transform import Transform, Value
from isobasin.views import AsFloat64, Change, ReadOnce, Tensors, View, chain, room
from isobasin.weights import ModelSource, Weights, load

Convention = Literal["alignment", "comparison"]
MOVES = ("primal", "dual", "permuted")  # how an axis moves: by g, by g⁻ᵀ, by the permutation of g alone
WIDE = 2**24  # numbers in a block above which a model is computed in float32
ROWS = 2**23  # numbers in a slice of a tall tensor


def normalize(model: ModelSource) -> Transform:
    """The transform that brings every free coordinate to its canonical value.

    >>> flat = normalize(model).apply(model)  # doctest: +SKIP
    """
    weights = load(model)
    return to_normal_form(weights, symmetry(weights.arch).coordinates, zero_means=True)


def to_normal_form(weights: Weights, coordinates: Mapping[str, Coordinate], *, zero_means: bool = False) -> Transform:
    """The transform that gives these coordinates their values in the normal form.

    >>> flat = to_normal_form(model, symmetry(model).scoped("first-attention").coordinates)  # doctest: +SKIP
    """
    tensors = AsFloat64(weights)
    free = [c for c in coordinates.values() if c.usable(tensors)]
    norms = {c: c.canonical(c.read(tensors)) for c in free if c.folds}
    folded = View(tensors, chain(*(c.set(value) for c, value in norms.items())))
    for stage in (Stage.HEAD_MEAN, Stage.HEAD_CONSTANT):  # what a reader's mean would have to make up for
        heads = [c for c in free if c.stage == stage]
        folded = View(folded, chain(*(c.set(c.least(folded)) for c in heads))) if heads else folded

    def value(c: Coordinate, before: Tensor) -> Tensor:
        if c.folds:
            return norms[c]
        return torch.zeros_like(before) if zero_means else c.least(folded)

    gauge = {c.name: Value(before.cpu(), value(c, before).cpu()) for c in free for before in (c.read(tensors),)}
    return Transform(weights.arch.family, dict(weights.arch.spaces), {}, gauge)


@dataclass(frozen=True)
class NormalForm:
    """One model in normal form, read one block of tensors at a time, in the type and on the device of the work.

    `coordinates` are the free coordinates that are set (by default all of `part`).
    """

    weights: Weights
    part: Symmetry
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    coordinates: Mapping[str, Coordinate] | None = None
    convention: Convention = "alignment"
    unit_shifts: Mapping[str, NormCoordinate] = field(default_factory=dict)  # norms that get a shift of one in any case
    _kept: dict[str, tuple[Element | None, dict[str, Tensor]]] = field(default_factory=dict, repr=False)

    @staticmethod
    def for_comparison(weights: Weights, device: torch.device | None = None) -> "NormalForm":
        """The whole model in the convention of comparisons; wide models in float32."""
        sizes = (sum(torch.Size(weights.arch.shapes[n]).numel() for n in ns) for ns in weights.arch.blocks.values())
        dtype = torch.float32 if max(sizes) > WIDE else torch.float64
        place = device or torch.device("cpu")
        return NormalForm(weights, symmetry(weights.arch), dtype, place, convention="comparison")

    @property
    def arch(self) -> Architecture:
        return self.weights.arch

    @cached_property
    def blocks(self) -> Mapping[str, tuple[str, ...]]:
        """Tensor names by block: by the space that moves them, those of the stream alone under its own name."""
        return self.arch.blocks if self.convention == "alignment" else block_tensors(self.arch)

    @property
    def spaces(self) -> list[str]:
        """All blocks except those of streams (embeddings and head), layers in their order."""
        return [space for space in self.blocks if space not in self.arch.streams]

    @cached_property
    def transform(self) -> Transform:
        """From the model to this form, without the balance of its units and heads."""
        if self.convention == "comparison":
            every = symmetry(self.arch).coordinates
            return _with_unit_shifts(self.weights, every, norms_without_bias(self.arch), zero_means=True)
        coordinates = self.part.coordinates if self.coordinates is None else self.coordinates
        return _with_unit_shifts(self.weights, coordinates, self.unit_shifts)

    @cached_property
    def _folded(self) -> Weights:
        return self.transform.apply(self.weights, device=self.device)

    @cached_property
    def least(self) -> float:
        """The relative size below which a singular value of a product QKᵀ or VOᵀ counts as zero."""
        return smallest_singular_value(self.weights.dtype)

    @cached_property
    def held(self) -> bool:
        """Whether the whole model is small enough to stay in memory, in the type of the work."""
        return self.weights.n_params * self.dtype.itemsize <= room(self.device, self.weights.memory)

    def read(self, name: str) -> Tensor:
        """One folded tensor."""
        return self._without_constant(name, self._folded[name].to(self.device, self.dtype))

    def _without_constant(self, name: str, tensor: Tensor) -> Tensor:
        """For alignment, without constants that a sign of the stream leaves as they are."""
        if self.convention == "comparison" or name not in holding_constants(self.arch) or self.arch.tied(name):
            return tensor
        return tensor - tensor.mean(constant_axis(self.arch, name)[0], keepdim=True)

    def folded(self, space: str) -> dict[str, Tensor]:
        """The tensors of a block, folded but not balanced."""
        return {name: self.read(name) for name in self.blocks[space]}

    def without_space(self) -> dict[str, Tensor]:
        """Folded tensors that no group element moves, such as the bias of a classifier."""
        patterns = self.arch.tensors.items()
        names = [n for n, p in patterns if p.roles and not any(axis.terms for role in p.roles for axis in role.axes)]
        return {name: self.read(name) for name in names}

    def block(self, space: str) -> Mapping[str, Tensor]:
        """The balanced tensors of a block, by name; kept in memory where the whole model is small enough."""
        return self.balanced(space)[1]

    def balanced(self, space: str) -> tuple[Element | None, Mapping[str, Tensor]]:
        """The element that balances a block (scales of units, factors of heads), and the tensors after it acted.

        For comparisons the block that was read last is kept, however large the model is.
        """
        if space in self._kept:
            return self._kept[space]
        element, tensors = None, self.folded(space)
        if space not in self.arch.streams and space in self.part.groups:
            element = self._balancing(space, tensors)
            if self._is_balanced(space):
                action = Action(self.arch, {space: element}, in_type=self.convention == "alignment")
                tensors = {name: action.tensor(name, t) for name, t in tensors.items()}
        if not self.held:
            self._kept.clear()
        if self.held or self.convention == "comparison":
            self._kept[space] = element, tensors
        return element, tensors

    def pieces(self, space: str) -> Iterator[Mapping[str, Tensor]]:
        """The same tensors part by part: those of the stream alone are tall, and come a few rows at a time."""
        if space not in self.arch.streams or self.held or space in self._kept:
            yield self.block(space)
            return
        for name in self.blocks[space]:
            for part in slices(self.weights, self.part, name):
                flat = self.transform.apply(part, device=self.device)
                yield {name: self._without_constant(name, flat[name].to(self.device, self.dtype))}

    def balance(self, space: str) -> Element:
        """The element that balanced a space."""
        if space in self.arch.streams or not self._is_balanced(space):
            return self.part.groups[space].identity()
        return self._balancing(space, self.folded(space))

    def _is_balanced(self, space: str) -> bool:
        place = self.arch.spaces[space]
        return place.scales or (place.role == "heads" and self.convention == "comparison")

    def _balancing(self, space: str, tensors: Tensors) -> Element:
        if not self._is_balanced(space):
            return self.part.groups[space].identity()
        place = self.arch.spaces[space]
        if isinstance(place, HeadSpace):
            exact = {name: t.to(torch.float64) for name, t in tensors.items()}
            return balance_heads(attention_matrices(self.arch, place, exact), place, self.least)
        sizes = {move: torch.zeros(place.size, dtype=torch.float64) for move in MOVES}
        for _, rows, move in unit_rows(self.arch, space, tensors):
            sizes[move] += rows.square().sum(1).to("cpu", torch.float64)
        return Monomial(torch.arange(place.size), balance(sizes["primal"], sizes["dual"]))


# -- the convention of comparisons ---------------------------------------------------------------------------------


def block_tensors(arch: Architecture) -> dict[str, tuple[str, ...]]:
    """Tensor names by block: as `Architecture.blocks`, but vectors of the stream go to the layer they belong to."""
    found = {space: list(names) for space, names in arch.blocks.items()}
    home = {name: space for space, names in found.items() if space not in arch.streams for name in names}
    for weight, space in list(home.items()):
        bias = arch.bias_of(weight)
        home |= {bias: space} if bias is not None and bias not in home else {}
    for norm in arch.norms.values():
        space = next((home[r.weight] for r in arch.readers(norm.name) if r.weight in home), norm.space)
        home |= {name: space for name in (norm.gain, norm.shift) if name in arch.tensors and name not in home}
    for stream in arch.streams:
        for name in list(found[stream]):
            if home.get(name, stream) != stream:
                found[stream].remove(name)
                found[home[name]].append(name)
    return {space: tuple(names) for space, names in found.items() if names or space in arch.streams}


def norms_without_bias(arch: Architecture) -> dict[str, NormCoordinate]:
    """Gains and shifts of norms with a reader that has no bias."""
    coordinates = symmetry(arch).coordinates.items()
    return {name: c for name, c in coordinates if isinstance(c, NormCoordinate) and c.lacks_bias}


@lru_cache(maxsize=16)
def holding_constants(arch: Architecture) -> frozenset[str]:
    """Readers without a bias, which hold a constant along the all-ones vector, and the shifts of their norms: where the
    stream has a sign, that component does not change with it, unlike the others."""
    norms = [c for c in norms_without_bias(arch).values() if _has_one_sign(arch.spaces[c.norm.space])]
    readers = {reader.weight for norm in norms for reader in norm.readers if reader.bias is None}
    return frozenset(readers | {norm.norm.shift for norm in norms})


def constant_axis(arch: Architecture, name: str) -> tuple[int, str]:
    """The axis of a tensor along which it holds a constant, and the stream there."""
    found = [
        (k, word.terms[0])
        for k, word in enumerate(arch.tensors[name].roles[0].axes)
        if word.terms and _has_one_sign(arch.space_of(word.terms[0]))
    ]
    axis, term = max(found, key=lambda each: each[1].dual)  # of two streams, the one that it reads
    return axis, arch.space_of(term).name


def _has_one_sign(space: Space | HeadSpace) -> bool:
    return isinstance(space, Space) and space.stream and space.kind == "permutation±"


def unheld_norms(a: Weights, b: Weights, *, by_both: bool = False) -> dict[str, NormCoordinate]:
    """Norms with readers that have no bias and do not hold their constants on their own: in one of two models alone, or
    with `by_both` in both models, too."""
    tensors = AsFloat64(a), AsFloat64(b)
    level = {name: c for name, c in norms_without_bias(b.arch).items() if all(map(c.is_level, tensors))}
    holds = {name: [c.holds(t) for t in tensors] for name, c in level.items()}
    return {name: c for name, c in level.items() if not all(holds[name]) and (by_both or any(holds[name]))}


def with_unit_shift(weights: Weights, norms: Mapping[str, NormCoordinate] | None = None) -> Weights:
    """The same function with shift one in front of every reader that has no bias (or behind these norms alone).

    Such a reader then stores its constant along the all-ones vector, whatever the shift was. `normalize` does this only
    where the inverse is accurate, which a small change of the shift decides; a comparison must not depend on that.
    """
    changes = unit_shift(norms_without_bias(weights.arch) if norms is None else norms)
    if not changes:
        return weights
    view = View(AsFloat64(weights), changes)
    tensors = View(weights, {name: lambda _, n=name: view[n] for name in changes})  # type: ignore[misc]
    return replace(weights, tensors=tensors, changed=weights.changed | set(changes))


def unit_shift(norms: Mapping[str, NormCoordinate]) -> dict[str, Change]:
    """The changes that give these norms a gain and a shift of one."""
    return chain(*(c.set(torch.ones(2, c.space_size, dtype=torch.float64)) for c in norms.values()))


def _with_unit_shifts(
    weights: Weights,
    coordinates: Mapping[str, Coordinate],
    norms: Mapping[str, NormCoordinate],
    *,
    zero_means: bool = False,
) -> Transform:
    """`to_normal_form` of the model with unit shifts, as one transform of the model itself."""
    found = to_normal_form(with_unit_shift(weights, norms), coordinates, zero_means=zero_means)
    tensors = AsFloat64(weights)
    before = {name: Value(c.rows(tensors).cpu(), found.gauge[name].after) for name, c in norms.items()}
    return replace(found, gauge={**found.gauge, **before})


def unit_rows(arch: Architecture, space: str, tensors: Tensors) -> Iterator[tuple[str, Tensor, str]]:
    """Each tensor with an axis in this space of units: its name, one row per unit, and how the rows move."""
    for name, tensor in tensors.items():
        for place in arch.placements(name, space):
            rows = tensor.narrow(place.axis, place.start, place.size).movedim(place.axis, 0).reshape(place.size, -1)
            yield name, rows, "permuted" if place.term.permutation_part else "dual" if place.term.dual else "primal"


# -- tall tensors -------------------------------------------------------------------------------------------------


def slices(weights: Weights, part: Symmetry, name: str) -> Iterator[Weights]:
    """The model again and again, each time with the next rows of this tensor in its place; once if it is small.

    For tall tensors of the stream, such as an embedding: what acts on one acts on every row alike.
    """
    shape = weights.arch.shapes[name]
    if not _by_rows(part, name) or torch.Size(shape).numel() <= ROWS:
        yield weights
        return
    step = max(1, ROWS * shape[0] // torch.Size(shape).numel())
    whole = None if _on_disk(weights, name) else weights[name]
    for start in range(0, shape[0], step):
        rows = _rows(weights, name, whole, start, min(start + step, shape[0]))
        yield replace(weights, tensors=View(weights.tensors, {name: lambda _, r=rows: r}))  # type: ignore[misc]


def _rows(weights: Weights, name: str, whole: Tensor | None, start: int, stop: int) -> Tensor:
    if whole is not None:
        return whole[start:stop]
    assert weights.checkpoint is not None
    return weights.checkpoint.rows(weights.names.on_disk[name], start, stop)


def _by_rows(part: Symmetry, name: str) -> bool:
    """Nothing acts on the rows' axis, and no coordinate adds rows up."""
    plain = all(len(role.axes) > 1 and not role.axes[0].terms for role in part.arch.tensors[name].roles)
    return plain and not any(c.stage == Stage.SUM and name in c.touches for c in part.coordinates.values())


def _on_disk(weights: Weights, name: str) -> bool:
    if isinstance(weights.tensors, ReadOnce):
        return False
    shared = name in weights.names.copies.values() or name in weights.names.slices
    return weights.checkpoint is not None and name not in weights.changed and not shared
