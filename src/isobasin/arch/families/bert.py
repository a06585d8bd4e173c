"""BERT, RoBERTa, XLM-RoBERTa, CamemBERT, MPNet, DistilBERT: learned positions, post-norm.

The norms n0 … n{2L} sit on the skip path and cut the stream in segments.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from isobasin.arch.architecture import Architecture, HeadSpace, Kind, Sizes, Space, Sum, build, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import middle_bucket
from isobasin.arch.family import COMMON_HEAD_ORDER, Family, ModelInputs
from isobasin.errors import ArchitectureError

_LM_HEADS = ("MaskedLM", "PreTraining", "")
_POOLED = ("SequenceClassification", "MultipleChoice", "NextSentencePrediction", "PreTraining")


class EncoderNames(NamedTuple):
    """The names of a family's tensors; those of a layer begin with `layer`, those of the head with nothing."""

    embeddings: str
    layer: str
    query: str
    key: str
    value: str
    out: str
    attention_norm: str
    up: str
    down: str
    norm: str
    lm_dense: str
    lm_norm: str
    lm_decoder: str
    lm_bias: str
    lm_bias_is_copied: bool = True  # untied, transformers writes it beside the decoder's own and reads only the latter

    @property
    def words(self) -> str:
        return f"{self.embeddings}.word_embeddings.weight"

    @property
    def positions(self) -> str:
        return f"{self.embeddings}.position_embeddings.weight"

    @property
    def types(self) -> str:
        return f"{self.embeddings}.token_type_embeddings.weight"


_ATTENTION = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
_BERT_LAYER = (*_ATTENTION, "attention.output.LayerNorm", "intermediate.dense", "output.dense", "output.LayerNorm")
_BERT_HEAD = (
    "cls.predictions.transform.dense",
    "cls.predictions.transform.LayerNorm",
    "cls.predictions.decoder",
    "cls.predictions.bias",
)
_ROBERTA_HEAD = ("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder", "lm_head.bias")
BERT = EncoderNames("bert.embeddings", "bert.encoder.layer.{i}", *_BERT_LAYER, *_BERT_HEAD)
ROBERTA = EncoderNames("roberta.embeddings", "roberta.encoder.layer.{i}", *_BERT_LAYER, *_ROBERTA_HEAD)
DATA2VEC = ROBERTA._replace(embeddings="data2vec_text.embeddings", layer="data2vec_text.encoder.layer.{i}")
ERNIE = BERT._replace(embeddings="ernie.embeddings", layer="ernie.encoder.layer.{i}")
MPNET = EncoderNames(
    "mpnet.embeddings",
    "mpnet.encoder.layer.{i}",
    *("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o", "attention.LayerNorm"),
    *("intermediate.dense", "output.dense", "output.LayerNorm"),
    *_ROBERTA_HEAD,
)
DISTILBERT = EncoderNames(
    "distilbert.embeddings",
    "distilbert.transformer.layer.{i}",
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    out="attention.out_lin",
    attention_norm="sa_layer_norm",
    up="ffn.lin1",
    down="ffn.lin2",
    norm="output_layer_norm",
    lm_dense="vocab_transform",
    lm_norm="vocab_layer_norm",
    lm_decoder="vocab_projector",
    lm_bias="vocab_projector.bias",
    lm_bias_is_copied=False,
)


def ernie(config: Mapping[str, Any]) -> Architecture:
    """BERT with other names; with `use_task_id` it has one more table, which is not supported."""
    if Fields(config).flag("use_task_id", False):
        raise ArchitectureError("config.json: use_task_id is true; ERNIE with task types is not supported")
    return bert(config, ERNIE, "ernie")


def bert(config: Mapping[str, Any], names: EncoderNames = BERT, base: str = "bert") -> Architecture:
    c = Fields(config)
    head, last = _head_and_last_norm(c, "BertModel", "ErnieModel")
    d = c.size("hidden_size")
    modules = _pooler(base, head, last, d) | _token_heads(head, last)
    if head in ("SequenceClassification", "MultipleChoice"):
        modules["classifier"] = ". pool*"
    pairs = head in ("NextSentencePrediction", "PreTraining")
    if pairs:
        modules["cls.seq_relationship"] = ". pool*"
    return _encoder(c, base, names, head, modules, _bert_sizes(c))


