"""Where a token stands: the sinusoidal table, rotary angles and the ALiBi bias.

Angles and slopes are computed in float64 and cast once, and never kept in a buffer: a buffer that went
through float32 would make a float64 model inexact.
"""

import torch
from torch import Tensor

from ..shapes import Float

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles m·θ_j, each T × r/2."""


def sinusoidal_table(n_positions: int, d_model: int) -> Float[Tensor, "n_positions d_model"]:
    """sin(m ω_j) in column 2j and cos(m ω_j) in column 2j+1, ω_j = 10000^(-2j/d), in float64."""
    columns = torch.arange(d_model, dtype=torch.float64, device="cpu")
    places = torch.arange(n_positions, dtype=torch.float64, device="cpu")
    angles = torch.outer(places, 10000.0 ** (-2 * (columns // 2) / d_model))  # (n_positions, d_model)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


def rotary_angles(n_tokens: int, rotary_dims: int, theta: float, like: Tensor) -> Rotation:
    """cos and sin of m·θ_j with θ_j = theta^(-2j/r), on the device and in the dtype of `like`."""
    return _angles(n_tokens, rotary_dims, theta, like.device, like.dtype)


# As a constant: a compiled model would take cosines in float64 at every place of every head.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _angles(n_tokens: int, rotary_dims: int, theta: float, device: torch.device, dtype: torch.dtype) -> Rotation:
    pairs = torch.arange(0, rotary_dims, 2, dtype=torch.float64, device=device)  # 2j
    places = torch.arange(n_tokens, dtype=torch.float64, device=device)
    angles = torch.outer(places, theta ** (-pairs / rotary_dims))  # (T, r/2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(
    x: Float[Tensor, "batch head time d_head"], rotation: Rotation, layout: str
) -> Float[Tensor, "batch head time d_head"]:
    """(col1 + i·col2) · e^{i m θ_j} for every rotary pair of columns; the other columns pass.

    Pairs are (j, j + r/2) in the layout "half" and (2j, 2j + 1) in the layout "interleaved".
    """
    cos, sin = rotation  # (T, r/2)
    r = 2 * cos.shape[-1]
    turning, resting = x[..., :r], x[..., r:]  # (B, H, T, r), (B, H, T, d_head - r)
    if layout == "half":
        real, imag = turning[..., : r // 2], turning[..., r // 2 :]  # (B, H, T, r/2)
    else:
        real, imag = turning[..., 0::2], turning[..., 1::2]  # (B, H, T, r/2)
    turned = (real * cos - imag * sin, real * sin + imag * cos)
    if layout == "half":
        return torch.cat((*turned, resting), -1)  # (B, H, T, d_head)
    return torch.cat((torch.stack(turned, -1).flatten(-2), resting), -1)  # (B, H, T, d_head)


def alibi_bias(n_tokens: int, n_heads: int, like: Tensor) -> Float[Tensor, "1 head time time"]:
    """-2^(-8(h+1)/n) · |m - n| for query head h, query place m and key place n."""
    heads = torch.arange(1, n_heads + 1, dtype=torch.float64, device=like.device)
    places = torch.arange(n_tokens, dtype=torch.float64, device=like.device)
    distance = (places[:, None] - places[None, :]).abs()  # (T, T)
    slopes = 2.0 ** (-8.0 * heads / n_heads)
    return (-slopes[:, None, None] * distance)[None].to(like.dtype)  # (1, H, T, T)
