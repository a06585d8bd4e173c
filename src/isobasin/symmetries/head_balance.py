"""Balanced heads: Q and K of a head have the same Gram matrix, and V and O. The form of least norm.

In balanced form the remaining freedom of a head is compact: O(n) for a matrix factor, a phase for a rotary pair. So
balanced heads can be compared by rotations alone.
"""

import torch
from torch import Tensor

from isobasin.arch import HeadSpace
from isobasin.groups import GL, Blocks, Element, HeadsElement, Phases
from isobasin.shapes import Float
from isobasin.symmetries.attention import AttentionMatrices, rotary_columns, rotary_pairs, stacked
from isobasin.symmetries.symmetry import norm_group

WELL = 1e-5  # smallest diagonal entry of a triangular factor relative to the largest: not close to deficient
UNSEEN = 1e-2  # of the root of the largest singular value: the size of columns that meet only zeros on the other side


def smallest_singular_value(dtype: torch.dtype) -> float:
    """The singular value of a product, relative to its largest, that counts as zero in a file of this type."""
    return min(max(64 * torch.finfo(dtype).eps, 1e-11), 1e-4)


def balance_heads(m: AttentionMatrices, heads: HeadSpace, least: float) -> HeadsElement:
    """The element that balances every head of a layer, without a permutation."""
    places = torch.arange(heads.group_size).expand(heads.n_kv_heads, -1).clone()
    vo = GL(heads.value_size).project(_balancing_factor(stacked(m.o, heads), m.v, least))
    qk, shared = _query_key_balancing(m, heads, least)
    return HeadsElement(torch.arange(heads.n_kv_heads), places, qk, vo, shared)


def _query_key_balancing(m: AttentionMatrices, heads: HeadSpace, least: float) -> tuple[Element, Element | None]:
    """How keys move: a positive number for every rotary pair, a matrix for the other columns; and the part of it that
    heads share."""
    q, k, r = stacked(m.q, heads), m.k, heads.rotary
    parts: list[Element] = []
    if heads.qk_norm:
        return norm_group(heads).identity(heads.n_kv_heads), None
    if r:
        sizes = [rotary_pairs(x, heads).abs().square().sum(-2).sqrt() for x in rotary_columns(m, heads)]
        scale = _pair_scale(sizes[0].cpu(), sizes[1].cpu(), least)
        parts.append(Phases(torch.complex(scale, torch.zeros_like(scale)), heads.interleaved))
    if r < heads.d_head:
        parts.append(GL(heads.d_head - r).project(_balancing_factor(q[..., r:], k[..., r:], least)))
    return query_key_element(parts, heads)


def query_key_element(parts: list[Element], heads: HeadSpace) -> tuple[Element, Element | None]:
    """The factor of every head from those of rotary and of other columns; and the one that all heads share."""
    if heads.shared_rotary:
        return parts[1], parts[0]
    return parts[0] if len(parts) == 1 else Blocks(tuple(parts)), None


def _pair_scale(q: Float[Tensor, "b pairs"], k: Float[Tensor, "b pairs"], least: float) -> Float[Tensor, "b pairs"]:
    """The factor of k at which both sizes are equal. Where one of them is zero the other gets the size of an unseen
    column, where both are nothing changes."""
    unseen = UNSEEN * (q * k).amax().sqrt()
    unseen = torch.where(unseen > 0, unseen, UNSEEN)
    empty_q, empty_k = (x <= least * x.amax() for x in (q, k))
    one = torch.ones_like(q)
    scale = (q / torch.where(empty_k, one, k)).sqrt()
    scale = torch.where(empty_q, unseen / torch.where(empty_k, one, k), scale)
    scale = torch.where(empty_k, q / unseen, scale)
    return torch.where(empty_q & empty_k, one, scale)


