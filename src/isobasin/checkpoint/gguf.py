"""GGUF files: their metadata as a config.json, and their tensors under the names of Hugging Face.

A key of the architecture is read, or has a value without effect, or is an error: llama.cpp may obey a key that
transformers does not have. Every tensor is used, or is an error. The files are those of llama.cpp, which stores queries
and keys of Llama in the order of its rotation, (0, 1), (2, 3), …; they are brought into that of transformers, which
rotates the first half of a head with the second.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobasin.checkpoint.header import check_finite
from isobasin.errors import CheckpointError, brief

# What is read, and the type that holds its numbers exactly.
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "Q8_0": torch.float32}
_WAY_OUT = "give the Hugging Face folder that it was converted from"
# Beginnings of keys that llama.cpp does not build the model from; `general.type` and `split.count` are checked.
_NO_EFFECT = ("GGUF.", "general.", "tokenizer.", "quantize.", "mradermacher.", "split.")
# Keys of every architecture, without its name, with the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "embedding_scale": (1.0,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "tensor_data_layout": ("Meta AI original pth",),  # the order of rows that all files of Llama have
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True)
class _Format:
    """How models of one architecture are stored: `keys`, the config key of a metadata key; `optional` ones among them;
    `outside` and `modules`, the names of tensors outside the layers and of modules inside them."""

    config: Mapping[str, Any]
    keys: Mapping[str, str]
    optional: frozenset[str]
    outside: Mapping[str, str]
    layers: str
    modules: Mapping[str, str]
    biases: Mapping[str, str] = field(default_factory=dict)  # the config key of the biases of modules of this name
    rotary: bool = True
    paired: bool = False  # queries and keys are in the order of rotated pairs
    transposed: bool = False  # modules have their inputs first


_ROTARY_KEYS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_OPTIONAL = frozenset({"attention.head_count_kv", "attention.key_length", "vocab_size"})
_GATED_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GATED_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FORMATS = {
    "llama": _Format(
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        _ROTARY_KEYS,
        _OPTIONAL,
        _GATED_OUTSIDE,
        "model.layers",
        _GATED_MODULES,
        {"attn": "attention_bias", "ffn": "mlp_bias"},
        paired=True,
    ),
    "qwen2": _Format(
        {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        _ROTARY_KEYS,
        _OPTIONAL,
        _GATED_OUTSIDE,
        "model.layers",
        _GATED_MODULES,
    ),
    "gpt2": _Format(
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {
            "context_length": "n_positions",
            "block_count": "n_layer",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
            "vocab_size": "vocab_size",
        },
        frozenset({"vocab_size"}),
        {
            "token_embd.weight": "transformer.wte.weight",
            "position_embd.weight": "transformer.wpe.weight",
            "output_norm.weight": "transformer.ln_f.weight",
            "output_norm.bias": "transformer.ln_f.bias",
            "output.weight": "lm_head.weight",
        },
        "transformer.h",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        rotary=False,
        transposed=True,
    ),
}


@dataclass(frozen=True)
class GgufModel:
    """A model of a GGUF file: what its config.json would say, and its tensors in their types."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    note: str  # how the numbers were made


def read_gguf(file: Path) -> GgufModel:
    """The model in a file, whole; what is quantised to Q8_0 is in float32."""
    reader, values = _open(file)
    kind = values.get("general.architecture")
    if kind not in _FORMATS:
        raise CheckpointError(
            f"{file} holds a {brief(kind, 40)} model, expected one of {', '.join(_FORMATS)}; for others {_WAY_OUT}"
        )
    types = sorted({tensor.tensor_type.name for tensor in reader.tensors})
    if coarse := [name for name in types if name not in TYPES]:
        raise CheckpointError(
            f"{file} is quantised to {', '.join(coarse)}, which leaves too little to compare, expected "
            f"{', '.join(TYPES)}; {_WAY_OUT}, or a Q8_0 file"
        )
    form = _FORMATS[kind]
    settings = _settings(file, kind, values)
    config = dict(form.config) | _sizes(file, kind, settings)
    stored = {tensor.name: _numbers(file, tensor) for tensor in reader.tensors}
    if form.rotary:
        config["rope_parameters"] = _rotary(file, kind, config, settings, stored)
    _check_unread(file, kind, settings)
    tensors = _renamed(file, kind, config, stored)
    dequantised = ", dequantised to float32" if "Q8_0" in types else ""
    note = f"from GGUF ({', '.join(types)}){dequantised}; the tokenizer is not read"
    return GgufModel(config, tensors, note)


