"""H(n): what commutes with rotary positions, one nonzero complex number per pair of columns."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.groups.group import FLOAT, TOLERANCE, DifferentiableElement, Element, Group, generator, spread
from isobasin.shapes import Complex, Float, Int

COMPLEX = torch.complex128
LARGEST = 1e30  # |u| and 1 / |u|: heads may have queries of any size that float32 holds, beside keys of any size


@dataclass(frozen=True, eq=False)
class Phases(Element):
    """Multiplies pair j, read as x₁ + i x₂, by the complex number u[j].

    A rotary position multiplies the same pair by e^{imθ}; complex numbers commute, other 2×2 maps do not.
    """

    u: Complex[Tensor, "*batch pairs"]
    interleaved: bool = False

    @property
    def n(self) -> int:
        return 2 * self.u.shape[-1]

    @property
    def _batch_dims(self) -> int:
        return self.u.dim() - 1

    def __matmul__(self, other: "Phases") -> "Phases":
        assert self.interleaved == other.interleaved
        return Phases(self.u * other.u, self.interleaved)

    def inverse(self) -> "Phases":
        return Phases(1 / self.u, self.interleaved)

    def dual(self) -> "Phases":
        """The transpose of multiplying by u is multiplying by its conjugate."""
        return Phases(1 / self.u.conj().resolve_conj(), self.interleaved)

    def permutation_part(self) -> "Phases":
        return Phases(torch.ones_like(self.u), self.interleaved)

    def take(self, index: Int[Tensor, " m"]) -> "Phases":
        return Phases(self.u[index], self.interleaved)

    def tensors(self) -> dict[str, Tensor]:
        return {"u": self.u}

    @property
    def exact(self) -> bool:
        return bool(((self.u == 1) | (self.u == -1)).all())

    @property
    def is_identity(self) -> bool:
        return bool((self.u == 1).all())

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        u = self.u.to(x.device)
        if self.interleaved:
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * u).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        turned = torch.complex(first, second) * u
        return torch.cat([turned.real, turned.imag], dim=-1)


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

    def permutation_part(self) -> "DifferentiablePhases":
        return DifferentiablePhases(torch.ones_like(self.u), self.interleaved)

    def take(self, index: Int[Tensor, " m"]) -> "DifferentiablePhases":
        return DifferentiablePhases(self.u.index_select(0, index), self.interleaved)

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        if self.interleaved:
            return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * self.u).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        a, b = self.u.real, self.u.imag
        return torch.cat([first * a - second * b, first * b + second * a], dim=-1)


@dataclass(frozen=True)
class RotaryCommutant(Group):
    """H(n) ≅ (ℂ*)^{n/2}, for pairs (j, j + n/2), or (2j, 2j + 1) where interleaved. A wrong layout is a wrong group."""

    n: int
    interleaved: bool = False

    def __post_init__(self) -> None:
        if self.n % 2:
            raise ValueError(f"rotary columns come in pairs, got {self.n}")

    def __str__(self) -> str:
        return f"H{self.n}"

    @property
    def dim(self) -> int:
        return self.n

    def identity(self, *batch: int) -> Phases:
        return Phases(torch.ones(*batch, self.n // 2, dtype=COMPLEX), self.interleaved)

    def sample(self, *batch: int, seed: int) -> Phases:
        rng = generator(seed)
        size = spread(*batch, self.n // 2, rng=rng)
        angle = 2 * torch.pi * torch.rand(*batch, self.n // 2, generator=rng, dtype=FLOAT)
        return Phases(torch.polar(size, angle), self.interleaved)

    def contains(self, element: Element) -> bool:
        if not isinstance(element, Phases) or (element.n, element.interleaved) != (self.n, self.interleaved):
            return False
        size = element.u.abs()
        return bool(((size > 1 / LARGEST) & (size < LARGEST)).all())

    def project(self, matrix: Float[Tensor, "*batch n n"]) -> Phases:
        """Per pair the complex number nearest to its 2×2 block: ((m₁₁+m₂₂) + i (m₂₁−m₁₂)) / 2."""
        first = torch.arange(self.n // 2) * (2 if self.interleaved else 1)
        second = first + (1 if self.interleaved else self.n // 2)
        m = matrix.to(FLOAT)
        real = m[..., first, first] + m[..., second, second]
        imag = m[..., second, first] - m[..., first, second]
        u = torch.complex(real, imag) / 2
        return Phases(torch.where(u.abs() > TOLERANCE, u, 2 * TOLERANCE), self.interleaved)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"size": (self.n // 2,), "angle": (self.n // 2,)}

    def parametrised(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """u = exp(a + ib)."""
        return {"u": torch.polar(parameters["size"].exp(), parameters["angle"])}

    def differentiable(self, tensors: Mapping[str, Tensor]) -> Element:
        return DifferentiablePhases(tensors["u"], self.interleaved)

    def element(self, tensors: dict[str, Tensor]) -> Phases:
        return Phases(tensors["u"].to(COMPLEX), self.interleaved)


@dataclass(frozen=True)
class PairSigns(Group):
    """A sign for every rotary pair: what is left of H(n) behind a norm on queries and keys whose gains differ inside
    pairs. `common`: one sign for all columns, which is what a LayerNorm leaves."""

    n: int
    interleaved: bool = False
    common: bool = False
    dim = 0

    def __str__(self) -> str:
        return "{±1}" if self.common else f"{{±1}}^{self.n // 2}"

    def identity(self, *batch: int) -> Phases:
        return Phases(torch.ones(*batch, self.n // 2, dtype=COMPLEX), self.interleaved)

    def sample(self, *batch: int, seed: int) -> Phases:
        u = torch.randint(0, 2, (*batch, 1 if self.common else self.n // 2), generator=generator(seed)) * 2 - 1
        return Phases(u.to(COMPLEX).expand(*batch, self.n // 2).clone(), self.interleaved)

    def contains(self, element: Element) -> bool:
        if not isinstance(element, Phases) or (element.n, element.interleaved) != (self.n, self.interleaved):
            return False
        single = not self.common or bool((element.u == element.u[..., :1]).all())
        return single and bool(((element.u == 1) | (element.u == -1)).all())

    def project(self, matrix: Float[Tensor, "*batch n n"]) -> Phases:
        """The sign of the trace of each 2×2 block, or of the whole."""
        return self.nearest_signs(RotaryCommutant(self.n, self.interleaved).project(matrix).u.real)

    def nearest_signs(self, overlap: Float[Tensor, "*batch pairs"]) -> Phases:
        """The signs of these overlaps, 1 for zero; one sign for all pairs if that is all there is."""
        if self.common:
            overlap = overlap.sum(-1, keepdim=True).expand_as(overlap)
        return Phases(torch.where(overlap < 0, -1.0, 1.0).to(COMPLEX), self.interleaved)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Nothing to learn; an empty parameter tells how many heads there are."""
        return {"none": (0,)}

    def parametrised(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        none = parameters["none"]
        return {"u": torch.ones(*none.shape[:-1], self.n // 2, dtype=torch.complex64, device=none.device)}

    def differentiable(self, tensors: Mapping[str, Tensor]) -> Element:
        return DifferentiablePhases(tensors["u"], self.interleaved)

    def element(self, tensors: dict[str, Tensor]) -> Phases:
        return Phases(tensors["u"].to(COMPLEX), self.interleaved)
