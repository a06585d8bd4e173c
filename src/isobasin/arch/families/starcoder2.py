"""StarCoder2: rotary positions and grouped queries with LayerNorm, biases everywhere, plain units."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, build, stream_kind, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import decoder_head
from isobasin.arch.families.llama import ATTENTION
from isobasin.arch.family import CAUSAL, LAST_TOKEN, BiasFlag, Family

_LAYER = "model.layers.{i}"


def starcoder2(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, n_heads, n_layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    n_kv_heads, d_ff, d_head = c.size("num_key_value_heads", 2), c.size("intermediate_size"), c.d_head(n_heads, d)
    head = decoder_head(c, "model.embed_tokens.weight", tied_default=True, token_head="score")
    return build(
        family="starcoder2",
        positions="rope",
        sizes=Sizes(n_layers, n_heads, n_kv_heads, d, d_head, d_ff),
        spaces=[
            Space("resid", d, stream_kind("layer", tied=head.tied, bare=head.bare), stream=True),
            Space("ff{i}", d_ff, units_kind(c.word("hidden_act", "gelu_pytorch_tanh"))),
        ],
        heads=HeadSpace("heads", n_heads, n_kv_heads, d_head, d_head),
        norms={
            "a{i}": f"layer(resid, {_LAYER}.input_layernorm)",
            "m{i}": f"layer(resid, {_LAYER}.post_attention_layernorm)",
            "f": f"layer(resid, model.norm{head.exposed})",
        },
        modules=ATTENTION
        | {f"{_LAYER}.mlp.c_fc": "ff{i} m{i}*", f"{_LAYER}.mlp.c_proj": "resid ff{i}*"}
        | head.modules,
        tensors=head.tensors,
        aliases=head.aliases,
        rotary=c.rotary(),
    )


FAMILIES = (
    Family(
        "starcoder2",
        starcoder2,
        "Starcoder2ForCausalLM",
        prefix="model.",
        settings={"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5, "sliding_window": None},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("use_bias", True, r"\b(self_attn|mlp)\.\w+\.bias$"),),
        example=(
            "StarCoder2 3B",
            {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 2, "num_hidden_layers": 30}
            | {"intermediate_size": 12288, "vocab_size": 49152},
        ),
    ),
)
