"""Gemma: Llama with gains stored less 1, scaled embeddings and a tied head."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture
from isobasin.arch.families.llama import ATTENTION, FEED_FORWARD, gated_decoder
from isobasin.arch.family import CAUSAL, LAST_TOKEN, BiasFlag, Family


def gemma(config: Mapping[str, Any]) -> Architecture:
    defaults = {"head_dim": 256, "num_key_value_heads": 16}
    return gated_decoder(config, ATTENTION | FEED_FORWARD, defaults=defaults, tied_default=True, plus_one=True)


FAMILIES = (
    Family(
        "gemma",
        gemma,
        "GemmaForCausalLM",
        prefix="model.",
        settings={"hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6},
        rare_settings=CAUSAL | {"use_bidirectional_attention": None},
        head_settings=LAST_TOKEN,
        bias_flags=(
            BiasFlag("attention_bias", False, r"\bself_attn\.\w+\.bias$"),
            BiasFlag("", False, r"\bmlp\.\w+\.bias$"),
        ),
        example=(
            "Gemma 2B",
            {"hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 1, "num_hidden_layers": 18}
            | {"intermediate_size": 16384, "vocab_size": 256000, "head_dim": 256},
        ),
    ),
)
