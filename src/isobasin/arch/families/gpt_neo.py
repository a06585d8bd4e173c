"""GPT-Neo, GPT-BigCode (SantaCoder, StarCoder) and OPT: learned positions, LayerNorm before each sublayer."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, Sum, build, stream_kind, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import DecoderHead, decoder_head
from isobasin.arch.family import CAUSAL, LAST_TOKEN, BiasFlag, Family
from isobasin.errors import ArchitectureError, brief

_H, _OPT = "transformer.h.{i}", "model.decoder.layers.{i}"


def gpt_neo(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, n_heads, n_layers = c.size("hidden_size"), c.size("num_heads"), c.size("num_layers")
    d_ff, d_head = c.size("intermediate_size", 4 * d), c.d_head(n_heads, d, key=None)
    head = decoder_head(c, "transformer.wte.weight", tied_default=True)
    attention = {
        f"{_H}.attn.attention.q_proj": "qk{i}* a{i}*",
        f"{_H}.attn.attention.k_proj": "qk{i} a{i}*",
        f"{_H}.attn.attention.v_proj": "vo{i} a{i}*",
        f"{_H}.attn.attention.out_proj": "resid vo{i}*",
    }
    buffers = {f"{_H}.attn.attention.bias": "-", f"{_H}.attn.attention.masked_bias": "-"}
    sizes = Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff)
    return _gpt(c, "gpt_neo", sizes, head, attention, buffers, n_positions=c.size("max_position_embeddings", 2048))


def gpt_bigcode(config: Mapping[str, Any]) -> Architecture:
    """One kv head for all queries, or (`multi_query` false) queries, keys and values fused inside each head."""
    c = Fields(config)
    d, n_heads, n_layers = c.size("n_embd"), c.size("n_head"), c.size("n_layer")
    if c.flag("add_cross_attention", False):
        raise ArchitectureError("config.json: add_cross_attention is true; only GPT-BigCode decoders are supported")
    d_ff, d_head = c.size("n_inner", 4 * d), c.d_head(n_heads, d, key=None)
    n_kv_heads = 1 if c.flag("multi_query", True) else n_heads
    head = decoder_head(c, "transformer.wte.weight", tied_default=True)
    attention = {
        f"{_H}.attn.c_attn": "(qk{i}:q*+qk{i}+vo{i}) a{i}*",
        f"{_H}.attn.c_proj": "resid vo{i}:q*",
    }
    sizes = Sizes(n_layers, n_heads, n_kv_heads, d, d_head, d_ff)
    buffers = {f"{_H}.attn.bias": "-", f"{_H}.attn.masked_bias": "-"}
    return _gpt(c, "gpt_bigcode", sizes, head, attention, buffers, n_positions=c.size("n_positions", 1024))


def _gpt(
    c: Fields,
    family: str,
    sizes: Sizes,
    head: DecoderHead,
    attention: Mapping[str, str],
    buffers: Mapping[str, str],
    *,
    n_positions: int,
) -> Architecture:
    """GPT-2 with this attention."""
    default = "gelu_new" if family == "gpt_neo" else "gelu_pytorch_tanh"
    return build(
        family=family,
        positions="learned",
        sizes=sizes,
        spaces=[
            Space("resid", sizes.d_model, stream_kind("layer", tied=head.tied, bare=head.bare), stream=True),
            Space("ff{i}", sizes.d_ff, units_kind(c.word("activation_function", default))),
        ],
        heads=HeadSpace("heads", sizes.n_heads, sizes.n_kv_heads, sizes.d_head),
        norms={
            "a{i}": f"layer(resid, {_H}.ln_1)",
            "m{i}": f"layer(resid, {_H}.ln_2)",
            "f": f"layer(resid, transformer.ln_f{head.exposed})",
        },
        modules=dict(attention) | {f"{_H}.mlp.c_fc": "ff{i} m{i}*", f"{_H}.mlp.c_proj": "resid ff{i}*"} | head.modules,
        tensors=head.tensors | {"transformer.wpe.weight": f".{n_positions} resid"} | dict(buffers),
        sums=_positions("transformer.wpe.weight", "transformer.wte.weight", head.tied),
        aliases=head.aliases,
    )


def opt(config: Mapping[str, Any]) -> Architecture:
    """The table of positions begins with two rows for padding, which no text reaches."""
    c = Fields(config)
    d, n_heads, n_layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    d_ff, d_head = c.size("ffn_dim", 4 * d), c.d_head(n_heads, d, key=None)
    _check_opt(c, d)
    tokens, positions = "model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"
    head = decoder_head(c, tokens, tied_default=True)
    return build(
        family="opt",
        positions="learned",
        sizes=Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff),
        spaces=[
            Space("resid", d, stream_kind("layer", tied=head.tied, bare=head.bare), stream=True),
            Space("ff{i}", d_ff, units_kind(c.word("activation_function", "relu"))),
        ],
        heads=HeadSpace("heads", n_heads, n_heads, d_head),
        norms={
            "a{i}": f"layer(resid, {_OPT}.self_attn_layer_norm)",
            "m{i}": f"layer(resid, {_OPT}.final_layer_norm)",
            "f": f"layer(resid, model.decoder.final_layer_norm{head.exposed})",
        },
        modules={
            f"{_OPT}.self_attn.q_proj": "qk{i}* a{i}*",
            f"{_OPT}.self_attn.k_proj": "qk{i} a{i}*",
            f"{_OPT}.self_attn.v_proj": "vo{i} a{i}*",
            f"{_OPT}.self_attn.out_proj": "resid vo{i}*",
            f"{_OPT}.fc1": "ff{i} m{i}*",
            f"{_OPT}.fc2": "resid ff{i}*",
        }
        | head.modules,
        tensors=head.tensors | {positions: f".{c.size('max_position_embeddings', 2048) + 2} resid"},
        sums=_positions(positions, tokens, head.tied, first=2),
        aliases=head.aliases,
        unread={positions: range(2)},
    )


def _check_opt(c: Fields, d: int) -> None:
    """Refuse the one OPT model that is built otherwise (350M), with the reason."""
    if not c.flag("do_layer_norm_before", True):
        raise ArchitectureError(
            "config.json: do_layer_norm_before is false (OPT 350M): its stream starts without a norm, which has "
            "symmetries that are not implemented; the other sizes of OPT are supported"
        )
    if c.size("word_embed_proj_dim", d) != d:
        raise ArchitectureError(
            "config.json: word_embed_proj_dim is not hidden_size: projected embeddings are not supported"
        )
    if not c.flag("layer_norm_elementwise_affine", True) or c.flag("_remove_final_layer_norm", False):
        raise ArchitectureError("config.json: OPT without gains or without its last norm is not supported")


def _positions(positions: str, tokens: str, tied: bool, first: int = 0) -> tuple[Sum, ...]:
    """Tied, the same vector added to every row of the embedding would add a constant to all logits. `first`: the first
    row of the table that is read."""
    return () if tied else (Sum("positions", ((positions, first, None),), ((tokens, 0, None),)),)


def _local_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    """The kind of attention of every layer, and the window of the local ones; `attention_layers` wins over the shorter
    `attention_types`, as in transformers."""
    layers, types = config.get("attention_layers"), config.get("attention_types")
    if layers is None and types is not None:
        layers = [kind for kinds, repeats in types for _ in range(repeats) for kind in kinds]
    if layers is None:
        layers = ["global" if i % 2 == 0 else "local" for i in range(int(config.get("num_layers", 24)))]
    if not isinstance(layers, list | tuple):
        raise ArchitectureError(f"config.json: attention_layers is {brief(layers)}, expected a list of words")
    return {"attention_layers": layers, "window_size": config.get("window_size", 256) if "local" in layers else None}


FAMILIES = (
    Family(
        "gpt_neo",
        gpt_neo,
        "GPTNeoForCausalLM",
        prefix="transformer.",
        settings={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
        rare_settings=CAUSAL,
        derived_settings=_local_layers,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("", False, r"\battention\.[qkv]_proj\.bias$"),),
        aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
        example=(
            "GPT-Neo 125M",
            {"hidden_size": 768, "num_heads": 12, "num_layers": 12, "vocab_size": 50257},
        ),
    ),
    Family(
        "gpt_bigcode",
        gpt_bigcode,
        "GPTBigCodeForCausalLM",
        prefix="transformer.",
        settings={"activation_function": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5, "scale_attn_weights": True},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        aliases={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
        },
        ignored=("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "num_key_value_heads"),
        example=("StarCoder 1B", {"n_embd": 2048, "n_head": 16, "n_layer": 24, "vocab_size": 49152}),
    ),
    Family(
        "opt",
        opt,
        "OPTForCausalLM",
        prefix="model.",
        settings={"activation_function": "relu"},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("enable_bias", True, r"\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)\.bias$"),),
        example=(
            "OPT 125M",
            {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "ffn_dim": 3072}
            | {"vocab_size": 50272},
        ),
    ),
)
