"""How two models overlap on one space: all that ‖A − g·B‖² says about the element g.

For a tensor with an axis in the space, overlap[i, j] is the product of A's slice i and B's slice j, summed over the
other axes; sums over all tensors of the space make an `Overlap`. `Group.nearest` finds the best element for one.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.shapes import Float


@dataclass(frozen=True)
class Overlap:
    """Sums over axes that move by g, by its dual g⁻ᵀ, and by its permutation part; and the sizes of B's slices.

    `signed` moves by the permutation and the signs of g, or by a rotation as a whole: what activations add.
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
