"""T5, mT5 and UMT5: an encoder and a decoder on one stream, RMSNorm, and tables of relative positions.

The word table is shared by both stacks, so both streams move together. In T5 and mT5 one table serves all layers of a
stack, which ties the order of their heads; that order is a symmetry which is not used. UMT5 has a table for each layer.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, build, stream_kind, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import attention_modules, middle_bucket
from isobasin.arch.family import COMMON_HEAD_ORDER, Family, ModelInputs

# transformers ties every head that a file does not have, whatever the config says.
_TIED = "head_is_tied"
_TABLE = "SelfAttention.relative_attention_bias.weight"


def t5(config: Mapping[str, Any], *, proj: str = "relu", table_per_layer: bool = False) -> Architecture:
    c = Fields(config)
    d, n_heads, d_head, d_ff = c.size("d_model"), c.size("num_heads"), c.size("d_kv", 64), c.size("d_ff")
    n_encoder, vocab, name = c.size("num_layers"), c.size("vocab_size"), c.architecture
    n_decoder = 0 if name.endswith("EncoderModel") else c.size("num_decoder_layers", n_encoder)
    bare = name.endswith("Model")
    tied = not bare and c.flag(_TIED, True)
    activation, gated = _activation(config, proj)
    n_buckets = c.size("relative_attention_num_buckets", 32)
    middle = middle_bucket(n_buckets, c.size("relative_attention_max_distance", 128))
    modules: dict[str, str] = {}
    tensors = {"shared.weight": f".{vocab} resid & .{vocab} f*" if tied else f".{vocab} resid"}
    norms = {"e": f"rms(resid, encoder.final_layer_norm{', exposed' if bare else ''})"}
    heads, spaces, tables = [], [], []
    for i in range(n_encoder + n_decoder):
        stack, k = ("encoder", i) if i < n_encoder else ("decoder", i - n_encoder)
        block = f"{stack}.block.{k}.layer"
        last = 1 if stack == "encoder" else 2
        norms |= {f"a{i}": f"rms(resid, {block}.0.layer_norm)", f"m{i}": f"rms(resid, {block}.{last}.layer_norm)"}
        modules |= _attention(f"{block}.0.SelfAttention", f"qk{i}", f"vo{i}", f"a{i}", f"a{i}")
        heads.append(_heads(f"heads{i}", "", i, stack, n_heads, d_head, permutable=table_per_layer))
        if k == 0 or table_per_layer:
            tables.append(f"{block}.0.{_TABLE}")
            tensors[tables[-1]] = f".{n_buckets} heads{i}" if table_per_layer else f".{n_buckets} .{n_heads}"
        if stack == "decoder":
            norms[f"c{i}"] = f"rms(resid, {block}.1.layer_norm)"
            modules |= _attention(f"{block}.1.EncDecAttention", f"xqk{i}", f"xvo{i}", f"c{i}", "e")
            heads.append(_heads(f"cross{i}", "x", i, stack, n_heads, d_head))
        place = f"{block}.{last}.DenseReluDense"
        modules |= {f"{place}.wi_0": f"|ff{i}| m{i}*", f"{place}.wi_1": f"ff{i} m{i}*"} if gated else {}
        modules |= {f"{place}.wo": f"resid ff{i}*"} | ({} if gated else {f"{place}.wi": f"ff{i} m{i}*"})
        spaces.append(
            Space(f"ff{i}", d_ff, "scaled" if gated else units_kind(activation), layer=i, stack=stack, label="ff")
        )
    if n_decoder:
        norms["f"] = f"rms(resid, decoder.final_layer_norm{', exposed' if bare else ''})"
    if not bare and not tied:
        tensors["lm_head.weight"] = f".{vocab} f*"
    words = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", *(("lm_head.weight",) if tied else ()))
    return build(
        family=c.word("model_type", "t5"),
        positions="relative",
        sizes=Sizes(n_encoder + n_decoder, n_heads, n_heads, d, d_head, d_ff),
        spaces=[Space("resid", d, stream_kind("rms", tied=tied, bare=bare), stream=True), *spaces],
        heads=heads,
        norms=norms,
        modules={},
        tensors=tensors | {f"{module}.weight": text for module, text in modules.items()},
        aliases=dict.fromkeys(words, "shared.weight"),
        tables=dict.fromkeys(tables, ()),
        unread=dict.fromkeys((table for table in tables if table.startswith("encoder.")), middle),
    )


def _attention(place: str, qk: str, vo: str, norm: str, source: str) -> dict[str, str]:
    return attention_modules([f"{place}.{name}" for name in "qkvo"], qk, vo, norm, source)


def _heads(
    name: str, prefix: str, i: int, stack: str, n_heads: int, d_head: int, *, permutable: bool = True
) -> HeadSpace:
    heads = HeadSpace(name, n_heads, n_heads, d_head, permutable=permutable, layer=i, stack=stack)
    label = "cross heads" if prefix else "heads"
    return replace(heads, label=label, qk=f"{prefix}qk{i}", vo=f"{prefix}vo{i}")


def _activation(config: Mapping[str, Any], default: str) -> tuple[str, bool]:
    """The activation, and whether units are gated: two keys that transformers writes into every config, and that win
    over the older one, which holds both (`gated-gelu`)."""
    c = Fields(config)
    words = c.word("feed_forward_proj", default).split("-")
    name = "gelu_new" if words == ["gated", "gelu"] else words[-1]
    return c.word("dense_act_fn", name), c.flag("is_gated_act", words[0] == "gated")


def _derived(config: Mapping[str, Any], *, proj: str) -> dict[str, Any]:
    """The outputs of T5's decoder are scaled before a head that was tied once, whatever the file has. A model that is
    not called an encoder-decoder has one cache of keys and values for both kinds of attention; encoders have none."""
    found: dict[str, Any] = dict(zip(("dense_act_fn", "is_gated_act"), _activation(config, proj)))
    encoder = Fields(config).architecture.endswith("EncoderModel")
    found["is_encoder_decoder"] = encoder or bool(config.get("is_encoder_decoder", True))
    if config.get("model_type") == "t5" and not Fields(config).architecture.endswith("Model"):
        tied = config.get("tie_word_embeddings") is not False
        found["scale_decoder_outputs"] = bool(config.get("scale_decoder_outputs", tied))
    return found


_HEADS = ("ForConditionalGeneration", "Model", "EncoderModel")
_SMALL = {"d_model": 512, "d_kv": 64, "num_layers": 8, "num_heads": 6, "d_ff": 1024}
_GATED = "gated-gelu"

FAMILIES = tuple(
    Family(
        name,
        partial(t5, proj=proj, table_per_layer=name == "umt5"),
        f"{stem}ForConditionalGeneration",
        _HEADS,
        encoder_heads=("EncoderModel",),
        settings={"layer_norm_epsilon": 1e-6, "relative_attention_max_distance": 128},
        rare_settings={"is_encoder_decoder": True},
        derived_settings=partial(_derived, proj=proj),
        inputs=ModelInputs(decoder=True, decoder_start=None if name == "t5" else 0, bidirectional=True),
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "head_dim": "d_kv",
        },
        ignored=("is_decoder", "scale_decoder_outputs", "feed_forward_proj", "dropout_rate", "n_positions"),
        own_head="lm_head.weight",
        tied_key=_TIED,
        unused=(COMMON_HEAD_ORDER,) if name != "umt5" else (),
        example=(title, sizes),
    )
    for name, stem, proj, title, sizes in (
        ("t5", "T5", "relu", "T5 base", _SMALL | {"d_model": 768, "num_heads": 12, "d_ff": 3072, "vocab_size": 32128}),
        ("mt5", "MT5", _GATED, "mT5 small", _SMALL | {"vocab_size": 250112}),
        ("umt5", "UMT5", _GATED, "UMT5 small", _SMALL | {"vocab_size": 256384}),
    )
)
