"""A model as this room sees it: folded, centred, heads and units balanced, one part of it at a time.

A part is the heads or the units of a layer with the vectors of the stream that go with them (output biases, shifts and
gains that do not fold); what is left is the ends: embeddings, positions, the head, the last norm.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from isobasin.action import Action
from isobasin.arch import Architecture, HeadSpace, Term
from isobasin.compare.balanced import balancing
from isobasin.gauge import NormCoordinate
from isobasin.groups import Element, Monomial
from isobasin.match.canonical import ENDS, STREAM, blocks
from isobasin.match.scales import balance
from isobasin.normalize import normalize
from isobasin.symmetries import group_of, symmetry
from isobasin.transform import Transform, Value
from isobasin.views import Doubled, Tensors, View, chain
from isobasin.weights import Weights

HELD = 2**29  # bytes of a model that may stay in memory
WIDE = 2**24  # numbers in a part above which it is held in float32


def parts(arch: Architecture) -> dict[str, tuple[str, ...]]:
    """Tensors by part: `blocks`, with every vector of the stream moved to the part that it belongs to."""
    found = {space: list(names) for space, names in blocks(arch).items()}
    home = {name: space for space, names in found.items() if space != ENDS for name in names}
    for weight, space in list(home.items()):
        bias = arch.bias_of(weight)
        home |= {bias: space} if bias is not None and bias not in home else {}
    for norm in arch.norms.values():
        space = next((home[r.weight] for r in arch.readers(norm.name) if r.weight in home), ENDS)
        home |= {name: space for name in (norm.gain, norm.shift) if name in arch.tensors and name not in home}
    for name in list(found[ENDS]):
        if home.get(name, ENDS) != ENDS:
            found[ENDS].remove(name)
            found[home[name]].append(name)
    return {space: tuple(names) for space, names in found.items() if names or space == ENDS}


def upright(weights: Weights) -> Weights:
    """The same function, with shift one in front of every reader that lacks a bias: it then holds its constant along
    the all-ones vector, whatever the shift was.

    `normalize` does so only where the way back keeps its digits, which a small change of the shift decides; what is
    compared must not depend on that.
    """
    chosen = [c for c in symmetry(weights.arch).coordinates.values() if isinstance(c, NormCoordinate) and c.lacks_bias]
    changes = chain(*(c.set(torch.ones(2, c.space_size, dtype=torch.float64)) for c in chosen))
    if not changes:
        return weights
    view = View(Doubled(weights), changes)
    return replace(weights, tensors=View(weights, {name: lambda _, n=name: view[n] for name in changes}))  # type: ignore[misc]


def flattened(weights: Weights) -> Transform:
    """`normalize`, by way of `upright`."""
    found = normalize(upright(weights))
    gauge = dict(found.gauge)
    for name, coordinate in symmetry(weights.arch).coordinates.items():
        if isinstance(coordinate, NormCoordinate) and coordinate.lacks_bias:
            norm = coordinate.norm
            before = torch.stack([weights[norm.gain].cpu().double(), weights[norm.shift].cpu().double()])
            gauge[name] = Value(before, gauge[name].after)
    return replace(found, gauge=gauge)


@dataclass(frozen=True)
class Form:
    """One model in balanced form. Small models stay in memory, of others the part that was read last."""

    weights: Weights
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _kept: dict[str, tuple[Element | None, dict[str, Tensor]]] = field(default_factory=dict, repr=False)

    @property
    def arch(self) -> Architecture:
        return self.weights.arch

    @cached_property
    def parts(self) -> dict[str, tuple[str, ...]]:
        return parts(self.arch)

    @property
    def spaces(self) -> list[str]:
        """The parts beside the ends, layers in their order."""
        return [space for space in self.parts if space not in (ENDS, STREAM)]

    @cached_property
    def folding(self) -> Transform:
        return flattened(self.weights)

    @cached_property
    def _flat(self) -> Weights:
        return self.folding.apply(self.weights, device=self.device)

    @cached_property
    def _dtype(self) -> torch.dtype:
        sizes = (sum(torch.Size(self.arch.shapes[n]).numel() for n in names) for names in self.parts.values())
        return torch.float32 if max(sizes) > WIDE else torch.float64

    def flat(self, space: str) -> dict[str, Tensor]:
        """The tensors of a part, folded and centred, before anything is balanced."""
        return {name: self.read(name) for name in self.parts[space]}

    def read(self, name: str) -> Tensor:
        """One tensor, folded and centred."""
        return self._flat[name].to(self.device, self._dtype)

    def loose(self) -> dict[str, Tensor]:
        """Tensors on no space at all, such as the bias of a classifier: no element moves them, but folding does."""
        patterns = self.arch.tensors.items()
        names = [n for n, p in patterns if p.roles and not any(axis.terms for role in p.roles for axis in role.axes)]
        return {name: self.read(name) for name in names}

    def part(self, space: str) -> Mapping[str, Tensor]:
        """The tensors of a part, balanced, by name."""
        return self.balanced(space)[1]

    def balanced(self, space: str) -> tuple[Element | None, Mapping[str, Tensor]]:
        """What balances a part (scales of units, factors inside heads), and its tensors after that."""
        if space in self._kept:
            return self._kept[space]
        if self.weights.n_params * self._dtype.itemsize > HELD:
            self._kept.clear()
        element, tensors = None, self.flat(space)
        if space != ENDS and space in symmetry(self.arch).groups:
            element = self._balancing(space, tensors)
            action = Action(self.arch, {space: element})
            tensors = {name: action.tensor(name, t) for name, t in tensors.items()}
        self._kept[space] = element, tensors
        return element, tensors

    def _balancing(self, space: str, tensors: Tensors) -> Element:
        place = self.arch.spaces[space]
        if isinstance(place, HeadSpace):
            return balancing(self.arch, place, {name: t.to("cpu", torch.float64) for name, t in tensors.items()})
        if place.kind not in ("positive", "scaled"):
            return group_of(place).identity()
        sizes = {dual: torch.zeros(place.size, dtype=torch.float64) for dual in (False, True)}
        for _, rows, term in unit_rows(self.arch, space, tensors):
            sizes[term.dual] += 0 if term.magnitude else rows.square().sum(1)
        return Monomial(torch.arange(place.size), balance(sizes[False], sizes[True]))


def unit_rows(arch: Architecture, space: str, tensors: Tensors) -> Iterator[tuple[str, Tensor, Term]]:
    """For every tensor of a part with an axis in its space of units: name, a row per unit (float64), how it moves."""
    for name, tensor in tensors.items():
        for axis, words in enumerate(arch.tensors[name].roles[0].axes):
            if len(words.terms) == 1 and arch.space_of(words.terms[0]).name == space:
                rows = tensor.movedim(axis, 0).reshape(tensor.shape[axis], -1)
                yield name, rows.to("cpu", torch.float64), words.terms[0]
