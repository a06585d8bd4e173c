"""The matrices of an attention layer, out of whatever layout a checkpoint stores them in; and what they compute.

Rows are inputs, with the bias as one more row: a head is Q, K, V (d + 1) × n and O d × n.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace
from isobasin.errors import IsobasinError
from isobasin.shapes import Complex, Float
from isobasin.symmetries.coordinate import face_columns
from isobasin.views import Tensors

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class AttentionMatrices:
    """Q and O per query head, K and V per kv head; `bias` says whether Q, K, V end with a bias row.

    Rotary columns come first. Where all heads share those of the keys, K has the rows of what these read, then the rows
    of what the others read; the shared columns are repeated for every head.
    """

    q: Float[Tensor, "h rows_q n"]
    k: Float[Tensor, "kv rows_k n"]
    v: Float[Tensor, "kv rows_v m"]
    o: Float[Tensor, "h d m"]

    def weighted(self, root: Float[Tensor, "rows rows"] | None) -> "AttentionMatrices":
        """Q, K, V as seen by inputs with this second moment (its square root): ‖Σ^½ Q‖² is the mean of ‖yQ‖²."""
        if root is None:
            return self
        part = root[:, : self.q.shape[-2]]  # all its rows: a corner of the root is not the root of a corner
        return AttentionMatrices(part @ self.q, part @ self.k, part @ self.v, self.o)


def attention_matrices(arch: Architecture, heads: HeadSpace, tensors: Tensors) -> AttentionMatrices:
    """Read one layer. `tensors` in float64; a bias row is there for all three of Q, K, V or for none."""
    q, q_bias = _face(arch, heads.qk, tensors, dual=True, n=heads.n_heads)
    k, k_bias = _face(arch, heads.qk, tensors, dual=False, n=heads.n_kv_heads)
    v, v_bias = _face(arch, heads.vo, tensors, dual=False, n=heads.n_kv_heads)
    o, _ = _face(arch, heads.vo, tensors, dual=True, n=heads.n_heads)
    if heads.shared_rotary:
        rotary, rotary_bias = _face(arch, heads.rope, tensors, dual=True, n=heads.n_heads)
        q, q_bias = torch.cat([rotary, q], -1), _beside(rotary_bias, q_bias, rotary, q)
        rotary, rotary_bias = _face(arch, heads.rope, tensors, dual=False, n=1)
        rotary, rotary_bias = (None if x is None else x.expand(len(k), *x.shape[1:]) for x in (rotary, rotary_bias))
        assert rotary is not None
        k_bias = _beside(rotary_bias, k_bias, rotary, k)
        pad = torch.nn.functional.pad
        k = torch.cat([pad(rotary, (0, k.shape[-1])), pad(k, (rotary.shape[-1], 0))], 1)
    if any(b is not None for b in (q_bias, k_bias, v_bias)):
        q, k, v = (_with_row(x, b) for x, b in ((q, q_bias), (k, k_bias), (v, v_bias)))
    return AttentionMatrices(q, k, v, o)


def _face(
    arch: Architecture, face: str, tensors: Tensors, *, dual: bool, n: int
) -> tuple[Float[Tensor, "h d n"], Float[Tensor, "h n"] | None]:
    """The weight of a face for each of n heads and the bias, if there is one."""
    weight, bias = None, None
    for name, axis, words, term in arch.carriers(face):
        if term.dual != dual or term.permutation_part:
            continue
        part = tensors[name].movedim(axis, 0)
        if len(words.terms) > 1:
            part = part[torch.tensor(face_columns(arch, words, face, dual=dual), device=part.device)]
        if part.dim() == 1:
            bias = part.reshape(n, -1)
        else:
            weight = part.reshape(n, len(part) // n, -1).mT
    assert weight is not None, face
    return weight, bias


def _beside(first: Tensor | None, second: Tensor | None, like_first: Tensor, like_second: Tensor) -> Tensor | None:
    """Two biases side by side; zeros where only one of them exists."""
    if first is None and second is None:
        return None
    pairs = ((first, like_first), (second, like_second))
    return torch.cat([torch.zeros_like(like[:, 0]) if x is None else x for x, like in pairs], -1)


def stored_matrices(
    arch: Architecture, heads: HeadSpace, tensors: Tensors, m: AttentionMatrices
) -> dict[str, Float[Tensor, "..."]]:
    """The tensors of a layer with these matrices, in the layout in which the checkpoint stores them."""
    found: dict[str, Tensor] = {}
    sides = [(heads.qk, True, m.q), (heads.qk, False, m.k), (heads.vo, False, m.v), (heads.vo, True, m.o)]
    if heads.shared_rotary:
        r, width = heads.rotary, sum(stream.size for stream in arch.head_streams(heads)[1][:1])
        shared = [(heads.rope, True, m.q[..., :r]), (heads.rope, False, m.k[:1, ..., :r])]
        sides = [*shared, (heads.qk, True, m.q[..., r:]), (heads.qk, False, m.k[:, width:, r:]), *sides[2:]]
    for face, dual, x in sides:
        for name, axis, words, term in arch.carriers(face):
            if term.dual != dual:
                continue
            whole = found.setdefault(name, tensors[name].clone()).movedim(axis, 0)
            rows = torch.tensor(face_columns(arch, words, face, dual=dual))
            if whole.dim() == 1:
                whole[rows] = x[:, -1].flatten()
            else:
                whole[rows] = x[:, : whole.shape[1]].mT.flatten(0, 1)
    return found


def rotary_columns(m: AttentionMatrices, heads: HeadSpace) -> tuple[Float[Tensor, "b d r"], Float[Tensor, "b d_k r"]]:
    """The rotary columns of queries and keys (behind norms, all of them), one batch for each factor: by kv head, or all
    heads under each other where they share the columns of the keys."""
    r = heads.d_head if heads.qk_norm else heads.rotary
    if heads.shared_rotary:
        return m.q[..., :r].reshape(1, -1, r), m.k[:1, :, :r]
    return stacked(m.q, heads)[..., :r], m.k[..., :r]


def _with_row(x: Tensor, bias: Tensor | None) -> Tensor:
    row = torch.zeros_like(x[:, :1]) if bias is None else bias[:, None]
    return torch.cat([x, row], dim=1)


def attend(
    m: AttentionMatrices,
    x: Float[Tensor, "t rows_q"],
    heads: HeadSpace,
    gains: tuple[Tensor, Tensor] | None = None,
    source: Float[Tensor, "t rows_k"] | None = None,
    values: Float[Tensor, "t rows_v"] | None = None,
    sinks: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "t d"]:
    """What the layer adds to the stream for inputs x (ended by a column of ones where there are biases), in float64.

    `gains` are those of the norms on queries and keys, where there are any; `source` is what keys and values read, if
    that is not what the queries read, and `values` what the values read, if that is something else again; `sinks` are
    scores of which nothing is read.

    Rotary angles and ALiBi slopes are generic ones: a symmetry holds for all of them or is none.
    """
    share = heads.group_size
    y = x if source is None else source
    read = ((x, m.q), (y, m.k), (y if values is None else values, m.v))
    q, k, v = (torch.einsum("td,hdn->htn", z, w) for z, w in read)
    if gains is not None:
        over = (0, -1) if heads.whole_norm else (-1,)
        q, k = (y - y.mean(-1, keepdim=True) if heads.layer_norm else y for y in (q, k))
        roots = (y.square().mean(over, keepdim=True).clamp(min=1e-300).sqrt() for y in (q, k))
        q, k = (y / root * gain for y, root, gain in zip((q, k), roots, gains))
    k, v = k.repeat_interleave(share, 0), v.repeat_interleave(share, 0)
    if heads.rotary:
        q, k = _turned(q, heads), _turned(k, heads)
    scores = q @ k.mT / math.sqrt(heads.d_head)
    if not heads.permutable:
        steps = torch.arange(len(x), dtype=x.dtype, device=x.device)
        slopes = torch.exp2(-8 * torch.arange(1, heads.n_heads + 1, dtype=x.dtype, device=x.device) / heads.n_heads)
        scores = scores - slopes[:, None, None] * (steps[:, None] - steps).abs()
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(x), 1)], -1)
    return torch.einsum("htn,hdn->td", torch.softmax(scores, -1)[..., : v.shape[1]] @ v, m.o)


def norm_gains(heads: HeadSpace, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """The gains of the norms on queries and keys: (heads, 1, columns), or one row for all heads."""
    q, k = (torch.cat([tensors[n].reshape(-1, 1, heads.d_head) for n in names]) for names in heads.gain_names)
    return q, k


def _turned(x: Float[Tensor, "h t n"], heads: HeadSpace) -> Tensor:
    r = heads.rotary
    rates = 10000.0 ** (-torch.arange(0, r, 2, dtype=x.dtype, device=x.device) / r)
    angles = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None] * rates
    turn = torch.polar(torch.ones_like(angles), angles)
    turning = x[..., :r]
    if heads.interleaved:
        pairs = torch.complex(turning[..., 0::2], turning[..., 1::2]) * turn
        turned = torch.stack([pairs.real, pairs.imag], -1).flatten(-2)
    else:
        pairs = torch.complex(turning[..., : r // 2], turning[..., r // 2 :]) * turn
        turned = torch.cat([pairs.real, pairs.imag], -1)
    return torch.cat([turned, x[..., r:]], -1)


def stacked(x: Tensor, heads: HeadSpace) -> Tensor:
    """Query heads of a group under each other: they share one factor, so they are one tall matrix."""
    return x.reshape(heads.n_kv_heads, -1, x.shape[-1])


def complex_pairs(columns: Float[Tensor, "*batch d r"], layout: Layout) -> Complex[Tensor, "*batch d p"]:
    """Rotary pairs as complex columns: (j, j + r/2) for "half", (2j, 2j + 1) for "interleaved"."""
    r = columns.shape[-1]
    if r % 2:
        raise IsobasinError(f"{r} rotary columns: expected an even number, two columns to a pair")
    columns = columns.to(torch.float64)
    if layout == "half":
        return torch.complex(columns[..., : r // 2], columns[..., r // 2 :])
    if layout == "interleaved":
        return torch.complex(columns[..., 0::2], columns[..., 1::2])
    raise IsobasinError(f"rotary layout {layout!r}: expected 'half' or 'interleaved'")


def rotary_pairs(x: Float[Tensor, "*b d r"], heads: HeadSpace) -> Complex[Tensor, "*b d p"]:
    """Rotary columns as complex numbers, in the layout of these heads."""
    return complex_pairs(x.contiguous(), "interleaved" if heads.interleaved else "half")
