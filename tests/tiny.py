"""Tiny transformers models of every supported family, with every parameter drawn at random.

A fresh transformers model has zero biases and unit gains, which hide exactly the errors we look for; here
nothing is zero or one. `CASES` is what the tests run over; transformers is imported when `build` is called.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import oracle

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH, LENGTH, VOCABULARY, LABELS, IMAGE, PATCH = 3, 7, 30, 5, 6, 2
PAD = 0

# What a model may say, in the order in which `logits` (and the oracle) put it side by side.
OUTPUTS = (
    "logits",
    "prediction_logits",
    "seq_relationship_logits",
    "start_logits",
    "end_logits",
    "reconstruction",
    "last_hidden_state",
    "pooler_output",
    "logits_per_image",
    "text_embeds",
    "image_embeds",
)

# Buffers of older files that no forward pass reads: the oracle's list, which has no prefixes.
HARMLESS = re.compile(rf"((transformer|gpt_neox|model|bert)\.)?({oracle.BUFFERS.pattern})")


@dataclass(frozen=True)
class Case:
    """One small model: `build()` or `build(seed=1)` makes it, `inputs(0)` is what to call it with."""

    name: str
    family: str
    build: Callable[..., "PreTrainedModel"]
    inputs: Callable[[int], dict[str, Tensor]]


def randomize(model: nn.Module, seed: int, *, signs: bool = False) -> nn.Module:
    """Draw every parameter of `model` anew, in place, and return it: a fixed function of shapes and seed.

    Matrices N(0, 1/fan_in); gains 1 + 0.3 N, with random signs if `signs`; shifts and biases 0.3 N;
    embeddings, positions and special tokens 0.5 N. A tied tensor is drawn once, as the embedding it is.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in drawn:
                drawn.add(id(parameter))
                value = _draw(module, name, parameter.shape, signs, generator)
                parameter.data.copy_(value)
    return model


