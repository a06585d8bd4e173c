"""Stage 2 for rotary positions: one complex number per rotary pair, at its global minimum, in one batch.

With q = col₁ + i·col₂ of a pair, B's pair moves as q → u q, k → k / ū, and the distance to A's pair is

    L(u) = ‖q_A‖² + ‖k_A‖² + x η_Q + η_K / x − 2 |r γ_Q + γ_K / r|,   x = r² = |u|²,
    arg u = −arg(r γ_Q + γ_K / r),

with η = ‖·_B‖² and γ = ⟨·_A, ·_B⟩. The stationary points are the positive roots of a polynomial of degree
six, and there can be two minima. Yet no polynomial has to be solved.

Scale x = √(η_K/η_Q) e^y and put a = |γ_Q| η_Q^{-¾} η_K^{-¼}, b = |γ_K| η_K^{-¾} η_Q^{-¼}, k = cos of the
angle between γ_Q and γ_K. Up to a positive factor and a constant L is F(y) = cosh y − h(y), with
h² = a² e^y + b² e^{−y} + 2abk. Let a ≥ b; else turn y around.

1. *The better side.* For y ≥ 0, h(y)² − h(−y)² = 2(a² − b²) sinh y ≥ 0, so F(y) ≤ F(−y): the global minimum
   is at some y ≥ 0.
2. *It is alone there.* With z = y + log(a/b) ≥ y, F' = 0 reads (sinh y / sinh z) √(cosh z + k) = √(ab/2).
   The left side grows with y, so there is at most one root y* > 0, and F' → ∞. (b = 0 is the limit; where
   a = b has no such root, the minimum is y* = 0.)
3. *Newton from the right gets there.* h' ≥ 0 and h‴/h' = ¼ (1 − 3(1 − k²)/(cosh z + k)²) ≤ ¼, so where
   F' ≥ 0 also F‴ = sinh y − h‴ ≥ ¾ sinh y ≥ 0. F' is convex on [y*, ∞), and Newton's method for F' = 0
   falls to y* monotonically from any start on its right, with no safeguard.
4. *A start on the right.* h' is largest at k = −1, where it is ½(a e^{y/2} + b e^{−y/2}) ≤ a cosh(y/2);
   hence F' ≥ 0 from y₀ = 2 asinh(a/2) on.

What is not determined, and the rule for it. A norm below 1e-100 counts as zero. With η_Q = 0 < |γ_K| the
minimum is r = η_K / |γ_K|; with η_K = 0 < |γ_Q| it is r = |γ_Q| / η_Q. If both η are zero, or one is and the
other's γ too (the infimum then lies at r = 0 or ∞, where no u is), u = 1. If both γ are zero,
u = (η_K / η_Q)^¼.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.shapes import Complex, Float
from isobasin.symmetries.attention import Layout, complex_pairs

ZERO = 1e-200  # squared norms below this count as zero


@dataclass(frozen=True)
class RotaryAlignment:
    """`u` moves B's pairs next to A's; `objective` is L(u) less ‖q_A‖² + ‖k_A‖² (which no u changes)."""

    u: Complex[Tensor, "*pairs"]
    objective: Float[Tensor, "*pairs"]


@dataclass(frozen=True)
class PairConstants:
    """All that L knows of a rotary pair; `norm_a` = ‖q_A‖² + ‖k_A‖²."""

    eta_q: Float[Tensor, "*pairs"]
    eta_k: Float[Tensor, "*pairs"]
    gamma_q: Complex[Tensor, "*pairs"]
    gamma_k: Complex[Tensor, "*pairs"]
    norm_a: Float[Tensor, "*pairs"]


def pair_constants(
    q_a: Float[Tensor, "*batch d r"],
    k_a: Float[Tensor, "*batch d_k r"],
    q_b: Float[Tensor, "*batch d r"],
    k_b: Float[Tensor, "*batch d_k r"],
    *,
    layout: Layout,
) -> PairConstants:
    """η and γ of every pair: sums over the d rows of the complex columns, shape (*batch, r/2)."""
    qa, ka, qb, kb = (complex_pairs(x, layout) for x in (q_a, k_a, q_b, k_b))
    return PairConstants(
        _square(qb),
        _square(kb),
        (qa.conj() * qb).sum(-2),
        (ka.conj() * kb).sum(-2),
        _square(qa) + _square(ka),
    )


def _square(columns: Complex[Tensor, "*batch d p"]) -> Float[Tensor, "*batch p"]:
    return torch.view_as_real(columns).square().sum((-1, -3))


def rotary_objective(
    u: Complex[Tensor, "*pairs"],
    eta_q: Float[Tensor, "*pairs"],
    eta_k: Float[Tensor, "*pairs"],
    gamma_q: Complex[Tensor, "*pairs"],
    gamma_k: Complex[Tensor, "*pairs"],
) -> Float[Tensor, "*pairs"]:
    """L(u) less the norm of A, for any u: |u|² η_Q + η_K / |u|² − 2 Re(u γ_Q + γ_K / ū)."""
    x = u.abs().square()
    return x * eta_q + eta_k / x - 2 * (u * gamma_q + gamma_k / u.conj()).real


def align_rotary(
    eta_q: Float[Tensor, "*pairs"],
    eta_k: Float[Tensor, "*pairs"],
    gamma_q: Complex[Tensor, "*pairs"],
    gamma_k: Complex[Tensor, "*pairs"],
) -> RotaryAlignment:
    """The u that minimises L for every pair at once; proof and rules are at the top of this module.

    >>> one = torch.ones(1, dtype=torch.float64)
    >>> align_rotary(4 * one, one / 4, 2j * one, one * 0.5j).u  # q_B = 2i q_A, k_B = i/2 k_A
    tensor([3.0616e-17-0.5000j], dtype=torch.complex128)
    """
    eta_q, eta_k = eta_q.to(torch.float64), eta_k.to(torch.float64)
    gamma_q, gamma_k = gamma_q.to(torch.complex128), gamma_k.to(torch.complex128)
    r = _radius(eta_q, eta_k, gamma_q, gamma_k)
    u = torch.polar(r, -(r * gamma_q + gamma_k / r).angle())
    return RotaryAlignment(u, rotary_objective(u, eta_q, eta_k, gamma_q, gamma_k))


def _radius(eta_q: Tensor, eta_k: Tensor, gamma_q: Tensor, gamma_k: Tensor) -> Tensor:
    """|u|, with the rule for vanishing norms; the places it does not use are filled with ones, not NaN."""
    size_q, size_k = gamma_q.abs(), gamma_k.abs()
    has_q, has_k = eta_q > ZERO, eta_k > ZERO
    one = torch.ones_like(eta_q)
    safe_q, safe_k = torch.where(has_q, eta_q, one), torch.where(has_k, eta_k, one)
    ratio = (safe_k / safe_q) ** 0.25
    a, b = size_q / safe_q / ratio, size_k / safe_k * ratio
    # |γ̂_Q + γ̂_K|² is 2 + 2k without the cancellation that k = −1 would bring
    e = a * b * (gamma_q.sgn() + gamma_k.sgn()).abs().square()
    y = _minimum(torch.maximum(a, b), torch.minimum(a, b), e)
    both = ratio * torch.exp(torch.where(a >= b, y, -y) / 2)
    only_q = torch.where(size_q > ZERO, size_q / safe_q, one)
    only_k = torch.where(size_k > ZERO, safe_k / size_k.clamp_min(ZERO), one)
    one_sided = torch.where(has_q, only_q, torch.where(has_k, only_k, one))
    return torch.where(has_q & has_k, both, one_sided)


def _minimum(a: Tensor, b: Tensor, e: Tensor, max_steps: int = 100) -> Tensor:
    """The y ≥ 0 that minimises cosh y − h(y), h² = (a e^{y/2} − b e^{−y/2})² + e, for a ≥ b.

    Newton from the right; quadratic but at a = b, h(0) = a², where the root is triple and each step leaves
    two thirds of y.
    """
    found = 2 * torch.asinh(a.flatten() / 2)
    left = torch.arange(len(found), device=a.device)
    y, a_left, b_left, e_left = found, a.flatten(), b.flatten(), e.flatten()
    for _ in range(max_steps):
        slope, curvature = _derivatives(y, a_left, b_left, e_left)
        # exact arithmetic never has slope < 0 or curvature ≤ 0 here: either means that only rounding is left
        step = torch.where((slope > 0) & (curvature > 0), slope / curvature, 0).minimum(y)
        y = y - step
        found = found.index_copy(0, left, y)
        moving = step > 4e-16 * (1 + y)
        if not bool(moving.any()):
            break
        left, y, a_left, b_left, e_left = (x[moving] for x in (left, y, a_left, b_left, e_left))
    return found.reshape(a.shape)


def _derivatives(y: Tensor, a: Tensor, b: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """F' and F'' of F = cosh y − h: h' = m s / 2h, h'' = (m⁴ + e (m² + s²)) / 4h³, all terms positive."""
    root = torch.exp(y / 2)
    m, s = a * root - b / root, a * root + b / root
    p = (m * m + e).clamp_min(torch.finfo(y.dtype).tiny)
    h = p.sqrt()
    slope = torch.sinh(y) - m * s / (2 * h)
    curvature = torch.cosh(y) - (m * m * (m * m / p) + e / p * (m * m + s * s)) / (4 * h)
    return slope, curvature
