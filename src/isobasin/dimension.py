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

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.attention import SEQUENCE_LENGTH, AttentionBlock
from isobasin.shapes import Float

__all__ = ["AttentionBlock", "Nullity", "measured_nullity", "predicted_nullity", "small_block"]

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
        + _free_table_constants(block)
        + _unseen_rows(block)
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
        positions="none" if positions in ABSOLUTE_POSITIONS else positions,
        rotary_dims=rotary_dims,
        bias=bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        centred=centred,
        causal=causal,
        layout=layout,
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
    if not block.bias:
        return 0
    # The softmax cancels b_K where its columns do not rotate; a norm behind the bias mixes it in.
    free_key = 0 if block.qk_norm else block.n_kv_heads * (block.d_head - block.n_rotary)
    # b_V and b_O reach the output only as the vector b_O + Σ b_V Oᵀ: b_O takes up all of b_V. Without b_O
    # that vector still hides a part of b_V once the kv heads have more columns than the stream.
    values = block.n_kv_heads * block.d_head
    free_value = values if block.has_out_bias else max(0, values - block.d_model)
    return free_key + free_value


def _free_table_constants(block: AttentionBlock) -> int:
    """T5: a constant added to all entries of one head's table is cancelled by the softmax."""
    return block.n_heads if block.positions == "t5" else 0


def _unseen_rows(block: AttentionBlock) -> int:
    """Centred inputs: the rows of Q, K, V along the all-ones vector are never read."""
    return (block.n_heads + 2 * block.n_kv_heads) * block.d_head * block.centred


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


def _null_space(singular: Float[Tensor, "parameter"]) -> Nullity:
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
