"""Groups and their elements: the verbs every group of this room has.

An `Element` is an immutable value: `g @ h`, `g.inverse()`, `g.dual()` (g⁻ᵀ), `g.act(x, axis)`.
A `Group` makes and judges elements: `identity`, `sample`, `contains`, `project`, `dim`. Arithmetic is in float64.

>>> from isobasin.groups import Orthogonal
>>> g = Orthogonal(3).sample(seed=0)
>>> bool(torch.allclose((g @ g.inverse()).matrix(), torch.eye(3, dtype=torch.float64)))
True
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.shapes import Float

Side = Literal["qk", "vo", "shared"]
FLOAT = torch.float64
TOLERANCE = 1e-8


class Element(ABC):
    """A group element, batched over leading dimensions (one per head where there are heads)."""

    @abstractmethod
    def __matmul__(self, other: Self) -> Self:
        """The product: `(g @ h).act(x) == g.act(h.act(x))`."""

    @abstractmethod
    def inverse(self) -> Self: ...

    @abstractmethod
    def dual(self) -> Self:
        """g⁻ᵀ: how a space that is paired with this one moves, so that ⟨g x, g⁻ᵀ y⟩ = ⟨x, y⟩."""

    @abstractmethod
    def permutation_part(self) -> Self:
        """What is left for gains and gates: the permutation, without signs, scales or rotations."""

    def take(self, index: Tensor) -> Self:
        """The elements at these places of the (one) batch dimension."""
        raise ValueError("this element is not batched over heads")

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The numbers of this element, for saving; `Group.element` is the way back."""

    @property
    def exact(self) -> bool:
        """True if acting rounds nothing in any floating type: permutations and signs."""
        return self.is_identity

    @property
    @abstractmethod
    def is_identity(self) -> bool: ...

    @property
    @abstractmethod
    def n(self) -> int:
        """The dimension of the space it acts on."""

    @abstractmethod
    def _apply(self, x: Tensor) -> Tensor:
        """Act on the last axis of a float64 tensor; batch dimensions are the ones just before it."""

    @property
    def precision(self) -> torch.dtype:
        """The type in which acting is computed."""
        return FLOAT

    def act(self, x: Tensor, axis: int = -1) -> Tensor:
        """g x along one axis: computed in float64, given back in the type of `x`; the identity is bitwise."""
        if self.is_identity:
            return x
        moved = x.movedim(axis, -1)
        return self._apply(moved.to(self.precision)).to(x.dtype).movedim(-1, axis)

    def act_in_type(self, x: Tensor, axis: int = -1, *, dual: bool = False) -> Tensor:
        """g x (or g⁻ᵀ x) computed in the type of `x`: for sweeps over float32 tables, which the next one measures."""
        return (self.dual() if dual else self).act(x, axis)

    def face(self, side: Side, *, queries: bool = False) -> "Element":
        """How one face of a heads space moves; any other element is its own."""
        return self

    def head_order(self, *, kv: bool = False) -> "Element":
        """How places move of which there is one for each query head, or kv head; any other element is its own."""
        return self

    @property
    def rotates(self) -> bool:
        """Whether it mixes coordinates, so that gains must be folded before it acts."""
        return False

    @property
    def ones_factor(self) -> float:
        """What it multiplies the all-ones vector of a stream by: permutations may have a sign, rotations keep it."""
        return 1.0

    def rescaled(self, scale: Tensor) -> "Element":
        """This element, then a scale per coordinate; only elements with scales have one."""
        raise ValueError("this element has no scale per coordinate")

    def forget_copies(self) -> None:
        """Free what acting has kept for the next time: copies in other types, duals and faces. They are made again."""
        parts = {part.name: getattr(self, part.name) for part in fields(self)}  # type: ignore[arg-type]
        for kept in vars(self).keys() - parts.keys():
            del self.__dict__[kept]
        for part in parts.values():
            if isinstance(part, Element):
                part.forget_copies()

    def signed_matrix(self) -> Tensor:
        """A dense matrix without scales: a rotation, a permutation with signs, or the permutation of heads."""
        return self.matrix()

    def matrix(self) -> Tensor:
        """The dense matrix (… × n × n): `g.act(x) == g.matrix() @ x`."""
        batch = next(iter(self.tensors().values())).shape[: self._batch_dims]
        eye = torch.eye(self.n, dtype=FLOAT).expand(*batch, self.n, self.n)
        columns = [self._apply(eye[..., k]) for k in range(self.n)]
        return torch.stack(columns, dim=-1)

    @property
    def _batch_dims(self) -> int:
        return 0


