"""ModernBERT: an encoder with rotary positions, gated units, and LayerNorm before each sublayer.

The norm on the embeddings stands on the skip path, and the first layer reads it: its gain keeps the stream from
rotating.
"""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, build, per_layer
from isobasin.arch.config import Fields
from isobasin.arch.family import BiasFlag, Family, ModelInputs

_EMBEDDING = "model.embeddings.tok_embeddings.weight"


def modernbert(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, n_heads, n_layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    d_ff, vocab, d_head = c.size("intermediate_size"), c.size("vocab_size"), c.d_head(n_heads, d, key=None)
    head = "bare" if c.architecture == "ModernBertModel" else c.architecture.partition("For")[2]
    lm = head in ("MaskedLM", "")
    tied = lm and c.flag("tie_word_embeddings", True)
    modules = {
        "model.layers.{i}.attn.Wqkv": "qk{i}*+qk{i}+vo{i} a{i}*",
        "model.layers.{i}.attn.Wo": "resid vo{i}*",
        "model.layers.{i}.mlp.Wi": "|ff{i}|+ff{i} m{i}*",
        "model.layers.{i}.mlp.Wo": "resid ff{i}*",
    }
    norms = {
        "a{i}": "layer(resid, model.layers.{i}.attn_norm)",
        "m{i}": "layer(resid, model.layers.{i}.mlp_norm)",
        "f": f"layer(resid, model.final_norm{', exposed' if head == 'bare' else ''})",
    }
    first = {"a0": "layer(resid, model.embeddings.norm, skip=model.layers.0.attn.Wo)"}
    tensors = {_EMBEDDING: f".{vocab} resid & .{vocab} t*" if tied else f".{vocab} resid"}
    if head != "bare":  # a LayerNorm over the units of the head: no activation frees a scale or a sign
        modules["head.dense"] = "|resid| f*" if tied else "pool f*"
        norms["t"] = f"layer({'resid' if tied else 'pool'}, head.norm)"
    if tied:
        tensors["decoder.bias"] = f"?.{vocab}"
    elif lm:
        modules["decoder"] = f".{vocab} t*"
    elif head != "bare":
        modules["classifier"] = ". t*"
    return build(
        family="modernbert",
        positions="rope",
        sizes=Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff),
        spaces=[
            # Tied to a head behind GELU units, the stream can not carry the global sign.
            Space("resid", d, "fixed" if head == "bare" else "permutation" if tied else "permutation±", stream=True),
            Space("ff{i}", d_ff, "scaled"),
            *([Space("pool", d, "permutation")] if not tied and head != "bare" else []),
        ],
        heads=HeadSpace("heads", n_heads, n_heads, d_head, d_head),
        norms=per_layer(norms, n_layers) | first,
        modules=modules,
        tensors=tensors,
        biases={_EMBEDDING: "decoder.bias"} if tied else {},
        aliases={"decoder.weight": _EMBEDDING} if tied else {},
        rotary=_rotary(c),
    )


def _rotary(c: Fields) -> dict[str, Any]:
    """Layers with and without a window have rotary angles of their own."""
    table, scaling = c.table("rope_parameters"), c.table("rope_scaling")
    found = {}
    for kind, key, base in (("full", "global_rope_theta", 160000.0), ("sliding", "local_rope_theta", 10000.0)):
        given = {**(table.get(f"{kind}_attention") or {}), **scaling}
        given.setdefault("rope_theta", c.config.get(key, base))
        found[kind] = given if given.get("rope_type", "default") != "default" else {"rope_theta": given["rope_theta"]}
    return found


def _windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """By default every third layer, from the first on, sees the whole text."""
    every = Fields(config).size("global_attn_every_n_layers", 3)
    types = Fields(config).layer_types(lambda i: "sliding_attention" if i % every else "full_attention")
    window = config.get("local_attention", 128)
    return {"sliding windows": [window if kind == "sliding_attention" else None for kind in types]}


_LABELS = {"classifier_activation": "gelu"}

FAMILIES = (
    Family(
        "modernbert",
        modernbert,
        "ModernBertForMaskedLM",
        (
            *("ForMaskedLM", "Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
            "ForMultipleChoice",
        ),
        prefix="model.",
        settings={"hidden_activation": "gelu", "norm_eps": 1e-5},
        head_settings={
            "LM": _LABELS,
            "TokenClassification": _LABELS,
            "QuestionAnswering": _LABELS,
            "SequenceClassification": _LABELS | {"classifier_pooling": "cls"},
            "MultipleChoice": _LABELS | {"classifier_pooling": "cls"},
        },
        rare_settings={"is_causal": False},
        derived_settings=_windows,
        inputs=ModelInputs(bidirectional=True),
        bias_flags=(
            BiasFlag("attention_bias", False, r"\battn\.\w+\.bias$"),
            BiasFlag("mlp_bias", False, r"\bmlp\.\w+\.bias$"),
            BiasFlag("norm_bias", False, r"norm\.bias$"),
            BiasFlag("decoder_bias", True, r"^decoder\.bias$"),
            BiasFlag("classifier_bias", False, r"^head\.dense\.bias$"),
        ),
        ignored=(
            *("mlp_dropout", "deterministic_flash_attn", "initializer_cutoff_factor", "sparse_pred_ignore_index"),
            *("sparse_prediction", "reference_compile", "repad_logits_with_grad", "max_position_embeddings"),
            *("global_attn_every_n_layers", "classifier_activation", "classifier_pooling", "position_embedding_type"),
        ),
        example=(
            "ModernBERT base",
            {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 22}
            | {"intermediate_size": 1152, "vocab_size": 50368},
        ),
    ),
)
