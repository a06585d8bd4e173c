"""Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE: Llama with a router and experts in place of the feed-forward.

Each expert has units of its own; the experts of a layer can be permuted together with the rows of the router.
"""

from collections import ChainMap
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from isobasin.arch.architecture import Architecture, Space
from isobasin.arch.config import Fields
from isobasin.arch.families.llama import ATTENTION, BASE_NAMES, FEED_FORWARD, gated_decoder
from isobasin.arch.families.qwen2 import qwen_windows
from isobasin.arch.family import CAUSAL, LAST_TOKEN, QUARTER_TURNS, BiasFlag, Family
from isobasin.errors import ArchitectureError, brief

_MLP = "model.layers.{i}.mlp"


class ExpertNames(NamedTuple):
    """The names of a router, of an expert {e} and of its projections."""

    router: str = f"{_MLP}.gate"
    expert: str = f"{_MLP}.experts.{{e}}"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = f"{_MLP}.shared_expert"
    shared_gate: str = f"{_MLP}.shared_expert_gate"


def mixtral(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    names = ExpertNames(
        "model.layers.{i}.block_sparse_moe.gate", "model.layers.{i}.block_sparse_moe.experts.{e}", "w1", "w3", "w2"
    )
    n, d_ff = c.size("num_local_experts", 8), c.size("intermediate_size")
    return with_experts(config, names, n, d_ff, defaults={"num_key_value_heads": 8}, rope_theta=1e6)


def qwen2_moe(config: Mapping[str, Any]) -> Architecture:
    """Beside the experts, one that every token takes, with a gate of its own."""
    c = Fields(config)
    shared = c.size("shared_expert_intermediate_size", 5632)
    n, d_ff = c.size("num_experts", 60), c.size("moe_intermediate_size", 1408)
    return with_experts(config, ExpertNames(), n, d_ff, shared=shared, defaults={"num_key_value_heads": 16})


def qwen3_moe(config: Mapping[str, Any]) -> Architecture:
    c = Fields(config)
    n, d_ff = c.size("num_local_experts", 128), c.size("moe_intermediate_size", 768)
    return with_experts(config, ExpertNames(), n, d_ff, defaults={"num_key_value_heads": 4}, qk_norm=True)


def olmoe(config: Mapping[str, Any]) -> Architecture:
    """Norms over all queries and over all keys."""
    c = Fields(config)
    if c.has("clip_qkv"):
        raise ArchitectureError("config.json: clip_qkv is set, which changes the symmetries of OLMoE: not supported")
    n, d_ff = c.size("num_experts", 64), c.size("intermediate_size")
    return with_experts(config, ExpertNames(), n, d_ff, qk_norm=True, whole_norm=True)


def with_experts(
    config: Mapping[str, Any],
    names: ExpertNames,
    n_experts: int,
    d_ff: int,
    *,
    shared: int = 0,
    groups: int = 0,
    softmax: bool = True,
    dense: Collection[int] | None = None,
    attention: Mapping[str, str] = ATTENTION,
    **options: Any,
) -> Architecture:
    """A decoder whose sparse layers have these experts; `shared` is the size of one that every token takes.

    `groups`: experts are chosen by so many groups of neighbours; `softmax`: the router ends with one; `dense`: the
    layers without experts.
    """
    c = Fields(config)
    n_layers, dense = c.size("num_hidden_layers"), _dense_layers(c) if dense is None else dense
    layer, spaces = dict(attention), []
    for i in range(n_layers):
        if i in dense:
            layer |= {name.format(i=i): text.format(i=i) for name, text in FEED_FORWARD.items()}
            spaces.append(Space(f"ff{i}", c.size("intermediate_size"), "scaled", layer=i, label="ff"))
            continue
        layer[names.router.format(i=i)] = f"experts{i} m{i}*"
        members = tuple(f"ff{i}_{e}" for e in range(n_experts))
        order = Space(f"experts{i}", n_experts, "permutation", members=members, layer=i, label="router")
        spaces.append(replace(order, groups=groups))
        for e in range(n_experts):
            layer |= _unit_modules(names.expert.format(i=i, e=e), f"ff{i}_{e}", i, names)
            spaces.append(Space(f"ff{i}_{e}", d_ff, "scaled", layer=i, label="expert"))
        if shared:
            layer |= _unit_modules(names.shared.format(i=i), f"shared{i}", i, names)
            if names.shared_gate:
                layer[names.shared_gate.format(i=i)] = f".1 m{i}*"
            spaces.append(Space(f"shared{i}", shared, "scaled", layer=i, label="shared expert"))
    routers = tuple(f"{names.router.format(i=i)}.weight" for i in range(n_layers) if i not in dense and softmax)
    return gated_decoder(config, layer, units_spaces=spaces, routers=routers, **options)


def _unit_modules(place: str, space: str, i: int, names: ExpertNames) -> dict[str, str]:
    return {
        f"{place}.{names.gate}": f"|{space}| m{i}*",
        f"{place}.{names.up}": f"{space} m{i}*",
        f"{place}.{names.down}": f"resid {space}*",
    }


def _dense_layers(c: Fields) -> Collection[int]:
    """Layers with a plain feed-forward (Qwen)."""
    step, listed = c.size("decoder_sparse_step", 1), c.config.get("mlp_only_layers") or []
    if not isinstance(listed, list | tuple):
        raise ArchitectureError(f"config.json: mlp_only_layers is {brief(listed)}, expected a list of layers")
    return [i for i in range(c.size("num_hidden_layers")) if i in listed or (i + 1) % step]


def _qwen2_windows(config: Mapping[str, Any]) -> dict[str, Any]:
    """As in Qwen2, but by default every second of the first layers has a window, not the last layers."""
    last = config.get("max_window_layers", 28)
    types = Fields(config).layer_types(lambda i: "full_attention" if i % 2 or i >= last else "sliding_attention")
    if config.get("layer_types") is None and not config.get("use_sliding_window", False):
        return qwen_windows(config)
    return qwen_windows(ChainMap({"layer_types": types}, dict(config)))


def _qwen3_window(config: Mapping[str, Any]) -> dict[str, Any]:
    """One window for all layers, which `use_sliding_window` switches on."""
    on = config.get("use_sliding_window", False)
    return {"sliding_window": config.get("sliding_window", 4096) if on else None}


_SETTINGS = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "norm_topk_prob": False}
_NO_UNIT_BIASES = BiasFlag("", False, r"\bmlp\.\S+\.bias$")

