"""Whisper: an encoder of audio and a decoder of text, each on a stream of its own; LayerNorm before each sublayer.

The encoder reads a spectrogram through two convolutions. The second one writes the stream behind a GELU, so the stream
of the encoder can be permuted, but neither rotated nor turned.
"""

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, Space, build, stream_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.bart import stacks
from isobasin.arch.family import BiasFlag, Family, ModelInputs
from isobasin.errors import ArchitectureError

_WORDS = "model.decoder.embed_tokens.weight"
_AUDIO = "ForAudioClassification"


def whisper(config: Mapping[str, Any]) -> Architecture:
    c = Fields(ChainMap({"d_model": Fields(config).size("d_model", 384)}, config))  # type: ignore[arg-type]
    d, vocab, bare = c.size("d_model"), c.size("vocab_size", 51865), c.architecture.endswith("Model")
    tied, encoder = not bare and c.flag("tie_word_embeddings", True), _is_encoder(config)
    streams = ("enc",) if encoder else ("enc", "dec")
    layers = stacks(c, pre_norm=True, bare=bare, streams=streams, defaults=(4, 6, 1536))
    modules, units = layers.modules, layers.units
    tensors = {
        "model.encoder.conv1.weight": f"conv .{c.size('num_mel_bins', 80)} .3",
        "model.encoder.conv1.bias": "conv",
        # Its outputs pass a GELU before they are the stream: their mean is seen.
        "model.encoder.conv2.weight": "|enc| conv* .3",
        "model.encoder.conv2.bias": "|enc|",
        "model.encoder.embed_positions.weight": f".{c.size('max_source_positions', 1500)} enc",
    }
    spaces = [Space("enc", d, "fixed" if bare else "permutation", stream=True, stack="encoder")]
    if encoder:
        size = c.size("classifier_proj_size", 256)
        modules = modules | {"projector": f".{size} {layers.source}*", "classifier": f". .{size}"}
    else:
        tensors |= {
            "model.decoder.embed_positions.weight": f".{c.size('max_target_positions', 448)} dec",
            _WORDS: f".{vocab} dec & .{vocab} {layers.last}*" if tied else f".{vocab} dec",
        }
        spaces.append(Space("dec", d, stream_kind("layer", tied=tied, bare=bare), stream=True, stack="decoder"))
        if not bare and not tied:
            tensors["proj_out.weight"] = f".{vocab} {layers.last}*"
    return build(
        family="whisper",
        positions="learned",
        sizes=layers.sizes,
        spaces=[*spaces, Space("conv", d, "permutation"), *units],
        heads=layers.heads,
        norms=layers.norms,
        modules=modules,
        tensors=tensors,
        aliases={"proj_out.weight": _WORDS} if tied and not encoder else {},
    )


def _is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether the class is an audio classifier, which has no decoder."""
    c = Fields(config)
    found = c.architecture.endswith(_AUDIO)
    if found and c.flag("use_weighted_layer_sum", False):
        raise ArchitectureError(
            "config.json: use_weighted_layer_sum is true; audio classifiers that read the states of all layers are not "
            "supported"
        )
    return found


def _of_decoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """An audio classifier has no decoder."""
    return {"decoder_attention_heads": None} if _is_encoder(config) else {}


FAMILIES = (
    Family(
        "whisper",
        whisper,
        "WhisperForConditionalGeneration",
        ("ForConditionalGeneration", "Model", _AUDIO),
        encoder_heads=(_AUDIO,),
        prefix="model.",
        settings={"activation_function": "gelu", "scale_embedding": False, "decoder_attention_heads": 6},
        derived_settings=_of_decoder,
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
        unused=("linear maps and constants between the two maps of an audio classifier",),
        example=("Whisper tiny", {}),
    ),
)