def _draw(module: nn.Module, name: str, shape: torch.Size, signs: bool, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if name == "bias":
        return 0.3 * noise
    if type(module).__name__.endswith("Norm"):
        sign = torch.randint(0, 2, shape, generator=generator) * 2 - 1 if signs else 1
        return (1 + 0.3 * noise) * sign
    if isinstance(module, nn.Embedding) or name != "weight":
        return 0.5 * noise
    fan_in = shape[0] if type(module).__name__ == "Conv1D" else noise[0].numel()
    return noise * fan_in**-0.5


def logits(model: "PreTrainedModel", inputs: Mapping[str, Tensor]) -> Tensor:
    """Everything the model says about each example, side by side in the order of `OUTPUTS`: (batch, n)."""
    with torch.no_grad():
        said = model(**inputs)
    return torch.cat([said[name].flatten(1) for name in OUTPUTS if said.get(name) is not None], dim=1)


def save(
    case: Case,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: int | str | None = None,
    legacy_bin: bool = False,
) -> None:
    """Write the case's model, drawn with `seed`, as a checkpoint folder."""
    model = case.build(seed=seed).to(dtype)
    write(model, folder, max_shard_size=max_shard_size, legacy_bin=legacy_bin)


def write(
    model: "PreTrainedModel",
    folder: Path,
    *,
    max_shard_size: int | str | None = None,
    legacy_bin: bool = False,
) -> None:
    """`save_pretrained`; with `legacy_bin` the same tensors in pickled .bin files, as in older folders."""
    model.save_pretrained(folder, **({} if max_shard_size is None else {"max_shard_size": max_shard_size}))
    if legacy_bin:
        _pickle(folder)


def _pickle(folder: Path) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        torch.save(load_file(file), folder / _legacy_name(file.name))
        file.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {name: _legacy_name(file) for name, file in content["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(content))
        index.unlink()


def _legacy_name(file: str) -> str:
    return "pytorch_" + file.replace(".safetensors", ".bin")


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """All tensors of a checkpoint folder under their on-disk names, and its config.json."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    for file in sorted(folder.glob("pytorch_model*.bin")):
        tensors |= torch.load(file, weights_only=True)
    return tensors, json.loads((folder / "config.json").read_text())


def load(folder: Path, *, dtype: torch.dtype = torch.float32) -> "PreTrainedModel":
    """The folder through transformers, by `architectures`; fails unless every tensor finds its place."""
    tensors, config = read(folder)
    name = config["architectures"][0]
    # config.json does not say whether a bare model has a pooler: the tensors do.
    bare = {"add_pooling_layer": "pooler.dense.weight" in tensors} if name in ("BertModel", "ViTModel") else {}
    model, report = _class(name).from_pretrained(
        folder,
        local_files_only=True,
        attn_implementation="eager",
        experts_implementation="eager",
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # so that the report below names them
        **bare,
    )
    unexpected = [key for key in report["unexpected_keys"] if not HARMLESS.fullmatch(key)]
    problems = (report["missing_keys"], unexpected, report["mismatched_keys"], report["error_msgs"])
    assert not any(problems), "{}: missing {}, unexpected {}, mismatched {}, errors {}".format(name, *problems)
    return model.eval()


def _class(name: str) -> Any:
    import transformers

    return getattr(transformers, name)


def _text(seed: int, *, types: bool = False, padded: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, LENGTH)
    inputs = {"input_ids": torch.randint(1, VOCABULARY, shape, generator=generator)}
    if padded:
        inputs["input_ids"][1, -2:] = PAD
    if types:
        inputs["token_type_ids"] = (torch.arange(LENGTH) >= LENGTH // 2).long().repeat(BATCH, 1)
        inputs["attention_mask"] = (inputs["input_ids"] != PAD).long()
    return inputs


def _images(seed: int, *, masked: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = {"pixel_values": torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)}
    if masked:
        order = torch.rand(BATCH, (IMAGE // PATCH) ** 2, generator=generator).argsort(-1)
        inputs["bool_masked_pos"] = order < 4
    return inputs


# An eps of 1e-3 is large enough to be seen: whoever drops it, or takes another, is caught.
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": LABELS,
}
_RMS = _DECODER | {"rms_norm_eps": 1e-3}
_ENCODER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "layer_norm_eps": 1e-3,
    "num_labels": LABELS,
}
_FAMILIES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        {
            "vocab_size": VOCABULARY,
            "n_embd": 24,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 16,
            "layer_norm_epsilon": 1e-3,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "num_labels": LABELS,
        },
    ),
    "bert": ("BertConfig", _ENCODER | {"vocab_size": VOCABULARY, "max_position_embeddings": 16}),
    "vit": ("ViTConfig", _ENCODER | {"image_size": IMAGE, "patch_size": PATCH, "encoder_stride": PATCH}),
    "llama": ("LlamaConfig", _RMS),
    "mistral": ("MistralConfig", _RMS | {"num_key_value_heads": 2, "sliding_window": None}),
    "qwen2": ("Qwen2Config", _RMS | {"num_key_value_heads": 2}),
    "phi3": ("Phi3Config", _RMS | {"num_key_value_heads": 2, "pad_token_id": PAD}),
    "gpt_neox": ("GPTNeoXConfig", _DECODER | {"layer_norm_eps": 1e-3, "hidden_size": 32}),
}


def _build(
    name: str,
    family: str,
    model: str,
    config: dict[str, Any],
    *,
    signs: bool,
    options: dict[str, Any],
    seed: int = 0,
) -> "PreTrainedModel":
    config_class, defaults = _FAMILIES[family]
    settings = _class(config_class)(**(defaults | config))
    with torch.random.fork_rng(devices=[]):  # transformers' own initialisation draws from the global generator
        fresh = _class(model)._from_config(settings, attn_implementation="eager", **options)
    return randomize(fresh, crc32(f"{name} {seed}".encode()), signs=signs).eval()


def _case(
    family: str, variant: str, model: str, *, signs: bool = False, pooler: bool | None = None, **config: Any
) -> Case:
    name = f"{family}-{variant}"
    options = {} if pooler is None else {"add_pooling_layer": pooler}
    build = partial(_build, name, family, model, config, signs=signs, options=options)
    if family == "vit":
        return Case(name, family, build, partial(_images, masked=model.endswith("ForMaskedImageModeling")))
    padded = family == "bert" or "pad_token_id" in config
    return Case(name, family, build, partial(_text, types=family == "bert", padded=padded))


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, **settings}


_gpt2 = partial(_case, "gpt2")
_bert = partial(_case, "bert")
_vit = partial(_case, "vit")
_llama = partial(_case, "llama")
_mistral = partial(_case, "mistral")
_qwen2 = partial(_case, "qwen2")
_phi3 = partial(_case, "phi3")
_neox = partial(_case, "gpt_neox")

CASES: tuple[Case, ...] = (
    _gpt2("lm-tied", "GPT2LMHeadModel"),
    _gpt2("lm-untied", "GPT2LMHeadModel", tie_word_embeddings=False),
    _gpt2("classifier", "GPT2ForSequenceClassification", pad_token_id=PAD),
    _gpt2("bare", "GPT2Model", n_layer=1),
    _gpt2("one-head", "GPT2LMHeadModel", n_head=1),
    _gpt2("three-heads", "GPT2LMHeadModel", n_head=3, tie_word_embeddings=False),
    _gpt2("inner", "GPT2LMHeadModel", n_inner=40),
    _gpt2("inverse-layer-scale", "GPT2LMHeadModel", n_layer=3, scale_attn_by_inverse_layer_idx=True),
    _gpt2("signed-gains", "GPT2LMHeadModel", signs=True, tie_word_embeddings=False),
    _bert("classifier", "BertForSequenceClassification"),
    _bert("masked-lm-tied", "BertForMaskedLM"),
    _bert("masked-lm-untied", "BertForMaskedLM", tie_word_embeddings=False),
    _bert("pretraining", "BertForPreTraining"),
    _bert("tokens", "BertForTokenClassification", num_hidden_layers=3),
    _bert("bare", "BertModel"),
    _bert("bare-no-pooler", "BertModel", pooler=False, num_hidden_layers=1),
    _bert("one-head", "BertForSequenceClassification", num_attention_heads=1),
    _bert("relu", "BertForSequenceClassification", hidden_act="relu"),
    _vit("classifier", "ViTForImageClassification"),
    _vit("no-qkv-bias", "ViTForImageClassification", qkv_bias=False, num_hidden_layers=3),
    _vit("bare", "ViTModel"),
    _vit("bare-no-pooler", "ViTModel", pooler=False, num_hidden_layers=1),
    _vit("masked-image", "ViTForMaskedImageModeling"),
    _llama("untied", "LlamaForCausalLM"),
    _llama("tied", "LlamaForCausalLM", tie_word_embeddings=True),
    _llama("gqa", "LlamaForCausalLM", num_key_value_heads=2, num_hidden_layers=3),
    _llama("one-kv-head", "LlamaForCausalLM", num_key_value_heads=1),
    _llama("biases", "LlamaForCausalLM", num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    _llama("head-dim", "LlamaForCausalLM", num_key_value_heads=2, head_dim=10),
    _llama(
        "rope-llama3",
        "LlamaForCausalLM",
        head_dim=8,
        rope_parameters=_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    _llama("rope-linear", "LlamaForCausalLM", rope_parameters=_rope("linear", factor=4.0)),
    _llama(
        "rope-yarn",
        "LlamaForCausalLM",
        head_dim=8,
        max_position_embeddings=256,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    _llama("rope-theta", "LlamaForCausalLM", rope_parameters={"rope_type": "default", "rope_theta": 50.0}),
    _llama("classifier", "LlamaForSequenceClassification", pad_token_id=PAD),
    _llama("bare", "LlamaModel", num_hidden_layers=1),
    _llama("three-heads", "LlamaForCausalLM", num_attention_heads=3),
    _llama("signed-gains", "LlamaForCausalLM", signs=True),
    _mistral("gqa", "MistralForCausalLM"),
    _mistral("head-dim", "MistralForCausalLM", head_dim=10),
    _mistral("window", "MistralForCausalLM", sliding_window=3),
    _qwen2("gqa", "Qwen2ForCausalLM"),
    _qwen2("tied", "Qwen2ForCausalLM", tie_word_embeddings=True, num_hidden_layers=3),
    _qwen2("classifier", "Qwen2ForSequenceClassification", pad_token_id=PAD),
    _phi3("gqa", "Phi3ForCausalLM"),
    _phi3("half-rotary", "Phi3ForCausalLM", head_dim=8, rope_parameters=_rope("default", partial_rotary_factor=0.5)),
    _phi3("tied", "Phi3ForCausalLM", tie_word_embeddings=True, num_hidden_layers=3),
    _neox("quarter-rotary", "GPTNeoXForCausalLM", num_attention_heads=2),
    _neox("full-rotary", "GPTNeoXForCausalLM", rotary_pct=1.0, num_hidden_layers=1),
    _neox("half-rotary", "GPTNeoXForCausalLM", rotary_pct=0.5, num_hidden_layers=3),
    _neox("sequential", "GPTNeoXForCausalLM", rotary_pct=0.5, use_parallel_residual=False),
    _neox("no-attention-bias", "GPTNeoXForCausalLM", rotary_pct=0.5, attention_bias=False),
    _neox("tied", "GPTNeoXForCausalLM", rotary_pct=0.5, tie_word_embeddings=True),
    _neox("classifier", "GPTNeoXForSequenceClassification", rotary_pct=0.5, pad_token_id=PAD),
    _neox("bare", "GPTNeoXModel", rotary_pct=1.0),
)


def case(name: str) -> Case:
    """The case of that name."""
    return next(each for each in CASES if each.name == name)
