"""Columns of a reader behind a gain of zero: the function does not depend on them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.arch import Architecture, Axis, Linear, Norm
from isobasin.symmetries.action import Action
from isobasin.symmetries.coordinate import Coordinate, Stage, along, contract
from isobasin.views import Change, Tensors


@dataclass(frozen=True)
class HiddenColumns(Coordinate):
    """What a reader holds in the columns of zero gains; zero in the others.

    Behind a shift such a column adds the constant Wβ. The reader's bias takes over the change of it; a reader without a
    bias keeps the constant, and the columns take the value that is nearest.
    """

    reader: Linear
    norm: Norm
    words: tuple[Axis, ...]
    shape: tuple[int, ...]
    has_shift: bool
    stage = Stage.HIDDEN
    dim = 0  # at a generic point no gain is zero

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"hidden:{self.reader.weight}"

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.shape,)

    @property
    def touches(self) -> frozenset[str]:
        bias = self.reader.bias if self.has_shift else None
        return frozenset({self.reader.weight} | ({bias} if bias else set()))

    def usable(self, tensors: Tensors) -> bool:
        return bool((tensors[self.norm.gain] == 0).any())

    def read(self, tensors: Tensors) -> Tensor:
        weight = tensors[self.reader.weight]
        return torch.where(self._hidden(tensors), weight, 0)

    def sample(self, value: Tensor, rng: torch.Generator) -> Tensor:
        """Zero: a model that is moved at random has other gains, or hides other columns."""
        return torch.zeros_like(value)

    def transported(self, value: Tensor, action: Action) -> Tensor:
        for axis, words in enumerate(self.words):
            value = action.act(value, axis, words)
        return value

    def set(self, value: Tensor) -> dict[str, Change]:
        changes: dict[str, Change] = {self.reader.weight: lambda t: self._weight(t, value)}
        bias = self.reader.bias
        if self.has_shift and bias:
            changes[bias] = lambda t: t[bias] + self._constant(t, t[self.reader.weight] - self._weight(t, value))
        return changes

    def _weight(self, t: Tensors, value: Tensor) -> Tensor:
        old, hidden = t[self.reader.weight], self._hidden(t)
        new = torch.where(hidden, value.to(old.device), old)
        if not self.has_shift or self.reader.bias:
            return new
        shift = t[self.norm.shift] * (t[self.norm.gain] == 0)
        size = shift.square().sum()
        lost = self._constant(t, old - new) / torch.where(size > 0, size, 1)
        moved = new.movedim(self.reader.axis, -1)
        return (moved + lost.reshape(moved.shape[:-1])[..., None] * shift).movedim(-1, self.reader.axis)

    def _constant(self, t: Tensors, weight: Tensor) -> Tensor:
        return contract(weight, self.reader.axis, t[self.norm.shift])

    def _hidden(self, t: Tensors) -> Tensor:
        return along(t[self.norm.gain] == 0, t[self.reader.weight], self.reader.axis)


def hidden_columns(arch: Architecture) -> list[HiddenColumns]:
    """For every reader of a norm; a tied tensor is seen in its other role."""
    return [
        HiddenColumns(
            reader,
            norm,
            arch.tensors[reader.weight].roles[0].axes,
            arch.shapes[reader.weight],
            norm.shift in arch.tensors,
        )
        for norm in arch.norms.values()
        for reader in arch.readers(norm.name)
        if not arch.tied(reader.weight)
    ]
