"""GPT-NeoX and Pythia: partial rotary positions, QKV fused inside each head, parallel or sequential residual."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, build, stream_kind, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import decoder_head, parallel_biases
from isobasin.arch.family import CAUSAL, LAST_TOKEN, BiasFlag, Family

_LAYER = "gpt_neox.layers.{i}"


def gpt_neox(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, n_heads, n_layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    d_ff = c.size("intermediate_size")
    d_head = c.d_head(n_heads, d, key=None)
    head = decoder_head(c, "gpt_neox.embed_in.weight", lm_head="embed_out")
    tensors = head.tensors | {
        f"{_LAYER}.attention.bias": "-",
        f"{_LAYER}.attention.masked_bias": "-",
        f"{_LAYER}.attention.rotary_emb.inv_freq": "-",
    }
    modules = head.modules | {
        f"{_LAYER}.attention.query_key_value": "(qk{i}*+qk{i}+vo{i}) a{i}*",
        f"{_LAYER}.attention.dense": "resid vo{i}*",
        f"{_LAYER}.mlp.dense_h_to_4h": "ff{i} m{i}*",
        f"{_LAYER}.mlp.dense_4h_to_h": "resid ff{i}*",
    }
    parallel = c.flag("use_parallel_residual", True)
    return build(
        family="gpt_neox",
        positions="rope",
        sizes=Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff),
        spaces=[
            Space("resid", d, stream_kind("layer", tied=head.tied, bare=head.bare), stream=True),
            Space("ff{i}", d_ff, units_kind(c.word("hidden_act", "gelu"))),
        ],
        heads=HeadSpace("heads", n_heads, n_heads, d_head, c.rotary_columns(d_head, "rotary_pct", 0.25)),
        norms={
            "a{i}": f"layer(resid, {_LAYER}.input_layernorm)",
            "m{i}": f"layer(resid, {_LAYER}.post_attention_layernorm)",
            "f": f"layer(resid, gpt_neox.final_layer_norm{head.exposed})",
        },
        modules=modules,
        tensors=tensors,
        sums=parallel_biases(f"{_LAYER}.attention.dense.bias", f"{_LAYER}.mlp.dense_4h_to_h.bias", n_layers)
        if parallel
        else (),
        # Without a bias of its own, attention leaves its constants to the bias that is added beside it.
        biases={}
        if c.flag("attention_bias", True) or not parallel
        else {
            f"gpt_neox.layers.{i}.attention.dense.weight": f"gpt_neox.layers.{i}.mlp.dense_4h_to_h.bias"
            for i in range(n_layers)
        },
        aliases=head.aliases,
        rotary=c.rotary("rotary_emb_base"),
    )


FAMILIES = (
    Family(
        "gpt_neox",
        gpt_neox,
        "GPTNeoXForCausalLM",
        prefix="gpt_neox.",
        spellings=((r"^lm_head\.", "embed_out."),),
        settings={"hidden_act": "gelu", "layer_norm_eps": 1e-5, "use_parallel_residual": True},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("attention_bias", True, r"\battention\.\w+\.bias$"),),
        ignored=("is_decoder",),
        example=(
            "Pythia 160M",
            {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}
            | {"intermediate_size": 3072, "vocab_size": 50304, "rotary_pct": 0.25},
        ),
    ),
)
