"""Stage 1: how far apart are two heads, whatever coordinates they are written in?

A head is (Q, K) or (V, O), each d × n; what its group leaves alone is the product M = X Yᵀ. The costs between
all heads of A (rows) and B (columns) come from n × n blocks, never from a d × d product:

    ⟨X_i Y_iᵀ, X_j Y_jᵀ⟩ = Σ (X_iᵀ X_j) ∘ (Y_iᵀ Y_j)

Add the costs of Q–K and V–O before the assignment: a head moves as one thing. With grouped queries X has h
heads and Y fewer (or the other way round): each of the fewer serves several neighbours, and costs are between
query heads.

| cost | sees | blind to |
|---|---|---|
| `product_cost` | ‖M_i − M_j‖², the paper's | under RoPE, a change of coordinates that the rotation notices |
| `complete_cost` | Q R_n Kᵀ for every offset n (RoPE) | nothing but the group H |
| `singular_cost` | the singular values of M | all orthogonal changes of input and output |
| `cosine_cost` | 1 − cos(M_i, M_j) | the size of a head |
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.shapes import Float
from isobasin.symmetries.attention import Layout, complex_pairs

LARGE = 2**30  # multiplications in one product beyond which it is done in float32
CHUNK = 2**22  # numbers held in float64 at once per side: 32 MB, whatever the width of the layer


def centred(y: Float[Tensor, "h d n"]) -> Float[Tensor, "h d n"]:
    """Y less the mean of its rows, which row-centres X Yᵀ: M − (M1)1ᵀ/d.

    Exact behind a LayerNorm whose gain is folded (under RoPE with zero shift), wrong elsewhere. Append a bias
    row after centring, not before.
    """
    return y - y.mean(-2, keepdim=True)


def product_cost(
    x_a: Float[Tensor, "h_a d_x n"],
    y_a: Float[Tensor, "g_a d_y n"],
    x_b: Float[Tensor, "h_b d_x n"],
    y_b: Float[Tensor, "g_b d_y n"],
    *,
    centre: bool = False,
) -> Float[Tensor, "rows columns"]:
    """‖X_i Y_iᵀ − X_j Y_jᵀ‖² between all heads, of the zero-offset products; `centre` as in `centred`."""
    if centre:
        y_a, y_b = centred(y_a), centred(y_b)
    squares_a, squares_b = product_squares(x_a, y_a), product_squares(x_b, y_b)
    cost = squares_a.unsqueeze(1) + squares_b - 2 * product_inner(x_a, y_a, x_b, y_b)
    return cost.clamp_min(0)  # equal heads cancel to rounding, which may fall below zero


def cosine_cost(
    x_a: Float[Tensor, "h_a d_x n"],
    y_a: Float[Tensor, "g_a d_y n"],
    x_b: Float[Tensor, "h_b d_x n"],
    y_b: Float[Tensor, "g_b d_y n"],
) -> Float[Tensor, "rows columns"]:
    """1 − ⟨M_i, M_j⟩ / (‖M_i‖ ‖M_j‖); a head that is zero is at 1 from every other."""
    sizes = product_squares(x_a, y_a).sqrt().unsqueeze(1) * product_squares(x_b, y_b).sqrt()
    inner = product_inner(x_a, y_a, x_b, y_b)
    return 1 - torch.where(sizes > 0, inner / sizes, 0.0)


def singular_cost(
    x_a: Float[Tensor, "h_a d_x n"],
    y_a: Float[Tensor, "g_a d_y n"],
    x_b: Float[Tensor, "h_b d_x n"],
    y_b: Float[Tensor, "g_b d_y n"],
) -> Float[Tensor, "rows columns"]:
    """Σ (σ_i − σ_j)² over the sorted singular values: never above `product_cost` (Mirsky)."""
    values_a, values_b = product_singular_values(x_a, y_a), product_singular_values(x_b, y_b)
    return (values_a.unsqueeze(1) - values_b).square().sum(-1)


def complete_cost(
    q_a: Float[Tensor, "h_a d_q n"],
    k_a: Float[Tensor, "g_a d_k n"],
    q_b: Float[Tensor, "h_b d_q n"],
    k_b: Float[Tensor, "g_b d_k n"],
    *,
    layout: Layout,
    rotary: int | None = None,
) -> Float[Tensor, "rows columns"]:
    """Σ_j ‖ΔS_j‖² + ‖ΔT_j‖² over rotary pairs, for the parts of Q R_n Kᵀ = Σ_j cos(nθ_j) S_j + sin(nθ_j) T_j.

    Per pair this is |q_A|²|k_A|² + |q_B|²|k_B|² − 2 Re(γ_Q conj γ_K), γ = ⟨·_A, ·_B⟩. Only the first `rotary`
    columns turn (all by default); the others add their `product_cost`.
    """
    r = q_a.shape[-1] if rotary is None else rotary
    qa, ka, qb, kb = (complex_pairs(x[..., :r], layout) for x in (q_a, k_a, q_b, k_b))
    n_a, n_b = max(len(qa), len(ka)), max(len(qb), len(kb))
    squares_a = _repeated(_squares(qa), n_a) * _repeated(_squares(ka), n_a)
    squares_b = _repeated(_squares(qb), n_b) * _repeated(_squares(kb), n_b)
    gamma_q, gamma_k = (_repeated(_repeated(_gamma(*x), n_a), n_b, dim=1) for x in ((qa, qb), (ka, kb)))
    inner = (gamma_q * gamma_k.conj()).real.sum(-1)
    cost = (squares_a.sum(-1).unsqueeze(1) + squares_b.sum(-1) - 2 * inner).clamp_min(0)
    if r == q_a.shape[-1]:
        return cost
    return cost + product_cost(q_a[..., r:], k_a[..., r:], q_b[..., r:], k_b[..., r:])


def product_inner(
    x_a: Float[Tensor, "h_a d_x n"],
    y_a: Float[Tensor, "g_a d_y n"],
    x_b: Float[Tensor, "h_b d_x n"],
    y_b: Float[Tensor, "g_b d_y n"],
) -> Float[Tensor, "rows columns"]:
    """⟨X_i Y_iᵀ, X_j Y_jᵀ⟩ for all pairs of heads, a few heads at a time."""
    n_a, n_b = max(len(x_a), len(y_a)), max(len(x_b), len(y_b))
    rows = []
    for i in _chunks(n_a, x_a, y_a):
        xa, ya = _some(x_a, i, n_a), _some(y_a, i, n_a)
        columns = [
            (_cross(xa, _some(x_b, j, n_b)) * _cross(ya, _some(y_b, j, n_b))).sum((-1, -3))
            for j in _chunks(n_b, x_b, y_b)
        ]
        rows.append(torch.cat(columns, dim=1))
    return torch.cat(rows)


def product_squares(x: Float[Tensor, "h d_x n"], y: Float[Tensor, "g d_y n"]) -> Float[Tensor, " heads"]:
    """‖X Yᵀ‖² per head, from its own two Grams."""
    n = max(len(x), len(y))
    return (_repeated(_grams(x), n) * _repeated(_grams(y), n)).sum((-1, -2))


def product_singular_values(x: Float[Tensor, "h d_x n"], y: Float[Tensor, "g d_y n"]) -> Float[Tensor, "heads n"]:
    """The n singular values of X Yᵀ (the others are zero): those of G_X^½ G_Y^½."""
    n = max(len(x), len(y))
    return torch.linalg.svdvals(_repeated(_root(_grams(x)), n) @ _repeated(_root(_grams(y)), n))


def _cross(x: Tensor, y: Tensor) -> Float[Tensor, "h_x n h_y n"]:
    """X_iᵀ Y_j for all i and j, as one matrix product: the bulk of Stage 1.

    In float32 for large layers: a sum of thousands of products is then right to 1e-6 of its size, and heads that are
    closer than that are the same head.
    """
    flat_x, flat_y = x.transpose(0, 1).flatten(1), y.transpose(0, 1).flatten(1)
    if flat_x.shape[0] * flat_x.shape[1] * flat_y.shape[1] > LARGE:
        flat_x, flat_y = flat_x.to(torch.float32), flat_y.to(torch.float32)
    blocks = (flat_x.mT @ flat_y).to(torch.float64)
    return blocks.reshape(len(x), x.shape[-1], len(y), y.shape[-1])


def _grams(x: Tensor) -> Float[Tensor, "h n n"]:
    return torch.cat([_some(x, i, len(x)).mT @ _some(x, i, len(x)) for i in _chunks(len(x), x)])


def _root(gram: Float[Tensor, "h n n"]) -> Float[Tensor, "h n n"]:
    values, basis = torch.linalg.eigh(gram)
    return (basis * values.clamp_min(0).sqrt().unsqueeze(-2)) @ basis.mT


def _gamma(x: Tensor, y: Tensor) -> Tensor:
    """Σ_d conj(x) y per pair of heads and rotary pair: (h_a, h_b, p)."""
    return (x.permute(2, 0, 1).conj() @ y.permute(2, 1, 0)).permute(1, 2, 0)


def _squares(pairs: Tensor) -> Float[Tensor, "h p"]:
    return torch.view_as_real(pairs).square().sum((-1, -3))


def _chunks(n_heads: int, *matrices: Tensor) -> Iterator[Tensor]:
    """Indices of heads, as many at a time as CHUNK allows."""
    size = max(1, CHUNK // max(1, max(x[0].numel() for x in matrices)))
    for first in range(0, n_heads, size):
        yield torch.arange(first, min(first + size, n_heads), device=matrices[0].device)


def _some(x: Tensor, heads: Tensor, n_heads: int) -> Tensor:
    """Those heads in float64, each of the fewer serving its neighbours."""
    return x[heads // _share(x.shape[0], n_heads)].to(torch.float64)


def _repeated(x: Tensor, n_heads: int, dim: int = 0) -> Tensor:
    return x.repeat_interleave(_share(x.shape[dim], n_heads), dim)


def _share(n_few: int, n_heads: int) -> int:
    if n_heads % n_few:
        raise IsobasinError(f"{n_heads} heads share {n_few}: expected a divisor of {n_heads}")
    return n_heads // n_few
