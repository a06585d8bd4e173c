"""BART and mBART: an encoder and a decoder on one stream, LayerNorm, learned positions.

The word table is shared by both stacks, so both streams move together. BART's norms sit on the skip path (post-norm);
mBART has them before each sublayer, on the embeddings and at the end of each stack.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, build, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import attention_modules
from isobasin.arch.family import Family, ModelInputs
from isobasin.errors import ArchitectureError


@dataclass(frozen=True)
class _Layer:
    """One layer of a stack: its number among all layers, its place in the file, and the norms that its parts read."""

    i: int
    place: str
    attention: str
    cross: str
    units: str
    stream: str


@dataclass(frozen=True)
class Stacks:
    """The layers of an encoder and a decoder: norms, weights, heads and units. `source` is the norm that keys and
    values of cross attention read, `last` that of the head."""

    norms: dict[str, str]
    modules: dict[str, str]
    heads: list[HeadSpace]
    units: list[Space]
    sizes: Sizes
    source: str
    last: str


def stacks(
    c: Fields,
    *,
    pre_norm: bool,
    bare: bool,
    streams: tuple[str, ...] = ("resid", "resid"),
    defaults: tuple[int, ...],
) -> Stacks:
    """Both stacks, or the encoder alone, each on its stream; `defaults`: the numbers of layers, of heads, of units."""
    names = ("encoder", "decoder")[: len(streams)]
    d, kind = c.size("d_model"), units_kind(c.word("activation_function", "gelu"))
    n_layers, n_heads, d_ff = (
        {stack: c.size(f"{stack}_{key}", default) for stack in names}
        for key, default in zip(("layers", "attention_heads", "ffn_dim"), defaults, strict=True)
    )
    exposed, n = ", exposed" if bare else "", sum(n_layers.values())
    source, last = ("e", "f") if pre_norm else (f"o{n_layers['encoder'] - 1}", f"o{n - 1}")
    norms: dict[str, str] = {}
    modules: dict[str, str] = {}
    heads: list[HeadSpace] = []
    units: list[Space] = []
    for stack, stream, start in zip(names, streams, (0, n_layers["encoder"]), strict=False):
        layers = [_layer(stack, stream, k, start + k, pre_norm) for k in range(n_layers[stack])]
        norms |= _pre_norms(stack, stream, layers, exposed) if pre_norm else _post_norms(stack, layers, exposed)
        h, d_head = n_heads[stack], c.d_head(n_heads[stack], d, key=None)
        for layer in layers:
            i = layer.i
            modules |= _attention(layer, "self_attn", f"qk{i}", f"vo{i}", layer.attention, layer.attention)
            heads.append(
                HeadSpace(f"heads{i}", h, h, d_head, layer=i, stack=stack, qk=f"qk{i}", vo=f"vo{i}", label="heads")
            )
            if stack == "decoder":
                modules |= _attention(layer, "encoder_attn", f"xqk{i}", f"xvo{i}", layer.cross, source)
                faces = {"qk": f"xqk{i}", "vo": f"xvo{i}", "label": "cross heads", "stack": stack}
                heads.append(HeadSpace(f"cross{i}", h, h, d_head, layer=i, **faces))  # type: ignore[arg-type]
            modules |= {f"{layer.place}.fc1": f"ff{i} {layer.units}*", f"{layer.place}.fc2": f"{stream} ff{i}*"}
            units.append(Space(f"ff{i}", d_ff[stack], kind, layer=i, stack=stack, label="ff"))
    sizes = Sizes(n, n_heads["encoder"], n_heads["encoder"], d, d // n_heads["encoder"], d_ff["encoder"])
    return Stacks(norms, modules, heads, units, sizes, source, last)


def bart(config: Mapping[str, Any], *, pre_norm: bool = False) -> Architecture:
    c = Fields(config)
    d, vocab, head = c.size("d_model"), c.size("vocab_size"), c.architecture.partition("For")[2]
    bare = c.architecture.endswith("Model")
    tied = not bare and head in ("ConditionalGeneration", "")
    if not c.flag("tie_word_embeddings", True):
        raise ArchitectureError(
            "config.json: tie_word_embeddings is false; models with word tables of their own for encoder, decoder and "
            "head are not supported"
        )
    layers = stacks(c, pre_norm=pre_norm, bare=bare, defaults=(12, 16, 4096))
    last, norms, modules = layers.last, layers.norms, layers.modules
    if pre_norm:  # the norm on the embeddings is read by nothing: it writes to the stream
        places = {stack: f"model.{stack}.layernorm_embedding" for stack in ("encoder", "decoder")}
        norms = {f"n_{stack}": f"layer(resid, {place})" for stack, place in places.items()} | norms
    tensors = {"model.shared.weight": f".{vocab} resid & .{vocab} {last}*" if tied else f".{vocab} resid"}
    n_positions = c.size("max_position_embeddings", 1024) + 2
    positions = [f"model.{stack}.embed_positions.weight" for stack in ("encoder", "decoder")]
    tensors |= dict.fromkeys(positions, f".{n_positions} resid")
    if tied:
        tensors["final_logits_bias"] = f"?.1 .{vocab}"
    elif head == "SequenceClassification":
        modules |= {"classification_head.dense": f"pool {last}*", "classification_head.out_proj": ". pool*"}
    elif head == "QuestionAnswering":
        modules["qa_outputs"] = f". {last}*"
    words = [f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")]
    return build(
        family=c.word("model_type", "bart"),
        positions="learned",
        sizes=layers.sizes,
        spaces=[
            Space("resid", d, "fixed" if bare else "permutation±", stream=True),
            *layers.units,
            *([Space("pool", d, "signed")] if head == "SequenceClassification" else []),
        ],
        heads=layers.heads,
        norms=norms,
        modules=modules,
        tensors=tensors,
        aliases=dict.fromkeys([*words, *(["lm_head.weight"] if tied else [])], "model.shared.weight"),
        unread=dict.fromkeys(positions, range(2)),
    )


def _layer(stack: str, stream: str, k: int, i: int, pre_norm: bool) -> _Layer:
    place = f"model.{stack}.layers.{k}"
    if pre_norm:
        return _Layer(i, place, f"a{i}", f"c{i}", f"m{i}", stream)
    before = f"o{i - 1}" if k else f"n_{stack}"
    return _Layer(i, place, before, f"s{i}", f"s{i}" if stack == "encoder" else f"c{i}", stream)


def _pre_norms(stack: str, stream: str, layers: list[_Layer], exposed: str) -> dict[str, str]:
    norms = {}
    for layer in layers:
        norms[layer.attention] = f"layer({stream}, {layer.place}.self_attn_layer_norm)"
        norms[layer.units] = f"layer({stream}, {layer.place}.final_layer_norm)"
        if stack == "decoder":
            norms[layer.cross] = f"layer({stream}, {layer.place}.encoder_attn_layer_norm)"
    return norms | {"e" if stack == "encoder" else "f": f"layer({stream}, model.{stack}.layer_norm{exposed})"}


def _post_norms(stack: str, layers: list[_Layer], exposed: str) -> dict[str, str]:
    """Each norm with the module that writes beside it on the skip path; the last of a stack has none."""
    first = f"{layers[0].place}.self_attn.out_proj"
    norms = {f"n_{stack}": f"layer(resid, model.{stack}.layernorm_embedding, skip={first})"}
    for layer, following in zip(layers, [*layers[1:], None]):
        after_attention = "fc2" if stack == "encoder" else "encoder_attn.out_proj"
        norms[f"s{layer.i}"] = f"layer(resid, {layer.place}.self_attn_layer_norm, skip={layer.place}.{after_attention})"
        if stack == "decoder":
            norms[layer.cross.replace("s", "c")] = (
                f"layer(resid, {layer.place}.encoder_attn_layer_norm, skip={layer.place}.fc2)"
            )
        end = f", skip={following.place}.self_attn.out_proj" if following else exposed
        norms[f"o{layer.i}"] = f"layer(resid, {layer.place}.final_layer_norm{end})"
    return norms


def _attention(layer: _Layer, part: str, qk: str, vo: str, norm: str, source: str) -> dict[str, str]:
    names = [f"{layer.place}.{part}.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]
    return attention_modules(names, qk, vo, norm, source, layer.stream)


def _decoder_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without tokens for the decoder, BART makes them of those of the encoder, but not without a padding token."""
    missing = config.get("model_type") == "bart" and config.get("pad_token_id", 1) is None
    return {"pad_token_id is null": True if missing else None}


FAMILIES = tuple(
    Family(
        name,
        partial(bart, pre_norm=pre_norm),
        f"{stem}ForConditionalGeneration",
        ("ForConditionalGeneration", "Model", "ForSequenceClassification", "ForQuestionAnswering"),
        prefix="model.",
        settings={"activation_function": "gelu", "scale_embedding": False, "decoder_attention_heads": 16},
        # Without tokens for the decoder, these make them of those of the encoder.
        rare_settings={"decoder_start_token_id": 2} if name == "bart" else {"pad_token_id": 1},
        head_settings={"ForSequenceClassification": {"eos_token_id": 2}},
        derived_settings=_decoder_tokens,
        inputs=ModelInputs(decoder=True, decoder_start=2 if name == "bart" else "last", bidirectional=True),
        aliases={
            "hidden_size": "d_model",
            "num_attention_heads": "encoder_attention_heads",
            "num_hidden_layers": "encoder_layers",
        },
        ignored=("is_decoder", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop"),
        example=(title, {"d_model": 1024, "vocab_size": vocab}),
    )
    for name, stem, pre_norm, title, vocab in (
        ("bart", "Bart", False, "BART large", 50265),
        ("mbart", "MBart", True, "mBART large", 250027),
    )
)
