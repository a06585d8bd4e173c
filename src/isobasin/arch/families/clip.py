"""CLIP: a tower for texts and a tower for images, each on a stream of its own; LayerNorm before each sublayer.

The pooled output of each tower is projected into a joint space. The embeddings there are outputs, so the joint space
does not move. The tower of images has one more norm, on its embeddings: its stream can be permuted, but not rotated.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isobasin.arch.architecture import (
    Architecture,
    HeadSpace,
    Kind,
    Sizes,
    Space,
    Stack,
    Sum,
    build,
    stream_kind,
    units_kind,
)
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import attention_modules
from isobasin.arch.family import Family, ModelInputs, Part

TEXT_DEFAULTS: dict[str, Any] = {"vocab_size": 49408, "hidden_size": 512, "intermediate_size": 2048}
TEXT_DEFAULTS |= {"num_hidden_layers": 12, "num_attention_heads": 8, "max_position_embeddings": 77}
VISION_DEFAULTS: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
VISION_DEFAULTS |= {"num_attention_heads": 12, "image_size": 224, "patch_size": 32}


@dataclass(frozen=True)
class Tower:
    """The layers of one tower: spaces, heads, norms and weights; `tensors` and `sums` are those of its embeddings."""

    spaces: list[Space]
    heads: list[HeadSpace]
    norms: dict[str, str]
    modules: dict[str, str]
    tensors: dict[str, str]
    sums: tuple[Sum, ...]
    sizes: Sizes


def text_tower(c: Fields, *, exposed: bool) -> Tower:
    """The tower of texts; `exposed`: all its final states are outputs."""
    embed = "text_model.embeddings"
    tokens, positions = f"{embed}.token_embedding.weight", f"{embed}.position_embedding.weight"
    return tower(
        c,
        "text",
        stream_kind("layer", bare=exposed),
        norms={"text_last": f"layer(text, text_model.final_layer_norm{', exposed' if exposed else ''})"},
        tensors={
            tokens: f".{c.size('vocab_size', TEXT_DEFAULTS['vocab_size'])} text",
            positions: f".{c.size('max_position_embeddings', TEXT_DEFAULTS['max_position_embeddings'])} text",
            f"{embed}.position_ids": "-",
        },
        sums=(Sum("positions", ((positions, 0, None),), ((tokens, 0, None),)),),
        defaults=TEXT_DEFAULTS,
    )


def vision_tower(c: Fields, start: int = 0, *, exposed: bool, pooled: bool) -> Tower:
    """The tower of images, whose layers are counted from `start` on. `exposed`: the stream itself is an output, and its
    mean is seen; `pooled`: so is the norm of its first token."""
    embed, stream = "vision_model.embeddings", "|vision|" if exposed else "vision"
    image, patch = c.size("image_size", VISION_DEFAULTS["image_size"]), c.size("patch_size", 32)
    positions, first = f"{embed}.position_embedding.weight", f"{embed}.class_embedding"
    return tower(
        c,
        "vision",
        stream_kind("layer", bare=exposed, post_norm=True),
        norms={
            # Read by nothing: it writes to the stream.
            "vision_first": f"layer(vision, vision_model.pre_layrnorm{', exposed' if exposed else ''})",
            "vision_last": f"layer(vision, vision_model.post_layernorm{', exposed' if pooled else ''})",
        },
        tensors={
            first: "vision",
            f"{embed}.patch_embedding.weight": f"vision .{c.size('num_channels', 3)} .{patch} .{patch}",
            positions: f".{(image // patch) ** 2 + 1} vision",
            f"{embed}.position_ids": "-",
        },
        sums=(Sum("class", ((first, 0, None),), ((positions, 0, 1),)),),
        defaults=VISION_DEFAULTS,
        start=start,
        stream=stream,
    )


def tower(
    c: Fields,
    name: str,
    kind: Kind,
    *,
    norms: dict[str, str],
    tensors: dict[str, str],
    sums: tuple[Sum, ...],
    defaults: Mapping[str, int],
    start: int = 0,
    stream: str = "",
) -> Tower:
    """The layers of a tower, counted from `start` on; `stream` is the word by which they write to its stream."""
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    d, n_layers, n_heads, d_ff = (c.size(key, defaults[key]) for key in keys)
    d_head, units = c.d_head(n_heads, d, key=None), units_kind(c.word("hidden_act", "quick_gelu"))
    spaces = [Space(name, d, kind, stream=True, stack=name)]
    heads: list[HeadSpace] = []
    modules: dict[str, str] = {}
    for k in range(n_layers):
        i, place = start + k, f"{name}_model.encoder.layers.{k}"
        parts = [f"{place}.self_attn.{part}_proj" for part in ("q", "k", "v", "out")]
        norms |= {f"a{i}": f"layer({name}, {place}.layer_norm1)", f"m{i}": f"layer({name}, {place}.layer_norm2)"}
        modules |= attention_modules(parts, f"qk{i}", f"vo{i}", f"a{i}", f"a{i}", stream or name)
        modules |= {f"{place}.mlp.fc1": f"ff{i} m{i}*", f"{place}.mlp.fc2": f"{stream or name} ff{i}*"}
        faces = {"qk": f"qk{i}", "vo": f"vo{i}", "label": "heads", "stack": name}
        heads.append(HeadSpace(f"heads{i}", n_heads, n_heads, d_head, layer=i, **faces))  # type: ignore[arg-type]
        spaces.append(Space(f"ff{i}", d_ff, units, layer=i, stack=name, label="ff"))
    sizes = Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff)
    return Tower(spaces, heads, norms, modules, tensors, sums, sizes)


def joined(
    family: str, towers: list[Tower], tensors: Mapping[str, str], stacks: Mapping[str, Stack] | None = None
) -> Architecture:
    """The architecture of one or two towers, with the tensors behind them."""
    first = towers[0].sizes
    n_layers = sum(tower.sizes.n_layers for tower in towers)
    return build(
        family=family,
        positions="learned",
        sizes=Sizes(n_layers, first.n_heads, first.n_kv_heads, first.d_model, first.d_head, first.d_ff),
        spaces=[space for tower in towers for space in tower.spaces],
        heads=[heads for tower in towers for heads in tower.heads],
        norms={name: text for tower in towers for name, text in tower.norms.items()},
        modules={name: text for tower in towers for name, text in tower.modules.items()},
        tensors={name: text for tower in towers for name, text in tower.tensors.items()} | dict(tensors),
        sums=tuple(each for tower in towers for each in tower.sums),
        stacks=stacks,
    )


def clip(config: Mapping[str, Any]) -> Architecture:
    c, text, vision = Fields(config), *(Fields(part.of(config)) for part in _PARTS.values())
    texts = text_tower(text, exposed=False)
    images = vision_tower(vision, texts.sizes.n_layers, exposed=False, pooled=False)
    size = c.size("projection_dim", 512)
    return joined(
        "clip",
        [texts, images],
        {
            "text_projection.weight": f".{size} text_last*",
            "visual_projection.weight": f".{size} vision_last*",
            "logit_scale": "()",
        },
    )


def clip_text_model(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    projection = {"text_projection.weight": f".{c.size('projection_dim', 512)} text_last*"}
    return joined("clip_text_model", [text_tower(c, exposed=True)], projection if _projects(c) else {})


def clip_vision_model(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    projection = {"visual_projection.weight": f".{c.size('projection_dim', 512)} vision_last*"} if _projects(c) else {}
    return joined("clip_vision_model", [vision_tower(c, exposed=True, pooled=not projection)], projection)


def _projects(c: Fields) -> bool:
    return c.architecture.endswith("WithProjection")


_SETTINGS: dict[str, Any] = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5}
_TOWERS = (
    Family(
        "clip_text_model",
        clip_text_model,
        "CLIPTextModel",
        ("Model", "ModelWithProjection"),
        prefix="text_model.",
        # A text is read at its first end token; 2 stands for the highest id in the text.
        settings=_SETTINGS | {"eos_token_id": 49407, "num_attention_heads": 8},
        inputs=ModelInputs(ends=True),
        ignored=("projection_dim",),
        example=("CLIP text tower", TEXT_DEFAULTS),
    ),
    Family(
        "clip_vision_model",
        clip_vision_model,
        "CLIPVisionModel",
        ("Model", "ModelWithProjection"),
        prefix="vision_model.",
        settings=_SETTINGS | {"patch_size": 32, "image_size": 224, "num_attention_heads": 12},
        inputs=ModelInputs(image_size=224),
        ignored=("projection_dim",),
        example=("CLIP vision tower", VISION_DEFAULTS),
    ),
)
_PARTS = {
    "text_config": Part(_TOWERS[0], TEXT_DEFAULTS, older="text_config_dict"),
    "vision_config": Part(_TOWERS[1], VISION_DEFAULTS, older="vision_config_dict"),
}

FAMILIES = (
    *_TOWERS,
    Family(
        "clip",
        clip,
        "CLIPModel",
        ("Model",),
        parts=_PARTS,
        ignored=("logit_scale_init_value",),
        unused=(
            "rotations of the joint space, which change the embeddings and not their products",
            "a positive scale for each projection, as embeddings are normalised",
            "a curve of gains of the norm on the embeddings of images, with a rotation of the stream behind it",
        ),
        example=("CLIP base", {}),
    ),
)