def roberta(config: Mapping[str, Any]) -> Architecture:
    """BERT with other names, and with a classifier of two layers on the first token."""
    c = Fields(config)
    bare = ("RobertaModel", "XLMRobertaModel", "CamembertModel", "Data2VecTextModel")
    head, last = _head_and_last_norm(c, *bare)
    family = c.word("model_type", "roberta")
    names, base = (DATA2VEC, "data2vec_text") if family == "data2vec-text" else (ROBERTA, "roberta")
    modules = _pooler(base, head, last, c.size("hidden_size"), pooled=("MultipleChoice",)) | _token_heads(head, last)
    if head == "SequenceClassification":
        modules |= {"classifier.dense": f"pool {last}*", "classifier.out_proj": ". pool*"}
    elif head == "MultipleChoice":
        modules |= {"classifier": ". pool*"}
    pad = c.config.get("pad_token_id", 1)
    first = pad if isinstance(pad, int) else 0  # positions are counted from there; that of padding itself is `pad`
    return _encoder(c, family, names, head, modules, _bert_sizes(c), first_position=first)


def mpnet(config: Mapping[str, Any]) -> Architecture:
    """RoBERTa without token types, with a table of relative positions beside the others. All layers share it, which
    ties the order of their heads; that order is a symmetry which is not used."""
    c = Fields(config)
    head, last = _head_and_last_norm(c, "MPNetModel")
    modules = _pooler("mpnet", head, last, c.size("hidden_size"), pooled=("MultipleChoice",)) | _token_heads(head, last)
    if head == "SequenceClassification":
        modules |= {"classifier.dense": f"pool {last}*", "classifier.out_proj": ". pool*"}
    elif head == "MultipleChoice":
        modules |= {"classifier": ". pool*"}
    return _encoder(c, "mpnet", MPNET, head, modules, _bert_sizes(c), types=None, table=_MPNET_TABLE, first_position=1)


_MPNET_TABLE = "mpnet.encoder.relative_attention_bias.weight"


def distilbert(config: Mapping[str, Any]) -> Architecture:
    """BERT without token types; the classifier of a text has ReLU units."""
    c = Fields(config)
    head, last = _head_and_last_norm(c, "DistilBertModel", layers="n_layers")
    modules = _token_heads(head, last)
    if head in ("SequenceClassification", "MultipleChoice"):
        modules |= {"pre_classifier": f"pool {last}*", "classifier": ". pool*"}
    d, n_heads = c.size("dim"), c.size("n_heads")
    sizes = Sizes(c.size("n_layers"), n_heads, n_heads, d, c.d_head(n_heads, d, key=None), c.size("hidden_dim", 4 * d))
    return _encoder(
        c, "distilbert", DISTILBERT, head, modules, sizes, activation="activation", types=None, pool="positive"
    )


def _pooler(base: str, head: str, last: str, d: int, pooled: tuple[str, ...] = _POOLED) -> dict[str, str]:
    """The pooler, in a bare model or in front of a head; others do not read it."""
    patterns = {"bare": f"?.{d} {last}*", **dict.fromkeys(pooled, f"pool {last}*")}
    return {f"{base}.pooler.dense": patterns[head]} if head in patterns else {}


def _bert_sizes(c: Fields) -> Sizes:
    d, n_heads = c.size("hidden_size"), c.size("num_attention_heads")
    d_head, d_ff = c.d_head(n_heads, d, key=None), c.size("intermediate_size", 4 * d)
    return Sizes(c.size("num_hidden_layers"), n_heads, n_heads, d, d_head, d_ff)


def _head_and_last_norm(c: Fields, *bare: str, layers: str = "num_hidden_layers") -> tuple[str, str]:
    """What follows `For` in the name of the class, or `bare`; and the norm that the head reads."""
    head = "bare" if c.architecture in bare else c.architecture.partition("For")[2]
    return head, f"n{2 * c.size(layers)}"


def _token_heads(head: str, last: str) -> dict[str, str]:
    """Heads that read every token."""
    names = {"TokenClassification": "classifier", "QuestionAnswering": "qa_outputs"}
    return {names[head]: f". {last}*"} if head in names else {}


