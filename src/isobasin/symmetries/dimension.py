"""The dimension test: the symmetry group of one attention block, as a number that can be measured.

At a generic point the null space of the Jacobian `d output / d parameters` has exactly the dimension of the
group that leaves the function unchanged. `predicted_nullity` adds up the parts of the group;
`measured_nullity` differentiates the block itself and knows nothing of groups.

    >>> block = AttentionBlock(n_heads=2, n_kv_heads=2, d_model=6, d_head=4, positions="rope")
    >>> predicted_nullity(block)
    40
    >>> measured_nullity(block).dim
    40
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.errors import ArchitectureError
from isobasin.shapes import Float

__all__ = ["AttentionBlock", "Nullity", "measured_nullity", "predicted_nullity", "small_block"]

POSITIONS = ("none", "rope", "alibi", "t5")
LAYOUTS = ("half", "interleaved")
Parameters = dict[str, Tensor]

# Every offset behind which a symmetry could hide must occur (three tokens are needed); more only costs time.
SEQUENCE_LENGTH = 5
# Rotary angles base^(-j/pairs): distinct, none near 0 or π. The usual 10000 gives angles so small that a few
# tokens hardly see them, and the gap in the singular values closes.
ROPE_BASE = 10.0


@dataclass(frozen=True)
class AttentionBlock:
    """One attention layer, without the norm before it or the stream around it.

        head(x) = softmax((xQ + b_Q) R_{m-n} (xK + b_K)ᵀ / √d_head) (xV + b_V) Oᵀ,   out = Σ heads + b_O

    `rotary_dims` is the number of leading columns that rotate (None: all). `out_bias` follows `bias` unless
    said otherwise. `centred`: the inputs have zero mean over the features, as behind a LayerNorm.
    `qk_norm`: RMS over each head's query and key with eps = 0 and gains that all heads share. `sinks`: a number for
    each head beside its scores, of which nothing is read.
    """

    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    positions: str = "none"
    rotary_dims: int | None = None
    bias: bool = False
    out_bias: bool | None = None
    qk_norm: bool = False
    centred: bool = False
    causal: bool = False
    layout: str = "half"
    sinks: bool = False

    def __post_init__(self) -> None:
        _refuse_bad_block(self)

    @property
    def n_rotary(self) -> int:
        """Columns of a head that rotate."""
        if self.positions != "rope":
            return 0
        return self.d_head if self.rotary_dims is None else self.rotary_dims

    @property
    def has_out_bias(self) -> bool:
        """Whether b_O exists."""
        return self.bias if self.out_bias is None else self.out_bias

    def parameters(self, seed: int = 0) -> Parameters:
        """Every parameter drawn at random: zero biases and unit gains would hide directions."""
        generator = torch.Generator().manual_seed(seed)
        return {name: _draw(name, shape, generator) for name, shape in _parameter_shapes(self).items()}

    def inputs(self, n_sequences: int, seed: int = 0) -> Float[Tensor, "sequence token d_model"]:
        """Random sequences, centred over the features if the block says so."""
        generator = torch.Generator().manual_seed(seed)
        shape = (n_sequences, SEQUENCE_LENGTH, self.d_model)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x - x.mean(-1, keepdim=True) if self.centred else x

    def forward(self, params: Parameters, x: Float[Tensor, "token d_model"]) -> Float[Tensor, "token d_model"]:
        """The output of the block for one sequence."""
        group = self.n_heads // self.n_kv_heads
        q, k, v = (_project(params, name, x) for name in "qkv")
        if self.qk_norm:
            q, k = _rms(q) * params["q_gain"], _rms(k) * params["k_gain"]
        if self.n_rotary:
            q, k = (_rotate(y, self.n_rotary, self.layout) for y in (q, k))
        k, v = (y.repeat_interleave(group, dim=0) for y in (k, v))
        scores = q @ k.mT / math.sqrt(self.d_head) + _position_scores(self, params, len(x))
        if self.causal:
            future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, -torch.inf)
        if self.sinks:
            scores = torch.cat([scores, params["sinks"][:, None, None].expand(-1, len(x), 1)], -1)
        out = torch.einsum("hte,hde->td", scores.softmax(-1)[..., : len(x)] @ v, params["o"])
        return out + params["o_bias"] if self.has_out_bias else out


def _parameter_shapes(block: AttentionBlock) -> dict[str, tuple[int, ...]]:
    heads = {"q": block.n_heads, "k": block.n_kv_heads, "v": block.n_kv_heads, "o": block.n_heads}
    shapes: dict[str, tuple[int, ...]] = {name: (n, block.d_model, block.d_head) for name, n in heads.items()}
    if block.bias:
        shapes |= {f"{name}_bias": (heads[name], 1, block.d_head) for name in "qkv"}
    if block.has_out_bias:
        shapes["o_bias"] = (block.d_model,)
    if block.qk_norm:
        shapes |= {"q_gain": (block.d_head,), "k_gain": (block.d_head,)}
    if block.sinks:
        shapes["sinks"] = (block.n_heads,)
    if block.positions == "t5":
        # One entry per offset that occurs: an entry nobody reads would count as a symmetry.
        shapes["table"] = (block.n_heads, SEQUENCE_LENGTH if block.causal else 2 * SEQUENCE_LENGTH - 1)
    return shapes


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if name.endswith("gain"):
        return 0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)
    fan_in = shape[1] if name in ("q", "k", "v", "o") else 1
    return torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(fan_in)


def _project(params: Parameters, name: str, x: Float[Tensor, "token d_model"]) -> Float[Tensor, "head token d_head"]:
    y = torch.einsum("td,hde->hte", x, params[name])
    return y + params[f"{name}_bias"] if f"{name}_bias" in params else y


def _rms(y: Float[Tensor, "head token d_head"]) -> Float[Tensor, "head token d_head"]:
    return y * y.square().mean(-1, keepdim=True).rsqrt()


def _rotate(y: Float[Tensor, "head token d_head"], r: int, layout: str) -> Float[Tensor, "head token d_head"]:
    """Turn pair j of token m by the angle m·θ_j; pairs are (j, j + r/2) or (2j, 2j + 1)."""
    columns = torch.arange(y.shape[-1])
    first, second = (columns[: r // 2], columns[r // 2 : r]) if layout == "half" else (columns[:r:2], columns[1:r:2])
    theta = ROPE_BASE ** (-torch.arange(r // 2, dtype=y.dtype) / (r // 2))
    angle = torch.arange(y.shape[-2], dtype=y.dtype)[:, None] * theta
    a, b = y[..., first], y[..., second]
    turned = [a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos(), y[..., r:]]
    back = torch.cat([first, second, columns[r:]]).argsort()
    return torch.cat(turned, dim=-1)[..., back]


def _position_scores(block: AttentionBlock, params: Parameters, n_tokens: int) -> Float[Tensor, "#head token token"]:
    """What is added to the scores of query m and key n because of m − n alone."""
    token = torch.arange(n_tokens)
    offset = token[:, None] - token
    if block.positions == "alibi":
        head = torch.arange(1, block.n_heads + 1, dtype=torch.float64)
        slope = 2.0 ** (-8.0 * head / block.n_heads)
        return -slope[:, None, None] * offset.abs()
    if block.positions == "t5":
        entry = offset.clamp(min=0) if block.causal else offset + SEQUENCE_LENGTH - 1
        return params["table"][:, entry]
    return torch.zeros(1, n_tokens, n_tokens, dtype=torch.float64)


def _refuse_bad_block(block: AttentionBlock) -> None:
    """Sizes and switches for which the group is not known, or that make no attention block."""
    r, readable = block.n_rotary, block.d_model - block.centred
    rules = (
        (
            min(block.n_heads, block.n_kv_heads, block.d_model, block.d_head) >= 1,
            "a size below 1, expected all at least 1",
        ),
        (
            block.n_kv_heads < 1 or block.n_heads % block.n_kv_heads == 0,
            f"{block.n_heads} heads and {block.n_kv_heads} kv heads, expected the first to be a multiple of the second",
        ),
        (block.d_head <= readable, f"d_head {block.d_head}, expected at most {readable}, the dimension of its inputs"),
        (block.d_head > 1 or not block.qk_norm, "qk_norm has d_head 1, expected at least 2"),
        (block.positions in POSITIONS, f"positions {block.positions!r}, expected one of {', '.join(POSITIONS)}"),
        (block.layout in LAYOUTS, f"rotary layout {block.layout!r}, expected one of {', '.join(LAYOUTS)}"),
        (
            block.positions == "rope" or block.rotary_dims is None,
            f"rotary_dims {block.rotary_dims} with positions {block.positions!r}",
        ),
        (
            block.positions != "rope" or (r % 2 == 0 and 2 <= r <= block.d_head),
            f"rotates {r} of {block.d_head} columns, expected an even number from 2 on",
        ),
    )
    for good, found in rules:
        if not good:
            raise ArchitectureError(f"attention block: {found}; correct its sizes")


# Below this ratio of neighbouring singular values the rank is not to be believed. Usual gaps are 1e9 and
# more; many heads on a stream of one feature have reached 3e4 at the wrong place.
CLEAR_GAP = 1e5
ABSOLUTE_POSITIONS = ("absolute", "learned", "sinusoidal")


@dataclass(frozen=True)
class Nullity:
    """A measured null space: `dim`, and the ratio `gap` of the singular values on its two sides.

    `edge` holds up to three singular values above the gap and three below it, relative to the largest.
    """

    dim: int
    gap: float
    edge: tuple[float, ...]

    @property
    def clear(self) -> bool:
        """Whether the gap is wide enough to believe `dim`."""
        return self.gap >= CLEAR_GAP

    def agrees_with(self, predicted: int) -> bool:
        """Whether the measurement is clear and equals the prediction."""
        return self.clear and self.dim == predicted

    def __str__(self) -> str:
        verdict = "clear" if self.clear else "unclear"
        return f"nullity {self.dim} (gap {self.gap:.1e}, {verdict})"


def predicted_nullity(block: AttentionBlock) -> int:
    """Dimension of the block's symmetry group, free directions included: the sum of its parts."""
    return (
        _qk_dim(block)
        + block.n_kv_heads * block.d_head**2  # GL(d_head) between V and O
        + _free_biases(block)
        # T5: the softmax cancels a constant added to all entries of one head's table.
        + (block.n_heads if block.positions == "t5" else 0)
        # Centred inputs: the rows of Q, K, V along the all-ones vector are never read.
        + (block.n_heads + 2 * block.n_kv_heads) * block.d_head * block.centred
    )


