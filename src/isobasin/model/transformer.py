"""The Transformer: positions, layers, the model, its initialisation from a seed, and its folder on disk.

Angles and slopes of positions are computed in float64 and cast once, and never kept in a buffer: a buffer that went
through float32 would make a float64 model inexact.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..arguments import checks_arguments
from ..errors import ArchitectureError, CheckpointError
from ..files import atomic_write_all
from ..shapes import Bool, Float
from .config import ModelConfig

INIT_STD = 0.02
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the rotary angles m·θ_j, each T × r/2."""


def sinusoidal_table(n_positions: int, d_model: int) -> Float[Tensor, "n_positions d_model"]:
    """sin(m ω_j) in column 2j and cos(m ω_j) in column 2j+1, ω_j = 10000^(-2j/d), in float64."""
    columns = torch.arange(d_model, dtype=torch.float64, device="cpu")
    positions = torch.arange(n_positions, dtype=torch.float64, device="cpu")
    angles = torch.outer(positions, 10000.0 ** (-2 * (columns // 2) / d_model))  # (n_positions, d_model)
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


# A constant for the compiler: it would otherwise compute cosines in float64 at every position of every head.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def rotary_angles(n_tokens: int, rotary_dims: int, theta: float, device: torch.device, dtype: torch.dtype) -> Rotation:
    """cos and sin of m·θ_j with θ_j = theta^(-2j/r)."""
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
        rotation = rotary_angles(n_tokens, config.rotary_dims, config.rope_theta, x.device, x.dtype)
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
        return self.tokens(ids)  # (B, T, d)

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
        return self.patches(cut)  # (B, T, d)


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
        return self.o(mixed.transpose(1, 2).flatten(2))  # (B, T, H·d_head) -> (B, T, d)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.d_head)).transpose(1, 2)  # (B, H, T, d_head)


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
        return self.down(hidden)


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


class Transformer(nn.Module):
    """The Transformer that `config` describes, with weights that depend on `seed` only.

    All computation is in the dtype of the parameters: `Transformer(config).double()` is a float64 model.
    """

    @checks_arguments
    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        # Built on the meta device and filled afterwards: the layers of torch would draw from the global generator.
        with torch.device("meta"):
            self.embed = Embedding(config)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
            self.norm = None if config.post_norm else make_norm(config)
            self.head = _make_head(config)
        self.to_empty(device=torch.get_default_device())
        _initialise(self, seed)

    def forward(self, inputs: Tensor, mask: Tensor | None = None) -> Float[Tensor, "batch *time out"]:
        """Logits: (B, T, d_vocab), or (B, n_classes) for a classifier.

        `inputs` are token ids (B, T) or images (B, C, H, W); `mask` is bool (B, T), True at real tokens.
        """
        x: Tensor = self.embed(inputs)  # (B, T, d)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
            raise ArchitectureError(
                f"mask is {mask.dtype} of shape {tuple(mask.shape)}, expected bool of shape "
                f"{tuple(x.shape[:2])}: True at real tokens"
            )
        where = geometry(self.config, x, mask)
        for block in self.blocks:
            x = block(x, where)  # (B, T, d); undefined at padded positions
        x = x if self.norm is None else self.norm(x)
        if self.head is None:
            return F.linear(x, self.embed.tokens.weight)  # (B, T, V)
        return self.head(x if self.config.n_classes is None else _mean(x, mask))

    @checks_arguments
    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors into a new or existing folder; if that fails, old files stay."""
        folder, tensors = Path(folder), self.state_dict()
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        text = json.dumps(self.config.to_dict() | {"dtype": dtype}, indent=2) + "\n"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            data = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{folder} can not be written ({error}): choose another folder") from error
        atomic_write_all({folder / WEIGHTS_NAME: data, folder / CONFIG_NAME: text}, error=CheckpointError)

    @classmethod
    @checks_arguments
    def load(cls, folder: str | Path) -> "Transformer":
        """Read what `save` wrote, in the dtype it was saved in; strict about names and shapes."""
        config, found = read_folder(Path(folder))
        _check_sizes(config, found, where=str(folder))
        with torch.device("meta"):
            model = cls(config)
        _check_tensors(found, expected=model.state_dict(), where=str(folder))
        model.load_state_dict(found, assign=True)
        return model


def _make_head(config: ModelConfig) -> nn.Linear | None:
    if config.n_classes is not None:
        return nn.Linear(config.d_model, config.n_classes, bias=config.bias)
    if config.tied:
        return None
    assert config.d_vocab is not None
    return nn.Linear(config.d_model, config.d_vocab, bias=False)


def _mean(x: Float[Tensor, "batch time d"], mask: Tensor | None) -> Float[Tensor, "batch d"]:
    """Mean over real positions; zero for a sequence that is all padding."""
    if mask is None:
        return x.mean(1)
    # where, not a product: 0 · inf is NaN.
    kept = torch.where(mask[:, :, None], x, 0.0).sum(1)  # (B, d)
    return kept / mask.sum(1, keepdim=True).clamp(min=1).to(x.dtype)


@torch.no_grad()
def _initialise(model: Transformer, seed: int) -> None:
    """Matrices are normal with std 0.02 (0.02/√(2·n_layers) if they write to the residual stream), gains 1, biases 0.

    They are sampled in float64 on the CPU and cast: a seed gives the same model on every device and in every dtype.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    config = model.config
    for name, parameter in model.named_parameters():
        if name.endswith(("attn.o.weight", "mlp.down.weight")):
            value = _normal(parameter, generator) / (2 * config.n_layers) ** 0.5
        elif name == "embed.positions.weight" and config.positions == "sinusoidal":
            value = config.position_scale * sinusoidal_table(config.n_positions, config.d_model)
        elif parameter.ndim == 2:
            value = _normal(parameter, generator)
        else:
            value = torch.full(parameter.shape, float(name.endswith("weight")), device="cpu")
        parameter.copy_(value)


def _normal(parameter: Tensor, generator: torch.Generator) -> Tensor:
    return INIT_STD * torch.randn(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")


def read_folder(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    try:
        settings = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = load_file(folder / WEIGHTS_NAME)
    except (OSError, ValueError, SafetensorError, RecursionError) as error:
        raise CheckpointError(
            f"{folder} can not be read ({error}), expected {CONFIG_NAME} and {WEIGHTS_NAME} of a saved model"
        ) from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{folder / CONFIG_NAME} holds {settings!r:.40}, expected a JSON object")
    return ModelConfig.from_dict(settings), tensors


def _check_sizes(config: ModelConfig, found: dict[str, Tensor], where: str) -> None:
    """Raise before a model is built that is larger than what was read: its layers and axes are those of tensors."""
    n_numbers = sum(tensor.numel() for tensor in found.values())
    claims = {"n_layers": (config.n_layers, len(found)), "n_heads": (config.n_heads * config.d_head, n_numbers)}
    claims |= {name: (getattr(config, name) or 0, n_numbers) for name in ("d_model", "d_ff", "d_vocab", "n_classes")}
    if config.positions in ("learned", "sinusoidal"):
        claims["n_positions"] = config.n_positions, n_numbers
    if config.image_size is not None:
        claims["patch_size"] = config.d_patch, n_numbers
    for name, (size, limit) in claims.items():
        if size > limit:
            raise ArchitectureError(
                f"{where}: {name} gives {size}, the tensors hold {limit}: config and weights disagree"
            )


def _check_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    differences = {"missing": expected.keys() - found.keys(), "unknown": found.keys() - expected.keys()}
    for what, names in differences.items():
        if names:
            raise ArchitectureError(f"{where}: {what} tensors {', '.join(sorted(names))}: config and weights disagree")
    for name, tensor in found.items():
        shapes = tuple(tensor.shape), tuple(expected[name].shape)
        if shapes[0] != shapes[1]:
            raise ArchitectureError(
                f"{where}: {name} has shape {shapes[0]}, expected {shapes[1]}: config and weights disagree"
            )
    dtypes = {tensor.dtype for tensor in found.values()}
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        found_types = ", ".join(sorted(map(str, dtypes)))
        raise ArchitectureError(f"{where}: tensors are of {found_types}, expected one floating-point dtype: cast them")
