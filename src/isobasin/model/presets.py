"""The four families of the study as settings of `ModelConfig`: small, with each family's own switches."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ..errors import ArchitectureError

_IMAGES = {"image_size": 32, "patch_size": 4, "n_channels": 3, "d_model": 192, "d_ff": 768}
_TOKENS = {"d_vocab": 256, "n_positions": 256, "d_model": 256, "d_ff": 1024}  # bytes
_SIZES = {"n_layers": 6, "n_heads": 4}

_PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "vit": _SIZES | _IMAGES | {"n_classes": 10},
        "bert": _SIZES | _TOKENS | {"n_classes": 2, "post_norm": True},
        "gpt2": _SIZES | _TOKENS | {"causal": True},
        # d_ff: 8/3 of d_model, up to a multiple of 16, so that three matrices weigh as much as GELU's two.
        "llama": _SIZES
        | _TOKENS
        | {"causal": True, "norm": "rms", "feed_forward": "swiglu", "bias": False, "d_ff": 688},
    }
)
_ABSOLUTE = MappingProxyType({"vit": "sinusoidal", "bert": "learned", "gpt2": "learned", "llama": "sinusoidal"})
# As large as the embeddings they are added to: ten times that cost a ViT nine points of accuracy on CIFAR-10.
_POSITION_SCALE = MappingProxyType({"vit": 0.1, "bert": 0.03, "gpt2": 0.03, "llama": 0.03})
_OWN = MappingProxyType({"vit": "absolute", "bert": "absolute", "gpt2": "absolute", "llama": "rope"})


def preset_settings(name: str, positions: str | None) -> dict[str, Any]:
    """Fields of `ModelConfig` for one family; `positions=None` is what the family is known for."""
    if name not in _PRESETS:
        raise ArchitectureError(f"preset {name!r} is unknown; there are {', '.join(_PRESETS)}")
    positions = _OWN[name] if positions is None else positions
    positions = _ABSOLUTE[name] if positions == "absolute" else positions
    scale = {"position_scale": _POSITION_SCALE[name]} if positions == "sinusoidal" else {}
    return dict(_PRESETS[name]) | scale | {"positions": positions}