def measured_nullity(block: AttentionBlock, seed: int = 0) -> Nullity:
    """Dimension of the null space of `d output / d parameters` at a random point, by singular values.

    It fails where float64 can not tell heads apart: with d_model = 1 and several heads the singular values
    fall off without a gap, and the result says that it is unclear.
    """
    return _null_space(torch.linalg.svdvals(_jacobian(block, seed)))


def small_block(
    *,
    n_heads: int,
    n_kv_heads: int,
    d_head: int,
    positions: str = "none",
    rotary_dims: int | None = None,
    bias: bool = False,
    out_bias: bool | None = None,
    qk_norm: bool = False,
    centred: bool = False,
    causal: bool = False,
    layout: str = "half",
    sinks: bool = False,
) -> AttentionBlock:
    """A block of at most 4 heads of at most 8 columns with the structure of a real model's attention.

    Kept: the number of query heads per kv head where 4 heads allow it (else 2 × 2, or 4 × 1 for a single kv
    head), the share of rotating columns, the biases and all switches. Positions that are added to the input
    ("learned", "sinusoidal") leave the group as it is for "none".

        >>> small_block(n_heads=32, n_kv_heads=8, d_head=128, positions="rope").n_heads
        4
    """
    real = AttentionBlock(
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        d_model=d_head + 1,
        d_head=d_head,
        positions="none" if positions in ABSOLUTE_POSITIONS else {"relative": "t5"}.get(positions, positions),
        rotary_dims=rotary_dims,
        bias=bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        centred=centred,
        causal=causal,
        layout=layout,
        sinks=sinks,
    )
    return _shrink(real)


