"""GPT-OSS: attention sinks, biases everywhere, experts in tensors of three axes, clamped gated units."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from isobasin.arch.architecture import Architecture, Space, Stack
from isobasin.arch.config import Fields
from isobasin.arch.families.decoder import sliding_windows
from isobasin.arch.families.llama import ATTENTION, gated_decoder
from isobasin.arch.family import CAUSAL, LAST_TOKEN, BiasFlag, Family

_MLP = "model.layers.{i}.mlp"
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_YARN |= {"original_max_position_embeddings": 4096}


def gpt_oss(config: Mapping[str, Any]) -> Architecture:
    """Units are (up + 1) · glu(gate), both clamped: up has no scale, so units are permuted and nothing more."""
    c = Fields(config)
    n_experts, d_ff = c.size("num_local_experts", 128), c.size("intermediate_size", 2880)
    layer, spaces, stacks = dict(ATTENTION), [], dict[str, Stack]()
    for i in range(c.size("num_hidden_layers")):
        layer[f"{_MLP.format(i=i)}.router"] = f"experts{i} m{i}*"
        members = tuple(f"ff{i}_{e}" for e in range(n_experts))
        spaces.append(Space(f"experts{i}", n_experts, "permutation", members=members, layer=i, label="router"))
        spaces += [Space(name, d_ff, "permutation", layer=i, label="expert") for name in members]
        for e, space in enumerate(members):
            place = f"{_MLP.format(i=i)}.experts.{e}"
            layer |= {f"{place}.gate_proj": f"m{i}* |{space}|", f"{place}.up_proj": f"m{i}* {space}"}
            layer[f"{place}.down_proj"] = f"{space}* resid"
        stacks |= _stacks(f"{_MLP.format(i=i)}.experts", n_experts, c.size("hidden_size"), d_ff)
    return gated_decoder(
        config,
        layer,
        units="permutation",
        units_spaces=spaces,
        routers=tuple(f"{_MLP.format(i=i)}.router.weight" for i in range(c.size("num_hidden_layers"))),
        defaults=_default_heads(c),
        rotary=c.rotary(default=150000.0, usual=_YARN),
        sinks="model.layers.{i}.self_attn.sinks",
        stacks=stacks,
    )


def _default_heads(c: Fields) -> dict[str, int]:
    """Sizes where a config has none; a null stands for what follows from the others."""
    d, n_heads = c.size("hidden_size", 2880), c.size("num_attention_heads", 64)
    derived = {"num_key_value_heads": n_heads, "head_dim": d // n_heads}
    return {"num_key_value_heads": 8, "head_dim": 64} | {k: n for k, n in derived.items() if k in c.config}


def _stacks(place: str, n_experts: int, d: int, d_ff: int) -> dict[str, Stack]:
    """The tensors of all experts of a layer; columns of gate and up alternate."""
    every, kinds = range(n_experts), (("gate_proj", slice(0, None, 2)), ("up_proj", slice(1, None, 2)))
    gates = {(e, kind): columns for e in every for kind, columns in kinds}
    return {
        f"{place}.gate_up_proj": Stack(
            (n_experts, d, 2 * d_ff),
            {f"{place}.{e}.{kind}.weight": (e, slice(None), columns) for (e, kind), columns in gates.items()},
        ),
        f"{place}.gate_up_proj_bias": Stack(
            (n_experts, 2 * d_ff), {f"{place}.{e}.{kind}.bias": (e, columns) for (e, kind), columns in gates.items()}
        ),
        f"{place}.down_proj": Stack((n_experts, d_ff, d), {f"{place}.{e}.down_proj.weight": (e,) for e in every}),
        f"{place}.down_proj_bias": Stack((n_experts, d), {f"{place}.{e}.down_proj.bias": (e,) for e in every}),
    }


FAMILIES = (
    Family(
        "gpt_oss",
        gpt_oss,
        "GptOssForCausalLM",
        prefix="model.",
        settings={"rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        rare_settings=CAUSAL,
        derived_settings=partial(sliding_windows, usual=128),
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("attention_bias", True, r"\bself_attn\.\w+\.bias$"),),
        aliases={"num_experts": "num_local_experts"},
        fused=True,
        example=(
            "gpt-oss 20B",
            {"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24}
            | {"intermediate_size": 2880, "vocab_size": 201088, "num_local_experts": 32, "head_dim": 64},
        ),
    ),
)
