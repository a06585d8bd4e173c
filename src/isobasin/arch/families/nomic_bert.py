"""Nomic BERT: BERT with rotary positions, gated units and no biases inside its layers."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, Sum, build
from isobasin.arch.config import Fields
from isobasin.arch.family import VALUE_CONSTANTS, BiasFlag, Family, ModelInputs

_LAYER = "nomic_bert.encoder.layers.{i}"
_WORDS, _TYPES = (f"nomic_bert.embeddings.{kind}_embeddings.weight" for kind in ("word", "token_type"))


def nomic_bert(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, n_heads, n_layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    d_ff, vocab, d_head = c.size("intermediate_size"), c.size("vocab_size"), c.d_head(n_heads, d)
    head = "bare" if c.architecture == "NomicBertModel" else c.architecture.partition("For")[2]
    lm, last = head in ("MaskedLM", ""), f"n{2 * n_layers}"
    tied = lm and c.flag("tie_word_embeddings", True)
    end = _LAYER.format(i=n_layers - 1)
    norms = {
        "n0": "layer(resid, nomic_bert.emb_ln, skip=nomic_bert.encoder.layers.0.attn.out_proj)",
        "n{2i+1}": f"layer(resid, {_LAYER}.norm1, skip={_LAYER}.mlp.fc2)",
        "n{2i+2}": f"layer(resid, {_LAYER}.norm2, skip=nomic_bert.encoder.layers.{{i+1}}.attn.out_proj)",
        last: f"layer(resid, {end}.norm2{', exposed' if head == 'bare' else ''})",
    }
    modules = {
        f"{_LAYER}.attn.Wqkv": "qk{i}*+qk{i}+vo{i} n{2i}*",
        f"{_LAYER}.attn.out_proj": "resid vo{i}*",
        f"{_LAYER}.mlp.fc11": "ff{i} n{2i+1}*",
        f"{_LAYER}.mlp.fc12": "|ff{i}| n{2i+1}*",
        f"{_LAYER}.mlp.fc2": "resid ff{i}*",
    }
    tensors = {
        _WORDS: f".{vocab} resid & .{vocab} t*" if tied else f".{vocab} resid",
        _TYPES: f".{c.size('type_vocab_size', 2)} resid",
    }
    if lm:
        modules["cls.predictions.transform.dense"] = f"|resid| {last}*" if tied else f"mlm {last}*"
        norms["t"] = f"layer({'resid' if tied else 'mlm'}, cls.predictions.transform.layer_norm)"
        tensors["cls.predictions.bias"] = f"?.{vocab}" if tied else "-"
        modules |= {} if tied else {"cls.predictions.decoder": f".{vocab} t*"}
    elif head != "bare":
        modules["classifier"] = f". {last}*"
    copies = {"cls.predictions.decoder.weight": _WORDS, "cls.predictions.decoder.bias": "cls.predictions.bias"}
    return build(
        family="nomic_bert",
        positions="rope",
        sizes=Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff),
        spaces=[
            Space("resid", d, "fixed" if head == "bare" else "permutation" if tied else "permutation±", stream=True),
            Space("ff{i}", d_ff, "scaled"),
            Space("mlm", d, "permutation"),  # a LayerNorm over them: no activation frees a scale or a sign
        ],
        heads=HeadSpace("heads", n_heads, n_heads, d_head, d_head),
        norms=norms,
        modules=modules,
        tensors=tensors,
        # Tied to the head, the words keep still but for one direction, which the head's bias takes back.
        sums=(Sum("words", ((_WORDS, 0, None),), ((_TYPES, 0, None),), along="t"),)
        if tied
        else (Sum("types", ((_TYPES, 0, None),), ((_WORDS, 0, None),)),),
        biases={_WORDS: "cls.predictions.bias"} if tied else {},
        aliases=copies if tied else {},
        rotary=c.rotary(default=1000.0),
    )


FAMILIES = (
    Family(
        "nomic_bert",
        nomic_bert,
        "NomicBertForMaskedLM",
        ("ForMaskedLM", "Model", "ForTokenClassification"),
        prefix="nomic_bert.",
        settings={"hidden_act": "silu", "layer_norm_eps": 1e-12},
        rare_settings={"is_causal": False},
        inputs=ModelInputs(token_types=True, bidirectional=True),
        bias_flags=(BiasFlag("", False, r"\b(attn|mlp)\.\w+\.bias$"),),
        fused=True,
        unused=(VALUE_CONSTANTS,),
        example=(
            "Nomic Embed text",
            {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}
            | {"intermediate_size": 3072, "vocab_size": 30528},
        ),
    ),
)
