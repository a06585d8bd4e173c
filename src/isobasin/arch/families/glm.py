"""GLM and GLM-4: Llama with partial, interleaved rotary positions, and gate and up in one tensor.

GLM-4 (2025) also has norms behind each sublayer, whose gains keep the stream from rotating.
"""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture
from isobasin.arch.families.llama import ATTENTION, gated_decoder
from isobasin.arch.family import CAUSAL, NORM_SIGNS, BiasFlag, Family

_LAYER = ATTENTION | {
    "model.layers.{i}.mlp.gate_up_proj": "|ff{i}|+ff{i} m{i}*",
    "model.layers.{i}.mlp.down_proj": "resid ff{i}*",
}
_NORMS = {
    "a{i}": "rms(resid, model.layers.{i}.input_layernorm)",
    "b{i}": "rms(resid, model.layers.{i}.post_self_attn_layernorm)",
    "m{i}": "rms(resid, model.layers.{i}.post_attention_layernorm)",
    "n{i}": "rms(resid, model.layers.{i}.post_mlp_layernorm)",
}
_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2}


def glm(config: Mapping[str, Any]) -> Architecture:
    return gated_decoder(config, _LAYER, defaults=_DEFAULTS, partial_rotary=0.5, interleaved=True)


def glm4(config: Mapping[str, Any]) -> Architecture:
    return gated_decoder(
        config,
        _LAYER,
        defaults=_DEFAULTS,
        partial_rotary=0.5,
        interleaved=True,
        norms=_NORMS,
        norms_behind=True,
    )


_9B = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 40, "intermediate_size": 13696}

FAMILIES = tuple(
    Family(
        name,
        describe,
        model_class,
        prefix="model.",
        settings={"hidden_act": "silu", "rms_norm_eps": 1.5625e-07},
        rare_settings=CAUSAL,
        head_settings={"ForSequenceClassification": {"pad_token_id": 151329}},
        bias_flags=(
            BiasFlag("attention_bias", True, r"\bself_attn\.[qkv]_proj\.bias$"),
            BiasFlag("", False, r"\b(self_attn\.o_proj|mlp\.\w+)\.bias$"),
        ),
        unused=(NORM_SIGNS,) if name == "glm4" else (),
        example=(title, _9B | {"vocab_size": 151552}),
    )
    for name, describe, model_class, title in (
        ("glm", glm, "GlmForCausalLM", "GLM-4 9B (2024)"),
        ("glm4", glm4, "Glm4ForCausalLM", "GLM-4 9B (2025)"),
    )
)