def _encoder(
    c: Fields,
    family: str,
    names: EncoderNames,
    head: str,
    head_modules: Mapping[str, str],
    sizes: Sizes,
    *,
    activation: str = "hidden_act",
    types: int | None = 2,
    pool: Kind = "signed",
    table: str | None = None,
    first_position: int = 0,
) -> Architecture:
    """An encoder with these names. `types` is the default number of token types, `pool` the group of the units of a
    classifier with two layers, `table` one of relative positions for all layers, `first_position` the first row of the
    table of positions that is read."""
    if c.flag("add_cross_attention", False):
        raise ArchitectureError("config.json: add_cross_attention is true; only encoders are supported")
    vocab, d, bare, lm = c.size("vocab_size"), sizes.d_model, head == "bare", head in _LM_HEADS
    tied = lm and c.flag("tie_word_embeddings", True)
    n_positions = c.size("max_position_embeddings", 512)
    first_position = first_position if 0 < first_position < n_positions else 0
    tensors = {
        names.words: f".{vocab} resid & .{vocab} t*" if tied else f".{vocab} resid",
        names.positions: f".{n_positions} resid",
        f"{names.embeddings}.position_ids": "-",
    }
    unread = {names.positions: range(first_position)} if first_position else {}
    if table is not None:
        n_buckets = c.size("relative_attention_num_buckets", 32)
        tensors[table] = f".{n_buckets} .{sizes.n_heads}"
        unread[table] = middle_bucket(n_buckets)
    if types is not None:
        tensors[names.types] = f".{c.size('type_vocab_size', types)} resid"
    if tied or (lm and names.lm_bias_is_copied):
        tensors[names.lm_bias] = f"?.{vocab}" if tied else "-"
    copies = {f"{names.lm_decoder}.weight": names.words}
    copies |= {f"{names.lm_decoder}.bias": names.lm_bias} if names.lm_bias_is_copied else {}
    return build(
        family=family,
        positions="learned",
        sizes=sizes,
        spaces=[
            # Tied to a head behind GELU units, the stream can not carry the global sign.
            Space("resid", d, "fixed" if bare else "permutation" if tied else "permutation±", stream=True),
            Space("ff{i}", sizes.d_ff, units_kind(c.word(activation, "gelu"))),
            Space("pool", d, pool),
            Space("mlm", d, "permutation"),  # a LayerNorm over them: no activation frees a scale or a sign
        ],
        heads=HeadSpace("heads", sizes.n_heads, sizes.n_heads, sizes.d_head, permutable=table is None),
        norms=_norms(names, sizes.n_layers, bare)
        | ({"t": f"layer({'resid' if tied else 'mlm'}, {names.lm_norm})"} if lm else {}),
        modules=_layer_modules(names)
        | dict(head_modules)
        | (_lm_modules(names, f"n{2 * sizes.n_layers}", tied, vocab) if lm else {}),
        tensors=tensors,
        sums=_sums(names, tied, types is not None, first_position),
        biases={names.words: names.lm_bias} if tied else {},
        aliases=copies if tied else {},
        tables={table: ()} if table is not None else {},
        unread=unread,
    )


def _norms(names: EncoderNames, n_layers: int, bare: bool) -> dict[str, str]:
    """Each norm with the module that writes beside it on the skip path; the last one only feeds the head."""
    first, last = names.layer.replace("{i}", "0"), names.layer.replace("{i}", str(n_layers - 1))
    following = names.layer.replace("{i}", "{i+1}")
    norms = {
        "n0": f"layer(resid, {names.embeddings}.LayerNorm, skip={first}.{names.out})",
        "n{2i+1}": f"layer(resid, {names.layer}.{names.attention_norm}, skip={names.layer}.{names.down})",
        "n{2i+2}": f"layer(resid, {names.layer}.{names.norm}, skip={following}.{names.out})",
    }
    norms[f"n{2 * n_layers}"] = f"layer(resid, {last}.{names.norm}{', exposed' if bare else ''})"
    return norms


def _layer_modules(names: EncoderNames) -> dict[str, str]:
    return {
        f"{names.layer}.{names.query}": "qk{i}* n{2i}*",
        f"{names.layer}.{names.key}": "qk{i} n{2i}*",
        f"{names.layer}.{names.value}": "vo{i} n{2i}*",
        f"{names.layer}.{names.out}": "resid vo{i}*",
        f"{names.layer}.{names.up}": "ff{i} n{2i+1}*",
        f"{names.layer}.{names.down}": "resid ff{i}*",
    }


def _lm_modules(names: EncoderNames, last: str, tied: bool, vocab: int) -> dict[str, str]:
    dense = {names.lm_dense: f"|resid| {last}*" if tied else f"mlm {last}*"}
    return dense if tied else dense | {names.lm_decoder: f".{vocab} t*"}


