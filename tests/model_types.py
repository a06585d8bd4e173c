"""Tiny models of every model type beside those of `tiny`, with every parameter random, and their outputs in float64.

transformers casts to float32 inside norms, rotary positions and softmax. `Float64` turns these casts into casts to
float64, so that transformers itself is the float64 oracle.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import isobasin as ib
import tiny
from isobasin.runtime import ENCODER_OUTPUTS, OUTPUTS

V, L = 30, 2
_IMAGE = {"image_size": 6, "patch_size": 2, "num_labels": 5, "encoder_stride": 2}
_WIDE = {"hidden_size": 24, "num_hidden_layers": L, "num_attention_heads": 4, "intermediate_size": 40}
_TEXT = {"vocab_size": V, "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GPT = {"vocab_size": V, "n_embd": 24, "n_layer": L, "n_head": 4, "n_positions": 24}
_GPT |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_RMS = _WIDE | _TEXT | {"num_key_value_heads": 2, "rms_norm_eps": 1e-3}
_LN = _WIDE | _TEXT | {"layer_norm_eps": 1e-3}
_ENCODER = _LN | {"pad_token_id": 1, "bos_token_id": 0}


@dataclass(frozen=True)
class ModelType:
    """One configuration of a model type: the class of transformers and its config (`own_head`: untied afterwards)."""

    name: str
    family: str
    model: str
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def config_class(self) -> str:
        stem = (
            self.model.partition("For")[0]
            .removesuffix("WithProjection")
            .removesuffix("Model")
            .removesuffix("LMHead")
            .removesuffix("Encoder")
        )
        text = stem == "Gemma3" and "vision_config" not in self.config
        return "Gemma3TextConfig" if text else f"{stem}Config"

    def build(self, seed: int = 0) -> Any:
        import transformers

        config = {key: value for key, value in self.config.items() if key != "own_head"}
        settings = getattr(transformers, self.config_class)(**config)
        with torch.random.fork_rng(devices=[]):
            fresh = getattr(transformers, self.model)._from_config(
                settings, attn_implementation="eager", experts_implementation="eager"
            )
        if self.config.get("own_head"):  # T5 files may have one although every config says tied
            fresh.lm_head.weight = nn.Parameter(fresh.lm_head.weight.detach().clone())
        return randomize(fresh, crc32(f"{self.name} {seed}".encode())).eval()


def randomize(model: nn.Module, seed: int) -> nn.Module:
    """As in `tiny`; gains that are stored less 1 are drawn around 0, and biases that are buffers are drawn too."""
    tiny.randomize(model, seed)
    for module in model.modules():
        kind = type(module).__name__
        if kind.startswith(("Gemma", "NemotronLayerNorm1P")) and "Norm" in kind:
            module.weight.data -= 1  # type: ignore[operator, union-attr]
        correction = getattr(module, "e_score_correction_bias", None)
        if isinstance(correction, Tensor):
            correction.copy_(0.05 * torch.randn(correction.shape, generator=torch.Generator().manual_seed(seed)))
    return model


def _variants(
    family: str, stem: str, base: Mapping[str, Any], **kinds: tuple[str, Mapping[str, Any]]
) -> list[ModelType]:
    return [
        ModelType(f"{family}-{kind.replace('_', '-')}", family, stem + head, {**base, **config})
        for kind, (head, config) in kinds.items()
    ]


_QUARTER = {"rope_type": "default", "partial_rotary_factor": 0.25}
_UNTIED = {"tie_word_embeddings": False}
_FALCON = _WIDE | _TEXT | {"ffn_hidden_size": 40, "layer_norm_epsilon": 1e-3}
_T5 = {"vocab_size": V, "d_model": 24, "d_kv": 5, "d_ff": 40, "num_layers": L, "num_heads": 4}
_T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "layer_norm_epsilon": 1e-3}
_BART = {"vocab_size": V, "d_model": 24, "encoder_layers": L, "decoder_layers": L, "max_position_embeddings": 24}
_BART |= {f"{stack}_attention_heads": 4 for stack in ("encoder", "decoder")}
_BART |= {"encoder_ffn_dim": 40, "decoder_ffn_dim": 28, "scale_embedding": True}
_WHISPER = {k: v for k, v in _BART.items() if k not in ("max_position_embeddings", "scale_embedding")}
_WHISPER |= {"num_mel_bins": 5, "max_source_positions": 6, "max_target_positions": 24, "decoder_layers": 1}
_WHISPER |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}
_SEQ = "ForConditionalGeneration"
_SPECIAL = {"cls_token_id": 1, "sep_token_id": 2}
_EXPERTS = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 14}
_SPARSE = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 14}
_MLA = {"num_key_value_heads": 4, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 3, "v_head_dim": 5}
_MLA |= {"n_routed_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 7, "first_k_dense_replace": 1}
_LM, _CLS = "ForCausalLM", "ForSequenceClassification"
_NEO = {"vocab_size": V, "hidden_size": 24, "num_layers": L, "num_heads": 4, "max_position_embeddings": 24}
_NEO |= {"attention_types": [[["global", "local"], 1]], "window_size": 3, "layer_norm_epsilon": 1e-3}
_NEO |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_DISTIL = {"vocab_size": V, "dim": 24, "hidden_dim": 40, "n_layers": L, "n_heads": 4, "max_position_embeddings": 24}
_BLOOM = {"vocab_size": V, "hidden_size": 24, "n_layer": L, "n_head": 4, "layer_norm_epsilon": 1e-3, "pad_token_id": 0}
_MPT = {"vocab_size": V, "d_model": 24, "n_layers": L, "n_heads": 4, "max_seq_len": 24, "layer_norm_epsilon": 1e-3}
_OPT = {"vocab_size": V, "hidden_size": 24, "ffn_dim": 40, "num_hidden_layers": L, "num_attention_heads": 4}
_OPT |= {"max_position_embeddings": 24, "word_embed_proj_dim": 24, "pad_token_id": 1}
_CLIP = {"model_type": "clip_vision_model", "hidden_size": 12, "intermediate_size": 10, "num_hidden_layers": 2}
_CLIP |= {"num_attention_heads": 2, "image_size": 6, "patch_size": 2, "layer_norm_eps": 1e-3}
_CLIP_TEXT = {k: v for k, v in _CLIP.items() if "_size" not in k or k == "intermediate_size"} | {"hidden_size": 16}
_CLIP_TEXT |= _TEXT | {"model_type": "clip_text_model", "eos_token_id": 5}
_SIGLIP = _CLIP | {"model_type": "siglip_vision_model", "vision_use_head": False}
_SIGLIP_TEXT = {k: v for k, v in _CLIP_TEXT.items() if k != "eos_token_id"} | {"model_type": "siglip_text_model"}
_SIGLIP_IMAGE = _CLIP | {"model_type": "siglip_vision_model", "hidden_size": 16}
_LLAVA = {"vision_config": _CLIP, "image_token_index": 7}
_QWEN_TEXT = _RMS | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 1]}}
_QWEN = {"image_token_id": 7, "video_token_id": 8, "vision_start_token_id": 9, "vision_end_token_id": 10}
_QWEN_VISION = {"depth": 2, "num_heads": 2, "patch_size": 2, "in_channels": 3}

MODEL_TYPES: tuple[ModelType, ...] = (
    *_variants(
        "gemma",
        "Gemma",
        _RMS | {"head_dim": 6},
        tied=(_LM, {}),
        untied=(_LM, _UNTIED | {"num_key_value_heads": 1, "attention_bias": True}),
        classifier=(_CLS, {"num_labels": 5}),
    ),
    *_variants(
        "gemma2",
        "Gemma2",
        _RMS | {"head_dim": 6, "query_pre_attn_scalar": 5, "sliding_window": 4},
        tied=(_LM, {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 3.0}),
        untied=(_LM, _UNTIED | {"attn_logit_softcapping": None, "num_hidden_layers": 3}),
    ),
    *_variants(
        "gemma3_text",
        "Gemma3",
        _RMS | {"head_dim": 6, "query_pre_attn_scalar": 5, "sliding_window": 4},
        tied=(_LM, {"layer_types": ["sliding_attention", "full_attention"]}),
        untied=(_LM, _UNTIED | {"num_key_value_heads": 1, "num_hidden_layers": 3}),
    ),
    *_variants(
        "qwen3",
        "Qwen3",
        _RMS | {"head_dim": 6},
        untied=(_LM, {}),
        tied=(_LM, {"tie_word_embeddings": True, "num_hidden_layers": 3, "num_key_value_heads": 4}),
        biases=(_LM, {"attention_bias": True}),
        classifier=(_CLS, {"num_labels": 5, "num_key_value_heads": 1}),
    ),
    *_variants(
        "granite",
        "Granite",
        _RMS | {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0},
        untied=(_LM, {"attention_multiplier": 0.3}),
        tied=(_LM, {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    ),
    *_variants(
        "smollm3",
        "SmolLM3",
        _RMS,
        tied=(_LM, {"no_rope_layers": [1, 0]}),
        untied=(_LM, _UNTIED | {"num_hidden_layers": 4, "attention_bias": True}),
    ),
    *_variants(
        "glm",
        "Glm",
        _RMS | {"head_dim": 8},
        untied=(_LM, {}),
        tied=(_LM, {"tie_word_embeddings": True, "attention_bias": False}),
    ),
    *_variants("glm4", "Glm4", _RMS | {"head_dim": 8}, untied=(_LM, {}), tied=(_LM, {"tie_word_embeddings": True})),
    *_variants(
        "cohere",
        "Cohere",
        _LN | {"num_key_value_heads": 2, "logit_scale": 0.5},
        tied=(_LM, {}),
        untied=(_LM, _UNTIED | {"num_key_value_heads": 4, "attention_bias": True}),
        head_norms=(_LM, {"use_qk_norm": True}),
        head_norms_biases=(_LM, _UNTIED | {"use_qk_norm": True, "attention_bias": True, "num_key_value_heads": 1}),
    ),
    *_variants(
        "cohere2",
        "Cohere2",
        _LN | {"num_key_value_heads": 2, "sliding_window": 4},
        tied=(_LM, {"layer_types": ["sliding_attention", "full_attention"]}),
        untied=(_LM, _UNTIED | {"num_hidden_layers": 4}),
    ),
    *_variants(
        "stablelm",
        "StableLm",
        _LN | {"num_key_value_heads": 2, "hidden_size": 32},
        untied=(_LM, {}),
        biases=(_LM, {"use_qkv_bias": True, "num_key_value_heads": 4}),
        parallel=(_LM, {"use_parallel_residual": True, "tie_word_embeddings": True}),
        head_norms=(_LM, {"qk_layernorm": True}),
        head_norms_biases=(_LM, {"qk_layernorm": True, "use_qkv_bias": True, "use_parallel_residual": True}),
        classifier=(_CLS, {"num_labels": 5}),
    ),
    *_variants(
        "nemotron",
        "Nemotron",
        _WIDE | _TEXT | {"num_key_value_heads": 2, "norm_eps": 1e-3, "head_dim": 8},
        untied=(_LM, {}),
        biases=(_LM, {"attention_bias": True, "mlp_bias": True}),
        relu=(_LM, {"hidden_act": "relu", "tie_word_embeddings": True}),
    ),
    *_variants(
        "olmo",
        "Olmo",
        _WIDE | _TEXT | {"num_key_value_heads": 2},
        untied=(_LM, {}),
        tied=(_LM, {"tie_word_embeddings": True, "attention_bias": True}),
        bare=("Model", {}),
    ),
    *_variants(
        "olmo2", "Olmo2", _RMS, untied=(_LM, {}), tied=(_LM, {"tie_word_embeddings": True, "attention_bias": True})
    ),
    *_variants(
        "olmo3",
        "Olmo3",
        _RMS | {"sliding_window": 4},
        untied=(_LM, {"num_hidden_layers": 4, "num_key_value_heads": 4}),
        tied=(_LM, {"tie_word_embeddings": True, "layer_types": ["full_attention", "sliding_attention"]}),
    ),
    *_variants("mixtral", "Mixtral", _RMS | _EXPERTS, untied=(_LM, {}), tied=(_LM, {"tie_word_embeddings": True})),
    *_variants(
        "qwen2_moe",
        "Qwen2Moe",
        _RMS | _SPARSE | {"shared_expert_intermediate_size": 10},
        untied=(_LM, {}),
        dense_layer=(_LM, {"mlp_only_layers": [0], "norm_topk_prob": True, "tie_word_embeddings": True}),
    ),
    *_variants(
        "qwen3_moe",
        "Qwen3Moe",
        _RMS | _SPARSE | {"head_dim": 6},
        untied=(_LM, {}),
        dense_layer=(_LM, {"decoder_sparse_step": 2, "norm_topk_prob": True, "attention_bias": True}),
    ),
    *_variants(
        "gpt_oss",
        "GptOss",
        _RMS | _EXPERTS | {"head_dim": 6, "sliding_window": 4, "swiglu_limit": 1.5},
        untied=(_LM, {}),
        tied=(_LM, {"tie_word_embeddings": True, "attention_bias": False}),
        classifier=(
            _CLS,
            {"num_labels": 5, "num_experts_per_tok": 3, "layer_types": ["full_attention", "sliding_attention"]},
        ),
    ),
    *_variants(
        "deepseek_v3",
        "DeepseekV3",
        _RMS | _MLA | {"n_group": 3, "topk_group": 2, "q_lora_rank": 9},
        groups=(_LM, {"attention_bias": True}),
        one_group=(
            _LM,
            {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "first_k_dense_replace": 0, "rope_interleave": False}
            | {"tie_word_embeddings": True, "num_experts_per_tok": 5},
        ),
    ),
    *_variants(
        "deepseek_v2",
        "DeepseekV2",
        _RMS | _MLA | {"qk_nope_head_dim": 4},
        groups=(
            _LM,
            {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2, "q_lora_rank": 9}
            | {"attention_bias": True},
        ),
        lite=(_LM, {"q_lora_rank": None, "mlp_bias": True, "n_shared_experts": 1}),
    ),
    *_variants("olmoe", "Olmoe", _RMS | _EXPERTS, untied=(_LM, {"num_experts": 3})),
    *_variants(
        "t5",
        "T5",
        _T5,
        relu=(_SEQ, {}),
        own_head=(_SEQ, {"own_head": True, "feed_forward_proj": "gated-gelu"}),
        gated=(_SEQ, {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 1}),
        bare=("Model", {}),
        encoder=("EncoderModel", {}),
    ),
    *_variants(
        "bart",
        "Bart",
        _BART,
        tied=(_SEQ, {}),
        relu=(_SEQ, {"decoder_layers": 1, "activation_function": "relu"}),
        classifier=(_CLS, {"num_labels": 5}),
        bare=("Model", {}),
    ),
    *_variants("mbart", "MBart", _BART, tied=(_SEQ, {}), answers=("ForQuestionAnswering", {"num_labels": 2})),
    *_variants(
        "whisper",
        "Whisper",
        _WHISPER,
        tied=(_SEQ, {}),
        untied=(_SEQ, _UNTIED),
        bare=("Model", {}),
        audio=("ForAudioClassification", {"num_labels": 5, "classifier_proj_size": 7}),
    ),
    *_variants(
        "clip",
        "CLIP",
        {"text_config": _CLIP_TEXT, "vision_config": _CLIP, "projection_dim": 7},
        towers=("Model", {}),
    ),
    *_variants(
        "clip_text_model",
        "CLIPText",
        _CLIP_TEXT | {"projection_dim": 7},
        bare=("Model", {"eos_token_id": 2}),
        projection=("ModelWithProjection", {}),
    ),
    *_variants(
        "clip_vision_model",
        "CLIPVision",
        _CLIP | {"projection_dim": 7},
        bare=("Model", {}),
        projection=("ModelWithProjection", {}),
    ),
    *_variants(
        "siglip",
        "Siglip",
        {"text_config": _SIGLIP_TEXT, "vision_config": _SIGLIP_IMAGE},
        towers=("Model", {}),
    ),
    *_variants("siglip_text_model", "SiglipText", _SIGLIP_TEXT, bare=("Model", {"projection_size": 7})),
    *_variants(
        "siglip_vision_model",
        "SiglipVision",
        _SIGLIP_IMAGE,
        bare=("Model", {}),
        no_head=("Model", {"vision_use_head": False}),
    ),
    *_variants("mt5", "MT5", _T5, gated=(_SEQ, {})),
    *_variants("umt5", "UMT5", _T5, gated=(_SEQ, {}), relu=(_SEQ, {"feed_forward_proj": "relu"})),
    *_variants(
        "starcoder2",
        "Starcoder2",
        _WIDE | _TEXT | {"num_key_value_heads": 2, "norm_epsilon": 1e-3},
        tied=(_LM, {}),
        untied=(_LM, _UNTIED | {"num_key_value_heads": 4}),
        no_bias=(_LM, _UNTIED | {"use_bias": False}),
    ),
    *_variants(
        "phi",
        "Phi",
        _LN | {"hidden_size": 32},
        untied=(_LM, {}),
        tied=(_LM, {"tie_word_embeddings": True, "num_key_value_heads": 2}),
        classifier=(
            _CLS,
            {"num_labels": 5, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
        ),
    ),
    *_variants(
        "gptj",
        "GPTJ",
        _GPT | {"rotary_dim": 4, "layer_norm_epsilon": 1e-3},
        untied=(_LM, {}),
        tied=(_LM, {"tie_word_embeddings": True, "rotary_dim": 2}),
    ),
    *_variants(
        "falcon",
        "Falcon",
        _FALCON,
        multi_query=(_LM, {}),
        multi_query_untied=(_LM, _UNTIED | {"bias": True}),
        groups=(_LM, {"new_decoder_architecture": True, "num_kv_heads": 2}),
        groups_untied=(_LM, _UNTIED | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
        one_norm=(_LM, {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
        alibi=(_LM, {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
        alibi_untied=(_LM, _UNTIED | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    ),
    *_variants("bloom", "Bloom", _BLOOM, tied=(_LM, {}), untied=(_LM, _UNTIED), classifier=(_CLS, {"num_labels": 5})),
    *_variants("mpt", "Mpt", _MPT, tied=(_LM, {}), untied=(_LM, _UNTIED)),
    *_variants("gpt_neo", "GPTNeo", _NEO, tied=(_LM, {}), untied=(_LM, _UNTIED | {"intermediate_size": 40})),
    *_variants(
        "gpt_bigcode",
        "GPTBigCode",
        _GPT | {"layer_norm_epsilon": 1e-3},
        tied=(_LM, {}),
        untied=(_LM, _UNTIED),
        many_kv_heads=(_LM, {"multi_query": False}),
    ),
    *_variants("opt", "OPT", _OPT, tied=(_LM, {}), untied=(_LM, _UNTIED), gelu=(_LM, {"activation_function": "gelu"})),
    *_variants(
        "roberta",
        "Roberta",
        _ENCODER,
        masked_lm=("ForMaskedLM", {}),
        masked_lm_untied=("ForMaskedLM", _UNTIED),
        classifier=(_CLS, {"num_labels": 5}),
        bare=("Model", {}),
    ),
    *_variants(
        "mpnet",
        "MPNet",
        _ENCODER,
        masked_lm=("ForMaskedLM", {}),
        classifier=(_CLS, {"num_labels": 5}),
    ),
    *_variants(
        "modernbert",
        "ModernBert",
        _WIDE | _TEXT | _SPECIAL | {"norm_eps": 1e-3, "local_attention": 4, "num_hidden_layers": 3},
        masked_lm=("ForMaskedLM", {}),
        masked_lm_untied=("ForMaskedLM", _UNTIED | {"attention_bias": True, "mlp_bias": True, "norm_bias": True}),
        classifier=(_CLS, {"num_labels": 5, "classifier_pooling": "mean"}),
        bare=("Model", {}),
    ),
    *_variants(
        "nomic_bert",
        "NomicBert",
        _LN,
        masked_lm=("ForMaskedLM", {}),
        untied_masked_lm=("ForMaskedLM", _UNTIED),
        tokens=("ForTokenClassification", {"num_labels": 5}),
        bare=("Model", {}),
    ),
    *_variants("data2vec-text", "Data2VecText", _ENCODER, masked_lm=("ForMaskedLM", {})),
    *_variants("ernie", "Ernie", _LN, masked_lm=("ForMaskedLM", {}), classifier=(_CLS, {"num_labels": 5})),
    *_variants("arcee", "Arcee", _RMS, untied=(_LM, {}), biases=(_LM, {"mlp_bias": True, "attention_bias": True})),
    *_variants(
        "ernie4_5", "Ernie4_5", _RMS | {"head_dim": 6}, tied=(_LM, {}), untied=(_LM, _UNTIED | {"use_bias": True})
    ),
    *_variants("helium", "Helium", _RMS | {"head_dim": 6}, untied=(_LM, {})),
    *_variants(
        "seed_oss", "SeedOss", _RMS | {"head_dim": 6}, untied=(_LM, {}), tied=(_LM, {"tie_word_embeddings": True})
    ),
    *_variants("biogpt", "BioGpt", _LN, tied=(_LM, {}), untied=(_LM, _UNTIED)),
    *_variants("xlm-roberta", "XLMRoberta", _ENCODER, masked_lm=("ForMaskedLM", {})),
    *_variants("camembert", "Camembert", _ENCODER, tokens=("ForTokenClassification", {"num_labels": 5})),
    *_variants(
        "distilbert",
        "DistilBert",
        _DISTIL,
        masked_lm=("ForMaskedLM", {}),
        masked_lm_untied=("ForMaskedLM", _UNTIED),
        classifier=(_CLS, {"num_labels": 5}),
    ),
    *_variants(
        "dinov2",
        "Dinov2",
        _WIDE | _IMAGE | {"layer_norm_eps": 1e-3, "mlp_ratio": 2},
        classifier=("ForImageClassification", {}),
        bare=("Model", {"qkv_bias": False}),
        gated=("ForImageClassification", {"use_swiglu_ffn": True}),
    ),
    *_variants(
        "beit",
        "Beit",
        _WIDE | _IMAGE | {"layer_norm_eps": 1e-3, "use_relative_position_bias": True},
        classifier=("ForImageClassification", {}),
        positions=("ForImageClassification", {"use_absolute_position_embeddings": True, "use_mean_pooling": False}),
    ),
    *_variants(
        "deit",
        "DeiT",
        _WIDE | _IMAGE | {"layer_norm_eps": 1e-3},
        classifier=("ForImageClassification", {}),
        two_classifiers=("ForImageClassificationWithTeacher", {}),
        masked_image=("ForMaskedImageModeling", {}),
        bare=("Model", {"qkv_bias": False}),
    ),
    *_variants(
        "llava",
        "Llava",
        _LLAVA,
        untied=(_SEQ, {"text_config": _RMS | {"model_type": "llama", "attention_bias": True}}),
        tied=(_SEQ, {"text_config": _RMS | {"model_type": "mistral", "tie_word_embeddings": True}}),
    ),
    *_variants(
        "gemma3",
        "Gemma3",
        {"vision_config": _SIGLIP, "image_token_index": 7, "mm_tokens_per_image": 9},
        tied=(_SEQ, {"text_config": _RMS | {"head_dim": 6, "query_pre_attn_scalar": 5, "sliding_window": 4}}),
    ),
    *_variants(
        "qwen2_vl",
        "Qwen2VL",
        _QWEN | {"vision_config": _QWEN_VISION | {"embed_dim": 16, "hidden_size": 24, "mlp_ratio": 2}},
        untied=(_SEQ, {"text_config": _QWEN_TEXT}),
    ),
    *_variants(
        "qwen2_5_vl",
        "Qwen2_5_VL",
        _QWEN
        | {
            "vision_config": _QWEN_VISION
            | {"hidden_size": 16, "intermediate_size": 10, "out_hidden_size": 24, "fullatt_block_indexes": [1]}
        },
        untied=(_SEQ, {"text_config": _QWEN_TEXT}),
        tied=(_SEQ, {"text_config": _QWEN_TEXT, "tie_word_embeddings": True}),
    ),
)


class Float64(TorchFunctionMode):
    """What asks for float32 gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.float:
            return args[0].double()
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if func in (Tensor.to, Tensor.type):
            args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        return func(*args, **kwargs)


