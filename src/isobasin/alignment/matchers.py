"""Matchers that need no training: from the weights alone, or with the activations of unlabeled data.

Each is a frozen choice. Its constructor only stores; `align` does the work. `ReferenceMatching`, the paper's own
recipe, is in `reference`, `LearnedMatching` in `isobasin.learn`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from isobasin.alignment.candidates import AlignOptions, align_by_descent
from isobasin.alignment.head_linear import Method
from isobasin.alignment.heads import HeadDistance, HeadMatch, HeadMatcher, head_cost, match_heads, match_paired_heads
from isobasin.alignment.result import Alignment
from isobasin.arch import HeadSpace
from isobasin.arguments import check_fields
from isobasin.errors import IsobasinError
from isobasin.groups.assignment import assign_grouped
from isobasin.symmetries import ATTENTION_SCOPES, check_scope
from isobasin.symmetries.attention import AttentionMatrices
from isobasin.weights import Weights


@dataclass(frozen=True)
class WeightMatching(HeadMatcher):
    """From the weights alone: exact head costs from Grams, and the global or Newton-polished optimum in each head."""

    scope: str = "model"
    stage2: Method = "full"
    head_distance: HeadDistance = "complete"

    def __post_init__(self) -> None:
        check_fields(self)
        check_scope(self.scope)

    def prepared(self, a: Weights, b: Weights) -> "WeightMatching":
        return self

    def align(self, b: Weights, a: Weights, options: AlignOptions) -> Alignment:
        return align_by_descent(b, a, self.scope, self, options)

    def rough(self) -> "WeightMatching":
        return replace(self, stage2="orthogonal")

    def match(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch:
        return match_heads(a, b, heads, stage2=self.stage2, distance=self.head_distance)


@dataclass(frozen=True)
class ActivationMatching:
    """With the activations of unlabeled data: a file of text, token ids or images, or a list of model inputs.

    Attention scopes: Q, K and V of a layer are compared in the metric of what it reads, E[yyᵀ] over both models. Scopes
    with units or the stream: correlations of activations between A and B are a term of the objective beside the
    weights, `activation_weight` times as heavy as they are.
    """

    data: "str | Path | Sequence[Mapping[str, Tensor]]"
    scope: str = "model"
    stage2: Method = "full"
    head_distance: HeadDistance = "complete"
    activation_weight: float = 0.3
    seed: int = 0
    fixed_basis: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)
        check_scope(self.scope)

    def prepared(self, a: Weights, b: Weights) -> "PreparedActivationMatching":
        """Both models run on the data, and what this scope needs of their activations."""
        from isobasin.alignment.activations import correlations, reading_roots, unlabeled_inputs

        inputs = [unlabeled_inputs(self.data, model, seed=self.seed) for model in (a, b)]
        choices: dict[str, Any] = {"stage2": self.stage2, "head_distance": self.head_distance}
        if self.scope in ATTENTION_SCOPES:
            heads = ActivationHeadMatcher(roots=reading_roots(a, b, *inputs), **choices)
        else:
            tables = correlations(a, b, inputs[0])
            heads = ActivationHeadMatcher(correlations=tables, activation_weight=self.activation_weight, **choices)
        return PreparedActivationMatching(self.scope, heads)

    def align(self, b: Weights, a: Weights, options: AlignOptions) -> Alignment:
        return self.prepared(a, b).align(b, a, options)


@dataclass(frozen=True)
class PreparedActivationMatching:
    """`ActivationMatching` after both models have run."""

    scope: str
    heads: "ActivationHeadMatcher"

    @property
    def fixed_basis(self) -> bool:
        return bool(self.heads.correlations)

    def prepared(self, a: Weights, b: Weights) -> "PreparedActivationMatching":
        return self

    def align(self, b: Weights, a: Weights, options: AlignOptions) -> Alignment:
        return align_by_descent(b, a, self.scope, self.heads, options)


@dataclass(frozen=True)
class ActivationHeadMatcher(HeadMatcher):
    """Pairs heads with what activations say: `roots[layer]` is Σ^½ of what a layer reads, `correlations[space]` says
    which coordinates of A and B go together."""

    roots: Mapping[str, Tensor] = field(default_factory=dict)
    correlations: Mapping[str, Tensor] = field(default_factory=dict)
    stage2: Method = "full"
    head_distance: HeadDistance = "complete"
    activation_weight: float = 0.3

    def rough(self) -> "ActivationHeadMatcher":
        return replace(self, stage2="orthogonal")

    def match(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch:
        if heads.name in self.correlations:
            return self._match_correlated(a, b, heads, self.correlations[heads.name].to(a.q))
        if heads.name not in self.roots:
            raise IsobasinError(
                f"{heads.name}: transformers runs these heads without modules of their own, so their activations are "
                "not seen; match by weights"
            )
        root = self.roots[heads.name].to(a.q)
        return match_heads(a.weighted(root), b.weighted(root), heads, stage2=self.stage2, distance=self.head_distance)

    def _match_correlated(
        self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace, correlation: Tensor
    ) -> HeadMatch:
        """Heads paired by weights and correlation together, each relative to its mean; then Stage 2 in place."""
        if not heads.permutable:
            return match_heads(a, b, heads, stage2=self.stage2)
        cost = head_cost(a, b, heads, self.head_distance)
        total = _relative(cost) + self.activation_weight * _relative(1 - correlation)
        return match_paired_heads(a, b, heads, assign_grouped(total, heads.n_kv_heads), stage2=self.stage2)


def _relative(cost: Tensor) -> Tensor:
    return cost / cost.mean().clamp_min(1e-300)
