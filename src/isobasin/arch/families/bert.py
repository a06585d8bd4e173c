"""BERT: learned positions, post-norm. The norms n0 … n{2L} sit on the skip path and cut the stream in segments."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, Sum, build, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.family import Family, ModelInputs
from isobasin.errors import ArchitectureError

_WORDS = "bert.embeddings.word_embeddings.weight"
_POSITIONS = "bert.embeddings.position_embeddings.weight"
_TYPES = "bert.embeddings.token_type_embeddings.weight"
_LM_HEADS = ("MaskedLM", "PreTraining", "")
_POOLED = ("SequenceClassification", "MultipleChoice", "NextSentencePrediction", "PreTraining")
_LAYER = "bert.encoder.layer.{i}"


def bert(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, n_heads, n_layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    vocab, d_ff, d_head = (
        c.size("vocab_size"),
        c.size("intermediate_size", 4 * d),
        c.d_head(n_heads, d, key=None),
    )
    if c.flag("add_cross_attention", False):
        raise ArchitectureError("config.json: add_cross_attention is true; only BERT encoders are supported")
    bare = c.architecture == "BertModel"
    head = "bare" if bare else c.architecture.partition("For")[2]
    tied = head in _LM_HEADS and c.flag("tie_word_embeddings", True)
    last = f"n{2 * n_layers}"
    return build(
        family="bert",
        positions="learned",
        sizes=Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff),
        spaces=[
            # Tied to a head behind GELU units, the stream can not carry the global sign.
            Space("resid", d, "fixed" if bare else "permutation" if tied else "permutation±", stream=True),
            Space("ff{i}", d_ff, units_kind(c.word("hidden_act", "gelu"))),
            Space("pool", d, "signed"),
            Space("mlm", d, "permutation"),  # a LayerNorm over them: no activation frees a scale or a sign
        ],
        heads=HeadSpace("heads", n_heads, n_heads, d_head),
        norms=_norms(n_layers, bare) | _lm_norm(head, tied),
        modules=_layers() | _heads(head, last, tied, vocab, d),
        tensors={
            _WORDS: f".{vocab} resid & .{vocab} t*" if tied else f".{vocab} resid",
            _POSITIONS: f".{c.size('max_position_embeddings', 512)} resid",
            _TYPES: f".{c.size('type_vocab_size', 2)} resid",
            "bert.embeddings.position_ids": "-",
        }
        # Untied, transformers writes this bias beside the decoder's own and reads only the latter.
        | ({"cls.predictions.bias": f"?.{vocab}" if tied else "-"} if head in _LM_HEADS else {}),
        sums=_sums(tied),
        biases={_WORDS: "cls.predictions.bias"} if tied else {},
        aliases={
            "cls.predictions.decoder.weight": _WORDS,
            "cls.predictions.decoder.bias": "cls.predictions.bias",
        }
        if tied
        else {},
    )


def _norms(n_layers: int, bare: bool) -> dict[str, str]:
    """Each norm with the module that writes beside it on the skip path; the last one only feeds the head."""
    attention, ff = f"{_LAYER}.attention.output", f"{_LAYER}.output"
    last = _LAYER.replace("{i}", str(n_layers - 1))
    norms = {
        "n0": "layer(resid, bert.embeddings.LayerNorm, skip=bert.encoder.layer.0.attention.output.dense)",
        "n{2i+1}": f"layer(resid, {attention}.LayerNorm, skip={ff}.dense)",
        "n{2i+2}": f"layer(resid, {ff}.LayerNorm, skip=bert.encoder.layer.{{i+1}}.attention.output.dense)",
    }
    norms[f"n{2 * n_layers}"] = f"layer(resid, {last}.output.LayerNorm{', exposed' if bare else ''})"
    return norms


def _lm_norm(head: str, tied: bool) -> dict[str, str]:
    space = "resid" if tied else "mlm"
    return {"t": f"layer({space}, cls.predictions.transform.LayerNorm)"} if head in _LM_HEADS else {}


def _layers() -> dict[str, str]:
    return {
        f"{_LAYER}.attention.self.query": "qk{i}* n{2i}*",
        f"{_LAYER}.attention.self.key": "qk{i} n{2i}*",
        f"{_LAYER}.attention.self.value": "vo{i} n{2i}*",
        f"{_LAYER}.attention.output.dense": "resid vo{i}*",
        f"{_LAYER}.intermediate.dense": "ff{i} n{2i+1}*",
        f"{_LAYER}.output.dense": "resid ff{i}*",
    }


def _heads(head: str, last: str, tied: bool, vocab: int, d: int) -> dict[str, str]:
    """Hub folders carry heads that their class does not use, so the pooler is listed for every head."""
    modules = {"bert.pooler.dense": f"pool {last}*" if head in _POOLED else f"?.{d} {last}*"}
    if head == "TokenClassification":
        modules["classifier"] = f". {last}*"
    elif head == "QuestionAnswering":
        modules["qa_outputs"] = f". {last}*"
    elif head in ("SequenceClassification", "MultipleChoice"):
        modules["classifier"] = ". pool*"
    elif head in ("NextSentencePrediction", "PreTraining"):
        modules["cls.seq_relationship"] = ". pool*"
    else:
        modules["cls.seq_relationship"] = f"?.2 .{d}"
    if head in _LM_HEADS:
        modules["cls.predictions.transform.dense"] = f"|resid| {last}*" if tied else f"mlm {last}*"
        if not tied:
            modules["cls.predictions.decoder"] = f".{vocab} t*"
    return modules


def _sums(tied: bool) -> tuple[Sum, ...]:
    """Words, positions and token types add up. Tied to the head, the words keep still but for one direction,
    which adds a constant to all logits; the head's bias takes it back."""
    words, positions, types = ((name, 0, None) for name in (_WORDS, _POSITIONS, _TYPES))
    if tied:
        return (Sum("types", (types,), (positions,)), Sum("words", (words,), (positions,), along="t"))
    return (Sum("types", (types,), (words,)), Sum("positions", (positions,), (words,)))


FAMILIES = (
    Family(
        "bert",
        bert,
        "BertForMaskedLM",
        prefix="bert.",
        # Checkpoints converted from TensorFlow call gain and shift of a LayerNorm gamma and beta.
        spellings=((r"\bLayerNorm\.gamma$", "LayerNorm.weight"), (r"\bLayerNorm\.beta$", "LayerNorm.bias")),
        settings={"hidden_act": "gelu", "layer_norm_eps": 1e-12},
        rare_settings={"is_decoder": False, "is_causal": False},
        inputs=ModelInputs(token_types=True, bidirectional=True),
        optional_pooler=("BertModel",),
        example=(
            "BERT base (MLM)",
            {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 30522},
        ),
    ),
)
