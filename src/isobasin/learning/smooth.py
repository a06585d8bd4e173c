"""Elements that a gradient flows through. They act in the type of their parameters, and never ask a device whether
they are the identity."""

from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.groups import Element
from isobasin.shapes import Complex, Float, Int


class Smooth(Element):
    """What the three below have in common: they are made to act, and nothing else."""

    @property
    def is_identity(self) -> bool:
        return False

    @property
    def exact(self) -> bool:
        return False

    @property
    def precision(self) -> torch.dtype:
        return torch.float32

    def __matmul__(self, other: Element) -> "Smooth":
        raise TypeError("elements that are being learned only act; turn them into elements of their group first")

    def inverse(self) -> "Smooth":
        return self.__matmul__(self)

    def tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class SmoothMatrix(Smooth):
    """A matrix and its dual, so that neither is computed twice."""

    value: Float[Tensor, "*batch n n"]
    other: Float[Tensor, "*batch n n"]

    @property
    def n(self) -> int:
        return self.value.shape[-1]

    def dual(self) -> "SmoothMatrix":
        return SmoothMatrix(self.other, self.value)

    def magnitude(self) -> "SmoothMatrix":
        eye = torch.eye(self.n, dtype=self.value.dtype, device=self.value.device).expand_as(self.value)
        return SmoothMatrix(eye, eye)

    def take(self, index: Int[Tensor, " m"]) -> "SmoothMatrix":
        return SmoothMatrix(self.value[index], self.other[index])

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        if self.value.dim() == 2:
            return x @ self.value.mT
        return torch.einsum("...ij,...j->...i", self.value, x)


@dataclass(frozen=True, eq=False)
class SmoothPhases(Smooth):
    """One complex number per rotary pair, as its real and imaginary parts."""

    u: Complex[Tensor, "*batch pairs"]
    interleaved: bool

    @property
    def n(self) -> int:
        return 2 * self.u.shape[-1]

    def dual(self) -> "SmoothPhases":
        return SmoothPhases(1 / self.u.conj(), self.interleaved)

    def magnitude(self) -> "SmoothPhases":
        return SmoothPhases(torch.ones_like(self.u), self.interleaved)

    def take(self, index: Int[Tensor, " m"]) -> "SmoothPhases":
        return SmoothPhases(self.u[index], self.interleaved)

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        if self.interleaved:
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * self.u).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        a, b = self.u.real, self.u.imag
        return torch.cat([first * a - second * b, first * b + second * a], dim=-1)


@dataclass(frozen=True, eq=False)
class SmoothScales(Smooth):
    """(g x)[i] = scale[i] · x[index[i]]; the index may change between steps, the scale is learned."""

    index: Int[Tensor, " n"] | None
    scale: Float[Tensor, " n"] | None

    @property
    def n(self) -> int:
        part = self.scale if self.scale is not None else self.index
        assert part is not None
        return part.shape[0]

    def dual(self) -> "SmoothScales":
        return SmoothScales(self.index, None if self.scale is None else 1 / self.scale)

    def magnitude(self) -> "SmoothScales":
        return SmoothScales(self.index, None)

    def take(self, index: Tensor) -> "SmoothScales":
        raise ValueError("a permutation is not batched over heads")

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        x = x if self.index is None else x[..., self.index]
        return x if self.scale is None else x * self.scale
