"""The one place where the settings of a model are checked, and sizes that follow from others filled in."""

import math
from collections.abc import Mapping
from typing import Any

from ..errors import ArchitectureError

_ALLOWED = {
    "positions": ("none", "sinusoidal", "learned", "rope", "alibi"),
    "norm": ("layer", "rms"),
    "feed_forward": ("gelu", "swiglu"),
    "rotary_layout": ("half", "interleaved"),
}
_IMAGE = ("image_size", "patch_size", "n_channels")
_COUNTS = ("d_model", "n_layers", "n_heads", "d_ff")
_OPTIONAL_COUNTS = ("n_kv_heads", "d_head", "n_positions", "rotary_dims", "d_vocab", *_IMAGE, "n_classes")
_FLAGS = ("post_norm", "causal", "bias", "tied")
_POSITIVE_NUMBERS = ("position_scale", "rope_theta", "norm_eps")


def checked_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with n_kv_heads, d_head, rotary_dims and n_positions filled in, or an error."""
    _check_each(given)
    _check_input(given)
    _check_output(given)
    settings = dict(given) | {"n_positions": _n_positions(given), "d_head": _d_head(given)}
    for name, default in (("n_kv_heads", settings["n_heads"]), ("rotary_dims", settings["d_head"])):
        settings[name] = default if settings[name] is None else settings[name]
    _check_heads(settings)
    return settings


def _check_each(settings: Mapping[str, Any]) -> None:
    """Each field by itself."""
    for name in (*_COUNTS, *_OPTIONAL_COUNTS):
        value = settings[name]
        if value is None and name in _OPTIONAL_COUNTS:
            continue
        # bool is an int to Python.
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ArchitectureError(f"{name} is {value!r}, expected a whole number of at least 1")
    for name in _FLAGS:
        if not isinstance(settings[name], bool):
            raise ArchitectureError(f"{name} is {settings[name]!r}, expected true or false")
    for name in _POSITIVE_NUMBERS:
        value = settings[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ArchitectureError(f"{name} is {value!r}, expected a positive finite number")
    for name, allowed in _ALLOWED.items():
        if settings[name] not in allowed:
            raise ArchitectureError(f"{name} is {settings[name]!r}, expected one of {', '.join(allowed)}")


def _check_input(settings: Mapping[str, Any]) -> None:
    given = [name for name in _IMAGE if settings[name] is not None]
    if settings["d_vocab"] is None and not given:
        raise ArchitectureError(f"no input: give d_vocab for tokens, or {', '.join(_IMAGE)} for images")
    if settings["d_vocab"] is not None and given:
        raise ArchitectureError(f"two inputs: d_vocab (tokens) and {', '.join(given)} (images): keep one")
    if given and len(given) < len(_IMAGE):
        missing = ", ".join(name for name in _IMAGE if name not in given)
        raise ArchitectureError(f"image input needs {', '.join(_IMAGE)}: add {missing}")


def _check_output(settings: Mapping[str, Any]) -> None:
    d_vocab, n_classes, tied = settings["d_vocab"], settings["n_classes"], settings["tied"]
    if tied and d_vocab is None:
        raise ArchitectureError("tied is true without tokens, so nothing can be shared: set tied to false")
    if tied and n_classes is not None:
        raise ArchitectureError(
            f"tied is true with n_classes={n_classes}: only a language-model head shares the tokens; "
            "set tied to false or n_classes to None"
        )
    if d_vocab is None and n_classes is None:
        raise ArchitectureError("image input without n_classes: a language-model head needs tokens; give it")


def _n_positions(settings: Mapping[str, Any]) -> int:
    found, size, patch = settings["n_positions"], settings["image_size"], settings["patch_size"]
    if size is None:
        if found is None:
            raise ArchitectureError("n_positions is missing: give the length of the longest token sequence")
        return int(found)
    if size % patch:
        raise ArchitectureError(f"image_size={size} is not divisible by patch_size={patch}: change one")
    n_patches = (size // patch) ** 2
    if found not in (None, n_patches):
        raise ArchitectureError(f"n_positions is {found}, but an image has {n_patches} patches: leave it out")
    return int(n_patches)


def _d_head(settings: Mapping[str, Any]) -> int:
    if settings["d_head"] is not None:
        return int(settings["d_head"])
    d_model, n_heads = settings["d_model"], settings["n_heads"]
    if d_model % n_heads:
        raise ArchitectureError(f"d_model={d_model} is not divisible by n_heads={n_heads}: or give d_head")
    return int(d_model // n_heads)


def _check_heads(settings: Mapping[str, Any]) -> None:
    n_heads, n_kv_heads = settings["n_heads"], settings["n_kv_heads"]
    if n_heads % n_kv_heads:
        raise ArchitectureError(
            f"n_heads={n_heads} is not divisible by n_kv_heads={n_kv_heads}: "
            "each kv head serves the same number of query heads"
        )
    if settings["positions"] != "rope":
        return
    rotary_dims, d_head = settings["rotary_dims"], settings["d_head"]
    if rotary_dims % 2:
        raise ArchitectureError(
            f"rotary_dims is {rotary_dims} (d_head={d_head}), expected an even number: columns turn in pairs"
        )
    if rotary_dims > d_head:
        raise ArchitectureError(f"rotary_dims={rotary_dims} is more than d_head={d_head}: give at most d_head")
