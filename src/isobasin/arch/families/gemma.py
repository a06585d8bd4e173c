"""Gemma and Gemma 2: Llama with gains stored less 1, scaled embeddings and a tied head.

Gemma 2 has norms behind each sublayer too. Their gains act on coordinates of the stream, which can not rotate.
"""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import sliding_windows, two_rotary
from isobasin.arch.families.llama import ATTENTION, FEED_FORWARD, gated_decoder
from isobasin.arch.family import CAUSAL, NORM_SIGNS, QUARTER_TURNS, BiasFlag, Family


def gemma(config: Mapping[str, Any]) -> Architecture:
    defaults = {"head_dim": 256, "num_key_value_heads": 16}
    return gated_decoder(config, ATTENTION | FEED_FORWARD, defaults=defaults, tied_default=True, plus_one=True)


def gemma2(config: Mapping[str, Any], **options: Any) -> Architecture:
    defaults = {"head_dim": 256, "num_key_value_heads": 4}
    return gated_decoder(
        config,
        ATTENTION | FEED_FORWARD,
        defaults=defaults,
        tied_default=True,
        plus_one=True,
        norms=_SANDWICH,
        norms_behind=True,
        **options,
    )


def gemma3(config: Mapping[str, Any]) -> Architecture:
    """Gemma 2 with norms on queries and keys, and with two sets of rotary angles."""
    return gemma2(config, qk_norm=True, rotary=two_rotary(Fields(config), 1e6, 10000.0))


_SANDWICH = {
    "a{i}": "rms(resid, model.layers.{i}.input_layernorm, plus_one)",
    "b{i}": "rms(resid, model.layers.{i}.post_attention_layernorm, plus_one)",
    "m{i}": "rms(resid, model.layers.{i}.pre_feedforward_layernorm, plus_one)",
    "n{i}": "rms(resid, model.layers.{i}.post_feedforward_layernorm, plus_one)",
}


def _gemma3_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    return sliding_windows(config, config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)


def _gemma_activation(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers takes the exact GELU of old configs for the approximate one, with which Gemma was trained."""
    activation = config.get("hidden_act", "gelu_pytorch_tanh")
    usual = activation in ("gelu", "gelu_pytorch_tanh", None)
    return {
        "hidden_act": "gelu_pytorch_tanh" if usual else activation,
        "use_bidirectional_attention": True if config.get("use_bidirectional_attention") else None,
    }


_GEMMA_BIASES = (
    BiasFlag("attention_bias", False, r"\bself_attn\.\w+\.bias$"),
    BiasFlag("", False, r"\bmlp\.\w+\.bias$"),
)

FAMILIES = (
    Family(
        "gemma3_text",
        gemma3,
        "Gemma3ForCausalLM",
        prefix="model.",
        settings={
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": None,
            "attn_logit_softcapping": None,
        },
        rare_settings=CAUSAL | {"use_bidirectional_attention": False},
        derived_settings=_gemma3_windows,
        head_settings={"ForSequenceClassification": {"pad_token_id": 0}},
        bias_flags=_GEMMA_BIASES,
        unused=(
            QUARTER_TURNS,
            NORM_SIGNS,
        ),
        example=(
            "Gemma 3 1B",
            {"hidden_size": 1152, "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 26}
            | {"intermediate_size": 6912, "vocab_size": 262144, "head_dim": 256},
        ),
    ),
    Family(
        "gemma2",
        gemma2,
        "Gemma2ForCausalLM",
        prefix="model.",
        settings={
            "hidden_activation": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
        rare_settings=CAUSAL | {"use_bidirectional_attention": None},
        derived_settings=sliding_windows,
        head_settings={"ForSequenceClassification": {"pad_token_id": 0}},
        bias_flags=_GEMMA_BIASES,
        unused=(NORM_SIGNS,),
        example=(
            "Gemma 2 2B",
            {"hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 26}
            | {"intermediate_size": 9216, "vocab_size": 256000, "head_dim": 256},
        ),
    ),
    Family(
        "gemma",
        gemma,
        "GemmaForCausalLM",
        prefix="model.",
        settings={"rms_norm_eps": 1e-6},
        rare_settings=CAUSAL,
        derived_settings=_gemma_activation,
        head_settings={"ForSequenceClassification": {"pad_token_id": 0}},
        bias_flags=_GEMMA_BIASES,
        example=(
            "Gemma 2B",
            {"hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 18}
            | {"intermediate_size": 16384, "vocab_size": 256000, "head_dim": 256},
        ),
    ),
)
