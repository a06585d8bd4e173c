"""A model as whole-model matching sees it: folded, centred, units balanced; one block of tensors at a time."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from isobasin.arch import Architecture, Space
from isobasin.groups import Element, Monomial
from isobasin.match.acting import Acting
from isobasin.match.scales import balance
from isobasin.match.slices import slices
from isobasin.normalize import lightest
from isobasin.symmetries import Symmetry
from isobasin.transform import Transform
from isobasin.views import Tensors
from isobasin.weights import Weights

STREAM = "resid"
ENDS = ""  # the block of tensors that live on the stream alone: embeddings, head, biases
HELD = 2**29  # bytes of a model that may stay in memory between sweeps


def stream_of(arch: Architecture) -> Space:
    """The space that every layer reads from and writes to."""
    space = arch.spaces[STREAM]
    assert isinstance(space, Space)
    return space


def blocks(arch: Architecture) -> dict[str, tuple[str, ...]]:
    """Tensors by the one space they touch beside the stream; what touches the stream alone comes under ENDS.

    Embeddings and head then come first of all, layers in their order.
    """
    found: dict[str, list[str]] = {name: [] for name in (ENDS, *arch.spaces) if name != STREAM}
    for name, pattern in arch.tensors.items():
        spaces = {arch.space_of(term).name for role in pattern.roles for axis in role.axes for term in axis.terms}
        if pattern.buffer or not spaces:
            continue
        others = sorted(spaces - {STREAM})
        assert len(others) <= 1, f"{name} joins {others}"
        found[others[0] if others else ENDS].append(name)
    return {space: tuple(names) for space, names in found.items()}


@dataclass(frozen=True)
class Canonical:
    """One model, brought to the canonical values of a scope's free coordinates and its units balanced."""

    weights: Weights
    part: Symmetry
    dtype: torch.dtype
    device: torch.device
    _kept: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)

    @cached_property
    def _normal(self) -> Transform:
        return lightest(self.weights, self.part.coordinates)

    @cached_property
    def _flat(self) -> Weights:
        return self._normal.apply(self.weights, device=self.device)

    @property
    def held(self) -> bool:
        """Whether the whole model is small enough to stay in memory."""
        return self.weights.n_params * self.dtype.itemsize <= HELD

    def block(self, space: str) -> Mapping[str, Tensor]:
        """The tensors of a block; kept in memory where the whole model is small enough."""
        if space in self._kept:
            return self._kept[space]
        tensors = {name: self._flat[name].to(self.device, self.dtype) for name in blocks(self.weights.arch)[space]}
        if _has_scales(self.weights.arch, space):
            action = Acting(self.weights.arch, {space: self._balance(space, tensors)})
            tensors = {name: action.tensor(name, t) for name, t in tensors.items()}
        if self.held:
            self._kept[space] = tensors
        return tensors

    def pieces(self, space: str) -> Iterator[Mapping[str, Tensor]]:
        """The same tensors part by part: those of the stream alone are tall, and come a few rows at a time."""
        if space != ENDS or self.held or space in self._kept:
            yield self.block(space)
            return
        for name in blocks(self.weights.arch)[space]:
            for part in slices(self.weights, self.part, name):
                flat = self._normal.apply(part, device=self.device)
                yield {name: flat[name].to(self.device, self.dtype)}

    def balance(self, space: str) -> Element:
        """The scales that were applied to the units of this space; the identity where there are none."""
        if not _has_scales(self.weights.arch, space):
            return self.part.groups[space].identity()
        raw = {name: self._flat[name].to(self.device, self.dtype) for name in blocks(self.weights.arch)[space]}
        return self._balance(space, raw)

    def _balance(self, space: str, tensors: Tensors) -> Element:
        place = self.weights.arch.spaces[space]
        assert isinstance(place, Space)
        found = _sizes(self.weights.arch, place, tensors)
        return Monomial(torch.arange(place.size), balance(*found).cpu().to(torch.float64))


def _has_scales(arch: Architecture, space: str) -> bool:
    place = arch.spaces.get(space)
    return isinstance(place, Space) and place.kind in ("positive", "scaled")


def _sizes(arch: Architecture, space: Space, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Squares of each unit's rows and columns."""
    rows = torch.zeros(space.size, dtype=torch.float64)
    sizes = {"primal": rows, "dual": rows.clone()}
    for name, tensor in tensors.items():
        for axis, words in enumerate(arch.tensors[name].roles[0].axes):
            if len(words.terms) == 1 and words.terms[0].name == space.name and not words.terms[0].magnitude:
                flat = tensor.movedim(axis, 0).reshape(space.size, -1)
                sizes["dual" if words.terms[0].dual else "primal"] += flat.square().sum(1).cpu().to(torch.float64)
    return sizes["primal"], sizes["dual"]
