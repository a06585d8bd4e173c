"""StableLM and Nemotron: partial rotary positions and LayerNorm in an architecture like Llama's."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.llama import ATTENTION, BASE_NAMES, FEED_FORWARD, PARALLEL_FEED_FORWARD, gated_decoder
from isobasin.arch.family import CAUSAL, HEAD_NORM_SIGNS, LAST_TOKEN, VALUE_CONSTANTS, BiasFlag, Family

_PLAIN_FEED_FORWARD = {
    "model.layers.{i}.mlp.up_proj": "ff{i} m{i}*",
    "model.layers.{i}.mlp.down_proj": "resid ff{i}*",
}


def stablelm(config: Mapping[str, Any]) -> Architecture:
    """Both sublayers may read one norm (`use_parallel_residual`). Queries and keys of each head may pass a LayerNorm
    (`qk_layernorm`), whose gains are one tensor for each head; the order of such heads is not used."""
    c = Fields(config)
    normed = c.flag("qk_layernorm", False)
    parallel = c.flag("use_parallel_residual", False)
    return gated_decoder(
        config,
        ATTENTION | (PARALLEL_FEED_FORWARD if parallel else FEED_FORWARD),
        norm="layer",
        defaults={"num_key_value_heads": 32},
        partial_rotary=0.25,
        rounded=False,
        head_dim=False,
        permutable=not normed,
        layer_norm=tuple(f"{side}_layernorm.norms.{{h}}.weight" for side in "qk") if normed else None,  # type: ignore[arg-type]
        norms={"a{i}": "layer(resid, model.layers.{i}.input_layernorm)"} if parallel else None,
    )


def nemotron(config: Mapping[str, Any]) -> Architecture:
    """Squared ReLU units without gates, and gains stored less 1. The scales of such units are not used."""
    activation = Fields(config).word("hidden_act", "relu2")
    return gated_decoder(
        config,
        ATTENTION | _PLAIN_FEED_FORWARD,
        norm="layer",
        units=units_kind(activation),
        partial_rotary=0.5,
        plus_one=True,
    )


FAMILIES = (
    Family(
        "stablelm",
        stablelm,
        "StableLmForCausalLM",
        prefix="model.",
        settings={"hidden_act": "silu", "layer_norm_eps": 1e-5},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        ignored=("head_dim",),
        bias_flags=(
            BiasFlag("use_qkv_bias", False, r"\bself_attn\.[qkv]_proj\.bias$"),
            BiasFlag("", False, r"\b(self_attn\.o_proj|mlp\.\w+)\.bias$"),
        ),
        unused=(VALUE_CONSTANTS, HEAD_NORM_SIGNS, "the order of heads with norms of their own (qk_layernorm)"),
        example=(
            "StableLM 3B",
            {"hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 32}
            | {"intermediate_size": 6912, "vocab_size": 50304},
        ),
    ),
    Family(
        "nemotron",
        nemotron,
        "NemotronForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings={"hidden_act": "relu2", "norm_eps": 1e-5},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=(
            BiasFlag("attention_bias", False, r"\bself_attn\.\w+\.bias$"),
            BiasFlag("mlp_bias", False, r"\bmlp\.\w+\.bias$"),
        ),
        unused=(
            "scales of squared ReLU units",
            VALUE_CONSTANTS,
        ),
        example=(
            "Minitron 4B",
            {"hidden_size": 3072, "num_attention_heads": 24, "num_key_value_heads": 8, "num_hidden_layers": 32}
            | {"intermediate_size": 9216, "vocab_size": 256000, "head_dim": 128},
        ),
    ),
)
