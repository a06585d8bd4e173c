"""Which head goes where: the linear assignment problem, plain and in two levels.

A cost is a square table, rows the reference A, columns the moving model B; an answer `p` says that B's head
`p[i]` lands on A's head `i`. Where the identity is among the best answers it is the answer, so equal heads
stay where they are; any other exact tie is broken by scipy, the same way every time.
"""

from dataclasses import dataclass

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.shapes import Float, Int


@dataclass(frozen=True)
class GroupedAssignment:
    """`groups[i]`: B's kv group that lands on A's group i. `heads[i]`: B's query head that lands on A's i."""

    groups: Int[Tensor, "g"]
    heads: Int[Tensor, "h"]
    cost: float


def assign(cost: Float[Tensor, "rows columns"]) -> Int[Tensor, "rows"]:
    """The permutation p that minimises Σᵢ cost[i, p(i)].

    >>> assign(torch.tensor([[4.0, 1.0], [2.0, 3.0]])).tolist()
    [1, 0]
    """
    if cost.ndim != 2 or cost.shape[0] != cost.shape[1]:
        raise IsobasinError(f"head costs have shape {tuple(cost.shape)}: expected a square table, one row per head")
    if not bool(torch.isfinite(cost).all()):
        raise IsobasinError("head costs hold NaN or infinity: look for non-finite weights in A and B")
    table = cost.detach().to("cpu", torch.float64)
    best = torch.as_tensor(linear_sum_assignment(table.numpy())[1], dtype=torch.int64)
    identity = torch.arange(len(best))
    if bool(table.diagonal().sum() <= table[identity, best].sum()):
        best = identity
    return best.to(cost.device)


def assign_grouped(cost: Float[Tensor, "rows columns"], n_groups: int) -> GroupedAssignment:
    """Permute kv groups, and query heads inside each group, at the least total cost.

    Query heads i of A and j of B may meet only if their whole groups do. For every pair of groups the best
    inner assignment is one number; the outer assignment over groups adds them up. Exact, since the inner
    problems do not touch each other. `n_groups = h` is plain `assign`, `n_groups = 1` is one shared kv head.
    """
    n_heads = cost.shape[0]
    if n_groups < 1 or n_heads % n_groups:
        raise IsobasinError(f"{n_heads} query heads in {n_groups} kv groups: expected a divisor of {n_heads}")
    size = n_heads // n_groups
    # blocks[g, k] holds the costs between the query heads of A's group g and of B's group k
    blocks = cost.reshape(n_groups, size, n_groups, size).transpose(1, 2)
    inner = torch.stack([torch.stack([assign(block) for block in row]) for row in blocks])
    # gather, then sum: the total of each inner problem at its own optimum
    totals = blocks.gather(-1, inner.unsqueeze(-1)).sum((-1, -2))
    groups = assign(totals)
    rows = torch.arange(n_groups, device=cost.device)
    heads = groups.unsqueeze(-1) * size + inner[rows, groups]
    return GroupedAssignment(groups, heads.reshape(-1), float(totals[rows, groups].sum()))
