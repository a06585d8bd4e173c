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


def bart(config: Mapping[str, Any], *, pre_norm: bool = False) -> Architecture:
    c = Fields(config)
    d, vocab, head = c.size("d_model"), c.size("vocab_size"), c.architecture.partition("For")[2]
    n_encoder, n_decoder = c.size("encoder_layers", 12), c.size("decoder_layers", 12)
    n_heads = {stack: c.size(f"{stack}_attention_heads", 16) for stack in ("encoder", "decoder")}
    d_ff = {stack: c.size(f"{stack}_ffn_dim", 4096) for stack in ("encoder", "decoder")}
    bare = c.architecture.endswith("Model")
    tied = not bare and head in ("ConditionalGeneration", "")
    if not c.flag("tie_word_embeddings", True):
        raise ArchitectureError(
            "config.json: tie_word_embeddings is false; models with word tables of their own for encoder, decoder and "
            "head are not supported"
        )
    exposed = ", exposed" if bare else ""
    last = "f" if pre_norm else f"o{n_encoder + n_decoder - 1}"
    source = "e" if pre_norm else f"o{n_encoder - 1}"
    encoder = [_layer("encoder", k, k, pre_norm) for k in range(n_encoder)]
    decoder = [_layer("decoder", k, n_encoder + k, pre_norm) for k in range(n_decoder)]
    norms: dict[str, str] = {}
    modules: dict[str, str] = {}
    heads: list[HeadSpace] = []
    spaces: list[Space] = []
    for stack, layers in (("encoder", encoder), ("decoder", decoder)):
        norms |= _pre_norms(stack, layers, exposed) if pre_norm else _post_norms(stack, layers, exposed)
        for layer in layers:
            i, h = layer.i, n_heads[stack]
            modules |= _attention(f"{layer.place}.self_attn", f"qk{i}", f"vo{i}", layer.attention, layer.attention)
            d_head = c.d_head(h, d, key=None)
            heads.append(
                HeadSpace(f"heads{i}", h, h, d_head, layer=i, stack=stack, qk=f"qk{i}", vo=f"vo{i}", label="heads")
            )
            if stack == "decoder":
                modules |= _attention(f"{layer.place}.encoder_attn", f"xqk{i}", f"xvo{i}", layer.cross, source)
                faces = {"qk": f"xqk{i}", "vo": f"xvo{i}", "label": "cross heads", "stack": stack}
                heads.append(HeadSpace(f"cross{i}", h, h, d_head, layer=i, **faces))  # type: ignore[arg-type]
            modules |= {f"{layer.place}.fc1": f"ff{i} {layer.units}*", f"{layer.place}.fc2": f"resid ff{i}*"}
            kind = units_kind(c.word("activation_function", "gelu"))
            spaces.append(Space(f"ff{i}", d_ff[stack], kind, layer=i, stack=stack, label="ff"))
    tensors = {"model.shared.weight": f".{vocab} resid & .{vocab} {last}*" if tied else f".{vocab} resid"}
    # The table begins with two rows that are never read.
    n_positions = c.size("max_position_embeddings", 1024) + 2
    tensors |= {f"model.{stack}.embed_positions.weight": f".{n_positions} resid" for stack in ("encoder", "decoder")}
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
        sizes=Sizes(
            n_encoder + n_decoder, n_heads["encoder"], n_heads["encoder"], d, d // n_heads["encoder"], d_ff["encoder"]
        ),
        spaces=[
            Space("resid", d, "fixed" if bare else "permutation±", stream=True),
            *spaces,
            *([Space("pool", d, "signed")] if head == "SequenceClassification" else []),
        ],
        heads=heads,
        norms=norms,
        modules=modules,
        tensors=tensors,
        aliases=dict.fromkeys([*words, *(["lm_head.weight"] if tied else [])], "model.shared.weight"),
    )


def _layer(stack: str, k: int, i: int, pre_norm: bool) -> _Layer:
    place = f"model.{stack}.layers.{k}"
    if pre_norm:
        return _Layer(i, place, f"a{i}", f"c{i}", f"m{i}")
    before = f"o{i - 1}" if k else f"n_{stack}"
    return _Layer(i, place, before, f"s{i}", f"s{i}" if stack == "encoder" else f"c{i}")


def _pre_norms(stack: str, layers: list[_Layer], exposed: str) -> dict[str, str]:
    """The norm on the embeddings is read by nothing: it writes to the stream."""
    norms = {f"n_{stack}": f"layer(resid, model.{stack}.layernorm_embedding)"}
    for layer in layers:
        norms[layer.attention] = f"layer(resid, {layer.place}.self_attn_layer_norm)"
        norms[layer.units] = f"layer(resid, {layer.place}.final_layer_norm)"
        if stack == "decoder":
            norms[layer.cross] = f"layer(resid, {layer.place}.encoder_attn_layer_norm)"
    return norms | {"e" if stack == "encoder" else "f": f"layer(resid, model.{stack}.layer_norm{exposed})"}


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


def _attention(place: str, qk: str, vo: str, norm: str, source: str) -> dict[str, str]:
    return attention_modules(
        [f"{place}.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")], qk, vo, norm, source
    )


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
        inputs=ModelInputs(decoder=True, bidirectional=True),
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