# The parts of the group.


def _qk_dim(block: AttentionBlock) -> int:
    """Q–K part: H(r) ⊕ GL(d_head − r) per kv head; behind a QK-norm only scales and the trade of gains."""
    rotary, plain = block.n_rotary, block.d_head - block.n_rotary
    if block.qk_norm:
        # One scale per head's Q and per head's K; γ_q·c, γ_k/c once per coordinate, or per rotary pair.
        return block.n_heads + block.n_kv_heads + rotary // 2 + plain
    return block.n_kv_heads * (rotary + plain**2)


def _free_biases(block: AttentionBlock) -> int:
    """Biases the function does not see, or sees only as a sum."""
    if not block.bias or block.sinks:  # beside sinks, no constant of keys or values is lost
        return 0
    # The softmax cancels b_K where its columns do not rotate; a norm behind the bias mixes it in.
    free_key = 0 if block.qk_norm else block.n_kv_heads * (block.d_head - block.n_rotary)
    # b_V and b_O reach the output only as the vector b_O + Σ b_V Oᵀ: b_O takes up all of b_V. Without b_O
    # that vector still hides a part of b_V once the kv heads have more columns than the stream.
    values = block.n_kv_heads * block.d_head
    free_value = values if block.has_out_bias else max(0, values - block.d_model)
    return free_key + free_value


