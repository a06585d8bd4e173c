"""The normal form of a model: the same function, without the choices that its function does not see.

Two models can be compared coordinate by coordinate only in one form. Every free coordinate is set to a fixed value
(gains one, shifts folded, unseen biases zero), and the units of a space with scales are balanced: their rows and
columns have one size. The mean of a reader behind a LayerNorm has two conventions:

* `means="zero"`: zero, a value that no group element moves. `normalize` and fingerprints use it.
* `means="least"`: where the reader is smallest. Behind a gain that stays as it is (BERT's, or that of a norm outside
  the scope) the two differ, and zero means would make the reader large for every small gain: distances would then be
  measured along directions that the function does not see. Alignment and learning use it.

Behind a folded gain the two are the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from isobasin.arch import Architecture, Space
from isobasin.groups import Element, Monomial
from isobasin.groups.scales import balance
from isobasin.symmetries.action import Action
from isobasin.symmetries.coordinate import Coordinate, Stage
from isobasin.symmetries.norm_coordinates import NormCoordinate
from isobasin.symmetries.symmetry import Symmetry, symmetry
from isobasin.symmetries.transform import Transform, Value
from isobasin.views import AsFloat64, Tensors, View, chain
from isobasin.weights import Weights

Means = Literal["zero", "least"]
HELD = 2**29  # bytes of a model that may stay in memory between sweeps
ROWS = 2**23  # numbers in a slice of a tall tensor


def normalize(weights: Weights) -> Transform:
    """The transform that brings every free coordinate to its canonical value.

    >>> flat = normalize(model).apply(model)  # doctest: +SKIP
    """
    return to_normal_form(weights, symmetry(weights.arch).coordinates, means="zero")


def to_normal_form(weights: Weights, coordinates: Mapping[str, Coordinate], *, means: Means = "least") -> Transform:
    """The transform that gives these coordinates their values in the normal form.

    >>> flat = to_normal_form(model, symmetry(model).scoped("first-attention").coordinates)  # doctest: +SKIP
    """
    tensors = AsFloat64(weights)
    free = [c for c in coordinates.values() if c.usable(tensors)]
    norms = {c: c.canonical(c.read(tensors)) for c in free if isinstance(c, NormCoordinate)}
    folded = View(tensors, chain(*(c.set(value) for c, value in norms.items())))

    def value(c: Coordinate, before: Tensor) -> Tensor:
        if isinstance(c, NormCoordinate):
            return norms[c]
        return torch.zeros_like(before) if means == "zero" else c.least(folded)

    gauge = {c.name: Value(before, value(c, before)) for c in free for before in (c.read(tensors),)}
    return Transform(weights.arch.family, dict(weights.arch.spaces), {}, gauge)


@dataclass(frozen=True)
class NormalForm:
    """One model in normal form, read one block of tensors at a time, in the type and on the device of the work.

    `coordinates` are the free coordinates that are set; the units of `part` with scales are balanced.
    """

    weights: Weights
    part: Symmetry
    dtype: torch.dtype = torch.float64
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    coordinates: Mapping[str, Coordinate] | None = None
    _kept: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False)

    @cached_property
    def transform(self) -> Transform:
        """From the model to this form, without the balance of its units."""
        return to_normal_form(self.weights, self.part.coordinates if self.coordinates is None else self.coordinates)

    @cached_property
    def _flat(self) -> Weights:
        return self.transform.apply(self.weights, device=self.device)

    @property
    def held(self) -> bool:
        """Whether the whole model is small enough to stay in memory."""
        return self.weights.n_params * self.dtype.itemsize <= HELD

    def block(self, space: str) -> Mapping[str, Tensor]:
        """The tensors of a block; kept in memory where the whole model is small enough."""
        if space in self._kept:
            return self._kept[space]
        tensors = self._unbalanced(space)
        if self.weights.arch.spaces[space].scales:
            action = Action(self.weights.arch, {space: self._balance(space, tensors)}, in_type=True)
            tensors = {name: action.tensor(name, t) for name, t in tensors.items()}
        if self.held:
            self._kept[space] = tensors
        return tensors

    def pieces(self, space: str) -> Iterator[Mapping[str, Tensor]]:
        """The same tensors part by part: those of the stream alone are tall, and come a few rows at a time."""
        if space != self.weights.arch.stream.name or self.held or space in self._kept:
            yield self.block(space)
            return
        for name in self.weights.arch.blocks[space]:
            for part in slices(self.weights, self.part, name):
                flat = self.transform.apply(part, device=self.device)
                yield {name: flat[name].to(self.device, self.dtype)}

    def balance(self, space: str) -> Element:
        """The scales that were applied to the units of this space; the identity where there are none."""
        if not self.weights.arch.spaces[space].scales:
            return self.part.groups[space].identity()
        return self._balance(space, self._unbalanced(space))

    def _unbalanced(self, space: str) -> dict[str, Tensor]:
        return {name: self._flat[name].to(self.device, self.dtype) for name in self.weights.arch.blocks[space]}

    def _balance(self, space: str, tensors: Tensors) -> Element:
        place = self.weights.arch.spaces[space]
        assert isinstance(place, Space)
        found = _unit_squares(self.weights.arch, place, tensors)
        return Monomial(torch.arange(place.size), balance(*found).cpu().to(torch.float64))


def _unit_squares(arch: Architecture, space: Space, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """Squares of each unit's rows and columns."""
    rows = torch.zeros(space.size, dtype=torch.float64)
    sizes = {"primal": rows, "dual": rows.clone()}
    for name, tensor in tensors.items():
        for axis, words in enumerate(arch.tensors[name].roles[0].axes):
            if len(words.terms) == 1 and words.terms[0].name == space.name and not words.terms[0].magnitude:
                flat = tensor.movedim(axis, 0).reshape(space.size, -1)
                sizes["dual" if words.terms[0].dual else "primal"] += flat.square().sum(1).cpu().to(torch.float64)
    return sizes["primal"], sizes["dual"]


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
    return weights.checkpoint is not None and name not in weights.changed and name not in weights.names.copies.values()
