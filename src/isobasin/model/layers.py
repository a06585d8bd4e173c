"""The layers of the Transformer: positions, embedding, attention, feed-forward, block.

Angles and slopes of positions are computed in float64 and cast once, and never kept in a buffer: a buffer that went
through float32 would make a float64 model inexact.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArchitectureError
from ..shapes import Bool, Float
from .config import ModelConfig

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles m·θ_j, each T × r/2."""


def sinusoidal_table(n_positions: int, d_model: int) -> Float[Tensor, "n_positions d_model"]:
    """sin(m ω_j) in column 2j and cos(m ω_j) in column 2j+1, ω_j = 10000^(-2j/d), in float64."""
    columns = torch.arange(d_model, dtype=torch.float64, device="cpu")
    positions = torch.arange(n_positions, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, 10000.0 ** (-2 * (columns // 2) / d_model))  # (n_positions, d_model)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


def rotary_angles(n_tokens: int, rotary_dims: int, theta: float, like: Tensor) -> Rotation:
    """cos and sin of m·θ_j with θ_j = theta^(-2j/r), on the device and in the dtype of `like`."""
    return _angles(n_tokens, rotary_dims, theta, like.device, like.dtype)


# A constant for the compiler: it would otherwise compute cosines in float64 at every position of every head.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _angles(n_tokens: int, rotary_dims: int, theta: float, device: torch.device, dtype: torch.dtype) -> Rotation:
    pairs = torch.arange(0, rotary_dims, 2, dtype=torch.float64, device=device)  # 2j
    positions = torch.arange(n_tokens, dtype=torch.float64, device=device)
    angles = torch.outer(positions, theta ** (-pairs / rotary_dims))  # (T, r/2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(
    x: Float[Tensor, "batch head time d_head"], rotation: Rotation, layout: str
) -> Float[Tensor, "batch head time d_head"]:
    """(col1 + i·col2) · e^{i m θ_j} for every rotary pair of columns; the other columns are unchanged.

    Pairs are (j, j + r/2) in the layout "half" and (2j, 2j + 1) in the layout "interleaved".
    """
    cos, sin = rotation  # (T, r/2)
    r = 2 * cos.shape[-1]
    rotary, rest = x[..., :r], x[..., r:]  # (B, H, T, r), (B, H, T, d_head - r)
    if layout == "half":
        real, imag = rotary[..., : r // 2], rotary[..., r // 2 :]  # (B, H, T, r/2)
    else:
        real, imag = rotary[..., 0::2], rotary[..., 1::2]  # (B, H, T, r/2)
    rotated = (real * cos - imag * sin, real * sin + imag * cos)
    if layout == "half":
        return torch.cat((*rotated, rest), -1)  # (B, H, T, d_head)
    return torch.cat((torch.stack(rotated, -1).flatten(-2), rest), -1)  # (B, H, T, d_head)


def alibi_bias(n_tokens: int, n_heads: int, like: Tensor) -> Float[Tensor, "1 head time time"]:
    """-2^(-8(h+1)/n) · |m - n| for query head h, query position m and key position n."""
    heads = torch.arange(1, n_heads + 1, dtype=torch.float64, device=like.device)
    positions = torch.arange(n_tokens, dtype=torch.float64, device=like.device)
    distance = (positions[:, None] - positions[None, :]).abs()  # (T, T)
    slopes = 2.0 ** (-8.0 * heads / n_heads)
    return (-slopes[:, None, None] * distance)[None].to(like.dtype)  # (1, H, T, T)


class Geometry(NamedTuple):
    """What all attention layers of one forward pass share: rotary angles and the attention mask or bias."""

    rotation: Rotation | None
    bias: Tensor | None  # added to the scores, or bool (True: may attend); broadcasts to (B, H, T, T)
    is_causal: bool  # only causal, which the attention kernel computes without a T × T mask


def geometry(config: ModelConfig, x: Float[Tensor, "batch time d_model"], mask: Tensor | None) -> Geometry:
    """The geometry of one forward pass, in the dtype of x."""
    n_tokens = x.shape[1]
    rotation = None
    if config.positions == "rope":
        rotation = rotary_angles(n_tokens, config.rotary_dims, config.rope_theta, like=x)
    if config.positions != "alibi" and mask is None:
        return Geometry(rotation, None, config.causal)
    allowed = _attention_mask(config.causal, x, mask)
    if config.positions != "alibi":
        return Geometry(rotation, allowed, False)
    bias = alibi_bias(n_tokens, config.n_heads, like=x).masked_fill(~allowed, float("-inf"))
    return Geometry(rotation, bias, False)


def _attention_mask(causal: bool, x: Tensor, mask: Tensor | None) -> Bool[Tensor, "_ 1 time time"]:
    n_tokens = x.shape[1]
    allowed = torch.ones(n_tokens, n_tokens, dtype=torch.bool, device=x.device)[None, None]  # (1, 1, T, T)
    if causal:
        allowed = allowed.tril()
    if mask is None:
        return allowed
    # Each position attends to itself: a padded query without any key would give NaN.
    itself = torch.eye(n_tokens, dtype=torch.bool, device=x.device)
    return (allowed & mask[:, None, None, :]) | itself  # (B, 1, T, T)


def make_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class Embedding(nn.Module):
    """Tokens or patches, plus absolute positions, plus a norm (as in BERT) if the model is post-norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        if config.d_vocab is not None:
            self.tokens = nn.Embedding(config.d_vocab, config.d_model)
        else:
            self.patches = nn.Linear(config.d_patch, config.d_model, bias=config.bias)
        if config.positions in ("learned", "sinusoidal"):
            self.positions = nn.Embedding(config.n_positions, config.d_model)
            self.positions.weight.requires_grad_(config.positions == "learned")
        if config.post_norm:
            self.norm = make_norm(config)

    def forward(self, inputs: Tensor) -> Float[Tensor, "batch time d_model"]:
        x: Tensor = self._tokens(inputs) if self.config.d_vocab is not None else self._patches(inputs)
        if self.config.positions in ("learned", "sinusoidal"):
            x = x + self.positions.weight[: x.shape[1]]  # (B, T, d) + (T, d)
        return self.norm(x) if self.config.post_norm else x

    def _tokens(self, ids: Tensor) -> Tensor:
        if ids.ndim != 2 or ids.shape[1] > self.config.n_positions:
            raise ArchitectureError(
                f"token ids have shape {tuple(ids.shape)}, expected (batch, time) with time at most "
                f"n_positions={self.config.n_positions}: shorten the sequences"
            )
        x: Tensor = self.tokens(ids)  # (B, T, d)
        return x

    def _patches(self, images: Tensor) -> Tensor:
        size, patch, channels = self.config.image_size, self.config.patch_size, self.config.n_channels
        assert size is not None
        assert patch is not None
        if images.ndim != 4 or images.shape[1:] != (channels, size, size):
            raise ArchitectureError(
                f"images have shape {tuple(images.shape)}, expected (batch, {channels}, {size}, {size}): "
                "resize them or change image_size and n_channels"
            )
        side = size // patch
        cut = images.reshape(-1, images.shape[1], side, patch, side, patch)  # (B, C, row, p, column, p)
        cut = cut.permute(0, 2, 4, 1, 3, 5)  # (B, row, column, C, p, p)
        cut = cut.reshape(-1, side * side, self.config.d_patch)  # (B, T, C·p·p)
        x: Tensor = self.patches(cut)  # (B, T, d)
        return x


class Attention(nn.Module):
    """softmax(q R_{m-n} kᵀ / √d_head + bias) v, heads side by side, then o.

    Query head h reads kv head h // (n_heads / n_kv_heads).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        d_query, d_kv = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.q = nn.Linear(config.d_model, d_query, bias=config.bias)
        self.k = nn.Linear(config.d_model, d_kv, bias=config.bias)
        self.v = nn.Linear(config.d_model, d_kv, bias=config.bias)
        self.o = nn.Linear(d_query, config.d_model, bias=config.bias)

    def forward(self, x: Float[Tensor, "batch time d_model"], where: Geometry) -> Float[Tensor, "batch time d_model"]:
        q, k, v = self._heads(self.q(x)), self._heads(self.k(x)), self._heads(self.v(x))
        if where.rotation is not None:
            q = rotate(q, where.rotation, self.config.rotary_layout)
            k = rotate(k, where.rotation, self.config.rotary_layout)
        group = self.config.n_heads // self.config.n_kv_heads
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)  # (B, H, T, d_head)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=where.bias, is_causal=where.is_causal)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))  # (B, T, H·d_head) -> (B, T, d)
        return out

    def _heads(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        n_heads = width // self.config.d_head
        return x.reshape(batch, time, n_heads, self.config.d_head).transpose(1, 2)  # (B, H, T, d_head)


class FeedForward(nn.Module):
    """down(gelu(up(x))), or down(silu(gate(x)) · up(x)) for SwiGLU; GELU is exact (erf)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gated = config.feed_forward == "swiglu"
        if self.gated:
            self.gate = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.up = nn.Linear(config.d_model, config.d_ff, bias=config.bias)
        self.down = nn.Linear(config.d_ff, config.d_model, bias=config.bias)

    def forward(self, x: Float[Tensor, "batch time d_model"]) -> Float[Tensor, "batch time d_model"]:
        up = self.up(x)  # (B, T, d_ff)
        hidden = F.silu(self.gate(x)) * up if self.gated else F.gelu(up)  # (B, T, d_ff)
        out: Tensor = self.down(hidden)
        return out


class Block(nn.Module):
    """Pre-norm x + f(norm(x)), or post-norm norm(x + f(x)), for attention and then feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.post_norm = config.post_norm
        self.norm1 = make_norm(config)
        self.attn = Attention(config)
        self.norm2 = make_norm(config)
        self.mlp = FeedForward(config)

    def forward(self, x: Float[Tensor, "batch time d_model"], where: Geometry) -> Float[Tensor, "batch time d_model"]:
        if self.post_norm:
            x = self.norm1(x + self.attn(x, where))
            return self.norm2(x + self.mlp(x))
        x = x + self.attn(self.norm1(x), where)
        return x + self.mlp(self.norm2(x))
