"""Can these two models be aligned at all? One line says why not."""

from collections.abc import Mapping
from typing import Any

from isobasin.errors import ArchitectureError
from isobasin.weights import Weights

# What changes the function without changing a shape, with what transformers takes where config.json has no such key:
# older files leave out what newer ones spell out.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_act": "silu", "rms_norm_eps": 1e-6},
    "mistral": {"hidden_act": "silu", "rms_norm_eps": 1e-6, "sliding_window": 4096},
    "gpt2": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
    },
    "bert": {"hidden_act": "gelu", "layer_norm_eps": 1e-12},
    "vit": {"hidden_act": "gelu", "layer_norm_eps": 1e-12, "patch_size": 16, "image_size": 224},
    "gpt_neox": {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True},
    "isobasin": {
        "positions": "none",
        "norm": "layer",
        "post_norm": False,
        "feed_forward": "gelu",
        "causal": False,
        "norm_eps": 1e-5,
        "image_size": None,
        "patch_size": None,
    },
}


def check_comparable(a: Weights, b: Weights) -> None:
    """The same family, sizes, tensors, positions and settings; anything else is a user's mistake."""
    if a.arch.family != b.arch.family:
        _refuse("family", a.arch.family, b.arch.family)
    sizes_a, sizes_b = vars(a.arch.sizes), vars(b.arch.sizes)
    for key, value in sizes_a.items():
        if value != sizes_b[key]:
            _refuse(key, value, sizes_b[key])
    rotary = any(heads.rotary for heads in a.arch.heads())
    if rotary and rope(a.config) != rope(b.config):
        _refuse("rotary positions", rope(a.config), rope(b.config))
    for name in a.arch.spaces:
        if a.arch.spaces[name] != b.arch.spaces.get(name):
            _refuse(f"space {name}", a.arch.spaces[name], b.arch.spaces.get(name))
    for name in sorted(_weights(a) | _weights(b)):
        if a.arch.shapes.get(name) != b.arch.shapes.get(name):
            _refuse(f"tensor {name}", a.arch.shapes.get(name, "absent"), b.arch.shapes.get(name, "absent"))
    for key, default in SETTINGS[a.arch.family].items():
        if a.config.get(key, default) != b.config.get(key, default):
            _refuse(f"config.json: {key}", a.config.get(key, default), b.config.get(key, default))


def _weights(model: Weights) -> set[str]:
    return {name for name, pattern in model.arch.tensors.items() if not pattern.buffer}


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Base, type and scaling of rotary positions, whichever way a config.json spells them.

    How many columns turn is a size of the heads, and compared there.
    """
    table: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        table |= config.get(key) or {}
    base = next(
        (
            v
            for v in (table.get("rope_theta"), config.get("rope_theta"), config.get("rotary_emb_base"))
            if v is not None
        ),
        10000.0,
    )
    kind = table.get("rope_type", table.get("type", "default"))
    rest = {k: v for k, v in table.items() if k not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")}
    return {"base": float(base), "type": kind, **rest}


def _refuse(what: str, a: object, b: object) -> None:
    raise ArchitectureError(f"{what}: A has {a}, B has {b}; only models of the same architecture can be aligned")
