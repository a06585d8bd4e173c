"""The configuration of the project's own Transformer: sizes and switches, their checks, presets. No torch here."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ..arguments import checks_arguments
from ..errors import ArchitectureError

MODEL_TYPE = "isobasin"

# Keys that other programs write to a config.json and that this model does not read.
_IGNORED_KEYS = {"dtype", "torch_dtype", "architectures", "isobasin_version", "transformers_version"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a `Transformer`.

    The input is either tokens (`d_vocab`) or square images in patches (`image_size`, `patch_size`,
    `n_channels`); the output is a classifier (`n_classes`, on the mean over positions) or, with
    `n_classes=None`, a language-model head onto `d_vocab`. `rope_theta`, `rotary_dims` and
    `rotary_layout` are read only with `positions="rope"`.
    """

    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    # These four are optional: __post_init__ fills them in, so that they are never None afterwards.
    n_kv_heads: int = None  # type: ignore[assignment]  # n_heads
    d_head: int = None  # type: ignore[assignment]  # d_model // n_heads
    n_positions: int = None  # type: ignore[assignment]  # (image_size // patch_size)²; to be given for tokens
    rotary_dims: int = None  # type: ignore[assignment]  # d_head

    d_vocab: int | None = None
    image_size: int | None = None
    patch_size: int | None = None
    n_channels: int | None = None
    n_classes: int | None = None

    positions: str = "none"  # none, sinusoidal, learned, rope, alibi
    norm: str = "layer"  # layer, rms
    post_norm: bool = False
    feed_forward: str = "gelu"  # gelu, swiglu
    causal: bool = False
    bias: bool = True  # of q, k, v, o, feed-forward, patches, LayerNorm and the classifier head
    tied: bool = False
    position_scale: float = 1.0  # of the sinusoidal table at initialisation
    rope_theta: float = 10000.0
    rotary_layout: str = "half"  # half, interleaved
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name, value in checked_settings(vars(self)).items():
            object.__setattr__(self, name, value)

    @classmethod
    def preset(cls, name: str, positions: str | None = None, **overrides: Any) -> "ModelConfig":
        """A small ViT, BERT, GPT-2 or Llama: `name` in vit, bert, gpt2, llama.

        `positions` is "absolute" (learned for bert and gpt2, sinusoidal for vit and llama), "rope", or any
        other value of the switch; the default is rope for llama and absolute for the others. Every field can be
        overridden.
        """
        return _from_fields(preset_settings(name, positions) | overrides, where=f"preset {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json: every field that is not None, and `model_type`."""
        fields = dataclasses.asdict(self).items()
        return {"model_type": MODEL_TYPE} | {key: value for key, value in fields if value is not None}

    @classmethod
    @checks_arguments
    def from_dict(cls, settings: Mapping[str, Any]) -> "ModelConfig":
        """Read a config.json of this model: `from_dict(c.to_dict()) == c`. An unknown key is an error."""
        found = settings.get("model_type")
        if found != MODEL_TYPE:
            raise ArchitectureError(f"config: model_type is {found!r}, expected {MODEL_TYPE!r}, our own model")
        read = settings.keys() - _IGNORED_KEYS - {"model_type"}
        return _from_fields({key: settings[key] for key in read}, where="config")

    @property
    def d_patch(self) -> int:
        """Values in one patch, C·p·p (image input only)."""
        assert self.n_channels is not None
        assert self.patch_size is not None
        return self.n_channels * self.patch_size**2


def _from_fields(fields: Mapping[str, Any], where: str) -> ModelConfig:
    known = {field.name: field for field in dataclasses.fields(ModelConfig)}
    required = {name for name, field in known.items() if field.default is dataclasses.MISSING}
    if unknown := sorted(fields.keys() - known.keys()):
        raise ArchitectureError(f"{where}: unknown keys {', '.join(unknown)}; known: {', '.join(known)}")
    if missing := sorted(required - fields.keys()):
        raise ArchitectureError(f"{where}: the keys {', '.join(missing)} are missing: add them")
    return ModelConfig(**fields)


# -- checks ------------------------------------------------------------------------------------------------------------

_ALLOWED = {
    "positions": ("none", "sinusoidal", "learned", "rope", "alibi"),
    "norm": ("layer", "rms"),
    "feed_forward": ("gelu", "swiglu"),
    "rotary_layout": ("half", "interleaved"),
}
_IMAGE = ("image_size", "patch_size", "n_channels")


def checked_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Check the settings and fill in n_kv_heads, d_head, rotary_dims and n_positions."""
    _check_each(given)
    _check_input(given)
    _check_output(given)
    settings = dict(given) | {"n_positions": _n_positions(given), "d_head": _d_head(given)}
    for name, default in (("n_kv_heads", settings["n_heads"]), ("rotary_dims", settings["d_head"])):
        settings[name] = default if settings[name] is None else settings[name]
    _check_heads(settings)
    return settings


def _check_each(settings: Mapping[str, Any]) -> None:
    """Check each field independently of the others: its type says what is expected."""
    for field in dataclasses.fields(ModelConfig):
        value = settings[field.name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)  # bool is a subclass of int
        if field.type is bool:
            fits, expected = isinstance(value, bool), "true or false"
        elif field.type is float:
            fits, expected = is_number and 0 < value < math.inf, "a positive finite number"
        elif field.type is str:
            fits, expected = value in _ALLOWED[field.name], f"one of {', '.join(_ALLOWED[field.name])}"
        else:
            is_left_out = value is None and field.default is None
            fits = is_left_out or (is_number and isinstance(value, int) and value >= 1)
            expected = "a whole number of at least 1"
        if not fits:
            raise ArchitectureError(f"{field.name} is {value!r}, expected {expected}")


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


# -- presets -----------------------------------------------------------------------------------------------------------

_IMAGE_INPUT = {"image_size": 32, "patch_size": 4, "n_channels": 3, "d_model": 192, "d_ff": 768}
_TOKEN_INPUT = {"d_vocab": 256, "n_positions": 256, "d_model": 256, "d_ff": 1024}  # bytes
_SIZES = {"n_layers": 6, "n_heads": 4}

_PRESETS: Mapping[str, Mapping[str, Any]] = {
    "vit": _SIZES | _IMAGE_INPUT | {"n_classes": 10},
    "bert": _SIZES | _TOKEN_INPUT | {"n_classes": 2, "post_norm": True},
    "gpt2": _SIZES | _TOKEN_INPUT | {"causal": True},
    # d_ff is 8/3 of d_model, rounded up to a multiple of 16: SwiGLU then has as many parameters as GELU.
    "llama": _SIZES
    | _TOKEN_INPUT
    | {"causal": True, "norm": "rms", "feed_forward": "swiglu", "bias": False, "d_ff": 688},
}


def preset_settings(name: str, positions: str | None) -> dict[str, Any]:
    """Fields of `ModelConfig` for one family; `positions=None` is the default of the family."""
    if name not in _PRESETS:
        raise ArchitectureError(f"preset {name!r} is unknown; there are {', '.join(_PRESETS)}")
    if positions is None:
        positions = "rope" if name == "llama" else "absolute"
    if positions == "absolute":
        positions = "learned" if name in ("bert", "gpt2") else "sinusoidal"
    found = dict(_PRESETS[name]) | {"positions": positions}
    if positions == "sinusoidal":
        # The scale of the embeddings that the table is added to: 1 cost a ViT nine points of accuracy on CIFAR-10.
        found["position_scale"] = 0.1 if name == "vit" else 0.03
    return found
