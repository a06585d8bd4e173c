"""The configuration of a well-known model of each family, to show its group (`isobasin families`)."""

from typing import Any

_MISTRAL: dict[str, Any] = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "intermediate_size": 14336,
    "vocab_size": 32000,
}

EXAMPLES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT-2 (tied)",
        {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50257},
    ),
    "bert": (
        "BERT base (MLM)",
        {
            "model_type": "bert",
            "hidden_size": 768,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "vocab_size": 30522,
        },
    ),
    "vit": (
        "ViT base",
        {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            "hidden_size": 768,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
        },
    ),
    "llama": (
        "Llama 2 7B",
        _MISTRAL | {"model_type": "llama", "num_key_value_heads": 32, "intermediate_size": 11008},
    ),
    "mistral": ("Mistral 7B", _MISTRAL),
    "gpt_neox": (
        "Pythia 160M",
        {
            "model_type": "gpt_neox",
            "hidden_size": 768,
            "num_attention_heads": 12,
            "num_hidden_layers": 12,
            "intermediate_size": 3072,
            "vocab_size": 50304,
            "rotary_pct": 0.25,
        },
    ),
    "isobasin": (
        "our Llama preset",
        {
            "model_type": "isobasin",
            "d_model": 256,
            "n_heads": 8,
            "n_layers": 6,
            "d_ff": 688,
            "d_vocab": 256,
            "positions": "rope",
            "norm": "rms",
            "feed_forward": "swiglu",
        },
    ),
}
