"""Cohere and Cohere 2: LayerNorm without shifts, one for both sublayers, interleaved rotary positions, a tied head."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture
from isobasin.arch.config import Fields
from isobasin.arch.families.llama import ATTENTION, PARALLEL_FEED_FORWARD, gated_decoder
from isobasin.arch.family import CAUSAL, HEAD_NORM_SIGNS, LAST_TOKEN, BiasFlag, Family


def cohere(config: Mapping[str, Any]) -> Architecture:
    """Queries and keys of each head may pass a LayerNorm (`use_qk_norm`)."""
    normed = Fields(config).flag("use_qk_norm", False)
    return _cohere(config, without_positions=(), layer_norm=("q_norm.weight", "k_norm.weight") if normed else None)


def cohere2(config: Mapping[str, Any]) -> Architecture:
    """Layers that see the whole text have no positions."""
    types = _layer_types(config)
    return _cohere(config, without_positions=[i for i, kind in enumerate(types) if kind != "sliding_attention"])


def _cohere(
    config: Mapping[str, Any], without_positions: list[int] | tuple[()], layer_norm: tuple[str, str] | None = None
) -> Architecture:
    return gated_decoder(
        config,
        ATTENTION | PARALLEL_FEED_FORWARD,
        norm="layer",
        interleaved=True,
        tied_default=True,
        rope_theta=500000.0 if config.get("model_type") == "cohere" else 10000.0,
        without_positions=without_positions,
        layer_norm=layer_norm,
        norms={"a{i}": "layer(resid, model.layers.{i}.input_layernorm)"},
    )


def _layer_types(config: Mapping[str, Any]) -> list[str]:
    """By default every fourth layer sees the whole text."""
    c = Fields(config)
    every = c.size("sliding_window_pattern", c.size("_sliding_window_pattern", 4))
    return c.layer_types(lambda i: "sliding_attention" if (i + 1) % every else "full_attention")


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    window = config.get("sliding_window", 4096)
    return {"sliding windows": [window if kind == "sliding_attention" else None for kind in _layer_types(config)]}


_BIAS_FLAGS = (
    BiasFlag("attention_bias", False, r"\bself_attn\.\w+\.bias$"),
    BiasFlag("", False, r"\b(mlp\.\w+|\w*norm)\.bias$"),
)
_SETTINGS = {"hidden_act": "silu", "layer_norm_eps": 1e-5, "logit_scale": 0.0625}

FAMILIES = (
    Family(
        "cohere",
        cohere,
        "CohereForCausalLM",
        prefix="model.",
        settings=_SETTINGS,
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=_BIAS_FLAGS,
        unused=(HEAD_NORM_SIGNS,),
        example=(
            "Command R",
            {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 40}
            | {"intermediate_size": 22528, "vocab_size": 256000},
        ),
    ),
    Family(
        "cohere2",
        cohere2,
        "Cohere2ForCausalLM",
        prefix="model.",
        settings=_SETTINGS,
        rare_settings=CAUSAL,
        derived_settings=_windows,
        head_settings=LAST_TOKEN,
        bias_flags=_BIAS_FLAGS,
        example=(
            "Command R7B",
            {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
            | {"intermediate_size": 14336, "vocab_size": 256000},
        ),
    ),
)