def _balancing_factor(
    x: Float[Tensor, "b rows_x n"], y: Float[Tensor, "b rows_y n"], least: float
) -> Float[Tensor, "b n n"]:
    """The g for which x g⁻¹ and y gᵀ have the same diagonal Gram matrix.

    With x = Y_x R_x, y = Y_y R_y and R_x R_yᵀ = Z Σ Wᵀ it is g = Σ^-½ Zᵀ R_x.
    """
    r_x, r_y = map(_triangular_factor, (x, y))
    z, sigma, wt = torch.linalg.svd(r_x @ r_y.mT)
    sizes = [torch.linalg.matrix_norm(r, ord=2)[:, None] for r in (r_x, r_y)]
    zero = sigma <= torch.maximum(least * sigma[:, :1], least / 16 * sizes[0] * sizes[1])
    g = z.mT @ r_x / torch.where(zero, 1, sigma).sqrt()[..., None]
    for head in torch.nonzero(zero.any(-1)).flatten().tolist():
        rank = int((~zero[head]).sum())
        g[head] = _deficient_factor(r_x[head], r_y[head], z[head], sigma[head], wt[head].mT, rank, least)
    return g


def _triangular_factor(x: Float[Tensor, "b rows n"]) -> Float[Tensor, "b n n"]:
    """The R of X = Y R, Y orthonormal, on the processor. On an accelerator by Cholesky factors of X and of X R⁻¹, which
    loses no digits unless X is close to deficient: then, and on a processor, by QR."""
    if x.device.type != "cpu":
        first = torch.linalg.cholesky_ex(x.mT @ x)
        r = first.L.mT
        diagonal = r.diagonal(dim1=-2, dim2=-1)
        if bool((first.info == 0).all() and (diagonal.amin(-1) > WELL * diagonal.amax(-1)).all()):
            y = torch.linalg.solve_triangular(r, x, upper=True, left=False)
            return (torch.linalg.cholesky_ex(y.mT @ y).L.mT @ r).cpu()
    return torch.linalg.qr(_tall(x.cpu()), mode="r").R


def _deficient_factor(
    x: Float[Tensor, "n n"],
    y: Float[Tensor, "n n"],
    z: Float[Tensor, "n n"],
    sigma: Float[Tensor, " n"],
    w: Float[Tensor, "n n"],
    rank: int,
    least: float,
) -> Float[Tensor, "n n"]:
    """The balancing factor of a product x yᵀ = Z Σ Wᵀ of lower rank.

    The columns of balanced x are Z Σ^½, then what x has beside the range of Z, where y is zero, then zeros; those of
    balanced y are W Σ^½, zeros, what y has beside the range of W, zeros. The parts beside those ranges meet nothing on
    the other side, so their size is free: they become orthonormal times a fixed share of the largest column.
    With g the map of y and h = g⁻ᵀ that of x, x = x̂ g and y = ŷ h give all rows of g but the last two kinds.
    """
    z, w, root = z[:, :rank], w[:, :rank], sigma[:rank, None].sqrt()
    size = UNSEEN * float(root[0] if rank and root[0] > 0 else 1)
    seen = z.mT @ x / root
    only_x = _beside(z, x, least, len(x) - rank).mT @ x / size
    h = torch.cat([w.mT @ y / root, _beside(w, y, least, len(x) - rank - len(only_x)).mT @ y / size])
    only_y = torch.linalg.pinv(h)[:, rank:].mT
    nowhere = _null_rows(torch.cat([h, only_x]), len(x) - len(h) - len(only_x))
    return torch.cat([seen, only_x, only_y, nowhere])


def _beside(z: Float[Tensor, "n r"], x: Float[Tensor, "n n"], least: float, most: int) -> Float[Tensor, "n m"]:
    """An orthonormal basis, of `most` vectors, of the range of x beside that of z."""
    u, s, _ = torch.linalg.svd(x - z @ (z.mT @ x))
    return u[:, :most][:, s[:most] > least * torch.linalg.matrix_norm(x, ord=2)]


def _null_rows(rows: Float[Tensor, "m n"], count: int) -> Float[Tensor, "count n"]:
    """Orthonormal rows on which these vanish."""
    return torch.linalg.svd(rows)[2][rows.shape[1] - count :]


def _tall(x: Float[Tensor, "b rows n"]) -> Float[Tensor, "b more n"]:
    """With rows of zeros where there are fewer rows than columns."""
    return torch.nn.functional.pad(x, (0, 0, 0, max(0, x.shape[-1] - x.shape[-2])))
