"""Llama, Mistral, Granite, SmolLM3: rotary positions, RMSNorm, grouped queries, gated feed-forward."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Kind, Sizes, Space, Stack, build, stream_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import decoder_head
from isobasin.arch.family import CAUSAL, LAST_TOKEN, BiasFlag, Family
from isobasin.errors import ArchitectureError


def llama(config: Mapping[str, Any]) -> Architecture:
    return gated_decoder(config, ATTENTION | FEED_FORWARD)


ATTENTION = {
    "model.layers.{i}.self_attn.q_proj": "qk{i}:q* a{i}*",
    "model.layers.{i}.self_attn.k_proj": "qk{i} a{i}*",
    "model.layers.{i}.self_attn.v_proj": "vo{i} a{i}*",
    "model.layers.{i}.self_attn.o_proj": "resid vo{i}:q*",
}
FEED_FORWARD = {
    "model.layers.{i}.mlp.gate_proj": "|ff{i}| m{i}*",
    "model.layers.{i}.mlp.up_proj": "ff{i} m{i}*",
    "model.layers.{i}.mlp.down_proj": "resid ff{i}*",
}
PARALLEL_FEED_FORWARD = {name: text.replace("m{i}*", "a{i}*") for name, text in FEED_FORWARD.items()}


def gated_decoder(
    config: Mapping[str, Any],
    layer: Mapping[str, str],
    *,
    defaults: Mapping[str, int] | None = None,
    norm: str = "rms",
    units: Kind = "scaled",
    partial_rotary: float | None = None,
    rounded: bool = True,
    head_dim: bool = True,
    interleaved: bool = False,
    permutable: bool = True,
    tied_default: bool = False,
    plus_one: bool = False,
    plain: bool = False,
    without_positions: Collection[int] = (),
    rope_theta: float = 10000.0,
    norms: Mapping[str, str] | None = None,
    norms_behind: bool = False,
    qk_norm: bool = False,
    whole_norm: bool = False,
    layer_norm: tuple[str, str] | None = None,
    rotary: Mapping[str, Any] | None = None,
    units_spaces: Sequence[Space] | None = None,
    routers: tuple[str, ...] = (),
    choice_biases: tuple[str, ...] = (),
    sinks: str = "",
    stacks: Mapping[str, Stack] | None = None,
    heads: HeadSpace | None = None,
    latents: Sequence[Space] = (),
    tensors: Mapping[str, str] | None = None,
) -> Architecture:
    """A decoder of this kind whose layers have these modules. Biases may be beside any of them.

    Llama, Mistral and Qwen2 rotate whole heads: transformers ignores a `partial_rotary_factor` in their configs. Others
    have a default for it, `partial_rotary` (`rounded`, `head_dim`, `interleaved`, `permutable`: see
    `Fields.rotary_columns` and `HeadSpace`).
    `defaults` are sizes that transformers takes where a config has none. `without_positions` are layers whose heads do
    not rotate at all; `plus_one`: gains are stored less 1; `plain`: norms have no parameters. `norms` are those of a
    layer where they are not Llama's; `norms_behind`: some of them stand behind a sublayer, and no weight reads them, so
    that their gains keep the stream from rotating. `qk_norm`, `whole_norm`: norms on queries and keys; `layer_norm`:
    LayerNorms of each head there, whose gains are called so. `rotary` is what a config says of rotary positions, where
    it says it in another way. `units_spaces` are the spaces of units where layers have experts, `routers` the weights
    that choose them, `choice_biases` what counts for the choice alone; `sinks`: the tensor of sinks of a layer;
    `stacks`: what files hold in one tensor; `heads`: the heads where they are of another kind, and `latents` the
    streams inside their layers; `tensors`: further ones, which are no weights of modules.
    """
    c = Fields(config)
    d, n_heads = c.size("hidden_size"), c.size("num_attention_heads")
    usual = {"num_key_value_heads": n_heads} | dict(defaults or {})
    if heads is not None:
        d_head = heads.d_head
    elif "head_dim" in usual:
        d_head = c.size("head_dim", usual["head_dim"])
    else:
        d_head = c.d_head(n_heads, d, key="head_dim" if head_dim else None)
    n_kv_heads, d_ff = c.size("num_key_value_heads", usual["num_key_value_heads"]), c.size("intermediate_size")
    sizes = Sizes(c.size("num_hidden_layers"), n_heads, n_kv_heads, d, d_head, d_ff)
    columns = d_head
    if partial_rotary is not None:
        columns = c.rotary_columns(d_head, "partial_rotary_factor", partial_rotary, rounded=rounded, head_dim=head_dim)
    head = decoder_head(c, "model.embed_tokens.weight", tied_default=tied_default, token_head="score")
    word = ", plus_one" if plus_one else ", plain" if plain else ""
    usual_heads = HeadSpace(
        "heads", n_heads, n_kv_heads, d_head, columns, interleaved, qk_norm=qk_norm, plus_one=plus_one
    )
    heads = heads or replace(usual_heads, whole_norm=whole_norm, permutable=permutable, sinks=sinks)
    if qk_norm or layer_norm:
        q, k = (f"model.layers.{{i}}.self_attn.{name}" for name in layer_norm or ("q_norm.weight", "k_norm.weight"))
        heads = replace(heads, qk_norm=True, layer_norm=layer_norm is not None, q_gain=q, k_gain=k)
    usual_norms = {
        "a{i}": f"{norm}(resid, model.layers.{{i}}.input_layernorm{word})",
        "m{i}": f"{norm}(resid, model.layers.{{i}}.post_attention_layernorm{word})",
    }
    return build(
        family=c.word("model_type", "llama"),
        positions="rope",
        sizes=sizes,
        spaces=[
            Space(
                "resid",
                d,
                stream_kind(norm, tied=(head.tied and not plain) or norms_behind, bare=head.bare),
                stream=True,
            ),
            *latents,
            *(units_spaces or [Space("ff{i}", d_ff, units)]),
        ],
        heads=[replace(heads, rotary=0) if i in without_positions else heads for i in range(sizes.n_layers)]
        if without_positions
        else heads,
        norms=dict(norms or usual_norms) | {"f": f"{norm}(resid, model.norm{head.exposed}{word})"},
        modules=dict(layer) | head.modules,
        tensors=head.tensors | {"model.layers.{i}.self_attn.rotary_emb.inv_freq": "-"} | dict(tensors or {}),
        aliases=head.aliases,
        rotary=c.rotary(default=rope_theta) if rotary is None else rotary,
        routers=routers,
        choice_biases=choice_biases,
        stacks=stacks,
    )


def smollm3(config: Mapping[str, Any]) -> Architecture:
    """Every fourth layer, or those that `no_rope_layers` marks with 0, has no positions."""
    layers = range(len(_rope_layers(config)))
    without = [i for i in layers if not _rope_layers(config)[i]]
    layer = ATTENTION | FEED_FORWARD
    return gated_decoder(config, layer, tied_default=True, without_positions=without, rope_theta=2e6)


def _rope_layers(config: Mapping[str, Any]) -> list[int]:
    c = Fields(config)
    n_layers, interval, marks = c.size("num_hidden_layers"), c.size("no_rope_layer_interval", 4), None
    if c.has("no_rope_layers"):
        marks = config["no_rope_layers"]
        if not isinstance(marks, list) or len(marks) != n_layers or any(mark not in (0, 1) for mark in marks):
            raise ArchitectureError(f"config.json: no_rope_layers is {marks!s:.80}, expected 0 or 1 for every layer")
    return [int((i + 1) % interval != 0) for i in range(n_layers)] if marks is None else marks


_7B = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}

# Question answering models have the decoder under another name.
BASE_NAMES = ((r"^transformer\.", "model."),)

NO_BIASES = BiasFlag("", False, r"\b(self_attn|mlp)\.\w+\.bias$")
_BIAS_FLAGS = (
    BiasFlag("attention_bias", False, r"\bself_attn\.\w+\.bias$"),
    BiasFlag("mlp_bias", False, r"\bmlp\.\w+\.bias$"),
)

FAMILIES = (
    Family(
        "llama",
        llama,
        "LlamaForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-6},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=_BIAS_FLAGS,
        example=("Llama 2 7B", _7B | {"num_key_value_heads": 32, "intermediate_size": 11008}),
    ),
    Family(
        "mistral",
        llama,
        "MistralForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-6, "sliding_window": 4096},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=(NO_BIASES,),
        example=("Mistral 7B", _7B | {"num_key_value_heads": 8, "intermediate_size": 14336}),
    ),
    Family(
        "granite",
        llama,
        "GraniteForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings={
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=_BIAS_FLAGS,
        example=(
            "Granite 3.1 2B",
            {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 40}
            | {"intermediate_size": 8192, "vocab_size": 49155},
        ),
    ),
    Family(
        "smollm3",
        smollm3,
        "SmolLM3ForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-6},
        rare_settings=CAUSAL,
        derived_settings=lambda config: {"no_rope_layers": _rope_layers(config)},
        head_settings=LAST_TOKEN,
        bias_flags=_BIAS_FLAGS,
        example=(
            "SmolLM3 3B",
            {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 36}
            | {"intermediate_size": 11008, "vocab_size": 128256},
        ),
    ),
)
