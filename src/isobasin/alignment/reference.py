"""The matcher `reference`: the paper's own two stages, kept as the baseline of benchmarks and of the study.

Stage 2 is gradient descent for GL, and Brent's method for rotary pairs.

Nothing here is clever, on purpose. Stage 1 of the recipe is `head_cost.product_cost(..., centre=True)`.

* Absolute positions: U starts at polar(C_Q + C_K), the closest orthogonal map, and descends
  L(U) = ‖Q_A − Q_B Uᵀ‖² + ‖K_A − K_B U⁻¹‖² on the full matrices, head by head.
* RoPE: a scalar search for x = |u|², pair by pair.

The paper leaves learning rate, steps and stopping open. An honest choice: Adam, whose rate halves whenever
twenty steps bring neither a lower loss nor a smaller gradient (a fixed rate never comes to rest), until the
relative gradient is below `tol`.
"""

import math
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from isobasin.alignment.candidates import AlignOptions, align_by_descent
from isobasin.alignment.head_linear import Method, align_linear, head_grams
from isobasin.alignment.head_rotary import ZERO, align_rotary, pair_constants
from isobasin.alignment.heads import (
    HeadDistance,
    HeadMatch,
    HeadMatcher,
    norm_signs,
    pair_heads,
    permuted,
    phases,
    rank_deficient,
    rotary_element,
)
from isobasin.alignment.result import Alignment
from isobasin.arch import HeadSpace
from isobasin.arguments import check_fields
from isobasin.errors import IsobasinError
from isobasin.groups import GL, Blocks, Element, HeadsElement, Matrix, Phases
from isobasin.groups.group import polar
from isobasin.shapes import Bool, Complex, Float, Int
from isobasin.symmetries import ATTENTION_SCOPES, check_scope
from isobasin.symmetries.attention import AttentionMatrices, Layout, stacked
from isobasin.weights import Weights


@dataclass(frozen=True)
class ReferenceMatching(HeadMatcher):
    """The published recipe: row-centred products, then gradient descent on U, or Brent per rotary pair."""

    scope: str = "all-attention"
    stage2: Method = "full"
    head_distance: HeadDistance = "frobenius"
    learning_rate: float = 1e-2
    max_steps: int = 2000
    tol: float = 1e-6

    def __post_init__(self) -> None:
        check_fields(self)
        check_scope(self.scope)

    def prepared(self, a: Weights, b: Weights) -> "ReferenceMatching":
        return self

    def align(self, b: Weights, a: Weights, options: AlignOptions) -> Alignment:
        if self.scope not in ATTENTION_SCOPES:
            raise IsobasinError(
                f"matcher reference aligns attention only, but the scope is {self.scope}: use first-attention or "
                "all-attention"
            )
        if any(heads.shared_rotary for heads in b.arch.heads()):
            raise IsobasinError(
                "matcher reference does not know latent attention, whose heads share columns of their keys: use weights"
            )
        return align_by_descent(b, a, self.scope, self, options)

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
        if heads.qk_norm:
            return norm_signs(a, b, heads, self.stage2), torch.ones(heads.n_kv_heads, dtype=torch.bool)
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


PATIENCE = 20


@dataclass(frozen=True)
class RecipeAlignment:
    """The best U seen, L there (from the matrices), and whether gradient or target was reached."""

    u: Float[Tensor, "*batch n n"]
    objective: Float[Tensor, "*batch"]
    converged: Bool[Tensor, "*batch"]
    steps: Int[Tensor, "*batch"]


def orthogonal_start(q_a: Tensor, k_a: Tensor, q_b: Tensor, k_b: Tensor) -> Float[Tensor, "*batch n n"]:
    """polar(Q_AᵀQ_B + K_AᵀK_B): the best U among orthogonal ones, where U⁻¹ = Uᵀ."""
    return polar(q_a.mT @ q_b + k_a.mT @ k_b)


