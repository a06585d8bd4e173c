"""Matchers: frozen choices of how to find the element. Their constructors only store."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor

from isobasin.arch import HeadSpace
from isobasin.match.assignment import assign_grouped
from isobasin.match.attention import AttentionMatrices
from isobasin.match.headcost import cosine_cost, product_cost, singular_cost
from isobasin.match.heads import HeadDistance, HeadMatch, match_heads, permuted, query_key_cost
from isobasin.match.linear import Method

_VALUE_COSTS: Mapping[HeadDistance, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "complete": product_cost,
    "frobenius": product_cost,
    "singular": singular_cost,
    "cosine": cosine_cost,
}


class Matcher(Protocol):
    """Anything that can match one attention layer of B to one of A."""

    @property
    def scope(self) -> str: ...

    def match(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch: ...


@dataclass(frozen=True)
class WeightMatching:
    """From the weights alone: exact head costs from Grams, and the global or Newton-polished optimum in each head."""

    scope: str = "model"
    stage2: Method = "full"
    head_distance: HeadDistance = "complete"

    def match(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch:
        return match_heads(a, b, heads, stage2=self.stage2, distance=self.head_distance)


@dataclass(frozen=True)
class ActivationMatching:
    """With the activations of unlabeled inputs, from `isobasin.moments`.

    Attention scopes: in the metric of what each layer reads; Q, K, V are weighted by `roots[layer]`, which is Σ^½, the
    mean over both models. Whole models: `agreements[space]`, which coordinates go together, stand beside the weights,
    `pull` times as heavy as they are.
    """

    roots: Mapping[str, Tensor] = field(default_factory=dict)
    scope: str = "model"
    stage2: Method = "full"
    head_distance: HeadDistance = "complete"
    agreements: Mapping[str, Tensor] = field(default_factory=dict)
    pull: float = 0.3

    def match(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch:
        if heads.name in self.agreements:
            return self._match_agreeing(a, b, heads, self.agreements[heads.name].to(a.q))
        root = self.roots[heads.name].to(a.q)
        return match_heads(a.weighted(root), b.weighted(root), heads, stage2=self.stage2, distance=self.head_distance)

    def _match_agreeing(
        self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace, agreement: Tensor
    ) -> HeadMatch:
        """Heads paired by weights and agreement together, each relative to its mean; then Stage 2 in place."""
        fixed = replace(heads, permutable=False)
        if not heads.permutable:
            return match_heads(a, b, fixed, stage2=self.stage2)
        value_cost = _VALUE_COSTS[self.head_distance](a.v, a.o, b.v, b.o)
        cost = query_key_cost(a, b, heads, self.head_distance) + value_cost
        pairs = assign_grouped(_relative(cost) + self.pull * _relative(1 - agreement), heads.n_kv_heads)
        found = match_heads(a, permuted(b, pairs), fixed, stage2=self.stage2)
        queries = pairs.heads.reshape(heads.n_kv_heads, -1) - pairs.groups[:, None] * heads.group_size
        element = replace(found.element, kv=pairs.groups.cpu(), queries=queries.cpu())
        return replace(found, element=element)


def _relative(cost: Tensor) -> Tensor:
    return cost / cost.mean().clamp_min(1e-300)
