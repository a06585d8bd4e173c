"""The unconstrained parameters of each group, and the elements that gradients flow through.

Rotations are the Cayley map of a skew matrix, GL is I + X, rotary pairs are exp(a + ib), unit scales are exp(x). For
all values of the parameters the element lies in the group, so the moved model computes the same function.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from isobasin.groups import (
    GL,
    Blocks,
    Element,
    Group,
    Heads,
    HeadsElement,
    Monomial,
    MonomialGroup,
    Orthogonal,
    OrthogonalFixingOnes,
    Product,
    RotaryCommutant,
)
from isobasin.shapes import Complex, Float, Int
from isobasin.symmetries import Symmetry

Tensors = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]


class DifferentiableElement(Element):
    """An element that only acts: in the type of its parameters, and without a query to the device."""

    @property
    def is_identity(self) -> bool:
        return False

    @property
    def exact(self) -> bool:
        return False

    @property
    def precision(self) -> torch.dtype:
        return torch.float32

    def __matmul__(self, other: Element) -> "DifferentiableElement":
        raise TypeError("a differentiable element only acts; use GroupParameters.elements() for elements to compose")

    def inverse(self) -> "DifferentiableElement":
        return self.__matmul__(self)

    def take(self, index: Tensor) -> "DifferentiableElement":
        raise ValueError("this element is not batched over heads")

    def tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class DifferentiableMatrix(DifferentiableElement):
    """A matrix and its dual, so that neither is computed twice."""

    value: Float[Tensor, "*batch n n"]
    other: Float[Tensor, "*batch n n"]

    @property
    def n(self) -> int:
        return self.value.shape[-1]

    def dual(self) -> "DifferentiableMatrix":
        return DifferentiableMatrix(self.other, self.value)

    def magnitude(self) -> "DifferentiableMatrix":
        eye = torch.eye(self.n, dtype=self.value.dtype, device=self.value.device).expand_as(self.value)
        return DifferentiableMatrix(eye, eye)

    def take(self, index: Int[Tensor, " m"]) -> "DifferentiableMatrix":
        return DifferentiableMatrix(self.value[index], self.other[index])

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        if self.value.dim() == 2:
            return x @ self.value.mT
        return torch.einsum("...ij,...j->...i", self.value, x)


@dataclass(frozen=True, eq=False)
class DifferentiablePhases(DifferentiableElement):
    """One complex number per rotary pair."""

    u: Complex[Tensor, "*batch pairs"]
    interleaved: bool

    @property
    def n(self) -> int:
        return 2 * self.u.shape[-1]

    def dual(self) -> "DifferentiablePhases":
        return DifferentiablePhases(1 / self.u.conj(), self.interleaved)

    def magnitude(self) -> "DifferentiablePhases":
        return DifferentiablePhases(torch.ones_like(self.u), self.interleaved)

    def take(self, index: Int[Tensor, " m"]) -> "DifferentiablePhases":
        return DifferentiablePhases(self.u[index], self.interleaved)

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        if self.interleaved:
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * self.u).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        a, b = self.u.real, self.u.imag
        return torch.cat([first * a - second * b, first * b + second * a], dim=-1)


@dataclass(frozen=True, eq=False)
class DifferentiableScales(DifferentiableElement):
    """(g x)[i] = scale[i] · x[i]."""

    scale: Float[Tensor, " n"]

    @property
    def n(self) -> int:
        return self.scale.shape[0]

    def dual(self) -> "DifferentiableScales":
        return DifferentiableScales(1 / self.scale)

    def magnitude(self) -> "DifferentiableScales":
        return DifferentiableScales(torch.ones_like(self.scale))

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        return x * self.scale


@dataclass(frozen=True)
class Parametrization:
    """How the elements of one group depend on unconstrained parameters, which are zero at the identity."""

    shapes: Callable[[Any], Shapes]  # the parameters by name; none for a discrete group
    tensors: Callable[[Any, Tensors], dict[str, Tensor]]  # parameters to the tensors of the element
    acting: Callable[[Any, Tensors], Element]  # tensors of the element to one that gradients flow through


def shapes(group: Group) -> Shapes:
    """The shapes of the parameters of a group."""
    return PARAMETRIZATIONS[type(group)].shapes(group)


def element_tensors(group: Group, parameters: Tensors) -> dict[str, Tensor]:
    """The tensors of the element with these parameters, in their type; `group.element` takes them."""
    return PARAMETRIZATIONS[type(group)].tensors(group, parameters)


def acting_element(group: Group, tensors: Tensors) -> Element:
    """The element with these tensors, for gradients to flow through."""
    return PARAMETRIZATIONS[type(group)].acting(group, tensors)


def _cayley(x: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """R = (I − S)⁻¹ (I + S) = 2 (I − S)⁻¹ − I with S = X − Xᵀ."""
    eye = _eye_like(x)
    return 2 * _inverse(eye - (x - x.mT)) - eye


def _cayley_fixing_ones(n: int, x: Float[Tensor, "m m"]) -> Float[Tensor, "n n"]:
    """The same in the complement of the all-ones vector: F R Fᵀ + 11ᵀ/n, the columns of F a basis of 1⊥."""
    frame = _frame(n, x.device).to(x)
    return frame @ _cayley(x) @ frame.mT + torch.full((n, n), 1 / n, dtype=x.dtype, device=x.device)


@lru_cache(maxsize=4)
def _frame(n: int, device: torch.device) -> Float[Tensor, "n m"]:
    """Cached on the device: a step that is captured as a CUDA graph can not copy it there."""
    return OrthogonalFixingOnes(n)._frame().to(device)


def _eye_like(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def _inverse(x: Tensor) -> Tensor:
    """The inverse without the check for singular matrices, which would wait for the device; the loss shows them."""
    return torch.linalg.inv_ex(x).inverse


def _rotation(group: Group, tensors: Tensors) -> Element:
    return DifferentiableMatrix(tensors["matrix"], tensors["matrix"])


def _heads_tensors(group: Heads, parameters: Tensors) -> dict[str, Tensor]:
    """The factors of every kv head; the heads keep their places."""
    device = next(iter(parameters.values())).device
    kv = torch.arange(group.n_kv, device=device)
    queries = torch.arange(group.group_size, device=device).expand(group.n_kv, -1).clone()
    sides = {side: element_tensors(g, _select(parameters, side)) for side, g in (("qk", group.qk), ("vo", group.vo))}
    return {"kv": kv, "queries": queries} | _join(sides)


def _heads_acting(group: Heads, tensors: Tensors) -> Element:
    qk, vo = (acting_element(g, _select(tensors, side)) for side, g in (("qk", group.qk), ("vo", group.vo)))
    return HeadsElement(tensors["kv"], tensors["queries"], qk, vo)


def _parts(group: Product) -> dict[str, Group]:
    return {str(k): part for k, part in enumerate(group.groups)}


def _join(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{prefix}.{name}": value for prefix, part in parts.items() for name, value in part.items()}


def _select(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}


PARAMETRIZATIONS: Mapping[type[Group], Parametrization] = {
    Orthogonal: Parametrization(
        lambda group: {"x": (group.n, group.n)},
        lambda group, p: {"matrix": _cayley(p["x"])},
        _rotation,
    ),
    OrthogonalFixingOnes: Parametrization(
        lambda group: {"x": (group.n - 1, group.n - 1)},
        lambda group, p: {"matrix": _cayley_fixing_ones(group.n, p["x"])},
        _rotation,
    ),
    GL: Parametrization(
        lambda group: {"x": (group.n, group.n)},
        lambda group, p: {"matrix": _eye_like(p["x"]) + p["x"]},
        lambda group, t: DifferentiableMatrix(t["matrix"], _inverse(t["matrix"]).mT),
    ),
    RotaryCommutant: Parametrization(
        lambda group: {"size": (group.n // 2,), "angle": (group.n // 2,)},
        lambda group, p: {"u": torch.polar(p["size"].exp(), p["angle"])},
        lambda group, t: DifferentiablePhases(t["u"], group.interleaved),
    ),
    MonomialGroup: Parametrization(  # scales where the group has them; permutations and signs are not continuous
        lambda group: {"x": (group.n,)} if group.dim else {},
        lambda group, p: {"index": torch.arange(group.n), "scale": p["x"].exp()},
        lambda group, t: DifferentiableScales(t["scale"]),
    ),
    Product: Parametrization(
        lambda group: _join({k: shapes(part) for k, part in _parts(group).items()}),
        lambda group, p: _join({k: element_tensors(part, _select(p, k)) for k, part in _parts(group).items()}),
        lambda group, t: Blocks(tuple(acting_element(part, _select(t, k)) for k, part in _parts(group).items())),
    ),
    Heads: Parametrization(
        lambda group: {
            name: (group.n_kv, *shape)
            for name, shape in _join({"qk": shapes(group.qk), "vo": shapes(group.vo)}).items()
        },
        _heads_tensors,
        _heads_acting,
    ),
}


class GroupParameters:
    """The parameters of every space of a symmetry that has a continuous group."""

    def __init__(self, part: Symmetry, device: torch.device | None = None) -> None:
        self.part = part
        self._groups = {space: group for space, group in part.groups.items() if shapes(group)}
        self._parameters = {
            space: {k: torch.zeros(shape, device=device, requires_grad=True) for k, shape in shapes(group).items()}
            for space, group in self._groups.items()
        }

    def tensors(self) -> list[Tensor]:
        """All parameters, for an optimizer."""
        return [tensor for tensors in self._parameters.values() for tensor in tensors.values()]

    def differentiable(self) -> dict[str, Element]:
        """The elements by space, for gradients to flow through."""
        return {
            space: acting_element(group, element_tensors(group, self._parameters[space]))
            for space, group in self._groups.items()
        }

    @torch.no_grad()
    def elements(self) -> dict[str, Element]:
        """The same as elements of their groups, in float64 on the CPU."""
        found = {}
        for space, group in self._groups.items():
            doubled = {name: tensor.double() for name, tensor in self._parameters[space].items()}
            found[space] = group.element({name: t.cpu() for name, t in element_tensors(group, doubled).items()})
        return found

    @torch.no_grad()
    def permute(self, moves: Mapping[str, Monomial]) -> None:
        """Permute the units of some spaces together with the scales they have learned."""
        for space, g in moves.items():
            for tensor in self._parameters.get(space, {}).values():
                tensor.copy_(tensor[g.index.to(tensor.device)])

    def state(self) -> dict[str, Tensor]:
        """All parameters by name, as a resume file holds them."""
        return {_state_name(space, k): t.detach() for space, ts in self._parameters.items() for k, t in ts.items()}

    @torch.no_grad()
    def load_state(self, state: Tensors) -> None:
        for space, tensors in self._parameters.items():
            for name, tensor in tensors.items():
                tensor.copy_(state[_state_name(space, name)])


def _state_name(space: str, name: str) -> str:
    """`factors.ff0.x`, `factors.heads0:vo.x`, `factors.heads0:qk.parts.1.x`."""
    separator = ":" if name.startswith(("qk.", "vo.")) else "."
    return f"factors.{space}{separator}" + re.sub(r"\b(\d+)\.", r"parts.\1.", name)


def compose(learned: Mapping[str, Element], base: Mapping[str, Element]) -> dict[str, Element]:
    """learned ∘ base; spaces without a learned element keep the base."""
    return {name: learned[name] @ g if name in learned else g for name, g in base.items()}
