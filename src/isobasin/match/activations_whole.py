"""Activations as a second voice in whole-model matching: beside ‖A − g·B‖² stands how well coordinates go together.

For every space the objective gains 2κ (n − Σᵢⱼ tᵢⱼ gᵢⱼ): t the table of agreements (`isobasin.moments.agreements`), g
the element's rotation, or its permutation with signs, n its size. Up to a constant this is κ E‖x_A − g x_B‖² for
activations of unit variance. κ is `pull` times the mean square of a coordinate's weights: pull 1 lets activations count
as much as the weights do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace
from isobasin.groups import Element, HeadsElement, Monomial
from isobasin.match.canonical import STREAM, Canonical, blocks


@dataclass(frozen=True)
class Agreement:
    """Tables by space, and what one coordinate's agreement is worth there; empty for matching by weights alone."""

    tables: Mapping[str, Tensor] = field(default_factory=dict)
    worth: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(tables: Mapping[str, Tensor], pull: float, a: Canonical, b: Canonical) -> "Agreement":
        """Only for spaces that move; each worth `pull` times what its coordinates weigh in A and B."""
        moving = {name: t for name, t in tables.items() if name in b.part.groups}
        squares = {name: (_square(a, name) + _square(b, name)) / 2 for name in blocks(b.weights.arch)}
        squares[STREAM] = sum(squares.values())
        return Agreement(moving, {name: pull * squares[name] / len(t) for name, t in moving.items()})

    def benefit(self, name: str, like: Tensor) -> Tensor | None:
        """κ t, to be added to what an element gains by moving coordinates onto each other."""
        return self.worth[name] * self.tables[name].to(like) if name in self.tables else None

    def missing(self, name: str, element: Element) -> float:
        """2κ (n − Σ t g): none where every coordinate meets its like."""
        if name not in self.tables:
            return 0.0
        table = self.tables[name]
        return 2 * self.worth[name] * (len(table) - float((table.cpu() * _signs(element, len(table))).sum()))


def _square(model: Canonical, name: str) -> float:
    return float(sum(t.square().sum(dtype=torch.float64) for part in model.pieces(name) for t in part.values()))


def _signs(element: Element, n: int) -> Tensor:
    """The element as a matrix without its scales: a rotation, a permutation with signs, or one of heads."""
    if isinstance(element, HeadsElement):
        return torch.eye(n, dtype=torch.float64)[element.head_permutation]
    if isinstance(element, Monomial):
        return torch.eye(n, dtype=torch.float64)[element.index] * element.scale.sign()[:, None]
    return element.matrix()


def check_tables(arch: Architecture, tables: Mapping[str, Tensor]) -> None:
    """Every table is square and of its space's size: our own bug if not, as `agreements` makes them."""
    for name, table in tables.items():
        space = arch.spaces[name]
        n = space.n_heads if isinstance(space, HeadSpace) else space.size
        assert tuple(table.shape) == (n, n), f"{name}: agreements of shape {tuple(table.shape)}, expected {n} × {n}"
