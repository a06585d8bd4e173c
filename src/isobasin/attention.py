"""One attention block in float64, by its sizes and switches: what the dimension test differentiates."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.errors import ArchitectureError
from isobasin.shapes import Float

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
    `qk_norm`: RMS over each head's query and key with eps = 0 and gains that all heads share.
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

    def __post_init__(self) -> None:
        _refuse_bad_sizes(self)
        _refuse_bad_positions(self)

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
        out = torch.einsum("hte,hde->td", scores.softmax(-1) @ v, params["o"])
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


def _refuse_bad_sizes(block: AttentionBlock) -> None:
    sizes = (block.n_heads, block.n_kv_heads, block.d_model, block.d_head)
    if min(sizes) < 1:
        raise ArchitectureError(
            f"attention block has sizes n_heads, n_kv_heads, d_model, d_head = {sizes}, expected all "
            "at least 1; correct the sizes"
        )
    if block.n_heads % block.n_kv_heads:
        raise ArchitectureError(
            f"attention block has {block.n_heads} heads and {block.n_kv_heads} kv heads, expected the "
            "first to be a multiple of the second; correct n_heads or n_kv_heads"
        )
    readable = block.d_model - block.centred
    if block.d_head > readable:
        raise ArchitectureError(
            f"attention block has d_head {block.d_head}, expected at most {readable} (the dimension of its "
            "inputs), where the group is known; take a larger d_model"
        )
    if block.qk_norm and block.d_head < 2:
        raise ArchitectureError(
            "attention block with qk_norm has d_head 1, expected at least 2: a normalised number is only a "
            "sign; take a larger d_head"
        )


def _refuse_bad_positions(block: AttentionBlock) -> None:
    if block.positions not in POSITIONS:
        raise ArchitectureError(
            f"attention block has positions {block.positions!r}, expected one of "
            f"{', '.join(POSITIONS)}; absolute positions are 'none'"
        )
    if block.layout not in LAYOUTS:
        raise ArchitectureError(
            f"attention block has rotary layout {block.layout!r}, expected one of {', '.join(LAYOUTS)}; correct layout"
        )
    if block.positions != "rope" and block.rotary_dims is not None:
        raise ArchitectureError(
            f"attention block has rotary_dims {block.rotary_dims} with positions {block.positions!r}, "
            "expected none without rope; drop rotary_dims"
        )
    if block.positions == "rope" and not _is_rotary_size(block.n_rotary, block.d_head):
        raise ArchitectureError(
            f"attention block rotates {block.n_rotary} of {block.d_head} columns, expected an even number "
            f"from 2 to {block.d_head}; correct rotary_dims"
        )


def _is_rotary_size(r: int, d_head: int) -> bool:
    return r % 2 == 0 and 2 <= r <= d_head
