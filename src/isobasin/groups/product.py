"""Direct sums: two groups side by side on one axis, as for partial rotary positions, H(r) ⊕ GL(n − r)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.groups.group import Element, Group, prefixed, selected
from isobasin.shapes import Float, Int


@dataclass(frozen=True, eq=False)
class Blocks(Element):
    """Elements that act on consecutive parts of an axis."""

    parts: tuple[Element, ...]

    @property
    def n(self) -> int:
        return sum(part.n for part in self.parts)

    @property
    def _batch_dims(self) -> int:
        return self.parts[0]._batch_dims

    def __matmul__(self, other: "Blocks") -> "Blocks":
        return Blocks(tuple(g @ h for g, h in zip(self.parts, other.parts, strict=True)))

    def inverse(self) -> "Blocks":
        return Blocks(tuple(part.inverse() for part in self.parts))

    def dual(self) -> "Blocks":
        return Blocks(tuple(part.dual() for part in self.parts))

    def permutation_part(self) -> "Blocks":
        return Blocks(tuple(part.permutation_part() for part in self.parts))

    def take(self, index: Int[Tensor, " m"]) -> "Blocks":
        return Blocks(tuple(part.take(index) for part in self.parts))

    def tensors(self) -> dict[str, Tensor]:
        return {f"{k}.{name}": t for k, part in enumerate(self.parts) for name, t in part.tensors().items()}

    @property
    def precision(self) -> torch.dtype:
        return self.parts[0].precision

    @property
    def exact(self) -> bool:
        return all(part.exact for part in self.parts)

    @property
    def is_identity(self) -> bool:
        return all(part.is_identity for part in self.parts)

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        pieces = x.split([part.n for part in self.parts], dim=-1)
        return torch.cat([part._apply(piece) for part, piece in zip(self.parts, pieces)], dim=-1)


@dataclass(frozen=True)
class Product(Group):
    groups: tuple[Group, ...]

    @property
    def n(self) -> int:  # type: ignore[override]
        return sum(group.n for group in self.groups)

    def __str__(self) -> str:
        return "(" + " ⊕ ".join(map(str, self.groups)) + ")"

    @property
    def dim(self) -> int:
        return sum(group.dim for group in self.groups)

    def identity(self, *batch: int) -> Blocks:
        return Blocks(tuple(group.identity(*batch) for group in self.groups))

    def sample(self, *batch: int, seed: int) -> Blocks:
        return Blocks(tuple(group.sample(*batch, seed=seed + k) for k, group in enumerate(self.groups)))

    def contains(self, element: Element) -> bool:
        return (
            isinstance(element, Blocks)
            and len(element.parts) == len(self.groups)
            and all(group.contains(part) for group, part in zip(self.groups, element.parts))
        )

    def project(self, matrix: Float[Tensor, "*batch n n"]) -> Blocks:
        parts, start = [], 0
        for group in self.groups:
            stop = start + group.n
            parts.append(group.project(matrix[..., start:stop, start:stop]))
            start = stop
        return Blocks(tuple(parts))

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        return prefixed({k: part.parameter_shapes() for k, part in self._parts.items()})

    def parametrised(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return prefixed({k: part.parametrised(selected(parameters, k)) for k, part in self._parts.items()})

    def differentiable(self, tensors: Mapping[str, Tensor]) -> Element:
        return Blocks(tuple(part.differentiable(selected(tensors, k)) for k, part in self._parts.items()))

    def element(self, tensors: dict[str, Tensor]) -> Blocks:
        return Blocks(tuple(part.element(selected(tensors, k)) for k, part in self._parts.items()))

    @property
    def _parts(self) -> dict[str, Group]:
        return {str(k): part for k, part in enumerate(self.groups)}
