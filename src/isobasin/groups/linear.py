"""Matrix groups: GL(n) inside a head, O(n) of the stream, and the part of O(n) that fixes the all-ones vector."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from isobasin.groups.group import (
    FLOAT,
    TOLERANCE,
    DifferentiableElement,
    Element,
    Group,
    Overlap,
    close,
    generator,
    haar,
    nearest_orthogonal,
    spread,
)
from isobasin.shapes import Float, Int


@dataclass(frozen=True, eq=False)
class Matrix(Element):
    """An invertible matrix, or a batch of them. `orthogonal` ones are inverted by transposing."""

    value: Float[Tensor, "*batch n n"]
    orthogonal: bool = False

    def __post_init__(self) -> None:
        # Products round differently over different strides; a saved and reloaded element must act bitwise alike.
        object.__setattr__(self, "value", self.value.contiguous())

    @property
    def n(self) -> int:
        return self.value.shape[-1]

    @property
    def _batch_dims(self) -> int:
        return self.value.dim() - 2

    def __matmul__(self, other: "Matrix") -> "Matrix":
        return Matrix(self.value @ other.value, self.orthogonal and other.orthogonal)

    def inverse(self) -> "Matrix":
        return Matrix(self.value.mT if self.orthogonal else torch.linalg.inv(self.value), self.orthogonal)

    def dual(self) -> "Matrix":
        return self if self.orthogonal else self._dual

    @cached_property
    def _dual(self) -> "Matrix":
        return Matrix(torch.linalg.inv(self.value).mT)

    def permutation_part(self) -> "Matrix":
        """A rotation carries no permutation: what can only be permuted must have been folded away before."""
        return self._permutation_part

    @cached_property
    def _permutation_part(self) -> "Matrix":
        return Matrix(_eye_like(self.value), orthogonal=True)

    def take(self, index: Int[Tensor, " m"]) -> "Matrix":
        return Matrix(self.value[index], self.orthogonal)

    def tensors(self) -> dict[str, Tensor]:
        return {"matrix": self.value}

    def matrix(self) -> Tensor:
        return self.value

    @cached_property
    def is_identity(self) -> bool:
        return torch.equal(self.value, _eye_like(self.value))

    def act_in_type(self, x: Tensor, axis: int = -1, *, dual: bool = False) -> Tensor:
        if not self.orthogonal or self.is_identity:
            return (self.dual() if dual else self).act(x, axis)
        value = self._like(x)
        if axis in (-1, x.ndim - 1):
            return x @ value.mT
        return (x.movedim(axis, -1) @ value.mT).movedim(-1, axis)

    @property
    def rotates(self) -> bool:
        return not self.is_identity

    def _like(self, x: Tensor) -> Tensor:
        """The matrix in the type of `x`, where `x` is; a copy for another place is made once."""
        if (self.value.device, self.value.dtype) == (x.device, x.dtype):
            return self.value
        place = x.device, x.dtype
        if place not in self._copies:
            self._copies[place] = self.value.to(x)
        return self._copies[place]

    @cached_property
    def _copies(self) -> dict[tuple[torch.device, torch.dtype], Tensor]:
        return {}

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        value = self._like(x)
        if value.dim() == 2:  # one plain product, not a broadcast batch of them
            return x @ value.mT
        return torch.einsum("...ij,...j->...i", value, x)


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

    def permutation_part(self) -> "DifferentiableMatrix":
        eye = torch.eye(self.n, dtype=self.value.dtype, device=self.value.device).expand_as(self.value)
        return DifferentiableMatrix(eye, eye)

    def take(self, index: Int[Tensor, " m"]) -> "DifferentiableMatrix":
        return DifferentiableMatrix(self.value.index_select(0, index), self.other.index_select(0, index))

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        if self.value.dim() == 2:
            return x @ self.value.mT
        return torch.einsum("...ij,...j->...i", self.value, x)


class _Rotations(Group):
    """What the two groups of rotations share."""

    def identity(self, *batch: int) -> Matrix:
        return Matrix(_eye(self.n, *batch), orthogonal=True)

    def nearest(self, overlap: Overlap) -> Element:
        """Procrustes: the orthogonal factor of the overlap."""
        return self.project(overlap.self_dual)

    def differentiable(self, tensors: Mapping[str, Tensor]) -> Element:
        return DifferentiableMatrix(tensors["matrix"], tensors["matrix"])

    def element(self, tensors: dict[str, Tensor]) -> Matrix:
        return Matrix(tensors["matrix"].to(FLOAT), orthogonal=True)

    def centre(self) -> Tensor:
        return _eye(self.n)

    def from_centre(self, tensors: Mapping[str, Tensor], centre: Tensor) -> dict[str, Tensor]:
        return {"matrix": tensors["matrix"] @ centre}

    def settled(self, tensors: dict[str, Tensor]) -> Element:
        return self.project(tensors["matrix"])


@dataclass(frozen=True)
class Orthogonal(_Rotations):
    """O(n): the stream of a model with RMSNorm whose gains are folded."""

    n: int

    def __str__(self) -> str:
        return f"O({self.n})"

    @property
    def dim(self) -> int:
        return self.n * (self.n - 1) // 2

    def sample(self, *batch: int, seed: int) -> Matrix:
        return Matrix(haar(self.n, *batch, rng=generator(seed)), orthogonal=True)

    def contains(self, element: Element) -> bool:
        if not isinstance(element, Matrix) or element.n != self.n:
            return False
        return close(element.value @ element.value.mT, _eye_like(element.value))

    def project(self, matrix: Float[Tensor, "*batch n n"]) -> Matrix:
        return Matrix(nearest_orthogonal(matrix.to(FLOAT)).cpu(), orthogonal=True)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.n, self.n)}

    def parametrised(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"matrix": _cayley(parameters["x"])}


@dataclass(frozen=True)
class OrthogonalFixingOnes(_Rotations):
    """The orthogonal maps with R 1 = 1: the stream behind LayerNorm, which removes the mean.

    In the coordinates (1⊥, 1) they are O(n−1) ⊕ 1, so the sign of a LayerNorm stream is one of them.
    """

    n: int

    def __str__(self) -> str:
        return f"O₁({self.n})"

    @property
    def dim(self) -> int:
        return (self.n - 1) * (self.n - 2) // 2

    def sample(self, *batch: int, seed: int) -> Matrix:
        return self._extend(haar(self.n - 1, *batch, rng=generator(seed)))

    def contains(self, element: Element) -> bool:
        if not Orthogonal(self.n).contains(element):
            return False
        assert isinstance(element, Matrix)
        return close(element.value.sum(-1), torch.ones_like(element.value[..., 0]))

    def project(self, matrix: Float[Tensor, "*batch n n"]) -> Matrix:
        frame, matrix = _frame_on(self.n, matrix.device), matrix.to(FLOAT)
        means = torch.stack([matrix.mean(-1), matrix.mean(-2)]) * self.n**0.5
        beside = float(means.norm(dim=-1).max())
        return self._extend(nearest_orthogonal(frame.mT @ matrix @ frame, beside=beside).cpu())

    def _extend(self, small: Tensor) -> Matrix:
        frame = _frame_on(self.n, small.device)
        return Matrix(frame @ small @ frame.mT + torch.full((self.n, self.n), 1 / self.n, dtype=FLOAT), orthogonal=True)

    def _frame(self) -> Float[Tensor, "n m"]:
        """Orthonormal columns that span 1⊥ (Helmert's)."""
        k = torch.arange(1, self.n, dtype=FLOAT)
        frame = torch.triu(torch.ones(self.n, self.n - 1, dtype=FLOAT))
        frame[1:].diagonal().copy_(-k)
        return frame / torch.sqrt(k * (k + 1))

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.n - 1, self.n - 1)}

    def parametrised(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The Cayley map in the complement of the all-ones vector: F R Fᵀ + 11ᵀ/n, the columns of F a basis of 1⊥."""
        x = parameters["x"]
        frame = _frame_on(self.n, x.device).to(x)
        mean = torch.full((self.n, self.n), 1 / self.n, dtype=x.dtype, device=x.device)
        return {"matrix": frame @ _cayley(x) @ frame.mT + mean}


@dataclass(frozen=True)
class GL(Group):
    """Invertible matrices. An element of condition over `max_condition` is refused: float32 could not carry it."""

    n: int
    max_condition: float = 1e6

    def __str__(self) -> str:
        return f"GL{self.n}"

    @property
    def dim(self) -> int:
        return self.n**2

    def identity(self, *batch: int) -> Matrix:
        return Matrix(_eye(self.n, *batch))

    def sample(self, *batch: int, seed: int) -> Matrix:
        rng = generator(seed)
        left, right = haar(self.n, *batch, rng=rng), haar(self.n, *batch, rng=rng)
        return Matrix(left * spread(*batch, 1, self.n, rng=rng) @ right)

    def contains(self, element: Element) -> bool:
        if not isinstance(element, Matrix) or element.n != self.n:
            return False
        if not torch.isfinite(element.value).all():
            return False
        sv = torch.linalg.svdvals(element.value)
        return bool((sv[..., -1] * self.max_condition > sv[..., 0]).all())

    def project(self, matrix: Float[Tensor, "*batch n n"]) -> Matrix:
        """The matrix itself, its small singular values raised to what the condition guard allows."""
        u, s, vt = torch.linalg.svd(matrix.to(FLOAT))
        floor = (s[..., :1] / self.max_condition * (1 + TOLERANCE)).clamp(min=TOLERANCE)
        raised = torch.maximum(s, floor)
        return Matrix(torch.where((raised == s).all(-1)[..., None, None], matrix, u * raised[..., None, :] @ vt))

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"x": (self.n, self.n)}

    def parametrised(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"matrix": _eye_like(parameters["x"]) + parameters["x"]}

    def differentiable(self, tensors: Mapping[str, Tensor]) -> Element:
        return DifferentiableMatrix(tensors["matrix"], _inverse(tensors["matrix"]).mT)

    def element(self, tensors: dict[str, Tensor]) -> Matrix:
        return Matrix(tensors["matrix"].to(FLOAT))


def _cayley(x: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """R = (I − S)⁻¹ (I + S) = 2 (I − S)⁻¹ − I with S = X − Xᵀ."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return 2 * _inverse(eye - (x - x.mT)) - eye


@lru_cache(maxsize=4)
def _frame_on(n: int, device: torch.device) -> Float[Tensor, "n m"]:
    """Cached on the device: a step that is captured as a CUDA graph can not copy it there."""
    return OrthogonalFixingOnes(n)._frame().to(device)


def _inverse(x: Tensor) -> Tensor:
    """The inverse without the check for singular matrices, which would wait for the device; the loss shows them."""
    return torch.linalg.inv_ex(x).inverse


def _eye(n: int, *batch: int) -> Tensor:
    return torch.eye(n, dtype=FLOAT).expand(*batch, n, n).clone()


def _eye_like(value: Tensor) -> Tensor:
    return torch.eye(value.shape[-1], dtype=value.dtype, device=value.device).expand_as(value)
