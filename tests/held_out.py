"""Random configurations of every model type, with sizes and options that those of `model_types` do not have.

A draw starts from one of the fixed configurations of its type and changes every size, the class, ties, biases, the
activation and the options of `OPTIONS`. Draws that transformers can not build or run are drawn again.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import model_types as mt
from isobasin.arch import FAMILIES
from isobasin.runtime import quiet_transformers
from model_types import ModelType

_WIDE = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
_TEXT = {"vocab_size": 30, "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_RMS = _WIDE | _TEXT | {"num_key_value_heads": 2, "rms_norm_eps": 1e-3}
_GPT = {"vocab_size": 30, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 24, "layer_norm_epsilon": 1e-3}
_IMAGE = {"image_size": 6, "patch_size": 2, "encoder_stride": 2, "layer_norm_eps": 1e-3}
# Types whose fixed configurations are those of `tiny`.
_OTHERS = (
    ModelType("gpt2", "gpt2", "GPT2LMHeadModel", _GPT | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}),
    ModelType("bert", "bert", "BertForMaskedLM", _WIDE | _TEXT | {"layer_norm_eps": 1e-3}),
    ModelType("vit", "vit", "ViTForImageClassification", _WIDE | _IMAGE),
    ModelType("llama", "llama", "LlamaForCausalLM", _RMS),
    ModelType("mistral", "mistral", "MistralForCausalLM", _RMS | {"sliding_window": None}),
    ModelType("qwen2", "qwen2", "Qwen2ForCausalLM", _RMS),
    ModelType("phi3", "phi3", "Phi3ForCausalLM", _RMS),
    ModelType("gpt_neox", "gpt_neox", "GPTNeoXForCausalLM", _WIDE | _TEXT | {"layer_norm_eps": 1e-3}),
)
NAMES = tuple(name for name, family in FAMILIES.items() if not family.own)

_YES_NO = (True, False)
_ROTARY = tuple({"rope_type": "default", "partial_rotary_factor": share} for share in (0.25, 0.5, 1.0))
_WINDOW = {"sliding_window": (3, 5)}
_EXPERTS = {"norm_topk_prob": _YES_NO, "mlp_only_layers": ([], [0]), "decoder_sparse_step": (1, 2)}
# The options of a type beside sizes, ties, biases and activations; None leaves a key out.
OPTIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "bert": {"type_vocab_size": (1, 2, 3)},
    "roberta": {"type_vocab_size": (1, 2), "pad_token_id": (0, 1, 3)},
    "xlm-roberta": {"type_vocab_size": (1, 2)},
    "camembert": {"pad_token_id": (1, 2)},
    "data2vec-text": {"type_vocab_size": (1, 2)},
    "ernie": {"type_vocab_size": (1, 4)},
    "vit": {"qkv_bias": _YES_NO, "num_channels": (1, 3, 4)},
    "deit": {"qkv_bias": _YES_NO, "num_channels": (1, 3)},
    "dinov2": {"qkv_bias": _YES_NO, "use_swiglu_ffn": _YES_NO, "mlp_ratio": (1, 2, 3), "num_channels": (1, 3)},
    "beit": {
        "use_relative_position_bias": _YES_NO,
        "use_shared_relative_position_bias": _YES_NO,
        "use_absolute_position_embeddings": _YES_NO,
        "use_mean_pooling": _YES_NO,
        "layer_scale_init_value": (0.1, 0),
    },
    "mistral": _WINDOW,
    "qwen2": {"use_sliding_window": _YES_NO, "sliding_window": (3,), "max_window_layers": (0, 1)},
    "phi3": {"rope_parameters": (*_ROTARY[1:], None), "sliding_window": (None, 4)},
    "gpt_neox": {"use_parallel_residual": _YES_NO, "rope_parameters": (*_ROTARY, None)},
    "gemma2": {"attn_logit_softcapping": (None, 2.0), "final_logit_softcapping": (None, 3.0), **_WINDOW},
    "gemma3_text": {"final_logit_softcapping": (None, 3.0), **_WINDOW},
    "granite": {"embedding_multiplier": (0.5, 3.0), "residual_multiplier": (0.4, 1.0), "logits_scaling": (0.5, 2.0)},
    "smollm3": {"no_rope_layer_interval": (2, 4)},
    "glm": {"rope_parameters": (*_ROTARY[1:], None)},
    "glm4": {"rope_parameters": (*_ROTARY[1:], None)},
    "cohere": {"use_qk_norm": _YES_NO, "logit_scale": (0.3, 1.0)},
    "cohere2": {"logit_scale": (0.3, 1.0), **_WINDOW},
    "stablelm": {"qk_layernorm": _YES_NO, "use_parallel_residual": _YES_NO, "rope_parameters": (*_ROTARY, None)},
    "nemotron": {"rope_parameters": (*_ROTARY, None)},
    "phi": {"rope_parameters": (*_ROTARY, None), "qk_layernorm": _YES_NO},
    "gptj": {"rotary_dim": (2, 4, 6)},
    "falcon": {
        "new_decoder_architecture": _YES_NO,
        "multi_query": _YES_NO,
        "parallel_attn": _YES_NO,
        "alibi": _YES_NO,
        "bias": _YES_NO,
        "num_ln_in_parallel_attn": (None, 1, 2),
    },
    "gpt_bigcode": {"multi_query": _YES_NO},
    "olmo3": _WINDOW,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": (3, 9)},
    "qwen3_moe": _EXPERTS,
    "olmoe": {"norm_topk_prob": _YES_NO},
    "gpt_oss": {"swiglu_limit": (0.7, 7.0), **_WINDOW},
    "deepseek_v2": {"q_lora_rank": (None, 7), "first_k_dense_replace": (0, 1), "n_shared_experts": (1, 2)},
    "deepseek_v3": {
        "q_lora_rank": (None, 7),
        "first_k_dense_replace": (0, 1),
        "n_shared_experts": (1, 2),
        "rope_interleave": _YES_NO,
        "norm_topk_prob": _YES_NO,
    },
    "t5": {"feed_forward_proj": ("relu", "gated-gelu", "gated-silu")},
    "mt5": {"feed_forward_proj": ("relu", "gated-gelu")},
    "umt5": {"feed_forward_proj": ("relu", "gated-gelu")},
    "bart": {"scale_embedding": _YES_NO},
    "mbart": {"scale_embedding": _YES_NO},
    "modernbert": {
        "norm_bias": _YES_NO,
        "mlp_bias": _YES_NO,
        "attention_bias": _YES_NO,
        "global_attn_every_n_layers": (1, 2, 3),
        "classifier_pooling": ("cls", "mean"),
    },
    "siglip_vision_model": {"vision_use_head": _YES_NO},
    "llava": {"vision_feature_layer": (-1, -2), "multimodal_projector_bias": _YES_NO},
}
_ACTIVATIONS = ("gelu", "relu", "silu", "gelu_new")
_ACTIVATION_KEYS = ("hidden_act", "activation_function", "activation", "hidden_activation")
_LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers")
_LAYER_KEYS += ("num_decoder_layers",)
_UNIT_KEYS = ("intermediate_size", "ffn_hidden_size", "hidden_dim", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim")
_UNIT_KEYS += ("ffn_dim", "n_inner", "moe_intermediate_size", "shared_expert_intermediate_size")
_WIDTH_KEYS = ("hidden_size", "n_embd", "dim", "d_model")
_HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
# Each of these names layers one by one, or goes with a size that is drawn here.
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_only_layers", "partial_rotary_factor")


def draw(family: str, seed: int) -> ModelType:
    """One configuration of a type: a class that its family covers, and sizes and options at random."""
    rng = Random(f"{family} {seed}")
    base = rng.choice([each for each in (*mt.MODEL_TYPES, *_OTHERS) if each.family == family])
    config = _sized(base.config, family, rng)
    known = FAMILIES[family]
    config |= {flag.key: rng.choice(_YES_NO) for flag in known.bias_flags if flag.key}
    config |= {key: rng.choice(_ACTIVATIONS) for key in _ACTIVATION_KEYS if key in known.settings}
    config |= {key: rng.choice(values) for key, values in OPTIONS.get(family, {}).items()}
    if config.get("new_decoder_architecture"):  # Falcon 40B and later, always in parallel
        config["parallel_attn"] = True
    elif family == "falcon":  # transformers makes norms for a number of them that it does not read then
        config["num_ln_in_parallel_attn"] = None
    if known.text is None and not known.own_head:
        config[known.tied_key] = rng.choice(_YES_NO)
    if known.own_head and not config.get("own_head") and known.name != "t5":
        config["tie_word_embeddings"] = rng.choice(_YES_NO)
    model = rng.choice(classes(family))
    config["num_labels"] = 2 if model.endswith("QuestionAnswering") else rng.randint(2, 6)
    config = {key: value for key, value in config.items() if value is not None or key in base.config or key in _NULLS}
    if config.get("own_head") and not model.endswith("ConditionalGeneration"):
        del config["own_head"]
    return replace(base, name=f"{family} {seed}", model=model, config=config)


_NULLS = ("sliding_window", "q_lora_rank", "attn_logit_softcapping", "final_logit_softcapping")


@cache
def classes(family: str) -> tuple[str, ...]:
    """The classes of transformers that a family covers."""
    transformers, known = quiet_transformers(), FAMILIES[family]
    names = [f"{known.stem}{head}" for head in known.heads]
    return tuple(name for name in names if hasattr(transformers, name))


def _sized(config: Mapping[str, Any], family: str, rng: Random) -> dict[str, Any]:
    """The configuration with every size drawn anew; so are those of the models inside."""
    found = {key: value for key, value in config.items() if key not in _PER_LAYER}
    for key in ("text_config", "vision_config"):
        if key in found:
            found[key] = _part(found[key], family, rng)
    layers = {key: rng.randint(1, 3) for key in _LAYER_KEYS if key in found}
    found |= layers | {key: rng.randint(3, 23) for key in _UNIT_KEYS if key in found}
    if "vocab_size" in found:
        found["vocab_size"] = rng.randint(17, 37)
    found |= _heads(found, family, rng)
    if "patch_size" in found and "text_config" not in found:
        patch = rng.choice((1, 2, 3))
        found |= {"patch_size": patch, "image_size": patch * rng.choice((2, 3))}
        found |= {"encoder_stride": patch} if "encoder_stride" in found else {}
    return found | _further(found, family, rng)


def _part(config: Mapping[str, Any], family: str, rng: Random) -> dict[str, Any]:
    """The config of a tower or of a language model. What joins the parts keeps its size."""
    inner = config.get("model_type", "gemma3_text" if family == "gemma3" else "qwen2")
    if family.startswith("qwen2") and "vocab_size" not in config:
        return dict(config)  # its sizes hang together
    kept = {"vocab_size", "patch_size", "image_size", "model_type"}
    if family not in ("clip", "siglip") and "vocab_size" in config:
        kept |= {"hidden_size"} if family.startswith("qwen2") else set()
    if family in ("llava", "gemma3") and "vocab_size" not in config:
        kept |= {"num_hidden_layers"}
    if family.startswith("qwen2"):
        kept |= {"num_attention_heads", "num_key_value_heads", "head_dim"}  # with the sections of rotary positions
    if family == "siglip":
        kept |= {"hidden_size", "num_attention_heads"}
    drawn = _sized(config, inner, rng)
    if family.startswith("qwen2"):
        drawn.pop("head_dim", None)  # these take it from the width
    return drawn | {key: config[key] for key in kept if key in config}


def _heads(config: Mapping[str, Any], family: str, rng: Random) -> dict[str, Any]:
    """Heads and their sizes: even where columns rotate in pairs, free of the width where a config may say so."""
    head_key = next((key for key in _HEAD_KEYS if key in config), None)
    width_key = next((key for key in _WIDTH_KEYS if key in config), None)
    if "encoder_attention_heads" in config:
        size = rng.choice((1, 2, 3, 5))
        counts = [rng.choice((1, 2, 4)) for _ in "ed"]
        return {
            "d_model": size * 4 * rng.choice((1, 2)),
            "encoder_attention_heads": counts[0],
            "decoder_attention_heads": counts[1],
        }
    if head_key is None or width_key is None:
        return {}
    if "d_kv" in config:
        return {head_key: rng.randint(1, 4), "d_kv": rng.randint(1, 6), width_key: rng.randint(6, 25)}
    rotary = family in _ROTATING
    kv, group = rng.choice((1, 2, 3)), rng.choice((1, 2, 3))
    if "num_key_value_heads" not in config or family in _OWN_KEYS:
        group, kv = 1, kv * group
    size = rng.choice(_ROTATING[family] if rotary else (2, 3, 5, 6, 7))
    size = max(size, 6 // (kv * group)) if not rotary else size
    found = {head_key: kv * group, width_key: kv * group * size}
    if "num_key_value_heads" in config:
        found["num_key_value_heads"] = kv
    if "num_kv_heads" in config:
        found["num_kv_heads"] = rng.choice([k for k in (1, 2, 3) if kv * group % k == 0])
    if "head_dim" in config or (rotary and family in _FREE_WIDTH and rng.random() < 0.5):
        found |= {"head_dim": size} | ({width_key: rng.randint(7, 29)} if family != "helium" else {})
    if width_key == "hidden_size" and "word_embed_proj_dim" in config:
        found["word_embed_proj_dim"] = found[width_key]
    return found


_EVEN, _FOURTHS, _EIGHTHS = (2, 4, 6, 10), (4, 8, 12), (8, 16)
_ROTATING: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(
        (
            *("llama", "mistral", "qwen2", "gemma", "gemma2", "gemma3_text", "qwen3", "granite", "smollm3", "helium"),
            *("cohere", "cohere2", "olmo2", "olmo3", "olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"),
            *("starcoder2", "falcon", "modernbert", "nomic_bert", "arcee", "ernie4_5", "seed_oss"),
        ),
        _EVEN,
    ),
    **dict.fromkeys(("phi3", "glm", "glm4"), _FOURTHS),
    **dict.fromkeys(("stablelm", "phi", "gpt_neox", "nemotron"), _EIGHTHS),
    "gptj": (6, 7, 8),
    "olmo": (4, 6, 10),  # of two numbers, a LayerNorm without parameters leaves a sign
}
_FREE_WIDTH = ("llama", "mistral", "qwen2", "granite", "smollm3", "mixtral", "arcee", "olmo2", "olmo3", "phi3")
_OWN_KEYS = ("deepseek_v2", "deepseek_v3")


def _further(config: Mapping[str, Any], family: str, rng: Random) -> dict[str, Any]:
    """Sizes that hang on others, and lists with a word for each layer."""
    found: dict[str, Any] = {}
    n_layers = config.get("num_hidden_layers", config.get("num_layers", 1))
    for key in ("num_experts", "num_local_experts"):
        if key in config:
            found |= {key: rng.randint(2, 5), "num_experts_per_tok": rng.randint(1, 2)}
    if family in _OWN_KEYS:
        found |= _latent(config, family, rng)
    if family == "gpt_neo":
        kinds = rng.choice((["global"], ["local"], ["global", "local"]))
        found["attention_types"] = [[kinds, 1]] if len(kinds) == n_layers else [[["global"], n_layers]]
    if family in ("gemma3_text", "cohere2", "olmo3", "gpt_oss", "gemma2"):
        found["layer_types"] = [rng.choice(("sliding_attention", "full_attention")) for _ in range(n_layers)]
    if family == "smollm3":
        found["no_rope_layers"] = [rng.randint(0, 1) for _ in range(n_layers)]
    if "d_model" in config and "relative_attention_num_buckets" in config:
        found |= {"relative_attention_num_buckets": rng.choice((4, 8, 10)), "relative_attention_max_distance": 12}
        found["num_decoder_layers"] = rng.randint(1, 3)
    for key, most in (("projection_dim", 9), ("projection_size", 9), ("num_mel_bins", 6), ("max_source_positions", 8)):
        if key in config:
            found[key] = rng.randint(2, most)
    if "max_position_embeddings" in config and family not in ("gpt2",):
        found["max_position_embeddings"] = rng.randint(14, 31)
    return found


def _latent(config: Mapping[str, Any], family: str, rng: Random) -> dict[str, Any]:
    """Ranks, head sizes and groups of experts of latent attention."""
    groups, each = rng.choice(((1, 4), (2, 3), (3, 2), (4, 2)))
    kept = rng.randint(1, groups)
    n_heads = rng.randint(1, 4)
    found = {"num_attention_heads": n_heads, "num_key_value_heads": n_heads, "hidden_size": rng.randint(8, 25)}
    found |= {"kv_lora_rank": rng.randint(2, 11), "qk_rope_head_dim": rng.choice((2, 4, 6))}
    found |= {"qk_nope_head_dim": rng.randint(1, 6), "v_head_dim": rng.randint(1, 6)}
    if family == "deepseek_v2":  # complex numbers are read in pairs of columns
        found |= {key: 2 * rng.randint(1, 5) for key in ("kv_lora_rank", "qk_nope_head_dim")}
    found |= {"n_routed_experts": groups * each, "n_group": groups, "topk_group": kept}
    found |= {"num_experts_per_tok": rng.randint(1, kept * each)}
    if family == "deepseek_v2":
        found["topk_method"] = rng.choice(("greedy", "group_limited_greedy"))
    return found


def built(family: str, seed: int, tries: int = 20) -> tuple[ModelType, Any]:
    """A draw that transformers builds, and the model with every parameter random."""
    for attempt in range(tries):
        found = draw(family, seed * tries + attempt)
        try:
            return found, found.build()
        except Exception:  # not a configuration that transformers knows
            continue
    raise AssertionError(f"transformers builds none of {tries} draws of {family}")
