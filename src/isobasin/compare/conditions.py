"""The conditions under which the group is all there is: full rank, patterns that are distinct and not zero.

Two attention layers whose matrices have full column rank and whose patterns QKᵀ (under rotary positions the families
Q R_n Kᵀ) are pairwise distinct and not zero compute the same function only if an element of the group maps one to the
other. Where a condition fails, a larger group may act, and no element found proves nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.arch import HeadSpace
from isobasin.compare.rounding import unit
from isobasin.match.attention import AttentionMatrices, attention_matrices
from isobasin.match.heads import RANK, query_key_cost
from isobasin.normalize import normalize
from isobasin.views import Doubled
from isobasin.weights import Weights


@dataclass(frozen=True)
class Failure:
    """A condition that does not hold, and where."""

    model: str
    layer: int
    heads: tuple[int, ...]
    condition: str

    @property
    def facts(self) -> dict[str, object]:
        return {"model": self.model, "layer": self.layer, "heads": list(self.heads), "condition": self.condition}

    def __str__(self) -> str:
        heads = " and ".join(map(str, self.heads))
        return f"{self.model}, layer {self.layer}, head {heads}: {self.condition}"


def failures(weights: Weights, model: str) -> tuple[Failure, ...]:
    """Every condition that fails in this model, at the precision it is stored in; one layer in memory at a time."""
    flat = Doubled(normalize(weights).apply(weights))
    least = max(RANK, 4 * unit(weights.dtype))
    return tuple(
        Failure(model, int(heads.name.removeprefix("heads")), where, what)
        for heads in weights.arch.heads()
        for where, what in _failing(attention_matrices(weights.arch, heads, flat), heads, least)
    )


def _failing(m: AttentionMatrices, heads: HeadSpace, least: float) -> Iterator[tuple[tuple[int, ...], str]]:
    for name, x in (("Q", m.q), ("K", m.k), ("V", m.v), ("O", m.o)):
        for head, (rank, full) in enumerate(_ranks(x, least)):
            if rank < full:
                yield (head,), f"{name} has rank {rank} of {full}"
    sizes, cost = patterns(m, heads)
    for head in torch.nonzero(sizes <= least**2 * sizes.max()).flatten().tolist():
        yield (head,), "its pattern is zero"
    for i, j in equal_patterns(sizes, cost, least):
        if heads.permutable:  # slopes tell other heads apart
            yield (i, j), "equal patterns"


def _ranks(x: Tensor, least: float) -> list[tuple[int, int]]:
    values = torch.linalg.svdvals(x)
    kept = values > least * values[..., :1].clamp(min=1e-300)
    return [(int(k.sum()), x.shape[-1]) for k in kept]


def patterns(m: AttentionMatrices, heads: HeadSpace) -> tuple[Tensor, Tensor]:
    """The square of each query head's pattern, and of the distances between them."""
    nothing = AttentionMatrices(*(torch.zeros_like(x) for x in (m.q, m.k, m.v, m.o)))
    return query_key_cost(m, nothing, heads, "complete")[:, 0], query_key_cost(m, m, heads, "complete")


def equal_patterns(sizes: Tensor, cost: Tensor, least: float) -> list[tuple[int, int]]:
    """Pairs of heads whose patterns agree; zero patterns are not counted among them."""
    seen = sizes > least**2 * sizes.max()
    near = cost <= least**2 * (sizes[:, None] + sizes)
    both = torch.triu(near & seen[:, None] & seen, diagonal=1)
    return [(i, j) for i, j in torch.nonzero(both).tolist()]
