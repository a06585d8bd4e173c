"""What a model is made of: a frozen set of sizes and switches. No torch here."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..errors import ArchitectureError
from .presets import preset_settings
from .settings import checked_settings

MODEL_TYPE = "isobasin"

# What other writers of a config.json add and this model does not read.
_IGNORED_KEYS = {"dtype", "torch_dtype", "architectures", "isobasin_version", "transformers_version"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a `Transformer`.

    The input is either tokens (`d_vocab`) or square images in patches (`image_size`, `patch_size`,
    `n_channels`); the output is a classifier (`n_classes`, on the mean over positions) or, with
    `n_classes=None`, a language-model head onto `d_vocab`. `rope_theta`, `rotary_dims` and
    `rotary_layout` are read only with `positions="rope"`.

        >>> ModelConfig(d_model=8, n_layers=1, n_heads=2, d_ff=16, d_vocab=5, n_positions=4).d_head
        4
    """

    d_model: int
    n_layers: int
    n_heads: int
    d_ff: int
    # These four may be left out and are then filled in by __post_init__: to a reader they are never None.
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
    position_scale: float = 1.0  # of the sinusoidal table when it is drawn; later the weights alone say it
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
        other value of the switch; left out it is what the family is known for: rope for llama, absolute for
        the rest. Every field can be overridden.

            >>> ModelConfig.preset("gpt2", n_layers=2).positions
            'learned'
        """
        return _from_fields(preset_settings(name, positions) | overrides, where=f"preset {name!r}")

    def to_dict(self) -> dict[str, Any]:
        """The content of config.json: every field that is not None, and `model_type`."""
        fields = dataclasses.asdict(self).items()
        return {"model_type": MODEL_TYPE} | {key: value for key, value in fields if value is not None}

    @classmethod
    def from_dict(cls, settings: Mapping[str, Any]) -> "ModelConfig":
        """Read a config.json of this model: `from_dict(c.to_dict()) == c`. An unknown key is an error."""
        found = settings.get("model_type")
        if found != MODEL_TYPE:
            raise ArchitectureError(f"config: model_type is {found!r}, expected {MODEL_TYPE!r}, our own model")
        read = settings.keys() - _IGNORED_KEYS - {"model_type"}
        return _from_fields({key: settings[key] for key in read}, where="config")

    @property
    def d_patch(self) -> int:
        """Numbers in one patch, C·p·p (image input only)."""
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
