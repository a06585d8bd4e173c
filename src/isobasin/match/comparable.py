"""Can these two models be aligned at all? One line says why not."""

from collections.abc import Mapping
from typing import Any

from isobasin.errors import ArchitectureError
from isobasin.weights import Weights

# What changes the function without changing a shape; a key that is absent in both is equal in both.
_SETTINGS = (
    "hidden_act",
    "activation_function",
    "layer_norm_eps",
    "layer_norm_epsilon",
    "rms_norm_eps",
    "norm_eps",
    "use_parallel_residual",
    "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx",
    "sliding_window",
    "causal",
    "feed_forward",
    "positions",
    "rotary_layout",
    "rotary_dims",
    "patch_size",
    "image_size",
)


def check_comparable(a: Weights, b: Weights) -> None:
    """The same family, sizes, tensors, positions and settings; anything else is a user's mistake."""
    if a.arch.family != b.arch.family:
        _refuse("family", a.arch.family, b.arch.family)
    sizes_a, sizes_b = vars(a.arch.sizes), vars(b.arch.sizes)
    for key, value in sizes_a.items():
        if value != sizes_b[key]:
            _refuse(key, value, sizes_b[key])
    if rope(a.config) != rope(b.config):
        _refuse("rotary positions", rope(a.config), rope(b.config))
    for name in a.arch.spaces:
        if a.arch.spaces[name] != b.arch.spaces.get(name):
            _refuse(f"space {name}", a.arch.spaces[name], b.arch.spaces.get(name))
    for name in sorted(_weights(a) | _weights(b)):
        if a.arch.shapes.get(name) != b.arch.shapes.get(name):
            _refuse(f"tensor {name}", a.arch.shapes.get(name, "absent"), b.arch.shapes.get(name, "absent"))
    for key in _SETTINGS:
        if a.config.get(key) != b.config.get(key):
            _refuse(f"config.json: {key}", a.config.get(key), b.config.get(key))


def _weights(model: Weights) -> set[str]:
    return {name for name, pattern in model.arch.tensors.items() if not pattern.buffer}


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Base, type and scaling of rotary positions, whichever way a config.json spells them."""
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
    fraction = next(
        (
            v
            for v in (config.get("rotary_pct"), config.get("partial_rotary_factor"), table.get("partial_rotary_factor"))
            if v is not None
        ),
        None,
    )
    rest = {k: v for k, v in table.items() if k not in ("rope_type", "type", "rope_theta", "partial_rotary_factor")}
    return {"base": float(base), "type": kind, "fraction": fraction, **rest}


def _refuse(what: str, a: object, b: object) -> None:
    raise ArchitectureError(f"{what}: A has {a}, B has {b}; only models of the same architecture can be aligned")
