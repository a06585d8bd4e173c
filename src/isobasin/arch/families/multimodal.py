"""The language model of multimodal models: Llava, PaliGemma, Gemma 3, Qwen2-VL, Qwen2.5-VL.

The features of an image take the places of some tokens in the text. The last linear map of the projector writes them
into the stream, and moves with it; everything before it is copied as it is. The language model has its own family.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isobasin.arch.architecture import Architecture
from isobasin.arch.families import gemma, llama, qwen2
from isobasin.arch.family import Family, ImageInputs, TextPart
from isobasin.arch.pattern import parse

CLASS = "ForConditionalGeneration"
_TEXT = {family.name: family for file in (llama, qwen2, gemma) for family in file.FAMILIES}

_7B = {"vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_GEMMA3 = {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
_GEMMA3 |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072}
_QWEN: dict[str, Any] = {"vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80}
_QWEN |= {"num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6}
_PALI = {"vocab_size": 257152, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18}
_PALI |= {"num_attention_heads": 8, "num_key_value_heads": 1}
# What transformers takes where the config of a language model has no value; files often leave values out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _7B | {"intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": _7B | {"intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072},
    "gemma3_text": _GEMMA3,
    "qwen2_vl_text": _QWEN | {"max_window_layers": 80, "max_position_embeddings": 32768},
}


def multimodal(
    text: TextPart,
    writes: Mapping[str, str],
    copied: tuple[str, ...],
    unread: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda config: (),
) -> Callable[..., Architecture]:
    """The description of a multimodal model: its language model, the tensors that write image features into the stream
    (`writes`, with their patterns), and the beginnings of the names of all others and, by its config, of those that it
    does not read."""

    def describe(config: Mapping[str, Any]) -> Architecture:
        family, inner = text.of(config)
        arch = family.architecture(inner).prefixed(text.prefix)
        tensors = {**arch.tensors, **{name: parse(pattern) for name, pattern in writes.items()}}
        kind, skipped = config["model_type"], unread(config)
        return replace(arch, family=kind, tensors=tensors, copied=copied, copied_unread=skipped)

    return describe


def _behind_features(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The layers of Llava's vision tower behind the one whose outputs are the features of an image, and its end."""
    vision, chosen = config.get("vision_config"), config.get("vision_feature_layer", -2)
    n_layers = 24
    if isinstance(vision, Mapping):
        n_layers = vision.get("num_hidden_layers", 12)
        if vision.get("model_type", "clip_vision_model") not in ("clip_vision_model", "siglip_vision_model"):
            return ()
    numbers = chosen if isinstance(chosen, list) else [chosen]
    if not numbers or not all(type(n) is int for n in (*numbers, n_layers)):
        return ()
    most = max(n if n >= 0 else n_layers + 1 + n for n in numbers)
    tower = "vision_tower.vision_model"
    layers = tuple(f"{tower}.encoder.layers.{i}." for i in range(max(0, most), min(n_layers, 10_000)))
    return (*layers, f"{tower}.post_layernorm.", f"{tower}.head.") if most < n_layers else ()


def _with_plain_rotary(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary positions with sections, which are a setting of their own, are of the usual type otherwise."""
    table = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if table.get("rope_type", table.get("type")) == "mrope":
        table |= {"rope_type": "default", "type": "default"}
    return {key: value for key, value in config.items() if key != "rope_scaling"} | {"rope_parameters": table}


def _sections(text: TextPart) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """How many rotary pairs turn with time, height and width of an image."""

    def read(config: Mapping[str, Any]) -> dict[str, Any]:
        table = text.of(config)[1]["rope_parameters"]
        return {"mrope_section": list(table.get("mrope_section") or (16, 24, 24))}

    return read


_LLAVA_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
    (r"^vision_tower\.(embeddings|encoder|pre_layrnorm|post_layernorm|head)\.", r"vision_tower.vision_model.\1."),
)
_LLAVA_PARTS = ("vision_tower.", "multi_modal_projector.")
_QWEN_NAMES = ((r"^model\.language_model\.", "model."), (r"^model\.visual\.", "visual."))
_QWEN_OUT = {"visual.merger.mlp.2.weight": "resid .", "visual.merger.mlp.2.bias": "resid"}
_QWEN_KEYS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}

_llava = TextPart("language_model.", {name: _TEXT[name] for name in ("llama", "mistral")}, ImageInputs(), DEFAULTS)
_gemma3 = TextPart(
    "language_model.",
    {"gemma3_text": _TEXT["gemma3_text"]},
    ImageInputs(tokens="mm_tokens_per_image", marks="token_type_ids"),
    DEFAULTS,
    tied=True,
)


def _qwen(kind: str) -> TextPart:
    text = _TEXT["qwen2"]
    return TextPart(
        "",
        {kind: text},
        ImageInputs(patches=True, marks="mm_token_type_ids"),
        {text.name: DEFAULTS["qwen2_vl_text"]},
        flat=True,
        prepared=_with_plain_rotary,
    )


_qwen2_vl, _qwen2_5_vl = _qwen("qwen2_vl_text"), _qwen("qwen2_5_vl_text")

FAMILIES = (
    Family(
        "llava",
        multimodal(
            _llava,
            {"multi_modal_projector.linear_2.weight": "resid .", "multi_modal_projector.linear_2.bias": "?resid"},
            _LLAVA_PARTS,
            _behind_features,
        ),
        f"Llava{CLASS}",
        heads=(CLASS,),
        spellings=_LLAVA_NAMES,
        settings={
            "image_token_index": 32000,
            "projector_hidden_act": "gelu",
            "vision_feature_select_strategy": "default",
            "vision_feature_layer": -2,
        },
        aliases={"image_token_id": "image_token_index"},
        rare_settings={"multimodal_projector_bias": True},  # false: the biases that a file has are not loaded
        ignored=("image_seq_length", "ignore_index"),
        text=_llava,
        example=("LLaVA 1.5 7B", {"text_config": {"model_type": "llama"}}),
    ),
    Family(
        "gemma3",
        multimodal(_gemma3, {"multi_modal_projector.mm_input_projection_weight": ". resid"}, _LLAVA_PARTS),
        f"Gemma3{CLASS}",
        heads=(CLASS,),
        spellings=_LLAVA_NAMES,
        settings={"image_token_index": 262144, "mm_tokens_per_image": 256},
        aliases={"image_token_id": "image_token_index"},
        ignored=("boi_token_index", "eoi_token_index", "boi_token_id", "eoi_token_id"),
        text=_gemma3,
        unused=_TEXT["gemma3_text"].unused,
        example=("Gemma 3 4B", {"text_config": {"hidden_size": 2560, "intermediate_size": 10240}}),
    ),
    *(
        Family(
            name,
            multimodal(text, _QWEN_OUT, ("visual.",)),
            f"{stem}{CLASS}",
            heads=(CLASS,),
            spellings=_QWEN_NAMES,
            settings=_QWEN_KEYS,
            derived_settings=_sections(text),
            text=text,
            example=(title, sizes),
        )
        for name, stem, text, title, sizes in (
            (
                "qwen2_vl",
                "Qwen2VL",
                _qwen2_vl,
                "Qwen2-VL 7B",
                {"hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28},
            ),
            (
                "qwen2_5_vl",
                "Qwen2_5_VL",
                _qwen2_5_vl,
                "Qwen2.5-VL 3B",
                {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": 36},
            ),
        )
    ),
)
