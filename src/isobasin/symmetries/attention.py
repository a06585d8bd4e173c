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
    """Q and O per query head, K and V per kv head; `bias` says whether Q, K, V end with a bias row."""

    q: Float[Tensor, "h rows n"]
    k: Float[Tensor, "kv rows n"]
    v: Float[Tensor, "kv rows n"]
    o: Float[Tensor, "h d n"]

    def weighted(self, root: Float[Tensor, "rows rows"] | None) -> "AttentionMatrices":
        """Q, K, V as seen by inputs with this second moment (its square root): ‖Σ^½ Q‖² is the mean of ‖yQ‖²."""
        if root is None:
            return self
        part = root[:, : self.q.shape[-2]]  # all its rows: a corner of the root is not the root of a corner
        return AttentionMatrices(part @ self.q, part @ self.k, part @ self.v, self.o)


def attention_matrices(arch: Architecture, heads: HeadSpace, tensors: Tensors) -> AttentionMatrices:
    """Read one layer. `tensors` in float64; a bias row is there for all three of Q, K, V or for none."""
    q, q_bias = _face(arch, heads, tensors, heads.qk, dual=True, heads_count=heads.n_heads)
    k, k_bias = _face(arch, heads, tensors, heads.qk, dual=False, heads_count=heads.n_kv_heads)
    v, v_bias = _face(arch, heads, tensors, heads.vo, dual=False, heads_count=heads.n_kv_heads)
    o, _ = _face(arch, heads, tensors, heads.vo, dual=True, heads_count=heads.n_heads)
    if any(b is not None for b in (q_bias, k_bias, v_bias)):
        q, k, v = (_with_row(x, b) for x, b in ((q, q_bias), (k, k_bias), (v, v_bias)))
    return AttentionMatrices(q, k, v, o)


def _face(
    arch: Architecture, heads: HeadSpace, tensors: Tensors, face: str, *, dual: bool, heads_count: int
) -> tuple[Tensor, Tensor | None]:
    """(heads × d × n) and the bias (heads × n), if there is one."""
    weight, bias = None, None
    for name, axis, words, term in arch.carriers(face):
        if term.dual != dual or term.permutation_part:
            continue
        part = tensors[name].movedim(axis, 0)
        if len(words.terms) > 1:
            part = part[torch.tensor(face_columns(arch, words, face, dual=dual), device=part.device)]
        if part.dim() == 1:
            bias = part.reshape(heads_count, heads.d_head)
        else:
            weight = part.reshape(heads_count, heads.d_head, -1).mT
    assert weight is not None, face
    return weight, bias


def _with_row(x: Tensor, bias: Tensor | None) -> Tensor:
    row = torch.zeros_like(x[:, :1]) if bias is None else bias[:, None]
    return torch.cat([x, row], dim=1)


def attend(
    m: AttentionMatrices,
    x: Float[Tensor, "t rows"],
    heads: HeadSpace,
    gains: tuple[Tensor, Tensor] | None = None,
    source: Float[Tensor, "t rows"] | None = None,
    sinks: Float[Tensor, " h"] | None = None,
) -> Float[Tensor, "t d"]:
    """What the layer adds to the stream for inputs x (ended by a column of ones where there are biases), in float64.

    `gains` are those of the norms on queries and keys, where there are any; `source` is what keys and values read, if
    that is not what the queries read; `sinks` are scores of which nothing is read.

    Rotary angles and ALiBi slopes are generic ones: a symmetry holds for all of them or is none.
    """
    share = heads.group_size
    y = x if source is None else source
    q, k, v = (torch.einsum("td,hdn->htn", z, w) for z, w in ((x, m.q), (y, m.k), (y, m.v)))
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
