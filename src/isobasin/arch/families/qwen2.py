"""Qwen2 and Qwen2.5: Llama with biases on queries, keys and values."""

from isobasin.arch.families.llama import llama
from isobasin.arch.family import Family

FAMILIES = (
    Family(
        "qwen2",
        llama,
        "Qwen2ForCausalLM",
        prefix="model.",
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-6, "use_sliding_window": False},
        example=(
            "Qwen2.5 7B",
            {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28}
            | {"intermediate_size": 18944, "vocab_size": 152064},
        ),
    ),
)
