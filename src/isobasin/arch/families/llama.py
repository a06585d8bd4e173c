"""Llama and Mistral: rotary positions, RMSNorm, grouped queries, gated feed-forward."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, build, stream_kind
from isobasin.arch.config import Fields
from isobasin.arch.family import CAUSAL, LAST_TOKEN, BiasFlag, Family


def llama(config: Mapping[str, Any]) -> Architecture:
    return gated_decoder(config, _ATTENTION | _FEED_FORWARD)


_ATTENTION = {
    "model.layers.{i}.self_attn.q_proj": "qk{i}:q* a{i}*",
    "model.layers.{i}.self_attn.k_proj": "qk{i} a{i}*",
    "model.layers.{i}.self_attn.v_proj": "vo{i} a{i}*",
    "model.layers.{i}.self_attn.o_proj": "resid vo{i}:q*",
}
_FEED_FORWARD = {
    "model.layers.{i}.mlp.gate_proj": "|ff{i}| m{i}*",
    "model.layers.{i}.mlp.up_proj": "ff{i} m{i}*",
    "model.layers.{i}.mlp.down_proj": "resid ff{i}*",
}


def gated_decoder(config: Mapping[str, Any], layer: Mapping[str, str], *, partial_rotary: bool = False) -> Architecture:
    """A decoder of this kind whose layers have these modules. Biases may be beside any of them.

    Llama, Mistral and Qwen2 rotate whole heads: transformers ignores a `partial_rotary_factor` in their configs.
    """
    c = Fields(config)
    d, n_heads = c.size("hidden_size"), c.size("num_attention_heads")
    d_head, d_ff, vocab = c.d_head(n_heads, d), c.size("intermediate_size"), c.size("vocab_size")
    sizes = Sizes(c.size("num_hidden_layers"), n_heads, c.size("num_key_value_heads", n_heads), d, d_head, d_ff)
    head = c.architecture.partition("For")[2]
    bare = c.architecture.endswith("Model")
    tied = c.flag("tie_word_embeddings", False) and head in ("CausalLM", "")
    columns = c.rotary_columns(d_head, "partial_rotary_factor", 1.0) if partial_rotary else d_head
    tensors = {
        "model.embed_tokens.weight": f".{vocab} resid & .{vocab} f*" if tied else f".{vocab} resid",
        "model.layers.{i}.self_attn.rotary_emb.inv_freq": "-",
    }
    modules = dict(layer)
    if head in ("SequenceClassification", "TokenClassification"):
        modules["score"] = ". f*"
    elif not bare and not tied:
        tensors["lm_head.weight"] = f".{vocab} f*"
    return build(
        family=c.word("model_type", "llama"),
        positions="rope",
        sizes=sizes,
        spaces=[
            Space("resid", d, stream_kind("rms", tied=tied, bare=bare), stream=True),
            Space("ff{i}", d_ff, "scaled"),
        ],
        heads=HeadSpace("heads", n_heads, sizes.n_kv_heads, d_head, columns),
        norms={
            "a{i}": "rms(resid, model.layers.{i}.input_layernorm)",
            "m{i}": "rms(resid, model.layers.{i}.post_attention_layernorm)",
            "f": "rms(resid, model.norm, exposed)" if bare else "rms(resid, model.norm)",
        },
        modules=modules,
        tensors=tensors,
        aliases={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
        rotary=c.rotary(),
    )


_7B = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}

FAMILIES = (
    Family(
        "llama",
        llama,
        "LlamaForCausalLM",
        prefix="model.",
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-6},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=(
            BiasFlag("attention_bias", False, r"\bself_attn\.\w+\.bias$"),
            BiasFlag("mlp_bias", False, r"\bmlp\.\w+\.bias$"),
        ),
        example=("Llama 2 7B", _7B | {"num_key_value_heads": 32, "intermediate_size": 11008}),
    ),
    Family(
        "mistral",
        llama,
        "MistralForCausalLM",
        prefix="model.",
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-6, "sliding_window": 4096},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        example=("Mistral 7B", _7B | {"num_key_value_heads": 8, "intermediate_size": 14336}),
    ),
)