class DifferentiableElement(Element):
    """An element that only acts: in the type of its parameters, and without a query to the device."""

    @property
    def is_identity(self) -> bool:
        return False

    @property
    def precision(self) -> torch.dtype:
        return torch.float32

    def __matmul__(self, other: Element) -> "DifferentiableElement":
        raise TypeError("a differentiable element only acts; use GroupParameters.elements() for elements to compose")

    def inverse(self) -> "DifferentiableElement":
        return self.__matmul__(self)

    def tensors(self) -> dict[str, Tensor]:
        return dict(vars(self))


@dataclass(frozen=True)
class Overlap:
    """How two models overlap on one space: all that ‖A − g·B‖² says about the element g.

    For a tensor with an axis in the space, overlap[i, j] is the product of A's slice i and B's slice j, summed over the
    other axes; here summed over all tensors: over axes that move by g, by its dual g⁻ᵀ, and by its permutation part.
    `signed` moves by the permutation and the signs of g, or by a rotation as a whole: what activations add. Sizes are
    the squares of B's slices.
    """

    primal: Float[Tensor, "n n"]
    dual: Float[Tensor, "n n"]
    permuted: Float[Tensor, "n n"]
    signed: Float[Tensor, "n n"]
    primal_size: Float[Tensor, " n"]
    dual_size: Float[Tensor, " n"]

    @staticmethod
    def empty(size: int, like: Tensor) -> "Overlap":
        """Two models that have nothing in common on a space of this size; takes no memory."""
        square = torch.zeros((), dtype=like.dtype, device=like.device).expand(size, size)
        return Overlap(square, square, square, square, square[:, 0], square[:, 0])

    def __add__(self, other: "Overlap") -> "Overlap":
        return Overlap(*(_sum(x, y) for x, y in zip(vars(self).values(), vars(other).values())))

    @property
    def self_dual(self) -> Tensor:
        """All that moves with an element that is its own dual."""
        return _sum(_sum(self.primal, self.dual), self.signed)

    def with_benefit(self, benefit: Tensor | None) -> "Overlap":
        """With a table of benefits that depend on the permutation and the signs alone."""
        return self if benefit is None else replace(self, signed=self.signed + benefit)


def _sum(x: Tensor, y: Tensor) -> Tensor:
    """x + y; tables of a wide layer are large, and most of them are the empty one."""
    if not any(x.stride()):
        return y
    return x if not any(y.stride()) else x + y


class Group(ABC):
    """A group acting on ℝⁿ. Frozen; two groups of the same kind and size are equal."""

    n: int

    @property
    @abstractmethod
    def dim(self) -> int:
        """The dimension as a manifold: how many directions of the weights it makes free."""

    @abstractmethod
    def identity(self, *batch: int) -> Element: ...

    @abstractmethod
    def sample(self, *batch: int, seed: int) -> Element:
        """A random element, well conditioned (scales and singular values in ½ … 2)."""

    @abstractmethod
    def contains(self, element: Element) -> bool: ...

    @abstractmethod
    def project(self, matrix: Tensor) -> Element:
        """The element nearest to a matrix (… × n × n)."""

    def nearest(self, overlap: Overlap) -> Element:
        """The element g that brings g·B closest to A, given how the two overlap on the space of this group."""
        raise IsobasinError(f"{self}: no element can be found from an overlap; heads are matched by their matrices")

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The unconstrained parameters that learning moves, zero at the identity; none for a discrete group."""
        return {}

    def parametrised(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the element with these parameters, in their type; `element` takes them."""
        raise IsobasinError(f"{self} has no continuous parameters")

    def centre(self) -> Tensor | None:
        """For rotations the matrix that parameters begin from, at first the identity: learning restarts after every
        step, so that a step turns by the same angle wherever the element is. Other parameters have no centre.
        """
        return None

    def from_centre(self, tensors: Mapping[str, Tensor], centre: Tensor) -> dict[str, Tensor]:
        """The tensors of an element that comes after the one at the centre."""
        raise IsobasinError(f"{self} has no centre")

    def settled(self, tensors: dict[str, Tensor]) -> Element:
        """The element of these tensors, which lie in the group up to rounding."""
        return self.element(tensors)

    def differentiable(self, tensors: Mapping[str, Tensor]) -> Element:
        """The element with these tensors, for gradients to flow through."""
        raise IsobasinError(f"{self} has no continuous parameters")

    def sorting(self, keys: Tensor) -> Element:
        """The element that brings coordinates with these keys into their order, the least first."""
        raise IsobasinError(f"{self} does not permute coordinates one by one")

    @abstractmethod
    def element(self, tensors: dict[str, Tensor]) -> Element:
        """Rebuild an element from `Element.tensors`; a KeyError if parts are missing."""


