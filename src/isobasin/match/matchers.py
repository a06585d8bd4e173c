"""Matchers: frozen choices of how to find the element. Their constructors only store."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from isobasin.arch import HeadSpace
from isobasin.match.attention import AttentionMatrices
from isobasin.match.heads import HeadDistance, HeadMatch, match_heads
from isobasin.match.linear import Method


class Matcher(Protocol):
    """Anything that can match one attention layer of B to one of A."""

    @property
    def scope(self) -> str: ...

    def match(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch: ...


@dataclass(frozen=True)
class WeightMatching:
    """From the weights alone: exact head costs from Grams, and the global or Newton-polished optimum in each head."""

    scope: str = "all-attention"
    stage2: Method = "full"
    head_distance: HeadDistance = "complete"

    def match(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch:
        return match_heads(a, b, heads, stage2=self.stage2, distance=self.head_distance)


@dataclass(frozen=True)
class ActivationMatching:
    """The same, in the metric of what each layer reads: Q, K, V are weighted by the root of its second moment.

    `roots[layer]` is Σ^½, the mean over both models, from `isobasin.match.moments`.
    """

    roots: Mapping[str, Tensor] = field(default_factory=dict)
    scope: str = "all-attention"
    stage2: Method = "full"
    head_distance: HeadDistance = "complete"

    def match(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch:
        root = self.roots[heads.name].to(a.q)
        return match_heads(a.weighted(root), b.weighted(root), heads, stage2=self.stage2, distance=self.head_distance)
