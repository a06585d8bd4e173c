"""Falcon (7B, 40B and RW), BLOOM and MPT: fused queries, keys and values; rotary positions or ALiBi."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, build, stream_kind, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import decoder_head, parallel_biases
from isobasin.arch.family import CAUSAL, LAST_TOKEN, BiasFlag, Family
from isobasin.errors import ArchitectureError

_LAYER, _BLOCK = "transformer.h.{i}", "transformer.blocks.{i}"


def falcon(config: Mapping[str, Any]) -> Architecture:
    """Three kinds: one kv head for all queries (7B), groups of queries (40B, `new_decoder_architecture`), and a kv head
    for each query (RW). Fused rows are ordered by kv head: its queries, its key, its value."""
    c = Fields(config)
    d, n_heads, n_layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    d_ff, d_head = c.size("ffn_hidden_size", 4 * d), c.d_head(n_heads, d, key=None)
    new, alibi = c.flag("new_decoder_architecture", False), c.flag("alibi", False)
    # Every key is read, also those that this kind ignores: none of them is unknown.
    n_groups, one = c.size("num_kv_heads", n_heads), c.flag("multi_query", True)
    n_kv_heads = n_groups if new else 1 if one else n_heads
    parallel = c.flag("parallel_attn", True) or new
    norms, unit_norm = _falcon_norms(c, new, parallel)
    head = decoder_head(c, "transformer.word_embeddings.weight", tied_default=True)
    return build(
        family="falcon",
        positions="alibi" if alibi else "rope",
        sizes=Sizes(n_layers, n_heads, n_kv_heads, d, d_head, d_ff),
        spaces=[
            Space("resid", d, stream_kind("layer", tied=head.tied, bare=head.bare), stream=True),
            Space("ff{i}", d_ff, units_kind(c.word("activation", "gelu"))),
        ],
        heads=HeadSpace("heads", n_heads, n_kv_heads, d_head, 0 if alibi else d_head, permutable=not alibi),
        norms=norms | {"f": f"layer(resid, transformer.ln_f{head.exposed})"},
        modules={
            f"{_LAYER}.self_attention.query_key_value": "(qk{i}:q*+qk{i}+vo{i}) a{i}*",
            f"{_LAYER}.self_attention.dense": "resid vo{i}:q*",
            f"{_LAYER}.mlp.dense_h_to_4h": f"ff{{i}} {unit_norm}{{i}}*",
            f"{_LAYER}.mlp.dense_4h_to_h": "resid ff{i}*",
        }
        | head.modules,
        tensors=head.tensors,
        sums=parallel_biases(f"{_LAYER}.self_attention.dense.bias", f"{_LAYER}.mlp.dense_4h_to_h.bias", n_layers)
        if parallel
        else (),
        aliases=head.aliases,
        rotary=c.rotary(),
    )


def _falcon_norms(c: Fields, new: bool, parallel: bool) -> tuple[dict[str, str], str]:
    """The norms of a layer, and the one that the feed-forward reads."""
    n_norms = c.size("num_ln_in_parallel_attn", 2)
    if new and n_norms == 2:
        return {"a{i}": f"layer(resid, {_LAYER}.ln_attn)", "m{i}": f"layer(resid, {_LAYER}.ln_mlp)"}, "m"
    first = {"a{i}": f"layer(resid, {_LAYER}.input_layernorm)"}
    if parallel:
        return first, "a"
    return first | {"m{i}": f"layer(resid, {_LAYER}.post_attention_layernorm)"}, "m"


def bloom(config: Mapping[str, Any]) -> Architecture:
    """A LayerNorm on the embeddings: its gain stays, so the stream has permutations only."""
    c = Fields(config)
    d, n_heads, n_layers = c.size("hidden_size", 64), c.size("n_head", 8), c.size("n_layer", 2)
    d_head, d_ff = c.d_head(n_heads, d, key=None), 4 * d
    if c.flag("apply_residual_connection_post_layernorm", False):
        raise ArchitectureError(
            "config.json: apply_residual_connection_post_layernorm is true; only BLOOM with pre-norm is supported"
        )
    if c.flag("slow_but_exact", False) and c.size("pretraining_tp", 1) > 1:
        raise ArchitectureError(
            "config.json: slow_but_exact with pretraining_tp makes transformers leave out biases; remove slow_but_exact"
        )
    head = decoder_head(c, "transformer.word_embeddings.weight", tied_default=True)
    return build(
        family="bloom",
        positions="alibi",
        sizes=Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff),
        spaces=[
            Space("resid", d, "fixed" if head.bare else "permutation±", stream=True),
            Space("ff{i}", d_ff, "permutation"),
        ],
        heads=HeadSpace("heads", n_heads, n_heads, d_head, permutable=False),
        norms={
            "e": "layer(resid, transformer.word_embeddings_layernorm)",
            "a{i}": f"layer(resid, {_LAYER}.input_layernorm)",
            "m{i}": f"layer(resid, {_LAYER}.post_attention_layernorm)",
            "f": f"layer(resid, transformer.ln_f{head.exposed})",
        },
        modules={
            f"{_LAYER}.self_attention.query_key_value": "(qk{i}*+qk{i}+vo{i}) a{i}*",
            f"{_LAYER}.self_attention.dense": "resid vo{i}*",
            f"{_LAYER}.mlp.dense_h_to_4h": "ff{i} m{i}*",
            f"{_LAYER}.mlp.dense_4h_to_h": "resid ff{i}*",
        }
        | head.modules,
        tensors=head.tensors,
        aliases=head.aliases,
    )


def mpt(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, n_heads, n_layers = c.size("d_model"), c.size("n_heads"), c.size("n_layers")
    attention = c.table("attn_config")
    for key in ("clip_qkv", "qk_ln"):
        if attention.get(key):
            raise ArchitectureError(
                f"config.json: attn_config has {key}, which changes the symmetries of MPT: not supported"
            )
    head = decoder_head(c, "transformer.wte.weight", tied_default=True)
    return build(
        family="mpt",
        positions="alibi",
        sizes=Sizes(n_layers, n_heads, n_heads, d, c.d_head(n_heads, d, key=None), 4 * d),
        spaces=[
            Space("resid", d, stream_kind("layer", tied=head.tied, bare=head.bare), stream=True),
            Space("ff{i}", 4 * d, "permutation"),  # transformers ignores expansion_ratio
        ],
        heads=HeadSpace("heads", n_heads, n_heads, c.d_head(n_heads, d, key=None), permutable=False),
        norms={
            "a{i}": f"layer(resid, {_BLOCK}.norm_1)",
            "m{i}": f"layer(resid, {_BLOCK}.norm_2)",
            "f": f"layer(resid, transformer.norm_f{head.exposed})",
        },
        modules={
            f"{_BLOCK}.attn.Wqkv": "qk{i}*+qk{i}+vo{i} a{i}*",
            f"{_BLOCK}.attn.out_proj": "resid vo{i}*",
            f"{_BLOCK}.ffn.up_proj": "ff{i} m{i}*",
            f"{_BLOCK}.ffn.down_proj": "resid ff{i}*",
        }
        | head.modules,
        tensors=head.tensors,
        aliases=head.aliases,
    )


def _falcon_sdpa(config: Mapping[str, Any]) -> dict[str, Any]:
    """With sdpa, a config that asks for attention weights makes transformers compute something else."""
    return {"output_attentions": True if config.get("output_attentions") else None}


def _mpt_attention(config: Mapping[str, Any]) -> dict[str, Any]:
    table = Fields(config).table("attn_config")
    return {f"attn_config.{key}": table.get(key, default) for key, default in _MPT_DEFAULTS.items()}


_MPT_DEFAULTS = {"softmax_scale": None}

FAMILIES = (
    Family(
        "falcon",
        falcon,
        "FalconForCausalLM",
        prefix="transformer.",
        settings={"activation": "gelu", "layer_norm_epsilon": 1e-5},
        rare_settings=CAUSAL,
        derived_settings=_falcon_sdpa,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("bias", False, r"\b(self_attention|mlp)\.\w+\.bias$"),),
        ignored=("intermediate_size",),
        example=(
            "Falcon 7B",
            {"hidden_size": 4544, "num_attention_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024},
        ),
    ),
    Family(
        "bloom",
        bloom,
        "BloomForCausalLM",
        prefix="transformer.",
        settings={"layer_norm_epsilon": 1e-5},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "n_embed": "hidden_size"},
        example=("BLOOM 560M", {"hidden_size": 1024, "n_head": 16, "n_layer": 24, "vocab_size": 250880}),
    ),
    Family(
        "mpt",
        mpt,
        "MptForCausalLM",
        prefix="transformer.",
        settings={"layer_norm_epsilon": 1e-5},
        rare_settings=CAUSAL,
        derived_settings=_mpt_attention,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("", False, r"\b(attn|ffn|norm_1|norm_2|norm_f)\b.*\.bias$"),),
        ignored=(
            "attn_config",
            "expansion_ratio",
            "learned_pos_emb",
            "norm_type",
            "embedding_fraction",
            "init_device",
            "no_bias",
        ),
        example=("MPT 7B", {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432}),
    ),
)
