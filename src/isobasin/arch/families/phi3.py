"""Phi-3 and Phi-4: Llama with Q, K and V in one tensor, and gate and up in another; rotary positions may be partial."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture
from isobasin.arch.families.llama import NO_BIASES, gated_decoder
from isobasin.arch.family import CAUSAL, Family

_LAYER = {
    "model.layers.{i}.self_attn.qkv_proj": "qk{i}:q*+qk{i}+vo{i} a{i}*",
    "model.layers.{i}.self_attn.o_proj": "resid vo{i}:q*",
    "model.layers.{i}.mlp.gate_up_proj": "|ff{i}|+ff{i} m{i}*",
    "model.layers.{i}.mlp.down_proj": "resid ff{i}*",
}


def phi3(config: Mapping[str, Any]) -> Architecture:
    return gated_decoder(config, _LAYER, partial_rotary=1.0)


FAMILIES = (
    Family(
        "phi3",
        phi3,
        "Phi3ForCausalLM",
        prefix="model.",
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-5, "sliding_window": None},
        rare_settings=CAUSAL,
        head_settings={"ForSequenceClassification": {"pad_token_id": 32000}},
        bias_flags=(NO_BIASES,),
        example=(
            "Phi-3 mini",
            {"hidden_size": 3072, "num_attention_heads": 32, "num_hidden_layers": 32}
            | {"intermediate_size": 8192, "vocab_size": 32064},
        ),
    ),
)
