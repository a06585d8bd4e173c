"""Heads in balanced form: Q and K of a head with the same Gram, and V and O too.

Among all forms of a head it is the one of least norm, and what is left of its group there is compact: O(n) for a
matrix factor, a phase for a rotary pair. So heads that are balanced can be compared by rotations alone.
"""

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace
from isobasin.groups import GL, Blocks, Element, HeadsElement, Matrix, Phases
from isobasin.match.attention import AttentionMatrices, attention_matrices
from isobasin.match.heads import stacked
from isobasin.shapes import Complex, Float
from isobasin.views import Tensors

EMPTY = 1e-12  # of the largest: singular values below this hold nothing


def balancing(arch: Architecture, heads: HeadSpace, tensors: Tensors) -> HeadsElement:
    """The element that balances every head of a layer and leaves each where it is."""
    m = attention_matrices(arch, heads, tensors)
    places = torch.arange(heads.group_size).expand(heads.n_kv_heads, -1).clone()
    vo = Matrix(GL(heads.d_head).project(balancing_factor(stacked(m.o, heads), m.v)).value)
    return HeadsElement(torch.arange(heads.n_kv_heads), places, query_key_balancing(m, heads), vo)


def query_key_balancing(m: AttentionMatrices, heads: HeadSpace) -> Element:
    """How keys move: a positive number for every rotary pair, a matrix for the other columns."""
    q, k, r = stacked(m.q, heads), m.k, heads.rotary
    parts: list[Element] = []
    if r:
        sizes = [rotary_pairs(x[..., :r], heads).abs().square().sum(-2).sqrt() for x in (q, k)]
        full = (sizes[0] > EMPTY * sizes[0].max()) & (sizes[1] > EMPTY * sizes[1].max())
        scale = torch.where(full, sizes[0] / torch.where(full, sizes[1], 1), 1).sqrt()
        parts.append(Phases(torch.complex(scale, torch.zeros_like(scale)), heads.interleaved))
    if r < heads.d_head:
        parts.append(GL(heads.d_head - r).project(balancing_factor(q[..., r:], k[..., r:])))
    return parts[0] if len(parts) == 1 else Blocks(tuple(parts))


def balancing_factor(x: Float[Tensor, "b rows_x n"], y: Float[Tensor, "b rows_y n"]) -> Float[Tensor, "b n n"]:
    """The g for which x g⁻¹ and y gᵀ have the same diagonal Gram: with x = Y_x R_x, y = Y_y R_y and
    R_x R_yᵀ = Z Σ Wᵀ it is g = Σ^-½ Zᵀ R_x. A head that holds nothing stays as it is.

    Where the rank is deficient, g is not determined; directions that hold nothing then get a small ridge.
    """
    n = x.shape[-1]
    r_x, r_y = _triangle(x), _triangle(y)
    z, sigma, _ = torch.linalg.svd(r_x @ r_y.mT)
    sigma = torch.maximum(sigma, 1e-8 * sigma[..., :1])
    eye = torch.eye(n, dtype=x.dtype, device=x.device).expand(len(x), n, n)
    nothing = (sigma[..., 0] <= 0)[:, None, None]
    g = z.mT @ r_x / torch.where(nothing[..., 0], 1, sigma).sqrt()[..., None]
    return torch.where(nothing, eye, g)


def _triangle(x: Tensor) -> Tensor:
    """R of x = Y R, with a ridge that rounding alone would not show."""
    n = x.shape[-1]
    ridge = EMPTY**0.5 * torch.linalg.matrix_norm(x, ord=2)[:, None, None]
    rows = ridge * torch.eye(n, dtype=x.dtype, device=x.device)
    return torch.linalg.qr(torch.cat([x, rows], dim=-2), mode="r").R


def rotary_pairs(x: Float[Tensor, "b d r"], heads: HeadSpace) -> Complex[Tensor, "b d p"]:
    """Rotary columns as complex numbers, in the layout of these heads."""
    if heads.interleaved:
        return torch.complex(x[..., 0::2].contiguous(), x[..., 1::2].contiguous())
    first, second = x.chunk(2, dim=-1)
    return torch.complex(first.contiguous(), second.contiguous())