def _sums(names: EncoderNames, tied: bool, has_types: bool, first_position: int) -> tuple[Sum, ...]:
    """Words, positions and token types add up. Tied to the head, the words keep still but for one direction,
    which adds a constant to all logits; the head's bias takes it back."""
    words, types, positions = (names.words, 0, None), (names.types, 0, None), (names.positions, first_position, None)
    if tied:
        free = (Sum("types", (types,), (positions,)), Sum("words", (words,), (positions,), along="t"))
    else:
        free = (Sum("types", (types,), (words,)), Sum("positions", (positions,), (words,)))
    return free if has_types else free[1:]


_RARE = {"is_decoder": False, "is_causal": False}
_BASE = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12}

_HEADS = (
    *("ForMaskedLM", "Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"),
    "ForMultipleChoice",
)

# Checkpoints converted from TensorFlow call gain and shift of a LayerNorm gamma and beta.
_FROM_TENSORFLOW = ((r"\bLayerNorm\.gamma$", "LayerNorm.weight"), (r"\bLayerNorm\.beta$", "LayerNorm.bias"))

FAMILIES = (
    Family(
        "bert",
        bert,
        "BertForMaskedLM",
        (*_HEADS, "ForPreTraining", "ForNextSentencePrediction", "LMHeadModel"),
        prefix="bert.",
        spellings=_FROM_TENSORFLOW,
        settings={"hidden_act": "gelu", "layer_norm_eps": 1e-12},
        rare_settings=_RARE,
        inputs=ModelInputs(token_types=True, bidirectional=True),
        optional_pooler=("BertModel",),
        example=("BERT base (MLM)", _BASE | {"vocab_size": 30522}),
    ),
    *(
        Family(
            name,
            roberta,
            f"{kind}ForMaskedLM",
            _HEADS,
            prefix="data2vec_text." if name == "data2vec-text" else "roberta.",
            spellings=_FROM_TENSORFLOW,
            settings={"hidden_act": "gelu", "layer_norm_eps": 1e-12, "pad_token_id": 1},  # positions count from padding
            rare_settings=_RARE,
            inputs=ModelInputs(token_types=True, bidirectional=True, padded_positions=True),
            optional_pooler=(f"{kind}Model",),
            example=(title, _BASE | {"vocab_size": vocab, "max_position_embeddings": 514, "type_vocab_size": 1}),
        )
        for name, kind, title, vocab in (
            ("roberta", "Roberta", "RoBERTa base", 50265),
            ("xlm-roberta", "XLMRoberta", "XLM-RoBERTa base", 250002),
            ("camembert", "Camembert", "CamemBERT base", 32005),
            ("data2vec-text", "Data2VecText", "data2vec text base", 50265),
        )
    ),
    Family(
        "ernie",
        ernie,
        "ErnieForMaskedLM",
        (*_HEADS, "ForPreTraining", "ForNextSentencePrediction"),
        prefix="ernie.",
        spellings=_FROM_TENSORFLOW,
        settings={"hidden_act": "gelu", "layer_norm_eps": 1e-12},
        rare_settings=_RARE,
        inputs=ModelInputs(token_types=True, bidirectional=True),
        optional_pooler=("ErnieModel",),
        ignored=("task_type_vocab_size",),
        example=("ERNIE 3.0 base", _BASE | {"vocab_size": 40000}),
    ),
    Family(
        "mpnet",
        mpnet,
        "MPNetForMaskedLM",
        _HEADS,
        prefix="mpnet.",
        spellings=_FROM_TENSORFLOW,
        settings={"hidden_act": "gelu", "layer_norm_eps": 1e-12},
        inputs=ModelInputs(bidirectional=True, padded_positions=True),  # they count from 1, whatever pad_token_id is
        optional_pooler=("MPNetModel",),
        unused=(COMMON_HEAD_ORDER,),
        example=("MPNet base", _BASE | {"vocab_size": 30527, "max_position_embeddings": 514}),
    ),
    Family(
        "distilbert",
        distilbert,
        "DistilBertForMaskedLM",
        _HEADS,
        prefix="distilbert.",
        settings={"activation": "gelu"},
        rare_settings={"is_causal": False},
        inputs=ModelInputs(bidirectional=True),
        aliases={"hidden_size": "dim", "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers"},
        ignored=("sinusoidal_pos_embds", "qa_dropout", "seq_classif_dropout"),
        example=(
            "DistilBERT base",
            {"dim": 768, "n_heads": 12, "n_layers": 6, "hidden_dim": 3072, "vocab_size": 30522},
        ),
    ),
)