# The measurement.


def _jacobian(block: AttentionBlock, seed: int) -> Float[Tensor, "output parameter"]:
    """d output / d parameters over twice as many outputs as there are parameters."""
    params = block.parameters(seed)
    n_params = sum(p.numel() for p in params.values())
    n_sequences = 4 + 2 * n_params // (SEQUENCE_LENGTH * block.d_model)
    x = block.inputs(n_sequences, seed + 1)
    # Fewer outputs than parameters per sequence: reverse mode.
    per_sequence = torch.func.vmap(torch.func.jacrev(block.forward), in_dims=(None, 0))
    parts = per_sequence(params, x)
    return torch.cat([p.flatten(0, 2).flatten(1) for p in parts.values()], dim=1)


def _null_space(singular: Float[Tensor, " parameter"]) -> Nullity:
    """Cut the singular values at their widest gap.

    Rounding noise is lifted to one floor, so that no gap is found inside it; the floor also closes the list,
    so that full rank is an answer.
    """
    relative = singular / singular[0]
    floor = torch.full((1,), 1e-15, dtype=singular.dtype)
    values = torch.cat([relative.clamp(min=1e-15), floor])
    ratios = values[:-1] / values[1:]
    rank = int(ratios.argmax()) + 1
    edge = tuple(float(s) for s in relative[max(rank - 3, 0) : rank + 3])
    return Nullity(dim=len(singular) - rank, gap=float(ratios[rank - 1]), edge=edge)


# Sizes.


def _shrink(real: AttentionBlock) -> AttentionBlock:
    columns = min(real.d_head, 8)
    heads, kv_heads = _small_heads(real)
    # A value bias without an output bias hides directions when the stream is narrower than the kv heads
    # together. Real streams are not, so neither is this one.
    narrowest = kv_heads * columns if _lone_value_bias(real) else columns + 1
    return replace(
        real,
        n_heads=heads,
        n_kv_heads=kv_heads,
        d_head=columns,
        d_model=max(narrowest, columns + 1, min(heads * columns, 10)),
        rotary_dims=_small_rotary(real, columns),
    )


def _lone_value_bias(block: AttentionBlock) -> bool:
    return block.bias and not block.has_out_bias


def _small_heads(real: AttentionBlock) -> tuple[int, int]:
    group = real.n_heads // real.n_kv_heads
    if group > 4:
        group = 2 if real.n_kv_heads > 1 else 4
    # A lone value bias asks for a wider stream: fewer heads keep the Jacobian small.
    most = 2 if _lone_value_bias(real) else 4
    kv_heads = min(real.n_kv_heads, most, 4 // group)
    return group * kv_heads, kv_heads


def _small_rotary(real: AttentionBlock, columns: int) -> int | None:
    """The same share of the columns, even, and partial if it was partial."""
    if real.rotary_dims is None or real.d_head == columns:
        return real.rotary_dims
    if real.rotary_dims == real.d_head:
        return columns
    pairs = round(columns * real.rotary_dims / real.d_head / 2)
    return 2 * min(max(pairs, 1), columns // 2 - 1)
