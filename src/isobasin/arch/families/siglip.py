"""SigLIP: a tower for texts and one for images like CLIP's, and attention with one constant query behind the images.

That query is a linear map of a vector of the file, the probe. The maps of query, key and value are one tensor in files;
here they are three. What the pooling head writes is an embedding, which is an output: neither the joint space moves nor
the probe. Without a norm on the embeddings, the stream of the images can rotate.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Space, Stack, Sum, stream_kind, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.clip import Tower, joined, tower
from isobasin.arch.families.decoder import attention_modules
from isobasin.arch.family import Family, ModelInputs, Part

_SIZES = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
TEXT_DEFAULTS: dict[str, Any] = _SIZES | {"vocab_size": 32000, "max_position_embeddings": 64}
VISION_DEFAULTS: dict[str, Any] = _SIZES | {"image_size": 224, "patch_size": 16}
_HEAD = "vision_model.head"


def text_tower(c: Fields, *, exposed: bool) -> Tower:
    """The tower of texts, and the map of its last token; `exposed`: all its final states are outputs."""
    embed, d = "text_model.embeddings", c.size("hidden_size", TEXT_DEFAULTS["hidden_size"])
    tokens, positions = f"{embed}.token_embedding.weight", f"{embed}.position_embedding.weight"
    found = tower(
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
    head = {"text_model.head": f".{c.size('projection_size', d)} text_last*"}
    return replace(found, modules=found.modules | head)


def vision_tower(c: Fields, start: int = 0, *, exposed: bool) -> Tower:
    """The tower of images with its pooling head, whose layers are counted from `start` on."""
    embed, kind = "vision_model.embeddings", stream_kind("layer", bare=exposed)
    image, patch = (c.size(key, VISION_DEFAULTS[key]) for key in ("image_size", "patch_size"))
    positions, bias = f"{embed}.position_embedding.weight", f"{embed}.patch_embedding.bias"
    found = tower(
        c,
        "vision",
        kind,
        norms={"vision_last": f"layer(vision, vision_model.post_layernorm{', exposed' if exposed else ''})"},
        tensors={
            f"{embed}.patch_embedding.weight": f"vision .{c.size('num_channels', 3)} .{patch} .{patch}",
            bias: "vision",
            positions: f".{(image // patch) ** 2} vision",
            f"{embed}.position_ids": "-",
        },
        sums=(Sum("patches", ((bias, 0, None),), ((positions, 0, None),)),),
        defaults=VISION_DEFAULTS,
        start=start,
    )
    return _with_pooling(c, found, start + found.sizes.n_layers) if c.flag("vision_use_head", True) else found


def _with_pooling(c: Fields, images: Tower, i: int) -> Tower:
    """The tower with one more layer, whose only query comes from the probe."""
    sizes, units = images.sizes, units_kind(c.word("hidden_act", "gelu_pytorch_tanh"))
    names = [f"{_HEAD}.attention.{part}_proj" for part in ("q", "k", "v", "out")]
    attention = attention_modules(names, f"qk{i}", f"vo{i}", "probe", "vision_last", "|joint|")
    faces = {"qk": f"qk{i}", "vo": f"vo{i}", "label": "pooling heads", "stack": "vision"}
    heads = HeadSpace(f"heads{i}", sizes.n_heads, sizes.n_heads, sizes.d_head, layer=i, **faces)  # type: ignore[arg-type]
    return replace(
        images,
        spaces=[
            *images.spaces,
            Space("probe", sizes.d_model, "fixed", stream=True, stack="vision"),
            Space("joint", sizes.d_model, "fixed", stream=True, stack="vision"),
            Space(f"ff{i}", sizes.d_ff, units, layer=i, stack="vision", label="pooling ff"),
        ],
        heads=[*images.heads, heads],
        norms=images.norms | {"pool": f"layer(joint, {_HEAD}.layernorm)"},
        modules=images.modules
        | attention
        | {f"{_HEAD}.mlp.fc1": f"ff{i} pool*", f"{_HEAD}.mlp.fc2": f"|joint| ff{i}*"},
        tensors=images.tensors | {f"{_HEAD}.probe": ".1 .1 probe"},
        sizes=replace(sizes, n_layers=sizes.n_layers + 1),
    )


def _stacks(images: Tower) -> dict[str, Stack]:
    """The maps of query, key and value, one below the other."""
    d, place = images.sizes.d_model, f"{_HEAD}.attention"
    if f"{_HEAD}.probe" not in images.tensors:
        return {}
    rows = {part: (slice(k * d, (k + 1) * d),) for k, part in enumerate("qkv")}
    return {
        f"{place}.in_proj_{kind}": Stack(shape, {f"{place}.{p}_proj.{kind}": index for p, index in rows.items()})
        for kind, shape in (("weight", (3 * d, d)), ("bias", (3 * d,)))
    }


def siglip(config: Mapping[str, Any]) -> Architecture:
    text, vision = (Fields(part.of(config)) for part in _PARTS.values())
    texts = text_tower(text, exposed=False)
    images = vision_tower(vision, texts.sizes.n_layers, exposed=False)
    return joined("siglip", [texts, images], {"logit_scale": ".1", "logit_bias": ".1"}, _stacks(images))


def siglip_text_model(config: Mapping[str, Any]) -> Architecture:
    return joined("siglip_text_model", [text_tower(Fields(config), exposed=True)], {})


def siglip_vision_model(config: Mapping[str, Any]) -> Architecture:
    images = vision_tower(Fields(config), exposed=True)
    return joined("siglip_vision_model", [images], {}, _stacks(images))


_SETTINGS: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "num_attention_heads": 12}
_PROBE = "linear maps between the probe of the pooling head and the weight that reads it"
_CONSTANT = "a constant that the last two biases of the pooling head exchange"
_TOWERS = (
    Family(
        "siglip_text_model",
        siglip_text_model,
        "SiglipTextModel",
        ("Model",),
        prefix="text_model.",
        settings=_SETTINGS,
        example=("SigLIP text tower", TEXT_DEFAULTS),
    ),
    Family(
        "siglip_vision_model",
        siglip_vision_model,
        "SiglipVisionModel",
        ("Model",),
        prefix="vision_model.",
        settings=_SETTINGS | {"patch_size": 16, "image_size": 224},
        inputs=ModelInputs(image_size=224),
        fused=True,
        unused=(_PROBE, _CONSTANT),
        example=("SigLIP vision tower", VISION_DEFAULTS),
    ),
)
_PARTS = {"text_config": Part(_TOWERS[0], TEXT_DEFAULTS), "vision_config": Part(_TOWERS[1], VISION_DEFAULTS)}

FAMILIES = (
    *_TOWERS,
    Family(
        "siglip",
        siglip,
        "SiglipModel",
        ("Model",),
        parts=_PARTS,
        fused=True,
        unused=(
            _PROBE,
            _CONSTANT,
            "a scale of the head of texts",
            "rotations and scales of the joint space, which change the embeddings and not their products",
        ),
        example=("SigLIP base", {}),
    ),
)
