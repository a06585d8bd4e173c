"""The activation term of the objective: how well the coordinates of A and g·B go together on data.

For every space the objective gains 2κ (n − Σᵢⱼ tᵢⱼ gᵢⱼ): t the table of correlations (`activations.correlations`), g
the element's rotation, or its permutation with signs, n its size. Up to a constant this is κ E‖x_A − g x_B‖² for
activations of unit variance. κ is the matcher's `activation_weight` times the mean square of a coordinate's weights:
at 1, activations count as much as the weights do.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobasin.groups import Element
from isobasin.symmetries.normal_form import NormalForm


@dataclass(frozen=True)
class ActivationTerm:
    """Tables by space, and what one coordinate's correlation is worth there; empty for matching by weights alone."""

    tables: Mapping[str, Tensor] = field(default_factory=dict)
    worth: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(tables: Mapping[str, Tensor], weight: float, a: NormalForm, b: NormalForm) -> "ActivationTerm":
        """Only for spaces that move; each worth `weight` times the mean square of its coordinates in A and B."""
        moving = {name: t for name, t in tables.items() if name in b.part.groups}
        if not moving:
            return ActivationTerm()
        arch = b.weights.arch
        squares = {name: (_square(a, name) + _square(b, name)) / 2 for name in arch.blocks}
        squares[arch.stream.name] = sum(squares.values())
        return ActivationTerm(moving, {name: weight * squares[name] / len(t) for name, t in moving.items()})

    def benefit(self, name: str, like: Tensor) -> Tensor | None:
        """κ t, to be added to what an element gains by moving coordinates onto each other."""
        return self.worth[name] * self.tables[name].to(like) if name in self.tables else None

    def missing(self, name: str, element: Element) -> float:
        """2κ (n − Σ t g): zero where every coordinate meets its like."""
        if name not in self.tables:
            return 0.0
        table = self.tables[name]
        return 2 * self.worth[name] * (len(table) - float((table.cpu() * element.signed_matrix()).sum()))


def _square(model: NormalForm, name: str) -> float:
    return float(sum(t.square().sum(dtype=torch.float64) for part in model.pieces(name) for t in part.values()))