def loss_and_gradient(q_a: Tensor, k_a: Tensor, q_b: Tensor, k_b: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """L(U) and ∂L/∂U = −2 R_qᵀ Q_B + 2 U⁻ᵀ (K_Bᵀ R_k) U⁻ᵀ, for the residuals R_q and R_k."""
    v = torch.linalg.inv_ex(u).inverse
    rest_q, rest_k = q_a - q_b @ u.mT, k_a - k_b @ v
    loss = rest_q.square().sum((-1, -2)) + rest_k.square().sum((-1, -2))
    return loss, 2 * (v.mT @ (k_b.mT @ rest_k) @ v.mT - rest_q.mT @ q_b)


def descend_linear(
    q_a: Float[Tensor, "*batch d n"],
    k_a: Float[Tensor, "*batch d_k n"],
    q_b: Float[Tensor, "*batch d n"],
    k_b: Float[Tensor, "*batch d_k n"],
    *,
    learning_rate: float = 1e-2,
    max_steps: int = 2000,
    tol: float = 1e-8,
    target: Float[Tensor, "*batch"] | None = None,
) -> RecipeAlignment:
    """Adam on U from the orthogonal start, until every head of the batch is at rest (or below `target`)."""
    size = 2 * (_norm(q_a.mT @ q_b) + _norm(k_a.mT @ k_b))  # what the gradient is measured by
    u = orthogonal_start(q_a, k_a, q_b, k_b)
    loss, gradient = loss_and_gradient(q_a, k_a, q_b, k_b, u)
    relative = _norm(gradient) / size
    goal = torch.full_like(loss, -torch.inf) if target is None else target
    best, best_u, calmest, waited = loss, u, relative, torch.zeros_like(loss)
    rate = torch.full_like(loss, learning_rate)
    mean, square = torch.zeros_like(u), torch.zeros_like(u)
    done = (relative <= tol) | (loss <= goal)
    steps = torch.zeros_like(done, dtype=torch.int64)
    for step in range(1, max_steps + 1):
        if bool(done.all()):
            break
        mean, square = 0.9 * mean + 0.1 * gradient, 0.999 * square + 0.001 * gradient.square()
        move = (mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)).sqrt() + 1e-12)
        u = torch.where(_wide(done), u, u - _wide(rate) * move)
        loss, gradient = loss_and_gradient(q_a, k_a, q_b, k_b, u)
        relative = _norm(gradient) / size
        steps = steps + ~done
        better = loss < best
        best, best_u = torch.where(better, loss, best), torch.where(_wide(better), u, best_u)
        waited = torch.where(better | (relative < calmest), 0, waited + 1)
        calmest = torch.minimum(relative, calmest)
        rate = torch.where(waited >= PATIENCE, rate / 2, rate)
        waited = torch.where(waited >= PATIENCE, 0, waited)
        done = done | (relative <= tol) | (loss <= goal)
    return RecipeAlignment(best_u, best, done, steps)


def align_linear_recipe(
    q_a: Float[Tensor, "h d n"],
    k_a: Float[Tensor, "h d_k n"],
    q_b: Float[Tensor, "h d n"],
    k_b: Float[Tensor, "h d_k n"],
    *,
    learning_rate: float = 1e-2,
    max_steps: int = 2000,
    tol: float = 1e-8,
    target: Float[Tensor, " h"] | None = None,
) -> RecipeAlignment:
    """`descend_linear`, head by head, as published."""
    heads = [
        descend_linear(
            *(x[i].to(torch.float64) for x in (q_a, k_a, q_b, k_b)),
            learning_rate=learning_rate,
            max_steps=max_steps,
            tol=tol,
            target=None if target is None else target[i],
        )
        for i in range(len(q_a))
    ]
    return RecipeAlignment(
        torch.stack([head.u for head in heads]),
        torch.stack([head.objective for head in heads]),
        torch.stack([head.converged for head in heads]),
        torch.stack([head.steps for head in heads]),
    )


def align_rotary_recipe(
    eta_q: Float[Tensor, "*pairs"],
    eta_k: Float[Tensor, "*pairs"],
    gamma_q: Complex[Tensor, "*pairs"],
    gamma_k: Complex[Tensor, "*pairs"],
    *,
    factor: float = 2.0,
) -> Complex[Tensor, "*pairs"]:
    """u per rotary pair by Brent's method on g(x) = x η_Q + η_K / x − factor · |r γ_Q + γ_K / r|, x = r².

    The paper prints factor 4; with γ = ⟨·_A, ·_B⟩ it is 2. All η must be positive. The search runs over
    log x, so that x stays positive; it finds one minimum of the possible two.
    """
    constants = zip(*(x.flatten().tolist() for x in (eta_q, eta_k, gamma_q, gamma_k)))
    found = [brent_pair(*pair, factor=factor) for pair in constants]
    return torch.tensor(found, dtype=torch.complex128, device=eta_q.device).reshape(eta_q.shape)


def brent_pair(eta_q: float, eta_k: float, gamma_q: complex, gamma_k: complex, *, factor: float = 2.0) -> complex:
    """One rotary pair of `align_rotary_recipe`."""
    a, b, c = abs(gamma_q) ** 2, abs(gamma_k) ** 2, 2 * (gamma_q * gamma_k.conjugate()).real

    def g(log_x: float) -> float:
        x = math.exp(log_x)
        return x * eta_q + eta_k / x - factor * math.sqrt(max(a * x + b / x + c, 0.0))

    r = math.exp(minimize_scalar(g, method="brent").x / 2)
    z = r * gamma_q + gamma_k / r
    return r * (z.conjugate() / abs(z) if z else 1 + 0j)


def _norm(x: Tensor) -> Tensor:
    return x.square().sum((-1, -2)).sqrt()


def _wide(x: Tensor) -> Tensor:
    return x.unsqueeze(-1).unsqueeze(-1)
