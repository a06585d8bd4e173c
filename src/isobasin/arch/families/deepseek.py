"""DeepSeek V2 and V3: latent attention, and experts that are chosen by groups.

Keys and values are read from a latent vector, behind a norm of its own; so are queries, unless there is one map from
the stream. The rotary columns of keys are one for all heads, and read the stream. A latent vector is a stream inside
its layer: it rotates, and the two maps beside it move along.
"""

from collections.abc import Mapping
from typing import Any

from isobasin.arch.architecture import Architecture, HeadSpace, Space, Stack
from isobasin.arch.config import Fields
from isobasin.arch.families.experts import ExpertNames, with_experts
from isobasin.arch.family import CAUSAL, LAST_TOKEN, BiasFlag, Family
from isobasin.errors import ArchitectureError

_LAYER = "model.layers.{i}"
_ATTENTION = f"{_LAYER}.self_attn"
_NAMES = ExpertNames(shared=f"{_LAYER}.mlp.shared_experts", shared_gate="")


def deepseek_v2(config: Mapping[str, Any]) -> Architecture:
    """A softmax over all experts; with `group_limited_greedy`, those of a few groups are chosen from."""
    c = Fields(config)
    limited = c.choice("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    groups = _groups(c, c.size("n_group"), c.size("topk_group"), c.size("n_routed_experts", 64)) if limited else 0
    return _deepseek(
        config,
        n_experts=c.size("n_routed_experts", 64),
        d_ff=c.size("moe_intermediate_size", 1407),
        shared=c.size("n_shared_experts", 2),
        groups=groups,
        first_sparse=_first_sparse(c, 0),
        interleaved=True,
    )


def deepseek_v3(config: Mapping[str, Any]) -> Architecture:
    """A sigmoid for every expert, and a bias that counts for the choice alone."""
    c = Fields(config)
    n_experts, first = c.size("n_routed_experts", 256), _first_sparse(c, 3)
    n_groups, kept = c.size("n_group", 8), c.size("topk_group", 4)
    groups = _groups(c, n_groups, kept, n_experts)
    most = min(kept, n_groups) * (n_experts // n_groups)
    if c.size("num_experts_per_tok", 8) > most:
        raise ArchitectureError(
            f"config.json: num_experts_per_tok is more than the {most} experts of the {kept} groups that a token may "
            "choose from; correct it"
        )
    sparse = range(first, c.size("num_hidden_layers"))
    biases = {f"{_LAYER.format(i=i)}.mlp.gate.e_score_correction_bias": f"experts{i}" for i in sparse}
    return _deepseek(
        config,
        n_experts=n_experts,
        d_ff=c.size("moe_intermediate_size", 2048),
        shared=c.size("n_shared_experts", 1),
        groups=groups,
        first_sparse=first,
        interleaved=bool(config.get("rope_interleave", True)),
        softmax=False,
        tensors=biases,
        choice_biases=tuple(biases),
    )


def _groups(c: Fields, n_groups: int, kept: int, n_experts: int) -> int:
    """The groups that experts are chosen by; 0 where all of them are kept, and any order will do."""
    if n_experts % n_groups:
        raise ArchitectureError(f"config.json: {n_experts} experts do not divide into n_group {n_groups}; correct it")
    return n_groups if kept < n_groups else 0


def _first_sparse(c: Fields, default: int) -> int:
    """How many dense layers come first."""
    value = c.config.get("first_k_dense_replace", default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ArchitectureError(f"config.json: first_k_dense_replace is {value!s:.80}, expected a whole number from 0")
    return value


def _deepseek(
    config: Mapping[str, Any],
    *,
    n_experts: int,
    d_ff: int,
    shared: int,
    groups: int,
    first_sparse: int,
    interleaved: bool,
    **options: Any,
) -> Architecture:
    c = Fields(config)
    n_layers, n_heads, d = c.size("num_hidden_layers"), c.size("num_attention_heads"), c.size("hidden_size")
    if c.size("num_key_value_heads", n_heads) != n_heads:
        raise ArchitectureError(
            f"config.json: num_key_value_heads is {config['num_key_value_heads']}, expected {n_heads} as "
            "num_attention_heads: latent attention has keys for every head"
        )
    rope, kv_rank = c.size("qk_rope_head_dim", 64), c.size("kv_lora_rank", 512)
    q_rank = None if config.get("q_lora_rank", 1536) is None else c.size("q_lora_rank", 1536)
    heads = HeadSpace(
        "heads",
        n_heads,
        n_heads,
        c.size("qk_nope_head_dim", 128) + rope,
        rope,
        interleaved,
        d_value=c.size("v_head_dim", 128),
        shared_rotary=True,
    )
    ranks = {"kv": kv_rank} | ({"q": q_rank} if q_rank else {})
    return with_experts(
        config,
        _NAMES,
        n_experts,
        d_ff,
        shared=shared * d_ff,
        groups=groups,
        dense=range(min(first_sparse, n_layers)),
        attention=_attention(lora=q_rank is not None),
        heads=heads,
        latents=[
            Space(f"{kind}{i}", rank, "orthogonal", stream=True, latent=True, label=f"latent {kind}")
            for i in range(n_layers)
            for kind, rank in ranks.items()
        ],
        norms={
            "a{i}": f"rms(resid, {_LAYER}.input_layernorm)",
            "m{i}": f"rms(resid, {_LAYER}.post_attention_layernorm)",
        }
        | {f"{kind}n{{i}}": f"rms({kind}{{i}}, {_ATTENTION}.{kind}_a_layernorm)" for kind in ranks},
        stacks=_stacks(n_layers, kv_rank, rope, d),
        **options,
    )


def _attention(*, lora: bool) -> dict[str, str]:
    reads = {f"{_ATTENTION}.q_b_proj": "qn{i}*"} if lora else {f"{_ATTENTION}.q_proj": "a{i}*"}
    queries = {name: f"(qk{{i}}:q*+rope{{i}}:q*) {norm}" for name, norm in reads.items()}
    return queries | {
        **({f"{_ATTENTION}.q_a_proj": "q{i} a{i}*"} if lora else {}),
        f"{_ATTENTION}.kv_a_proj": "kv{i} a{i}*",
        f"{_ATTENTION}.k_rope_proj": "rope{i} a{i}*",
        f"{_ATTENTION}.kv_b_proj": "(qk{i}+vo{i}) kvn{i}*",
        f"{_ATTENTION}.o_proj": "resid vo{i}:q*",
    }


def _stacks(n_layers: int, kv_rank: int, rope: int, d: int) -> dict[str, Stack]:
    """Files hold what writes the latent vector and what makes the common rotary columns of keys as one."""
    rows = {"kv_a_proj": (slice(0, kv_rank),), "k_rope_proj": (slice(kv_rank, kv_rank + rope),)}
    shapes: dict[str, tuple[int, ...]] = {"weight": (kv_rank + rope, d), "bias": (kv_rank + rope,)}
    return {
        f"{place}.kv_a_proj_with_mqa.{kind}": Stack(
            shape, {f"{place}.{name}.{kind}": index for name, index in rows.items()}
        )
        for place in (_ATTENTION.format(i=i) for i in range(n_layers))
        for kind, shape in shapes.items()
    }


def _score_scale(config: Mapping[str, Any]) -> dict[str, Any]:
    """A key of the table of rotary positions that scales scores, whatever the type of the positions is."""
    rotary, table = Fields(config).rotary(), Fields(config).rotary_table
    return {"mscale_all_dim": None if rotary["type"] == "default" else table.get("mscale_all_dim") or None}


_SETTINGS = {"hidden_act": "silu", "rms_norm_eps": 1e-6}
_BIASES = (
    BiasFlag("attention_bias", False, r"\bself_attn\.(q_a|kv_a|k_rope|o)_proj\.bias$"),
    BiasFlag("", False, r"\bself_attn\.(q|q_b|kv_b)_proj\.bias$"),
    BiasFlag("", False, r"\bmlp\.(gate|experts\.\d+\.\w+)\.bias$"),
)

FAMILIES = (
    Family(
        "deepseek_v2",
        deepseek_v2,
        "DeepseekV2ForCausalLM",
        prefix="model.",
        settings=_SETTINGS
        | {"num_experts_per_tok": None, "topk_method": "greedy", "n_group": None, "topk_group": None}
        | {"routed_scaling_factor": 1.0},
        rare_settings=CAUSAL,
        derived_settings=_score_scale,
        head_settings=LAST_TOKEN,
        bias_flags=(*_BIASES, BiasFlag("mlp_bias", False, r"\bmlp\.(shared_experts\.)?\w+_proj\.bias$")),
        aliases={"num_experts": "n_routed_experts"},
        ignored=("head_dim", "qk_head_dim", "norm_topk_prob"),
        fused=True,
        example=(
            "DeepSeek V2 Lite",
            {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 27, "intermediate_size": 10944}
            | {"q_lora_rank": None, "kv_lora_rank": 512, "n_routed_experts": 64, "moe_intermediate_size": 1408}
            | {"first_k_dense_replace": 1, "vocab_size": 102400},
        ),
    ),
    Family(
        "deepseek_v3",
        deepseek_v3,
        "DeepseekV3ForCausalLM",
        prefix="model.",
        settings=_SETTINGS
        | {"num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True}
        | {"routed_scaling_factor": 2.5},
        rare_settings=CAUSAL,
        derived_settings=_score_scale,
        head_settings=LAST_TOKEN,
        bias_flags=(*_BIASES, BiasFlag("", False, r"\bmlp\.(shared_experts\.)?\w+_proj\.bias$")),
        aliases={"num_local_experts": "n_routed_experts"},
        ignored=("head_dim", "qk_head_dim", "num_nextn_predict_layers", "num_mtp_layers"),
        fused=True,
        example=(
            "DeepSeek V3",
            {"hidden_size": 7168, "num_attention_heads": 128, "num_hidden_layers": 61, "intermediate_size": 18432}
            | {"vocab_size": 129280},
        ),
    ),
)
