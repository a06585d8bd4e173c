"""ViT and DeiT: patches, a class token and learned positions, LayerNorm before each sublayer."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, Sum, build, stream_kind, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.family import BiasFlag, Family, ModelInputs
from isobasin.errors import ArchitectureError


def vit(config: Mapping[str, Any]) -> Architecture:
    return _patches(Fields(config), "vit", "ViTModel", "ViTForMaskedImageModeling")


def deit(config: Mapping[str, Any]) -> Architecture:
    """ViT with a second token, for distillation, and with two classifiers if both tokens are read."""
    return _patches(Fields(config), "deit", "DeiTModel", "DeiTForMaskedImageModeling", tokens=("distillation_token",))


def _patches(c: Fields, family: str, bare_class: str, masked_class: str, tokens: tuple[str, ...] = ()) -> Architecture:
    """An encoder of image patches with a class token and these further tokens."""
    embed, layer = f"{family}.embeddings", f"{family}.encoder.layer.{{i}}"
    d, n_heads, n_layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    d_ff, d_head = c.size("intermediate_size", 4 * d), c.d_head(n_heads, d)
    patch, channels = pair(c, "patch_size", 16), c.size("num_channels", 3)
    image = pair(c, "image_size", 224)
    n_tokens = 1 + len(tokens)
    n_positions = (image[0] // patch[0]) * (image[1] // patch[1]) + n_tokens
    bare = c.architecture == bare_class
    modules = {
        f"{embed}.patch_embeddings.projection": f"resid .{channels} .{patch[0]} .{patch[1]}",
        f"{layer}.attention.attention.query": "qk{i}* a{i}*",
        f"{layer}.attention.attention.key": "qk{i} a{i}*",
        f"{layer}.attention.attention.value": "vo{i} a{i}*",
        f"{layer}.attention.output.dense": "resid vo{i}*",
        f"{layer}.intermediate.dense": "ff{i} m{i}*",
        f"{layer}.output.dense": "resid ff{i}*",
    }
    masked = c.architecture == masked_class
    if bare:
        modules[f"{family}.pooler.dense"] = "?. f*"
    elif masked:
        modules["decoder.0"] = ". f* .1 .1"
    elif c.architecture.endswith("WithTeacher"):
        modules |= {"cls_classifier": ". f*", "distillation_classifier": ". f*"}
    else:
        modules["classifier"] = ". f*"
    positions = f"{embed}.position_embeddings"
    patches = ((f"{embed}.patch_embeddings.projection.bias", 0, None), (f"{embed}.mask_token", 0, None))
    return build(
        family=family,
        positions="learned",
        sizes=Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff),
        spaces=[
            Space("resid", d, stream_kind("layer", bare=bare), stream=True),
            Space("ff{i}", d_ff, units_kind(c.word("hidden_act", "gelu"))),
        ],
        heads=HeadSpace("heads", n_heads, n_heads, d_head),
        norms={
            "a{i}": f"layer(resid, {layer}.layernorm_before)",
            "m{i}": f"layer(resid, {layer}.layernorm_after)",
            "f": f"layer(resid, {family}.layernorm{', exposed' if bare else ''})",
        },
        modules=modules,
        tensors={
            f"{embed}.cls_token": ".1 .1 resid",
            f"{embed}.mask_token": "?.1 .1 resid",
            positions: f".1 .{n_positions} resid",
            **{f"{embed}.{token}": ".1 .1 resid" for token in tokens},
        },
        sums=(
            Sum("cls", ((f"{embed}.cls_token", 0, None),), ((positions, 0, 1),)),
            *(
                Sum(token, ((f"{embed}.{token}", 0, None),), ((positions, k, k + 1),))
                for k, token in enumerate(tokens, 1)
            ),
            Sum("patches", patches, ((positions, n_tokens, None),)),
        ),
        unread={} if bare or masked else {f"{embed}.mask_token": None},
    )


def pair(c: Fields, key: str, default: int) -> tuple[int, int]:
    """Height and width: one number for both, or two."""
    value = c.config.get(key)
    if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(v, int) for v in value):
        return int(value[0]), int(value[1])
    if isinstance(value, list | tuple):
        raise ArchitectureError(f"config.json: {key} is {value!r}, expected a size or two")
    return c.size(key, default), c.size(key, default)


# transformers keeps these models under other names in memory than on disk; both are read.
_SPELLINGS = (
    (r"\blayers\.(\d+)\.attention\.q_proj\b", r"encoder.layer.\1.attention.attention.query"),
    (r"\blayers\.(\d+)\.attention\.k_proj\b", r"encoder.layer.\1.attention.attention.key"),
    (r"\blayers\.(\d+)\.attention\.v_proj\b", r"encoder.layer.\1.attention.attention.value"),
    (r"\blayers\.(\d+)\.attention\.o_proj\b", r"encoder.layer.\1.attention.output.dense"),
    (r"\blayers\.(\d+)\.mlp\.fc1\b", r"encoder.layer.\1.intermediate.dense"),
    (r"\blayers\.(\d+)\.mlp\.fc2\b", r"encoder.layer.\1.output.dense"),
    (r"(?<!encoder\.)\blayers\.(\d+)\.layernorm_", r"encoder.layer.\1.layernorm_"),
)

_HEADS = ("ForImageClassification", "ForMaskedImageModeling", "Model")

FAMILIES = (
    Family(
        "vit",
        vit,
        "ViTForImageClassification",
        _HEADS,
        prefix="vit.",
        spellings=_SPELLINGS,
        settings={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "patch_size": 16, "image_size": 224},
        rare_settings={"is_causal": False},
        head_settings={"Model": {"pooler_act": "tanh"}},
        bias_flags=(BiasFlag("qkv_bias", True, r"\battention\.attention\.\w+\.bias$"),),
        ignored=("pooler_act",),  # by other classes
        inputs=ModelInputs(image_size=224),
        optional_pooler=("ViTModel",),
        example=("ViT base", {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}),
    ),
    Family(
        "deit",
        deit,
        "DeiTForImageClassification",
        (*_HEADS, "ForImageClassificationWithTeacher"),
        prefix="deit.",
        spellings=_SPELLINGS,
        settings={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "patch_size": 16, "image_size": 224},
        rare_settings={"is_causal": False},
        head_settings={"Model": {"pooler_act": "tanh"}},
        bias_flags=(BiasFlag("qkv_bias", True, r"\battention\.attention\.\w+\.bias$"),),
        ignored=("pooler_act",),
        inputs=ModelInputs(image_size=224, extra_tokens=1),
        optional_pooler=("DeiTModel",),
        example=("DeiT base", {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}),
    ),
)
