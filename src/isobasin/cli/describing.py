"""Commands that only look: info, check, families."""

from dataclasses import replace
from typing import Any

from isobasin.arch import FAMILIES, Architecture, HeadSpace
from isobasin.arch.examples import EXAMPLES
from isobasin.checking import check
from isobasin.checkpoint import dtype_name
from isobasin.symmetries import Symmetry, group_of, heads_group, symmetry
from isobasin.weights import Weights, load


def describe(model: str) -> dict[str, Any]:
    """Everything `info` says, as plain data."""
    weights = load(model)
    arch, whole = weights.arch, symmetry(weights.arch)
    heads = next(iter(arch.heads()))
    unturned = heads_group(replace(heads, rotary=0))
    here = heads_group(heads)
    return {
        "family": arch.family,
        "positions": arch.positions,
        "n_layers": arch.sizes.n_layers,
        "n_heads": arch.sizes.n_heads,
        "n_kv_heads": arch.sizes.n_kv_heads,
        "d_model": arch.sizes.d_model,
        "d_head": arch.sizes.d_head,
        "d_ff": arch.sizes.d_ff,
        "dtype": dtype_name(weights.dtype),
        "group": whole.formula,
        "group_dim": whole.dim,
        "element_dim": whole.element_dim,
        "free_dim": whole.free_dim,
        "n_params": weights.n_params,
        "effective_dim": weights.n_params - whole.dim,
        "qk_group": str(here.qk),
        "qk_dim": here.qk.dim,
        "qk_group_without_rotary": str(unturned.qk),
        "qk_dim_without_rotary": unturned.qk.dim,
        "group_dim_without_rotary": symmetry(_without_rotary(arch)).dim,
        "tied": sorted(_tied(weights)),
        "spaces": _spaces(whole),
    }


def _without_rotary(arch: Architecture) -> Architecture:
    """The same tensors, read as a model without rotary positions: its group is larger by what they cost."""
    spaces = {name: replace(s, rotary=0) if isinstance(s, HeadSpace) else s for name, s in arch.spaces.items()}
    return replace(arch, spaces=spaces)


def _tied(weights: Weights) -> list[str]:
    return [weights.names.on_disk[name] for name in weights if weights.arch.tied(name)]


def _spaces(whole: Symmetry) -> list[dict[str, Any]]:
    return [
        {"name": name, "size": group.n, "group": str(group), "dim": group.dim} for name, group in whole.groups.items()
    ]


def describe_lines(facts: dict[str, Any]) -> list[str]:
    f = facts
    kv = "" if f["n_heads"] == f["n_kv_heads"] else f" ({f['n_kv_heads']} kv)"
    lines = [
        f"family      {f['family']}, {f['positions']} positions, {f['dtype']}",
        f"sizes       {f['n_layers']} layers, width {f['d_model']}, {f['n_heads']} heads{kv} of {f['d_head']},"
        f" feed-forward {f['d_ff']}",
        f"group       {f['group']}",
        f"dimension   {f['group_dim']:,} = {f['element_dim']:,} of elements + {f['free_dim']:,} free directions",
        f"parameters  {f['n_params']:,}, of which the function sees {f['effective_dim']:,} dimensions",
    ]
    if f["qk_group"] != f["qk_group_without_rotary"]:
        lines.append(
            f"rotary      Q–K of each head: {f['qk_group_without_rotary']} (dimension {f['qk_dim_without_rotary']:,})"
            f" shrinks to {f['qk_group']} ({f['qk_dim']:,}); the whole from {f['group_dim_without_rotary']:,}"
            f" to {f['group_dim']:,}"
        )
    else:
        lines.append(f"Q–K         of each head: {f['qk_group']} (dimension {f['qk_dim']:,})")
    lines.append(f"tied        {', '.join(f['tied']) or 'nothing'}")
    return lines


def check_facts(model: str, seed: int) -> dict[str, Any]:
    weights = load(model)
    result = check(weights, seed=seed)
    return {
        "max_error": result.max_error,
        "tolerance": result.tolerance,
        "per_space": dict(result.per_space),
        "nullity_measured": result.nullity.dim,
        "nullity_predicted": result.nullity_predicted,
        "nullity_gap": result.nullity.gap,
        "ok": result.ok,
    }


def check_lines(facts: dict[str, Any]) -> list[str]:
    width = max(map(len, facts["per_space"]), default=0)
    spaces = [f"  {name:<{width}}  {error:.1e}" for name, error in facts["per_space"].items()]
    agrees = "=" if facts["nullity_measured"] == facts["nullity_predicted"] else "≠"
    return [
        "largest change of outputs, relative, by space:",
        *spaces,
        f"largest of all {facts['max_error']:.1e}, allowed {facts['tolerance']:.1e}",
        f"attention block: predicted nullity {facts['nullity_predicted']} {agrees} measured {facts['nullity_measured']}"
        f" (gap {facts['nullity_gap']:.0e})",
        "ok" if facts["ok"] else "NOT ok: please report this model, its group is not what isobasin believes",
    ]


def families_facts() -> dict[str, Any]:
    rows = []
    for name, family in FAMILIES.items():
        label, config = EXAMPLES[name]
        arch = family.describe(config)
        groups = {n: group_of(space) for n, space in arch.spaces.items() if n not in ("pool", "mlm")}
        rows.append(
            {
                "family": name,
                "positions": arch.positions,
                "example": label,
                "group": Symmetry(arch, groups, {}).formula,
            }
        )
    return {"families": rows}


def families_lines(facts: dict[str, Any]) -> list[str]:
    return [
        f"{row['family']:<9} {row['positions']:<8} {row['example']:<18} {row['group']}" for row in facts["families"]
    ]
