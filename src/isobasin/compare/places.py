"""Canonical places of heads and units: their order, their signs and scales, and the factor inside each head.

Everything here is seen in the canonical frame of the stream, where fixed numbers can stand for directions.
"""

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.compare.balanced import EMPTY, rotary_pairs
from isobasin.compare.fixed import fixed
from isobasin.compare.normal_form import unit_rows
from isobasin.groups import Blocks, Element, HeadsElement, Matrix, Monomial, Phases
from isobasin.groups.group import polar
from isobasin.match.attention import AttentionMatrices, attention_matrices
from isobasin.match.heads import stacked
from isobasin.shapes import Float
from isobasin.views import Tensors


def place_heads(arch: Architecture, heads: HeadSpace, tensors: Tensors) -> HeadsElement:
    """Order the heads, then turn each to its canonical form. `tensors` balanced, in the canonical frame."""
    m = attention_matrices(arch, heads, tensors)
    kv, queries = torch.arange(heads.n_kv_heads), torch.arange(heads.group_size).expand(heads.n_kv_heads, -1).clone()
    if heads.permutable:
        keys = head_keys(m, heads).reshape(heads.n_kv_heads, -1)
        kv = torch.argsort(keys.sum(1))
        queries = torch.argsort(keys[kv], dim=1)
    every = (kv[:, None] * heads.group_size + queries).flatten()
    m = AttentionMatrices(m.q[every], m.k[kv], m.v[kv], m.o[every])
    return HeadsElement(kv, queries, _query_key(m, heads), Matrix(_turned(stacked(m.o, heads), m.v)))


def head_keys(m: AttentionMatrices, heads: HeadSpace) -> Float[Tensor, " h"]:
    """One number for every query head, which no factor inside it changes: s(QKᵀ)t + s(VOᵀ)t with fixed s and t."""
    s, t = fixed("key s", m.q.shape[1]), fixed("key t", m.q.shape[1])
    o_t = t[: m.o.shape[1]] @ m.o
    values = ((s @ m.v).repeat_interleave(heads.group_size, 0) * o_t).sum(-1)
    q, k, r = s @ m.q, (t @ m.k).repeat_interleave(heads.group_size, 0), heads.rotary
    scores = (q[..., r:] * k[..., r:]).sum(-1)
    if r:
        turned = rotary_pairs(q[..., :r], heads) * rotary_pairs(k[..., :r], heads).conj()
        scores = scores + (turned * pair_weights(r // 2)).sum(-1).real
    return values + scores


def pair_weights(n: int) -> Tensor:
    """A fixed complex number of size one for every rotary pair: so the plain product is not all that is seen."""
    return torch.polar(torch.ones(n, dtype=torch.float64), fixed("pair", n))


def _query_key(m: AttentionMatrices, heads: HeadSpace) -> Element:
    q, k, r = stacked(m.q, heads), m.k, heads.rotary
    parts: list[Element] = []
    if r:
        found = sum(
            (fixed(f"phase {side}", x.shape[-2]).to(torch.complex128) @ rotary_pairs(x[..., :r], heads))
            for side, x in (("q", q), ("k", k))
        )
        assert isinstance(found, Tensor)
        full = found.abs() > EMPTY
        turn = torch.where(full, found.conj() / torch.where(full, found.abs(), 1), 1)
        parts.append(Phases(turn.resolve_conj(), heads.interleaved))
    if r < heads.d_head:
        parts.append(Matrix(_turned(q[..., r:], k[..., r:])))
    return parts[0] if len(parts) == 1 else Blocks(tuple(parts))


def _turned(x: Float[Tensor, "b rows_x n"], y: Float[Tensor, "b rows_y n"]) -> Float[Tensor, "b n n"]:
    """The rotation g for which x gᵀ and y gᵀ, balanced and then whitened, come closest to fixed numbers."""
    seen = [fixed(f"turn {name}", *side.shape[-2:]).mT @ _white(side) for name, side in (("x", x), ("y", y))]
    return polar(seen[0] + seen[1])


def _white(x: Tensor) -> Tensor:
    """x (xᵀx)^-½, without the directions that hold nothing."""
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    return u * (s > 1e-7 * s[..., :1])[..., None, :] @ vt


def place_units(arch: Architecture, space: Space, tensors: Tensors) -> Monomial:
    """Order the units by what fixed numbers make of their rows; choose the sign of those that have one."""
    sums = {kind: torch.zeros(space.size, dtype=torch.float64) for kind in ("primal", "dual", "magnitude")}
    for name, rows, term in unit_rows(arch, space.name, tensors):
        kind = "magnitude" if term.magnitude else "dual" if term.dual else "primal"
        sums[kind] += rows @ fixed(f"unit {name.rpartition('.')[0]}", rows.shape[1])
    if space.kind == "permutation":
        index = torch.argsort(sums["primal"] + sums["dual"] + sums["magnitude"], stable=True)
        return Monomial(index, torch.ones_like(sums["dual"]))
    index = torch.argsort(sums["primal"] * sums["dual"] + sums["magnitude"], stable=True)
    sign = torch.ones_like(sums["dual"])
    if space.kind in ("scaled", "signed"):
        sign = torch.where(sums["primal"] + sums["dual"] < 0, -1.0, 1.0).to(torch.float64)
    return Monomial(index, sign[index])