def _open(file: Path) -> tuple[Any, dict[str, Any]]:
    """A reader, and the metadata; arrays are None, as no setting of a model that is read here is one."""
    try:
        from gguf import GGUFReader, GGUFValueType
    except ImportError as error:
        raise CheckpointError(f"{file}: reading GGUF needs the package gguf: pip install 'isobasin[gguf]'") from error
    if not file.is_file():
        raise CheckpointError(f"{file} is not there: expected a GGUF file")
    try:
        reader = GGUFReader(file)
        values = {}
        for key, found in reader.fields.items():
            kind = found.types[0] if found.types else None
            value: Any = None if kind == GGUFValueType.ARRAY else found.contents()
            values[key] = _shortest(value) if kind == GGUFValueType.FLOAT32 else value
    except Exception as error:  # a damaged file can raise anything
        raise CheckpointError(f"{file} can not be read as GGUF ({error!s:.160}): re-download it") from error
    if reader.byte_order != "I":
        raise CheckpointError(f"{file} has the byte order of another kind of machine: convert it, or {_WAY_OUT}")
    if (count := values.get("split.count")) not in (None, 0, 1):
        raise CheckpointError(
            f"{file} is one of {brief(count)} parts of a model: join them first (llama-gguf-split --merge)"
        )
    return reader, values


def _shortest(value: float) -> float:
    """The shortest decimal number that is this one in float32: 1e-06, where the file has 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _settings(file: Path, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of the architecture, by keys without its name; others must be known to have no effect."""
    settings = {key.removeprefix(f"{kind}."): v for key, v in values.items() if key.startswith(f"{kind}.")}
    for key in values:
        if not key.startswith((f"{kind}.", *_NO_EFFECT)):
            raise CheckpointError(f"{file}: the key {brief(key)} is unknown, and may change the model: {_WAY_OUT}")
    if values.get("general.type", "model") != "model":
        raise CheckpointError(f"{file}: general.type is {brief(values['general.type'])}, expected a 'model'")
    return settings


