"""Where the canonical point of a model is not determined to the precision of its file: which space, why, by how much.

Estimates to first order: the weights of a copy carry the rounding of its file, enlarged by the condition of the
elements that moved it. A choice (an order, a sign, a rotation) whose quantity is not larger than that error may differ
between copies.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobasin.shapes import Float
from isobasin.weights import Weights

LIMIT = 1e-3  # relative change of the weights of a space above which it is reported
# Growth of errors by the elements that a copy was moved by; calibrated by tests/campaigns/canonical.py.
CONDITION = 4


@dataclass(frozen=True)
class Doubt:
    """A space whose canonical weights copies of a model may not share."""

    space: str
    reason: str
    uncertainty: float  # the relative change that its weights may have; 1: another order, sign or rotation

    def to_dict(self) -> dict[str, Any]:
        return {"space": self.space, "reason": self.reason, "uncertainty": self.uncertainty}

    def __str__(self) -> str:
        return f"{self.space}: {self.reason} (its weights may change by {self.uncertainty:.0e} of their size)"


def noise_of(weights: Weights) -> float:
    """The relative error of the weights of a copy, from the coarsest type in the file."""
    stored = (dtype for name, dtype in weights.dtypes.items() if not weights.arch.tensors[name].buffer)
    return CONDITION * max(torch.finfo(dtype).eps for dtype in stored) / 2


def ties(keys: Float[Tensor, " n"], noise: Float[Tensor, " n"], order: Tensor) -> list[tuple[int, int]]:
    """Neighbours in a sorted order whose keys differ by no more than their errors."""
    sorted_keys, errors = keys[order], noise[order]
    close = sorted_keys.diff() <= errors[1:] + errors[:-1]
    return [(int(order[i]), int(order[i + 1])) for i in torch.nonzero(close).flatten().tolist()]


def swap_uncertainty(rows: Float[Tensor, "n m"], pairs: list[tuple[int, int]]) -> float:
    """The relative change of all rows if the most different of these pairs changed places; 0 for equal rows."""
    size = float(rows.norm()) or 1.0
    return max((2**0.5 * float((rows[i] - rows[j]).norm()) / size for i, j in pairs), default=0.0)


def rotation_uncertainty(product: Float[Tensor, "n n"], error: float) -> float:
    """How much the polar factor of a matrix may change, where each of its entries has this error.

    ‖ΔU‖ ≤ 2 ‖ΔP‖ / (s₁ + s₂) with the two smallest singular values; a reflection where the smallest may be zero.
    """
    if not product.numel():
        return 0.0
    values = torch.linalg.svdvals(product)
    change = error * len(product) ** 0.5
    if float(values[-1]) <= change:
        return 1.0
    return min(1.0, 2 * change / float(values[-2:].sum()))


def large_doubts(space: str, reason: str, uncertainty: float) -> list[Doubt]:
    """The doubt, in a list, if it is large enough to be reported."""
    return [Doubt(space, reason, uncertainty)] if uncertainty > LIMIT else []
