"""The matcher `reference`: the paper's own two stages, kept as the baseline of benchmarks and of the study."""

from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.arch import HeadSpace
from isobasin.groups import GL, Blocks, Element, HeadsElement, Matrix, Phases
from isobasin.match.attention import AttentionMatrices
from isobasin.match.heads import (
    HeadDistance,
    HeadMatch,
    pair_heads,
    permuted,
    phases,
    rank_deficient,
    rotary_element,
    stacked,
)
from isobasin.match.linear import Method, align_linear, head_grams
from isobasin.match.recipe import align_linear_recipe, align_rotary_recipe
from isobasin.match.rotary import ZERO, Layout, align_rotary, pair_constants


@dataclass(frozen=True)
class ReferenceMatching:
    """The published recipe: row-centred products, then gradient descent on U, or Brent per rotary pair."""

    scope: str = "all-attention"
    stage2: Method = "full"
    head_distance: HeadDistance = "frobenius"
    learning_rate: float = 1e-2
    max_steps: int = 2000
    tol: float = 1e-6

    def match(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch:
        # The layer's free directions are already removed, so centring is part of what it is given.
        found = pair_heads(a, b, heads, self.head_distance)
        moved = permuted(b, found)
        qk, qk_done = self._query_key(a, moved, heads)
        vo, vo_done = self._linear(a.v, stacked(a.o, heads), moved.v, stacked(moved.o, heads))
        queries = found.heads.reshape(heads.n_kv_heads, -1) - found.groups[:, None] * heads.group_size
        element = HeadsElement(found.groups, queries, qk, vo)
        return HeadMatch(element, qk_done & vo_done, rank_deficient(a, moved, heads))

    def _query_key(self, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> tuple[Element, Tensor]:
        r = heads.rotary
        q_a, q_b = stacked(a.q, heads), stacked(b.q, heads)
        done = torch.ones(heads.n_kv_heads, dtype=torch.bool)
        parts: list[Element] = []
        if r:
            parts.append(self._rotary(q_a[..., :r], a.k[..., :r], q_b[..., :r], b.k[..., :r], heads))
        if r < heads.d_head:
            u, done = self._linear(q_a[..., r:], a.k[..., r:], q_b[..., r:], b.k[..., r:])
            parts.append(u.dual())
        return parts[0] if len(parts) == 1 else Blocks(tuple(parts)), done

    def _rotary(self, q_a: Tensor, k_a: Tensor, q_b: Tensor, k_b: Tensor, heads: HeadSpace) -> Phases:
        if self.stage2 != "full":
            return rotary_element(q_a, k_a, q_b, k_b, heads, self.stage2)
        layout: Layout = "interleaved" if heads.interleaved else "half"
        c = pair_constants(q_a, k_a, q_b, k_b, layout=layout)
        u = align_rotary(c.eta_q, c.eta_k, c.gamma_q, c.gamma_k).u  # for the pairs that the recipe has no answer to
        sound = (c.eta_q > ZERO) & (c.eta_k > ZERO)
        some = (x[sound] for x in (c.eta_q, c.eta_k, c.gamma_q, c.gamma_k))
        return phases(u.masked_scatter(sound, align_rotary_recipe(*some)), heads)

    def _linear(self, q_a: Tensor, k_a: Tensor, q_b: Tensor, k_b: Tensor) -> tuple[Matrix, Tensor]:
        if self.stage2 != "full":
            closed = align_linear(head_grams(q_a, k_a, q_b, k_b), method=self.stage2)
            return Matrix(closed.u), closed.converged
        found = align_linear_recipe(
            q_a, k_a, q_b, k_b, learning_rate=self.learning_rate, max_steps=self.max_steps, tol=self.tol
        )
        return GL(q_a.shape[-1]).project(found.u), found.converged
