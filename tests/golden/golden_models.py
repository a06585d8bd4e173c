"""Tiny models of every family for the golden file, written as checkpoint folders without any isobasin module.

Every parameter is drawn by a generator that is seeded by case, seed and tensor name, so that neither transformers'
initialisation nor the order of tensors matters.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from zlib import crc32

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

VOCABULARY, LABELS = 20, 3
WEIGHTS = "model.safetensors"

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": LABELS,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_inner": 24,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_BERT = _ENCODER | {"vocab_size": VOCABULARY, "max_position_embeddings": 16}

# Name of the case -> (configuration class, model class, settings).
HUGGING_FACE: Mapping[str, tuple[str, str, dict[str, Any]]] = MappingProxyType(
    {
        "gpt2-tied": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
        "gpt2-untied": ("GPT2Config", "GPT2LMHeadModel", _GPT2 | {"tie_word_embeddings": False}),
        "bert-mlm": ("BertConfig", "BertForMaskedLM", _BERT),
        "bert-classifier": ("BertConfig", "BertForSequenceClassification", _BERT),
        "vit-classifier": (
            "ViTConfig",
            "ViTForImageClassification",
            _ENCODER | {"image_size": 6, "patch_size": 2, "encoder_stride": 2},
        ),
        "llama": ("LlamaConfig", "LlamaForCausalLM", _DECODER),
        "llama-tied-gqa": (
            "LlamaConfig",
            "LlamaForCausalLM",
            _DECODER | {"num_key_value_heads": 2, "tie_word_embeddings": True},
        ),
        "mistral": (
            "MistralConfig",
            "MistralForCausalLM",
            _DECODER | {"num_key_value_heads": 2, "sliding_window": None},
        ),
        "gpt_neox": (
            "GPTNeoXConfig",
            "GPTNeoXForCausalLM",
            _DECODER | {"rotary_pct": 0.5, "num_attention_heads": 2},
        ),
    }
)

# Configurations of the model type `isobasin`; the names and shapes of their tensors follow in `_own_shapes`.
_OWN = {
    "model_type": "isobasin",
    "d_model": 16,
    "n_layers": 2,
    "n_heads": 4,
    "d_ff": 24,
    "n_positions": 16,
    "d_vocab": VOCABULARY,
    "dtype": "float32",
}
OWN: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "own-rope": _OWN
        | {
            "positions": "rope",
            "norm": "rms",
            "feed_forward": "swiglu",
            "bias": False,
            "causal": True,
            "n_kv_heads": 2,
            "rotary_layout": "interleaved",
        },
        "own-learned": _OWN | {"positions": "learned", "norm": "layer", "feed_forward": "gelu", "n_classes": LABELS},
        "own-alibi": _OWN | {"positions": "alibi", "norm": "layer", "causal": True, "tied": True},
    }
)
CASES = (*HUGGING_FACE, *OWN)


def write_model(case: str, folder: Path, *, seed: int) -> None:
    """The model of a case with every parameter drawn from `seed`, as a checkpoint folder."""
    if case in OWN:
        _write_own(case, folder, seed)
        return
    import transformers

    config_class, model_class, settings = HUGGING_FACE[case]
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_drawn(case, seed, name, parameter.shape))
    model.save_pretrained(folder)


def _write_own(case: str, folder: Path, seed: int) -> None:
    folder.mkdir(parents=True)
    tensors = {name: _drawn(case, seed, name, shape) for name, shape in _own_shapes(OWN[case]).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(OWN[case], indent=2) + "\n", encoding="utf-8")


def _own_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a model of type `isobasin`, pre-norm, on tokens."""
    width, inner, vocabulary = config["d_model"], config["d_ff"], config["d_vocab"]
    key_width = width // config["n_heads"] * config.get("n_kv_heads", config["n_heads"])
    shapes: dict[str, tuple[int, ...]] = {"embed.tokens.weight": (vocabulary, width)}
    if config["positions"] == "learned":
        shapes["embed.positions.weight"] = (config["n_positions"], width)
    biases = config.get("bias", True)
    norms = ["norm"]

    def linear(name: str, rows: int, columns: int) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if biases:
            shapes[f"{name}.bias"] = (rows,)

    for layer in range(config["n_layers"]):
        block = f"blocks.{layer}"
        norms += [f"{block}.norm1", f"{block}.norm2"]
        linear(f"{block}.attn.q", width, width)
        linear(f"{block}.attn.k", key_width, width)
        linear(f"{block}.attn.v", key_width, width)
        linear(f"{block}.attn.o", width, width)
        if config.get("feed_forward") == "swiglu":
            linear(f"{block}.mlp.gate", inner, width)
        linear(f"{block}.mlp.up", inner, width)
        linear(f"{block}.mlp.down", width, inner)
    for name in norms:
        shapes[f"{name}.weight"] = (width,)
        if biases and config["norm"] == "layer":
            shapes[f"{name}.bias"] = (width,)
    if "n_classes" in config:
        linear("head", config["n_classes"], width)
    elif not config.get("tied", False):
        shapes["head.weight"] = (vocabulary, width)
    return shapes


def _drawn(case: str, seed: int, name: str, shape: tuple[int, ...]) -> Tensor:
    """Gains 1 + 0.3 N, biases 0.3 N, embeddings 0.5 N, matrices N / √(their last axis)."""
    generator = torch.Generator().manual_seed(crc32(f"{case} {seed} {name}".encode()))
    noise = torch.randn(tuple(shape), generator=generator)
    if noise.ndim == 1:
        return 1 + 0.3 * noise if name.endswith("weight") else 0.3 * noise
    if any(part in name for part in ("embed", "wte", "wpe")):
        return 0.5 * noise
    return noise * shape[-1] ** -0.5


def write_changed(source: Path, folder: Path) -> str:
    """A copy of a folder with noise added to one feed-forward matrix of the first layer; gives its name."""
    shutil.copytree(source, folder)
    with safe_open(source / WEIGHTS, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(source / WEIGHTS)
    parts = ("mlp.c_fc", "intermediate.dense", "mlp.up", "mlp.dense_h_to_4h", "mlp.fc1")
    name = next(name for name in sorted(tensors) if any(p in name for p in parts) and tensors[name].ndim == 2)
    generator = torch.Generator().manual_seed(5)
    tensors[name] = tensors[name] + 0.01 * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, folder / WEIGHTS, metadata=metadata)
    return name


def projections(place: Path) -> dict[str, list[float]]:
    """Of each tensor of a file or folder: its norm, and its inner product with random numbers seeded by its name."""
    found: dict[str, list[float]] = {}
    paths = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    for path in paths:
        for name, tensor in load_file(path).items():
            values = tensor.double().numpy().ravel()
            direction = np.random.Generator(np.random.PCG64(crc32(name.encode()))).standard_normal(values.size)
            found[name] = [float(np.linalg.norm(values)), float(values @ direction)]
    return dict(sorted(found.items()))