def _sizes(file: Path, kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The keys of config.json that a file has under another name; these are taken out of the settings."""
    form, config = _FORMATS[kind], {}
    for key, name in form.keys.items():
        if key not in settings and key in form.optional:
            continue
        value = settings.pop(key, None)
        if type(value) is not (float if key.endswith("epsilon") else int) or value <= 0:
            raise CheckpointError(
                f"{file}: {kind}.{key} is {'a list, or missing' if value is None else brief(value, 40)}, expected one "
                f"positive number: {_WAY_OUT}"
            )
        config[name] = value
    return config


def _check_unread(file: Path, kind: str, settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if value not in _NEUTRAL.get(key, ()):
            raise CheckpointError(
                f"{file}: {kind}.{brief(key)[1:-1]} is {brief(value, 40)}, which can change the function and is not "
                f"supported: {_WAY_OUT}"
            )


# -- rotary positions -------------------------------------------------------------------------------------------------


def _rotary(
    file: Path, kind: str, config: Mapping[str, Any], settings: dict[str, Any], stored: dict[str, Tensor]
) -> dict[str, Any]:
    """`rope_parameters`. What is read is taken out of the settings and the tensors."""
    d_head = _d_head(file, kind, config, settings)
    base = settings.pop("rope.freq_base", 10000.0)
    if type(base) is not float or not 0 < base < math.inf:
        raise CheckpointError(f"{file}: {kind}.rope.freq_base is {brief(base, 40)}, expected a positive number")
    scaling = {key: settings.pop(key) for key in list(settings) if key.startswith(("rope.scaling.", "rope.scale_"))}
    found: dict[str, Any] | None = _linear(file, kind, scaling)
    freqs = stored.pop(_ROPE_FREQS, None) if kind == "llama" else None  # others do not read it: an unknown tensor
    if freqs is not None:
        found = None if found else _llama3(freqs, base, d_head)
    if found is None:
        raise CheckpointError(
            f"{file}: {_ROPE_FREQS} is not the table of Llama 3, so the scaling of rotary positions can not be told "
            f"from it: {_WAY_OUT}"
        )
    return {"rope_type": "default", "rope_theta": base} | found


def _d_head(file: Path, kind: str, config: Mapping[str, Any], settings: dict[str, Any]) -> int:
    """The size of a head; values must have the same, and all of it rotates."""
    size = config.get("head_dim")
    if size is None:
        size = config["hidden_size"] // max(1, config["num_attention_heads"])
    for key in ("attention.value_length", "rope.dimension_count"):
        if (other := settings.pop(key, size)) != size:
            raise CheckpointError(f"{file}: {kind}.{key} is {brief(other, 40)} in heads of {size}: {_WAY_OUT}")
    return int(size)


def _linear(file: Path, kind: str, scaling: Mapping[str, Any]) -> dict[str, Any]:
    """Linear scaling, which llama.cpp also takes where a factor has no type; empty: none."""
    values = {key.removeprefix("rope."): value for key, value in scaling.items()}
    factor = values.pop("scaling.factor", None) or values.pop("scale_linear", None) or 1.0
    how = values.pop("scaling.type", "linear")
    values.pop("scaling.finetuned", None)
    values.pop("scaling.original_context_length", None)  # other types read it
    if values.get("scaling.attn_factor", 1.0) == 1.0:
        values.pop("scaling.attn_factor", None)
    if type(factor) is not float or not 0 < factor < math.inf:
        values["scaling.factor"] = factor
    if how not in ("none", "linear") or values:
        key = "scaling.type" if how not in ("none", "linear") else next(iter(values))
        shown = brief(scaling.get(f"rope.{key}", factor), 40)
        raise CheckpointError(
            f"{file}: {kind}.rope.{key} is {shown}, expected rotary positions without scaling or with a linear one: "
            f"{_WAY_OUT}"
        )
    return {} if how == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _llama3(freqs: Tensor, base: float, d_head: int) -> dict[str, Any] | None:
    """The parameters of Llama 3.1 and later, if these divisors of frequencies are exactly theirs; empty: all are 1."""
    found, factor = freqs.double().numpy(), float(freqs.max())
    if found.shape != (d_head // 2,):
        return None
    if (found == 1).all():
        return {}
    low, high, length = _LLAMA3.values()
    lengths = 2 * math.pi * base ** (np.arange(0, d_head, 2) / d_head)
    smooth = np.clip((length / lengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3} if np.allclose(found, expected, 1e-6, 0) else None


# -- tensors ----------------------------------------------------------------------------------------------------------


def _numbers(file: Path, tensor: Any) -> Tensor:
    from gguf.quants import dequantize

    try:
        found = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
    except ValueError as error:
        raise CheckpointError(f"{file}: {tensor.name:.80} can not be read ({error!s:.160}): re-download it") from error
    check_finite(found, tensor.name, f"{file} is damaged: re-download it")
    return found.to(TYPES[tensor.tensor_type.name])


def _renamed(file: Path, kind: str, config: dict[str, Any], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors under the names of Hugging Face. The config says which biases there are, and whether the head is
    that of the embedding: it is not stored, or (GPT-2 of older converters) stored twice."""
    form, found = _FORMATS[kind], {}
    for name, tensor in stored.items():
        match = _LAYER.fullmatch(name)
        module = form.modules.get(match[2]) if match else None
        place = f"{form.layers}.{int(match[1])}.{module}.{match[3]}" if match and module else form.outside.get(name)
        if place is None:
            raise CheckpointError(f"{file}: no {kind} model of Hugging Face has the tensor {brief(name)}: {_WAY_OUT}")
        found[place] = _oriented(file, form, config, name, tensor)
    for part, flag in form.biases.items():
        config[flag] = _has_biases(file, part, stored)
    embedding, head = (stored.get(f"{name}.weight") for name in ("token_embd", "output"))
    if embedding is not None:
        config.setdefault("vocab_size", len(embedding))
        config["tie_word_embeddings"] = head is None or torch.equal(head.float(), embedding.float())
        if config["tie_word_embeddings"]:
            found.pop("lm_head.weight", None)
    return found


def _has_biases(file: Path, part: str, stored: Mapping[str, Tensor]) -> bool:
    """Whether the modules of this part have biases: all of them, or none."""
    weights = re.compile(rf"(blk\.\d+\.{part}_(?!norm)\w+)\.weight")
    biases = {f"{match[1]}.bias" for name in stored if (match := weights.fullmatch(name))}
    if biases & stored.keys() and (missing := sorted(biases - stored.keys())):
        raise CheckpointError(
            f"{file}: {missing[0]} is missing and {sorted(biases & stored.keys())[0]} is there, but a Llama of Hugging "
            f"Face has all {part} biases or none: {_WAY_OUT}"
        )
    return bool(biases & stored.keys())


def _oriented(file: Path, form: _Format, config: Mapping[str, Any], name: str, tensor: Tensor) -> Tensor:
    """A tensor with its axes and its rotary rows in the order of transformers."""
    if form.transposed and name.startswith("blk.") and tensor.ndim == 2:
        return tensor.mT.contiguous()
    if not form.paired or not (".attn_q." in name or ".attn_k." in name):
        return tensor
    heads = config["num_attention_heads"]
    n_heads = heads if ".attn_q." in name else config.get("num_key_value_heads", heads)
    if n_heads < 1 or len(tensor) % (2 * n_heads):
        raise CheckpointError(f"{file}: {name} has {len(tensor)} rows, expected pairs for each of {n_heads} heads")
    return (
        tensor.reshape(n_heads, len(tensor) // (2 * n_heads), 2, *tensor.shape[1:])
        .transpose(1, 2)
        .reshape(tensor.shape)
    )