FAMILIES = (
    Family(
        "mixtral",
        mixtral,
        "MixtralForCausalLM",
        prefix="model.",
        settings={"hidden_act": "silu", "rms_norm_eps": 1e-5, "num_experts_per_tok": 2, "sliding_window": None},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("", False, r"\b(self_attn|block_sparse_moe)\.\S+\.bias$"),),
        aliases={"num_experts": "num_local_experts"},
        fused=True,
        example=(
            "Mixtral 8x7B",
            {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32}
            | {"intermediate_size": 14336, "vocab_size": 32000},
        ),
    ),
    Family(
        "qwen2_moe",
        qwen2_moe,
        "Qwen2MoeForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings=_SETTINGS | {"num_experts_per_tok": 4, "use_sliding_window": False},
        rare_settings=CAUSAL,
        derived_settings=_qwen2_windows,
        head_settings=LAST_TOKEN,
        bias_flags=(
            BiasFlag("qkv_bias", True, r"\bself_attn\.[qkv]_proj\.bias$"),
            BiasFlag("", False, r"\bself_attn\.o_proj\.bias$"),
            _NO_UNIT_BIASES,
        ),
        fused=True,
        example=(
            "Qwen1.5 MoE A2.7B",
            {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 24}
            | {"intermediate_size": 5632, "vocab_size": 151936},
        ),
    ),
    Family(
        "qwen3_moe",
        qwen3_moe,
        "Qwen3MoeForCausalLM",
        prefix="model.",
        spellings=BASE_NAMES,
        settings=_SETTINGS | {"num_experts_per_tok": 8},
        rare_settings=CAUSAL,
        derived_settings=_qwen3_window,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("attention_bias", False, r"\bself_attn\.\w+\.bias$"), _NO_UNIT_BIASES),
        aliases={"num_experts": "num_local_experts"},
        fused=True,
        unused=(QUARTER_TURNS,),
        example=(
            "Qwen3 30B A3B",
            {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 48}
            | {"intermediate_size": 6144, "vocab_size": 151936, "head_dim": 128},
        ),
    ),
    Family(
        "olmoe",
        olmoe,
        "OlmoeForCausalLM",
        prefix="model.",
        settings=_SETTINGS | {"rms_norm_eps": 1e-5, "num_experts_per_tok": 8},
        rare_settings=CAUSAL,
        head_settings=LAST_TOKEN,
        bias_flags=(BiasFlag("attention_bias", False, r"\bself_attn\.\w+\.bias$"), _NO_UNIT_BIASES),
        aliases={"num_local_experts": "num_experts"},
        fused=True,
        unused=(QUARTER_TURNS,),
        example=(
            "OLMoE 1B-7B",
            {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 16}
            | {"intermediate_size": 1024, "vocab_size": 50304},
        ),
    ),
)
