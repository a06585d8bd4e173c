"""The Transformer: embedding, blocks and head, its initialisation from a seed, and its folder on disk."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from ..errors import ArchitectureError, CheckpointError
from ..files import atomic_write_all
from ..shapes import Float
from .config import ModelConfig
from .layers import Block, Embedding, geometry, make_norm, sinusoidal_table

INIT_STD = 0.02
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


class Transformer(nn.Module):
    """The Transformer that `config` describes, with weights that depend on `seed` only.

    All computation is in the dtype of the parameters: `Transformer(config).double()` is a float64 model.
    """

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
        x = self.hidden(inputs, mask)
        if self.head is None:
            return F.linear(x, self.embed.tokens.weight)  # (B, T, V)
        logits: Tensor = self.head(x if self.config.n_classes is None else _mean(x, mask))
        return logits

    def hidden(self, inputs: Tensor, mask: Tensor | None = None) -> Float[Tensor, "batch time d_model"]:
        """The last hidden states, which the head reads; those at padded positions are undefined."""
        x: Tensor = self.embed(inputs)  # (B, T, d)
        if mask is not None and (mask.dtype != torch.bool or mask.shape != x.shape[:2]):
            raise ArchitectureError(
                f"mask is {mask.dtype} of shape {tuple(mask.shape)}, expected bool of shape "
                f"{tuple(x.shape[:2])}: True at real tokens"
            )
        where = geometry(self.config, x, mask)
        for block in self.blocks:
            x = block(x, where)  # (B, T, d)
        return x if self.norm is None else self.norm(x)

    def save(self, folder: str | Path) -> None:
        """Write config.json and model.safetensors; the folder is created, existing files are replaced."""
        write_folder(Path(folder), self.config, self.state_dict())

    @classmethod
    def load(cls, folder: str | Path) -> "Transformer":
        """Read what `save` wrote, in the dtype it was saved in; strict about names and shapes."""
        config, found = read_folder(Path(folder))
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


def write_folder(folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Write config.json and model.safetensors; if that fails, the old files stay."""
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    text = json.dumps(config.to_dict() | {"dtype": dtype}, indent=2) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data = save({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, {"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} can not be written ({error}): choose another folder") from error
    atomic_write_all({folder / WEIGHTS_NAME: data, folder / CONFIG_NAME: text}, error=CheckpointError)


def read_folder(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    try:
        settings = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        tensors: dict[str, Tensor] = load_file(folder / WEIGHTS_NAME)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{folder} can not be read ({error}), expected {CONFIG_NAME} and {WEIGHTS_NAME} of a saved model"
        ) from error
    if not isinstance(settings, dict):
        raise CheckpointError(f"{folder / CONFIG_NAME} holds {settings!r:.40}, expected a JSON object")
    return ModelConfig.from_dict(settings), tensors


def _check_tensors(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    if missing := sorted(expected.keys() - found.keys()):
        raise ArchitectureError(f"{where}: missing tensors {', '.join(missing)}: config and weights disagree")
    if unknown := sorted(found.keys() - expected.keys()):
        raise ArchitectureError(f"{where}: unknown tensors {', '.join(unknown)}: config and weights disagree")
    for name, tensor in found.items():
        shapes = tuple(tensor.shape), tuple(expected[name].shape)
        if shapes[0] != shapes[1]:
            raise ArchitectureError(
                f"{where}: {name} has shape {shapes[0]}, expected {shapes[1]}: config and weights disagree"
            )
    dtypes = {tensor.dtype for tensor in found.values()}
    if len(dtypes) > 1 or not all(dtype.is_floating_point for dtype in dtypes):
        names = ", ".join(sorted(map(str, dtypes)))
        raise ArchitectureError(f"{where}: tensors are of {names}, expected one floating-point dtype: cast them")
