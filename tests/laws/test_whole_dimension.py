"""The whole symmetry of a model is as large as the null space of its Jacobian: nothing is missing, nothing too much.

At a generic point dim ker(d output / d weights) is the dimension of the group, free coordinates included. The
measurement knows nothing of groups: it differentiates the float64 oracle, or the project's own model.

Sizes are small, but not the smallest: more words than the stream is wide, few units (else many units of a small
stream nearly mimic each other), and an eps of 1e-3, without which the scale of the embeddings is almost free.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from null_space import Measured, null_space
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import oracle
import tiny
from isobasin.model import ModelConfig, Transformer
from isobasin.symmetries import Symmetry, symmetry
from isobasin.weights import load

pytestmark = pytest.mark.hf

WORDS, LENGTH = 11, 4

# -- transformers ---------------------------------------------------------------------------------------------

_SHARED = {
    "hidden_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 5,
    "vocab_size": WORDS,
    "num_labels": 8,
    "pad_token_id": None,
}
_TEXT = _SHARED | {"bos_token_id": 0, "eos_token_id": 0, "max_position_embeddings": 8}
_LLAMA = _TEXT | {"head_dim": 4, "rms_norm_eps": 1e-3}
_NEOX = _TEXT | {"hidden_size": 8, "intermediate_size": 3, "vocab_size": 26, "rotary_pct": 0.5, "layer_norm_eps": 1e-3}
_GPT2 = {
    "n_embd": 6,
    "n_layer": 2,
    "n_head": 2,
    "n_inner": 5,
    "vocab_size": WORDS,
    "n_positions": LENGTH,
    "num_labels": 8,
    "layer_norm_epsilon": 1e-3,
}
_BERT = _SHARED | {"layer_norm_eps": 1e-3, "max_position_embeddings": LENGTH}
_VIT = _SHARED | {"image_size": 4, "patch_size": 2, "num_channels": 1, "layer_norm_eps": 1e-3, "encoder_stride": 2}
_CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "GPT2": ("GPT2Config", _GPT2),
    "Bert": ("BertConfig", _BERT),
    "ViT": ("ViTConfig", _VIT),
    "Llama": ("LlamaConfig", _LLAMA),
    "Mistral": ("MistralConfig", _LLAMA),
    "Qwen2": ("Qwen2Config", _LLAMA),
    "Phi3": ("Phi3Config", _LLAMA | {"pad_token_id": 0}),
    "GPTNeoX": ("GPTNeoXConfig", _NEOX),
}

MODELS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2 tied": ("GPT2LMHeadModel", {}),
    "gpt2 untied": ("GPT2LMHeadModel", {"tie_word_embeddings": False}),
    "gpt2 bare": ("GPT2Model", {}),
    "gpt2 classifier": ("GPT2ForSequenceClassification", {}),
    "bert masked-lm tied": ("BertForMaskedLM", {}),
    "bert masked-lm untied": ("BertForMaskedLM", {"tie_word_embeddings": False}),
    "bert masked-lm relu": ("BertForMaskedLM", {"tie_word_embeddings": False, "hidden_act": "relu"}),
    "bert pretraining": ("BertForPreTraining", {}),
    "bert classifier": ("BertForSequenceClassification", {}),
    "bert relu": ("BertForSequenceClassification", {"hidden_act": "relu"}),
    "bert tokens": ("BertForTokenClassification", {}),
    "bert bare": ("BertModel", {}),
    "vit": ("ViTForImageClassification", {}),
    "vit no qkv bias": ("ViTForImageClassification", {"qkv_bias": False}),
    "vit bare": ("ViTModel", {}),
    "vit masked image": ("ViTForMaskedImageModeling", {}),
    "llama": ("LlamaForCausalLM", {"hidden_size": 8}),
    "llama gqa biases": ("LlamaForCausalLM", {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama bare": ("LlamaModel", {}),
    "llama classifier": ("LlamaForSequenceClassification", {}),
    "mistral gqa": ("MistralForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}),
    # K·e ≤ d, so that the values' bias is seen whole: there is no output bias to take it over.
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}),
    "qwen2 tied": (
        "Qwen2ForCausalLM",
        {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "phi3": ("Phi3ForCausalLM", {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}),
    "neox": ("GPTNeoXForCausalLM", {}),
    "neox sequential": ("GPTNeoXForCausalLM", {"use_parallel_residual": False}),
    "neox no attention bias": ("GPTNeoXForCausalLM", {"attention_bias": False}),
    "neox tied": ("GPTNeoXForCausalLM", {"tie_word_embeddings": True}),
    "neox bare": ("GPTNeoXModel", {}),
    "neox classifier": ("GPTNeoXForSequenceClassification", {"num_hidden_layers": 1}),
}


def build(name: str) -> Any:
    import transformers

    model, settings = MODELS[name]
    family = next(f for f in sorted(_CONFIGS, key=len, reverse=True) if model.startswith(f))
    config_class, defaults = _CONFIGS[family]
    config = getattr(transformers, config_class)(**(defaults | settings))
    with torch.random.fork_rng(devices=[]):
        fresh = getattr(transformers, model)._from_config(config, attn_implementation="eager")
    return tiny.randomize(fresh, seed=3)


def batch(config: Mapping[str, Any], n: int) -> dict[str, Tensor]:
    """Sequences (or images) that say everything a model can hear: all words, places and types."""
    rng = torch.Generator().manual_seed(0)
    if config["model_type"] == "vit":
        images = torch.randn(n, 1, 4, 4, generator=rng, dtype=torch.float64)
        masked = {"bool_masked_pos": torch.rand(n, 4, generator=rng) < 0.4}
        return {"pixel_values": images} | (masked if "Masked" in config["architectures"][0] else {})
    inputs = {"input_ids": torch.randint(config["vocab_size"], (n, LENGTH), generator=rng)}
    if config["model_type"] == "bert":
        inputs["token_type_ids"] = torch.randint(2, (n, LENGTH), generator=rng)
    return inputs


def measure(name: str, folder: Path) -> tuple[Measured, Symmetry]:
    tiny.write(build(name), folder)
    weights, (tensors, config) = load(folder), tiny.read(folder)
    disk = weights.names.on_disk
    params = {disk[n]: tensors[disk[n]].double() for n in weights if not weights.arch.tensors[n].buffer}
    buffers = {n: t for n, t in tensors.items() if n not in params}
    said = oracle.forward(tensors, config, batch(config, 1)).shape[1]
    inputs = batch(config, enough(params, said, weights.arch.sizes.d_model))

    def function(p: dict[str, Tensor]) -> Tensor:
        copies = {copy: p[disk[target]] for copy, target in weights.names.copies.items()}
        return oracle.forward({**p, **buffers, **copies}, config, inputs)

    return null_space(function, params), symmetry(weights.arch)


def enough(params: Mapping[str, Tensor], said: int, width: int) -> int:
    """Examples that say half as much again as there are parameters; logits at a place are as many as its states."""
    return 20 + int(1.5 * sum(p.numel() for p in params.values()) / min(said, LENGTH * width))


@pytest.mark.parametrize("name", MODELS)
def test_the_symmetry_is_the_whole_null_space(name: str, tmp_path: Path) -> None:
    measured, found = measure(name, tmp_path)
    assert measured.agrees_with(found.dim), (measured, found.element_dim, found.free_dim)
    for dim in fewer(found):
        assert not measured.agrees_with(dim)


def fewer(found: Symmetry) -> set[int]:
    """The count with any one coordinate or any one group forgotten."""
    parts = [*found.groups.values(), *found.coordinates.values()]
    return {found.dim - part.dim for part in parts if part.dim}


# -- the project's own model ----------------------------------------------------------------------------------

_OWN = {"d_model": 6, "n_layers": 2, "n_heads": 2, "d_head": 4, "d_ff": 4, "norm_eps": 1e-3}
_OWN_TEXT = _OWN | {"d_vocab": WORDS, "n_positions": LENGTH, "causal": True}
_OWN_LLAMA = _OWN_TEXT | {"norm": "rms", "feed_forward": "swiglu", "bias": False}
OWN: Mapping[str, dict[str, Any]] = {
    "llama rope": _OWN_LLAMA | {"positions": "rope"},
    "llama none": _OWN_LLAMA | {"positions": "none"},
    "llama alibi": _OWN_LLAMA | {"positions": "alibi"},
    "half of the columns rotate": _OWN_LLAMA | {"positions": "rope", "rotary_dims": 2},
    "interleaved, one kv head": _OWN_LLAMA | {"positions": "rope", "rotary_layout": "interleaved", "n_kv_heads": 1},
    "gpt2 learned": _OWN_TEXT | {"positions": "learned"},
    "gpt2 tied": _OWN_TEXT | {"positions": "learned", "tied": True},
    "bert": _OWN_TEXT | {"positions": "learned", "post_norm": True, "causal": False, "n_classes": 8},
    "post-norm rms": _OWN_TEXT | {"positions": "sinusoidal", "post_norm": True, "norm": "rms"},
    "layer norm without biases": _OWN_TEXT | {"positions": "rope", "bias": False},
    "vit": _OWN | {"image_size": 4, "patch_size": 2, "n_channels": 1, "n_classes": 8, "positions": "learned"},
}


@cache
def measure_own(name: str) -> tuple[Measured, Symmetry]:
    config = ModelConfig(**OWN[name])
    model = tiny.randomize(Transformer(config).double(), seed=3)
    params = {n: p.detach() for n, p in model.named_parameters()}
    said = config.n_classes or WORDS * LENGTH
    rng = torch.Generator().manual_seed(0)
    n = enough(params, said, config.d_model)
    if config.d_vocab is None:
        inputs = torch.randn(n, 1, 4, 4, generator=rng, dtype=torch.float64)
    else:
        inputs = torch.randint(WORDS, (n, LENGTH), generator=rng)

    def function(p: dict[str, Tensor]) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # the one whose derivative is batched
            return torch.func.functional_call(model, p, (inputs,))

    return null_space(function, params), symmetry(load(params, config.to_dict()).arch)


@pytest.mark.parametrize("name", OWN)
def test_the_symmetry_of_the_own_model_is_the_whole_null_space(name: str) -> None:
    measured, found = measure_own(name)
    assert measured.agrees_with(found.dim), (measured, found.element_dim, found.free_dim)
    for dim in fewer(found):
        assert not measured.agrees_with(dim)


def test_rotary_positions_shrink_the_group() -> None:
    """From GL(4) to H(4) in two heads of two layers: 4 · (16 − 4) directions fewer, and that is measured."""
    rope, none = measure_own("llama rope"), measure_own("llama none")
    assert none[0].dim - rope[0].dim == 48
    assert not rope[0].agrees_with(none[1].dim)
    assert not none[0].agrees_with(rope[1].dim)


# -- the measurement itself -----------------------------------------------------------------------------------


def test_the_measurement_counts_a_known_null_space() -> None:
    rng = torch.Generator().manual_seed(1)
    matrix = torch.randn(30, 5, generator=rng, dtype=torch.float64) @ torch.randn(
        5, 8, generator=rng, dtype=torch.float64
    )
    params = {"x": torch.zeros(8, dtype=torch.float64), "unseen": torch.zeros(2, dtype=torch.float64)}
    measured = null_space(lambda p: matrix @ p["x"] + 0 * p["unseen"].sum(), params)
    assert measured.agrees_with(5)
    assert not measured.agrees_with(4)
    assert not measured.agrees_with(6)


def test_singular_values_without_a_gap_agree_with_nothing() -> None:
    rng = torch.Generator().manual_seed(1)
    left, right = (torch.linalg.qr(torch.randn(12, 12, generator=rng, dtype=torch.float64))[0] for _ in "ab")
    slope = left * 10.0 ** -torch.arange(12, dtype=torch.float64) @ right
    measured = null_space(lambda p: torch.cat([slope @ p["x"]] * 2), {"x": torch.zeros(12, dtype=torch.float64)})
    assert not any(measured.agrees_with(dim) for dim in range(13))
