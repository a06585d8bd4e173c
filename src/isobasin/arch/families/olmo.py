"""OLMo: Llama with LayerNorms that have no parameters. OLMo 2 and 3: norms behind each sublayer and none before it, and
norms over all queries and over all keys."""

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from isobasin.arch.architecture import Architecture
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import sliding_windows, two_rotary
from isobasin.arch.families.llama import ATTENTION, FEED_FORWARD, gated_decoder
from isobasin.arch.family import CAUSAL, LAST_TOKEN, NORM_SIGNS, QUARTER_TURNS, BiasFlag, Family
from isobasin.errors import ArchitectureError


def olmo(config: Mapping[str, Any]) -> Architecture:
    if config.get("clip_qkv") is not None:
        raise ArchitectureError(
            "config.json: clip_qkv is set; cutting off queries, keys and values changes the symmetries of OLMo: not "
            "supported"
        )
    return gated_decoder(config, ATTENTION | FEED_FORWARD, norm="layer", plain=True)


_READS_STREAM = {name: re.sub(r"\b[am]\{i\}\*", "resid*", text) for name, text in (ATTENTION | FEED_FORWARD).items()}
_NORMS_BEHIND = {
    "b{i}": "rms(resid, model.layers.{i}.post_attention_layernorm)",
    "n{i}": "rms(resid, model.layers.{i}.post_feedforward_layernorm)",
}


def olmo2(config: Mapping[str, Any], rotary: Mapping[str, Any] | None = None) -> Architecture:
    return gated_decoder(
        config,
        _READS_STREAM,
        norms=_NORMS_BEHIND,
        norms_behind=True,
        qk_norm=True,
        whole_norm=True,
        rotary=rotary,
    )


def olmo3(config: Mapping[str, Any]) -> Architecture:
    """OLMo 2 with sliding windows; layers with and without one may have other rotary angles."""
    return olmo2(config, two_rotary(Fields(config), 500000.0))


_BIAS_FLAGS = (
    BiasFlag("attention_bias", False, r"\bself_attn\.\w+\.bias$"),
    BiasFlag("", False, r"\bmlp\.\w+\.bias$"),
)
_7B = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "intermediate_size": 11008}

FAMILIES = (
    Family(
        "olmo2",
        olmo2,
        "Olmo2ForCausalLM",
        prefix="model.",
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-5},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=_BIAS_FLAGS,
        unused=(
            QUARTER_TURNS,
            NORM_SIGNS,
        ),
        example=("OLMo 2 7B", _7B | {"vocab_size": 100352}),
    ),
    Family(
        "olmo3",
        olmo3,
        "Olmo3ForCausalLM",
        prefix="model.",
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-5},
        rare_settings=CAUSAL,
        derived_settings=partial(sliding_windows, every=4),
        head_settings=LAST_TOKEN,
        bias_flags=_BIAS_FLAGS,
        unused=(
            QUARTER_TURNS,
            NORM_SIGNS,
        ),
        example=("OLMo 3 7B", _7B | {"vocab_size": 100278}),
    ),
    Family(
        "olmo",
        olmo,
        "OlmoForCausalLM",
        prefix="model.",
        settings={"hidden_act": "silu"},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=_BIAS_FLAGS,
        example=("OLMo 7B", _7B | {"vocab_size": 50304}),
    ),
)
