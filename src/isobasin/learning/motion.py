"""A group element with parameters, at the identity to begin with: what learning moves.

Rotations of the stream by Cayley's map of a skew matrix, GL by I + X, rotary pairs by exp(a + ib), unit scales by exp.
Whatever the parameters are, the element lies in the group, so the moved model computes what it always did.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from isobasin.arch import Space
from isobasin.arch.architecture import ROTATED
from isobasin.groups import (
    GL,
    Blocks,
    Element,
    Group,
    Heads,
    HeadsElement,
    Matrix,
    Monomial,
    OrthogonalFixingOnes,
    Phases,
    Product,
    RotaryCommutant,
)
from isobasin.learning.smooth import SmoothMatrix, SmoothPhases, SmoothScales
from isobasin.symmetries import Symmetry


class Factor(nn.Module, ABC):
    """The parameters of one factor of the group."""

    @abstractmethod
    def smooth(self) -> Element:
        """The element where the parameters stand, for gradients to flow through."""

    @abstractmethod
    def element(self) -> Element:
        """The same as an element of its group, in float64."""


class Motion(nn.Module):
    """Parameters for every space of a symmetry that moves continuously."""

    def __init__(self, part: Symmetry) -> None:
        super().__init__()
        self.part = part
        self._factors: dict[str, Factor] = {}
        for name, group in part.groups.items():
            space = part.arch.spaces[name]
            if isinstance(group, Heads):
                self._factors[f"{name}:qk"] = _factor(group.qk, group.n_kv)
                self._factors[f"{name}:vo"] = _factor(group.vo, group.n_kv)
                # On the device from the start: a step that is recorded once can not fetch them.
                still = group.identity()
                self.register_buffer(f"{name}:kv", still.kv, persistent=False)
                self.register_buffer(f"{name}:queries", still.queries, persistent=False)
            elif isinstance(space, Space) and space.kind in ROTATED:
                self._factors[name] = _Rotation(space.size, fixes_ones=isinstance(group, OrthogonalFixingOnes))
            elif isinstance(space, Space) and space.kind in ("positive", "scaled"):
                self._factors[name] = _Scales(space.size)
        self.factors = nn.ModuleDict(self._factors)  # so that torch knows them

    def smooth(self) -> dict[str, Element]:
        """The elements where the parameters stand, for gradients to flow through."""
        found: dict[str, Element] = {}
        for name, group in self.part.groups.items():
            if isinstance(group, Heads):
                kv, queries = self.get_buffer(f"{name}:kv"), self.get_buffer(f"{name}:queries")
                qk, vo = (self._factors[f"{name}:{side}"].smooth() for side in ("qk", "vo"))
                found[name] = HeadsElement(kv, queries, qk, vo)
            elif name in self._factors:
                found[name] = self._factors[name].smooth()
        return found

    @torch.no_grad()
    def elements(self) -> dict[str, Element]:
        """The same as elements of their groups, in float64."""
        found: dict[str, Element] = {}
        for name, group in self.part.groups.items():
            if isinstance(group, Heads):
                here = group.identity()
                qk, vo = (self._factors[f"{name}:{side}"].element() for side in ("qk", "vo"))
                found[name] = HeadsElement(here.kv, here.queries, qk, vo)
            elif name in self._factors:
                found[name] = self._factors[name].element()
        return found

    @torch.no_grad()
    def permute(self, proposal: Mapping[str, Element]) -> None:
        """Units change places and take the scales they have learned with them."""
        for name, g in proposal.items():
            factor = self._factors.get(name)
            if isinstance(factor, _Scales) and isinstance(g, Monomial):
                factor.x.copy_(factor.x[g.index.to(factor.x.device)])


class _Rotation(Factor):
    """R = (I − S)⁻¹ (I + S) = 2 (I − S)⁻¹ − I, S skew; with `fixes_ones` in the complement of the all-ones vector."""

    frame: Tensor | None

    def __init__(self, n: int, *, fixes_ones: bool) -> None:
        super().__init__()
        frame = OrthogonalFixingOnes(n)._frame() if fixes_ones else None
        self.register_buffer("frame", frame, persistent=False)
        self.x = nn.Parameter(torch.zeros(n - fixes_ones, n - fixes_ones))

    def smooth(self) -> Element:
        value = self._value(self.x)
        return SmoothMatrix(value, value)

    def element(self) -> Element:
        return Matrix(self._value(self.x.double()).cpu(), orthogonal=True)

    def _value(self, x: Tensor) -> Tensor:
        skew = x - x.mT
        eye = torch.eye(len(x), dtype=x.dtype, device=x.device)
        small = 2 * _inverse(eye - skew) - eye
        if self.frame is None:
            return small
        frame = self.frame.to(x)
        n = len(frame)
        return frame @ small @ frame.mT + torch.full((n, n), 1 / n, dtype=x.dtype, device=x.device)


class _Linear(Factor):
    """I + X per kv head."""

    def __init__(self, n: int, heads: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(heads, n, n))

    def smooth(self) -> Element:
        value = self._value(self.x)
        return SmoothMatrix(value, _inverse(value).mT)

    def element(self) -> Element:
        return Matrix(self._value(self.x.double()).cpu())

    def _value(self, x: Tensor) -> Tensor:
        return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device) + x


class _Rotary(Factor):
    """u = exp(a + ib) per pair and kv head."""

    def __init__(self, n: int, heads: int, interleaved: bool) -> None:
        super().__init__()
        self.interleaved = interleaved
        self.size = nn.Parameter(torch.zeros(heads, n // 2))
        self.angle = nn.Parameter(torch.zeros(heads, n // 2))

    def smooth(self) -> Element:
        return SmoothPhases(torch.polar(self.size.exp(), self.angle), self.interleaved)

    def element(self) -> Element:
        return Phases(torch.polar(self.size.double().exp(), self.angle.double()).cpu(), self.interleaved)


class _Scales(Factor):
    """exp(x) per unit."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(n))

    def smooth(self) -> Element:
        return SmoothScales(None, self.x.exp())

    def element(self) -> Element:
        return Monomial(torch.arange(len(self.x)), self.x.double().exp().cpu())


class _Parts(Factor):
    """Side by side, for partial rotary positions."""

    def __init__(self, parts: list[Factor]) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self.parts = nn.ModuleList(parts)

    def smooth(self) -> Element:
        return Blocks(tuple(part.smooth() for part in self._parts))

    def element(self) -> Element:
        return Blocks(tuple(part.element() for part in self._parts))


def _inverse(x: Tensor) -> Tensor:
    """Without asking the device whether x is singular: a step may not wait. A loss that is not finite tells."""
    return torch.linalg.inv_ex(x).inverse


def _factor(group: Group, heads: int) -> Factor:
    if isinstance(group, GL):
        return _Linear(group.n, heads)
    if isinstance(group, RotaryCommutant):
        return _Rotary(group.n, heads, group.interleaved)
    assert isinstance(group, Product)
    return _Parts([_factor(part, heads) for part in group.groups])


def joined(learned: Mapping[str, Element], base: Mapping[str, Element]) -> dict[str, Element]:
    """First the base, then what was learned on top of it."""
    return {name: learned[name] @ g if name in learned else g for name, g in base.items()}
