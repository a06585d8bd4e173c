"""DINOv2 and BEiT: ViT with LayerScale, a factor for every coordinate that a sublayer writes.

BEiT has a table of relative positions in each layer, and keys without a bias.
"""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Kind, Sizes, Space, Sum, build, stream_kind, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.vit import pair
from isobasin.arch.family import BiasFlag, Family, ModelInputs
from isobasin.errors import ArchitectureError

_ATTENTION = {
    "attention.attention.query": "qk{i}* a{i}*",
    "attention.attention.key": "qk{i} a{i}*",
    "attention.attention.value": "vo{i} a{i}*",
    "attention.output.dense": "resid vo{i}*",
}


def dinov2(config: Mapping[str, Any]) -> Architecture:
    """A classifier reads the class token and the mean of the patches behind one norm; its stream is not rotated."""
    c = Fields(config)
    d, layer, embed = c.size("hidden_size"), "dinov2.encoder.layer.{i}", "dinov2.embeddings"
    bare, gated = c.architecture == "Dinov2Model", c.flag("use_swiglu_ffn", False)
    d_ff = int(d * c.size("mlp_ratio", 4))
    if gated:
        d_ff = (int(d_ff * 2 / 3) + 7) // 8 * 8
        units = {f"{layer}.mlp.weights_in": "|ff{i}|+ff{i} m{i}*", f"{layer}.mlp.weights_out": "resid ff{i}*"}
    else:
        units = {f"{layer}.mlp.fc1": "ff{i} m{i}*", f"{layer}.mlp.fc2": "resid ff{i}*"}
    activation: Kind = "scaled" if gated else units_kind(c.word("hidden_act", "gelu"))
    patch, image = pair(c, "patch_size", 14), pair(c, "image_size", 224)
    n_positions = (image[0] // patch[0]) * (image[1] // patch[1]) + 1
    tensors = _embeddings(c, embed, patch) | {f"{embed}.position_embeddings": f".1 .{n_positions} resid"}
    tensors[f"{embed}.mask_token"] = "?.1 resid"
    last = "mlp.weights_out" if gated else "mlp.fc2"
    return build(
        family="dinov2",
        positions="learned",
        sizes=_sizes(c, d_ff),
        spaces=[
            Space("resid", d, "fixed" if bare else "permutation±", stream=True),
            Space("ff{i}", d_ff, activation),
        ],
        heads=_heads(c),
        norms={
            "a{i}": f"layer(resid, {layer}.norm1)",
            "m{i}": f"layer(resid, {layer}.norm2)",
            "f": "layer(resid, dinov2.layernorm, exposed)",
        },
        modules={f"{layer}.{name}": text for name, text in _ATTENTION.items()}
        | units
        | ({} if bare else {"classifier": ". f*+f*"}),
        tensors=tensors,
        sums=_sums(embed, f"{embed}.position_embeddings"),
        scales={
            f"{layer}.layer_scale1.lambda1": f"{layer}.attention.output.dense.weight",
            f"{layer}.layer_scale2.lambda1": f"{layer}.{last}.weight",
        },
        unread={} if bare else {f"{embed}.mask_token": None},
    )


def beit(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    if c.flag("use_shared_relative_position_bias", False):
        raise ArchitectureError(
            "config.json: use_shared_relative_position_bias is true; one table for all layers ties the order of their "
            "heads: not supported for BEiT"
        )
    d, d_ff = c.size("hidden_size"), c.size("intermediate_size")
    layer, embed = "beit.encoder.layer.{i}", "beit.embeddings"
    patch, image = pair(c, "patch_size", 16), pair(c, "image_size", 224)
    n_rows, n_columns = (image[k] // patch[k] for k in (0, 1))
    tensors = _embeddings(c, embed, patch) | {f"{embed}.mask_token": "?.1 .1 resid"}
    sums: tuple[Sum, ...] = ()
    if c.flag("use_absolute_position_embeddings", False):
        tensors[f"{embed}.position_embeddings"] = f".1 .{n_rows * n_columns + 1} resid"
        sums = _sums(embed, f"{embed}.position_embeddings")
    n_layers = c.size("num_hidden_layers")
    tables: dict[str, tuple[tuple[int, ...], ...]] = {}
    unread: dict[str, tuple[int, ...] | None] = {f"{embed}.mask_token": None}
    patches_only = c.flag("use_mean_pooling", True)  # the classifier reads the mean of the patches, or the class token
    if c.flag("use_relative_position_bias", False):
        size = (2 * n_rows - 1) * (2 * n_columns - 1) + 3
        table = f"{layer}.attention.attention.relative_position_bias.relative_position_bias_table"
        tensors[table] = f".{size} heads{{i}}"
        # The last three rows: from the class token to patches, from patches to it, from it to itself.
        groups = ((*range(size - 3), size - 2), (size - 3, size - 1))
        tables = {table.format(i=i): groups for i in range(n_layers)}
        unread[table.format(i=n_layers - 1)] = groups[int(patches_only)]  # by queries that the classifier does not read
    last = "beit.pooler.layernorm" if patches_only else "beit.layernorm"
    return build(
        family="beit",
        positions="relative" if tables else "learned",
        sizes=_sizes(c, d_ff),
        spaces=[
            Space("resid", d, stream_kind("layer"), stream=True),
            Space("ff{i}", d_ff, units_kind(c.word("hidden_act", "gelu"))),
        ],
        heads=_heads(c),
        norms={
            "a{i}": f"layer(resid, {layer}.layernorm_before)",
            "m{i}": f"layer(resid, {layer}.layernorm_after)",
            "f": f"layer(resid, {last})",
        },
        modules={f"{layer}.{name}": text for name, text in _ATTENTION.items()}
        | {f"{layer}.intermediate.dense": "ff{i} m{i}*", f"{layer}.output.dense": "resid ff{i}*", "classifier": ". f*"},
        tensors=tensors,
        sums=sums,
        tables=tables,
        scales={
            f"{layer}.lambda_1": f"{layer}.attention.output.dense.weight",
            f"{layer}.lambda_2": f"{layer}.output.dense.weight",
        }
        if _has_layer_scales(config)
        else {},
        unread=unread,
    )


def _has_layer_scales(config: Mapping[str, Any]) -> bool:
    """BEiT has none where they would begin at zero."""
    start = config.get("layer_scale_init_value", 0.1)
    if not isinstance(start, int | float) or isinstance(start, bool):
        raise ArchitectureError(f"config.json: layer_scale_init_value is {start!r}, expected a number")
    return start > 0


def _sizes(c: Fields, d_ff: int) -> Sizes:
    d, n_heads = c.size("hidden_size"), c.size("num_attention_heads")
    return Sizes(c.size("num_hidden_layers"), n_heads, n_heads, d, c.d_head(n_heads, d, key=None), d_ff)


def _heads(c: Fields) -> HeadSpace:
    n_heads = c.size("num_attention_heads")
    return HeadSpace("heads", n_heads, n_heads, c.d_head(n_heads, c.size("hidden_size"), key=None))


def _embeddings(c: Fields, embed: str, patch: tuple[int, int]) -> dict[str, str]:
    channels = c.size("num_channels", 3)
    return {
        f"{embed}.cls_token": ".1 .1 resid",
        f"{embed}.patch_embeddings.projection.weight": f"resid .{channels} .{patch[0]} .{patch[1]}",
        f"{embed}.patch_embeddings.projection.bias": "resid",
    }


def _sums(embed: str, positions: str) -> tuple[Sum, ...]:
    patches = ((f"{embed}.patch_embeddings.projection.bias", 0, None), (f"{embed}.mask_token", 0, None))
    return (
        Sum("cls", ((f"{embed}.cls_token", 0, None),), ((positions, 0, 1),)),
        Sum("patches", patches, ((positions, 1, None),)),
    )


_BASE = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}

FAMILIES = (
    Family(
        "dinov2",
        dinov2,
        "Dinov2ForImageClassification",
        ("ForImageClassification", "Model"),
        prefix="dinov2.",
        settings={"layer_norm_eps": 1e-6, "patch_size": 14, "image_size": 224},
        derived_settings=lambda c: {} if c.get("use_swiglu_ffn") else {"hidden_act": c.get("hidden_act", "gelu")},
        rare_settings={"is_causal": False},
        bias_flags=(BiasFlag("qkv_bias", True, r"\battention\.attention\.\w+\.bias$"),),
        ignored=(
            *("apply_layernorm", "drop_path_rate", "layerscale_value", "out_features", "out_indices", "stage_names"),
            *("reshape_hidden_states", "use_mask_token", "hidden_act"),
        ),
        inputs=ModelInputs(image_size=224),
        fused=True,
        unused=("rotations of the stream of a classifier, which reads one norm twice",),
        example=("DINOv2 base, classifier", _BASE),
    ),
    Family(
        "beit",
        beit,
        "BeitForImageClassification",
        ("ForImageClassification",),
        prefix="beit.",
        settings={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "patch_size": 16, "image_size": 224},
        rare_settings={"is_causal": False, "use_mean_pooling": True},
        bias_flags=(BiasFlag("", False, r"\battention\.attention\.key\.bias$"),),
        ignored=(
            *("drop_path_rate", "out_features", "out_indices", "stage_names", "vocab_size"),
            *("reshape_hidden_states", "use_mask_token", "add_fpn", "pool_scales", "use_auxiliary_head"),
            *("auxiliary_loss_weight", "auxiliary_channels", "auxiliary_num_convs", "auxiliary_concat_input"),
            "semantic_loss_ignore_index",
        ),
        inputs=ModelInputs(image_size=224),
        fused=True,
        example=("BEiT base", _BASE | {"intermediate_size": 3072, "use_relative_position_bias": True}),
    ),
)
