"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values. Qwen3: norms on queries and keys instead."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture
from isobasin.arch.config import Fields
from isobasin.arch.families.llama import ATTENTION, BASE_NAMES, FEED_FORWARD, gated_decoder, llama
from isobasin.arch.family import CAUSAL, LAST_TOKEN, QUARTER_TURNS, BiasFlag, Family


def qwen_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sliding window of each layer, where any has one.

    Without `use_sliding_window` there is no window, but listed layers of another kind than full attention stay such.
    """
    first, window = config.get("max_window_layers", 28), config.get("sliding_window", 4096)
    on = bool(config.get("use_sliding_window", False)) and window is not None
    types = Fields(config).layer_types(lambda i: "sliding_attention" if on and i >= first else "full_attention")
    if all(kind == "full_attention" for kind in types):
        return {"use_sliding_window": False, "sliding windows": None}
    windows = [window if kind == "sliding_attention" else None for kind in types]
    return {"use_sliding_window": on, "sliding windows": windows if on else types}


def qwen3(config: Mapping[str, Any]) -> Architecture:
    defaults = {"head_dim": 128, "num_key_value_heads": 32}
    return gated_decoder(config, ATTENTION | FEED_FORWARD, defaults=defaults, qk_norm=True)


FAMILIES = (
    Family(
        "qwen3",
        qwen3,
        "Qwen3ForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-6, "use_sliding_window": False},
        rare_settings=CAUSAL,
        derived_settings=qwen_windows,
        head_settings=LAST_TOKEN,
        bias_flags=(
            BiasFlag("attention_bias", False, r"\bself_attn\.\w+\.bias$"),
            BiasFlag("", False, r"\bmlp\.\w+\.bias$"),
        ),
        unused=(QUARTER_TURNS,),
        example=(
            "Qwen3 8B",
            {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 36}
            | {"intermediate_size": 12288, "vocab_size": 151936, "head_dim": 128},
        ),
    ),
    Family(
        "qwen2",
        llama,
        "Qwen2ForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-6, "use_sliding_window": False},
        rare_settings=CAUSAL,
        derived_settings=qwen_windows,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("", False, r"\b(self_attn\.o_proj|mlp\.\w+)\.bias$"),),
        example=(
            "Qwen2.5 7B",
            {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28}
            | {"intermediate_size": 18944, "vocab_size": 152064},
        ),
    ),
)