def forward(model: nn.Module, inputs: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Tensor:
    """Everything a float64 model says with these tensors in place of its own, one row per example."""
    cast = {k: x.double() if x.is_floating_point() else x for k, x in inputs.items()}
    with Float64():
        said = torch.func.functional_call(model, dict(tensors), (), cast)
    names = (*OUTPUTS, *(ENCODER_OUTPUTS if said.get("last_hidden_state") is not None else ()))
    return torch.cat([said[name].flatten(1) for name in names if said.get(name) is not None], dim=1)


def model_type(name: str) -> ModelType:
    return next(each for each in MODEL_TYPES if each.name == name)


def case(name: str) -> tiny.Case:
    """The configuration as a case of `tiny`."""
    found = model_type(name)

    def some(seed: int) -> dict[str, Tensor]:
        batch = inputs(weights(name), seed=seed)
        if found.model.endswith("ForSequenceClassification") and "decoder_layers" not in found.config:
            batch["input_ids"][1, -2:] = found.config.get("pad_token_id", 0)
        return batch

    return tiny.Case(name, found.family, found.build, some)


@cache
def built(name: str, seed: int = 0) -> Any:
    return model_type(name).build(seed)


@cache
def weights(name: str, seed: int = 0) -> ib.Weights:
    """The model as a file would hold it, in memory."""
    return ib.load(built(name, seed))


def _file_tensor(w: ib.Weights, disk: str) -> Tensor:
    return w.assembled(disk, lambda name: w.stored(name).double())


@cache
def _in_memory(model: nn.Module) -> tuple[nn.Module, list[str], dict[str, Tensor]]:
    """The model in float64; the tensors of its file; and for every tensor in memory, which entries of these it holds,
    counted through all of them. transformers may hold several tensors of a file as one."""
    import copy

    start = ib.load(model)
    state, n = {}, 0
    for disk in sorted(start.names.by_disk):
        shape = _file_tensor(start, disk).shape
        state[disk] = torch.arange(n, n + shape.numel(), dtype=torch.float64).reshape(shape)
        n += shape.numel()
    stored = list(state)
    if start.family.fused:
        fused = type(model).from_pretrained(None, config=model.config, state_dict=state, dtype=torch.float64)
        state = fused.state_dict()
    module = copy.deepcopy(model).double()
    parameters = [(name, each) for name, each in module.named_parameters(remove_duplicate=False) if name in state]
    own = {id(each): name for name, each in (*reversed(parameters), *module.named_buffers()) if name in state}
    return module, stored, {name: state[name].long() for name in own.values()}


def outputs(w: ib.Weights, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """The outputs of these weights in float64, by the class of transformers of `model`."""
    module, stored, places = _in_memory(model)
    entries = torch.cat([_file_tensor(w, disk).flatten() for disk in stored])
    with torch.no_grad():
        return forward(module, inputs, {name: entries[index] for name, index in places.items()})


def inputs(w: ib.Weights, n: int = 3, length: int = 9, seed: int = 0) -> dict[str, Tensor]:
    """A batch of random inputs."""
    from isobasin.runtime import random_inputs

    each = random_inputs(w, n=n, length=length, seed=seed)
    batch = {k: torch.cat([one[k] for one in each]) for k in each[0]}
    if "bool_masked_pos" in batch:
        batch["bool_masked_pos"][:, :2] = torch.tensor([True, False])
    return batch


def save(name: str, folder: Path, seed: int = 0) -> Path:
    built(name, seed).save_pretrained(folder)
    assert json.loads((folder / "config.json").read_text())["model_type"]
    return folder