def prefixed(parts: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Tables of several factors as one, under `factor.name`."""
    return {f"{prefix}.{name}": value for prefix, part in parts.items() for name, value in part.items()}


def selected(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The table of one factor."""
    return {name.removeprefix(f"{prefix}."): t for name, t in tensors.items() if name.startswith(f"{prefix}.")}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def haar(n: int, *batch: int, rng: torch.Generator) -> Tensor:
    """Orthogonal matrices from the uniform (Haar) measure.

    QR alone is not uniform: its R has a positive diagonal only by convention, so the signs are put back.
    """
    q, r = torch.linalg.qr(torch.randn(*batch, n, n, generator=rng, dtype=FLOAT))
    return q * torch.diagonal(r, dim1=-2, dim2=-1).sign()[..., None, :]


POLAR_STEPS = 30
LARGEST_BY_SVD = 256  # rows of a matrix that is not worth a trip through an accelerator


def polar(matrix: Tensor, *, iterate: bool = False) -> Tensor:
    """The orthogonal matrix nearest to a matrix, or to each of a batch: by SVD, or faster for small matrices by
    Newton's iteration X ← ½ (ζ X + X⁻ᵀ/ζ), where the SVD takes over for those that are close to singular.
    """
    if not iterate:
        u, _, vt = torch.linalg.svd(matrix)
        return u @ vt
    x = matrix / _norm(matrix).clamp_min(torch.finfo(matrix.dtype).tiny)
    rounding = matrix.shape[-1] * torch.finfo(matrix.dtype).eps
    for _ in range(POLAR_STEPS):
        inverse = torch.linalg.inv_ex(x).inverse.mT
        scale = (_norm(inverse) / _norm(x)).sqrt()
        new = (scale * x + inverse / scale) / 2
        settled = bool((_norm(new - x) <= max(1e-14, rounding) * _norm(new)).all())
        x = new
        if settled:
            break
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    bad = torch.nonzero(~(_norm(x @ x.mT - eye).flatten() <= 1e-10)).flatten()
    return x.index_copy(0, bad, polar(matrix[bad])) if len(bad) else x


def nearest_orthogonal(matrix: Tensor, *, beside: float = 0.0) -> Tensor:
    """`polar` of the overlap of two models on a stream; of a singular one the factor that is nearest to the identity.
    `beside`: the size of what was taken away from the overlap before, whose rounding is left in it.

    On a processor an SVD is faster (2048 columns, one thread: 5 s against 9 s), on an accelerator the iteration, which
    consists of products and inverses.
    """
    if matrix.dim() > 2:
        return polar(matrix.cpu())
    small = matrix.device.type == "cpu" or len(matrix) <= LARGEST_BY_SVD
    if small or is_singular(matrix, beside):
        return _polar_nearest_to_identity(matrix.cpu(), beside)
    return polar(matrix[None], iterate=True)[0]


def _polar_nearest_to_identity(matrix: Float[Tensor, "n n"], beside: float) -> Float[Tensor, "n n"]:
    """The sum of U Vᵀ over the singular vectors that count, and U₀ W V₀ᵀ over the others, on which the overlap says
    nothing: any rotation W is as good, and W = polar(U₀ᵀ V₀) moves least."""
    u, s, vt = torch.linalg.svd(matrix)
    free = s <= zero_share(matrix) * s[:1].clamp_min(beside)
    if bool(free.any()):
        u[:, free] = u[:, free] @ polar(u[:, free].mT @ vt[free].mT)
    return u @ vt


def is_singular(matrix: Float[Tensor, "n n"], beside: float = 0.0) -> bool:
    """Whether some direction counts as zero beside the largest, by products and an inverse alone."""
    larger = (beside / torch.linalg.matrix_norm(matrix, 1)).clamp_min(1)
    return not float(torch.linalg.cond(matrix, 1) * larger) < 1 / zero_share(matrix)


def zero_share(matrix: Tensor) -> float:
    """The share of the largest singular value below which one is zero but for rounding: ten times what was seen for
    products of tables with fewer rows than columns, from 8 columns to 512."""
    return max(len(matrix), 16) * torch.finfo(matrix.dtype).eps


def _norm(x: Tensor) -> Tensor:
    return x.square().sum((-1, -2), keepdim=True).sqrt()


def spread(*shape: int, rng: torch.Generator) -> Tensor:
    """Positive numbers between ½ and 2, evenly on a log scale."""
    return torch.exp2(2 * torch.rand(*shape, generator=rng, dtype=FLOAT) - 1)


def signs(*shape: int, rng: torch.Generator) -> Tensor:
    return torch.where(torch.rand(*shape, generator=rng) < 0.5, -1.0, 1.0).to(FLOAT)


def close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE))
