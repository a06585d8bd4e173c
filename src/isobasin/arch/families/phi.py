"""Phi and GPT-J: attention and feed-forward side by side behind one LayerNorm, partly rotating heads, a head with a
bias."""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Sizes, Space, build, stream_kind, units_kind
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import decoder_head, parallel_biases
from isobasin.arch.family import CAUSAL, LAST_TOKEN, BiasFlag, Family
from isobasin.errors import ArchitectureError

_PHI, _GPTJ = "model.layers.{i}", "transformer.h.{i}"


def phi(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, n_heads, n_layers = c.size("hidden_size"), c.size("num_attention_heads"), c.size("num_hidden_layers")
    n_kv_heads, d_ff, d_head = c.size("num_key_value_heads", n_heads), c.size("intermediate_size"), c.d_head(n_heads, d)
    if c.flag("qk_layernorm", False):
        raise ArchitectureError(
            "config.json: qk_layernorm is true; Phi with norms on queries and keys is not supported"
        )
    columns = c.rotary_columns(d_head, "partial_rotary_factor", 0.5, rounded=False)
    head = decoder_head(c, "model.embed_tokens.weight", bias=True, token_head="score")
    return build(
        family="phi",
        positions="rope",
        sizes=Sizes(n_layers, n_heads, n_kv_heads, d, d_head, d_ff),
        spaces=_spaces(c, d, d_ff, "hidden_act", tied=head.tied, bare=head.bare),
        heads=HeadSpace("heads", n_heads, n_kv_heads, d_head, columns),
        norms={
            "a{i}": f"layer(resid, {_PHI}.input_layernorm)",
            "f": f"layer(resid, model.final_layernorm{head.exposed})",
        },
        modules={
            f"{_PHI}.self_attn.q_proj": "qk{i}:q* a{i}*",
            f"{_PHI}.self_attn.k_proj": "qk{i} a{i}*",
            f"{_PHI}.self_attn.v_proj": "vo{i} a{i}*",
            f"{_PHI}.self_attn.dense": "resid vo{i}:q*",
            f"{_PHI}.mlp.fc1": "ff{i} a{i}*",
            f"{_PHI}.mlp.fc2": "resid ff{i}*",
        }
        | head.modules,
        tensors=head.tensors | {f"{_PHI}.self_attn.rotary_emb.inv_freq": "-"},
        sums=parallel_biases(f"{_PHI}.self_attn.dense.bias", f"{_PHI}.mlp.fc2.bias", n_layers),
        biases=head.biases,
        aliases=head.aliases,
        rotary=c.rotary(),
    )


def gptj(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    d, n_heads, n_layers = c.size("n_embd"), c.size("n_head"), c.size("n_layer")
    d_ff, d_head = c.size("n_inner", 4 * d), c.d_head(n_heads, d, key=None)
    if "rotary_dim" in config and config["rotary_dim"] is None:
        raise ArchitectureError("config.json: rotary_dim is null; give the number of rotary columns of a head")
    head = decoder_head(c, "transformer.wte.weight", bias=True)
    return build(
        family="gptj",
        positions="rope",
        sizes=Sizes(n_layers, n_heads, n_heads, d, d_head, d_ff),
        spaces=_spaces(c, d, d_ff, "activation_function", tied=head.tied, bare=head.bare),
        heads=HeadSpace("heads", n_heads, n_heads, d_head, c.size("rotary_dim", 64), interleaved=True),
        norms={"a{i}": f"layer(resid, {_GPTJ}.ln_1)", "f": f"layer(resid, transformer.ln_f{head.exposed})"},
        modules={
            f"{_GPTJ}.attn.q_proj": "qk{i}* a{i}*",
            f"{_GPTJ}.attn.k_proj": "qk{i} a{i}*",
            f"{_GPTJ}.attn.v_proj": "vo{i} a{i}*",
            f"{_GPTJ}.attn.out_proj": "resid vo{i}*",
            f"{_GPTJ}.mlp.fc_in": "ff{i} a{i}*",
            f"{_GPTJ}.mlp.fc_out": "resid ff{i}*",
        }
        | head.modules,
        tensors=head.tensors | {f"{_GPTJ}.attn.bias": "-", f"{_GPTJ}.attn.masked_bias": "-"},
        # Without a bias of its own, attention leaves its constants to the bias that is added beside it.
        biases={
            f"transformer.h.{i}.attn.out_proj.weight": f"transformer.h.{i}.mlp.fc_out.bias" for i in range(n_layers)
        }
        | head.biases,
        aliases=head.aliases,
    )


def _spaces(c: Fields, d: int, d_ff: int, activation: str, *, tied: bool, bare: bool) -> list[Space]:
    return [
        Space("resid", d, stream_kind("layer", tied=tied, bare=bare), stream=True),
        Space("ff{i}", d_ff, units_kind(c.word(activation, "gelu_new"))),
    ]


FAMILIES = (
    Family(
        "phi",
        phi,
        "PhiForCausalLM",
        prefix="model.",
        settings={"hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        example=(
            "Phi-2",
            {"hidden_size": 2560, "num_attention_heads": 32, "num_hidden_layers": 32, "intermediate_size": 10240}
            | {"vocab_size": 51200, "partial_rotary_factor": 0.4},
        ),
    ),
    Family(
        "gptj",
        gptj,
        "GPTJForCausalLM",
        prefix="transformer.",
        settings={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("", False, r"\battn\.\w+_proj\.bias$"),),
        aliases={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
        },
        example=(
            "GPT-J 6B",
            {"n_embd": 4096, "n_head": 16, "n_layer": 28, "vocab_size": 50400, "rotary_dim": 64},
        ),
    ),
)
