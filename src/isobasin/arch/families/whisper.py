"""Whisper: an encoder of audio and a decoder of text, each on a stream of its own; LayerNorm before each sublayer.

The encoder reads a spectrogram through two convolutions. The second one writes the stream behind a GELU, so the stream
of the encoder can be permuted, but neither rotated nor turned.
"""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, Space, build, stream_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.bart import stacks
from isobasin.arch.family import BiasFlag, Family, ModelInputs

_WORDS = "model.decoder.embed_tokens.weight"


def whisper(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, vocab, bare = c.size("d_model", 384), c.size("vocab_size", 51865), c.architecture.endswith("Model")
    tied = not bare and c.flag("tie_word_embeddings", True)
    layers = stacks(
        Fields({**config, "d_model": d}), pre_norm=True, bare=bare, streams=("enc", "dec"), defaults=(4, 6, 1536)
    )
    tensors = {
        "model.encoder.conv1.weight": f"conv .{c.size('num_mel_bins', 80)} .3",
        "model.encoder.conv1.bias": "conv",
        # Its outputs pass a GELU before they are the stream: their mean is seen.
        "model.encoder.conv2.weight": "|enc| conv* .3",
        "model.encoder.conv2.bias": "|enc|",
        "model.encoder.embed_positions.weight": f".{c.size('max_source_positions', 1500)} enc",
        "model.decoder.embed_positions.weight": f".{c.size('max_target_positions', 448)} dec",
        _WORDS: f".{vocab} dec & .{vocab} {layers.last}*" if tied else f".{vocab} dec",
    }
    if not bare and not tied:
        tensors["proj_out.weight"] = f".{vocab} {layers.last}*"
    return build(
        family="whisper",
        positions="learned",
        sizes=layers.sizes,
        spaces=[
            Space("enc", d, "fixed" if bare else "permutation", stream=True, stack="encoder"),
            Space("dec", d, stream_kind("layer", tied=tied, bare=bare), stream=True, stack="decoder"),
            Space("conv", d, "permutation"),
            *layers.units,
        ],
        heads=layers.heads,
        norms=layers.norms,
        modules=layers.modules,
        tensors=tensors,
        aliases={"proj_out.weight": _WORDS} if tied else {},
    )


FAMILIES = (
    Family(
        "whisper",
        whisper,
        "WhisperForConditionalGeneration",
        ("ForConditionalGeneration", "Model"),
        prefix="model.",
        settings={"activation_function": "gelu", "scale_embedding": False, "decoder_attention_heads": 6},
        rare_settings={"is_causal": None},  # set, it holds for both stacks
        inputs=ModelInputs(decoder=True, decoder_start=50257, features=True),
        bias_flags=(BiasFlag("", False, r"\.k_proj\.bias$"),),
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "encoder_attention_heads",
            "num_key_value_heads": "encoder_attention_heads",
            "num_hidden_layers": "encoder_layers",
        },
        ignored=(
            *("is_decoder", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "median_filter_width"),
            *("use_weighted_layer_sum", "classifier_proj_size", "apply_spec_augment", "mask_time_prob"),
            *("mask_time_length", "mask_time_min_masks", "mask_feature_prob", "mask_feature_length"),
            "mask_feature_min_masks",
        ),
        example=("Whisper tiny", {}),
    ),
)
