"""The commands `info`, `check` and `families`, which only read."""

from dataclasses import asdict, replace
from math import prod
from shutil import get_terminal_size
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobasin.cli.options import Json, Model, Seed
from isobasin.cli.output import emit

if TYPE_CHECKING:
    from isobasin.arch import Architecture, HeadSpace


def info_command(model: Model, json: Json = False) -> None:
    """Show family, positions, sizes, the symmetry group and its dimension, and tied weights."""
    from isobasin.checkpoint import dtype_name
    from isobasin.symmetries import heads_group, symmetry
    from isobasin.weights import load

    weights = load(model)
    arch, group = weights.arch, symmetry(weights.arch)
    heads = next(iter(arch.heads()))
    qk, qk_without_rotary = heads_group(heads).qk, heads_group(_without_positions(heads)).qk
    facts = {
        "family": arch.family,
        "positions": arch.positions,
        **asdict(arch.sizes),
        "dtype": dtype_name(weights.dtype),
        "group": group.formula,
        "group_dim": group.dim,
        "element_dim": group.element_dim,
        "free_dim": group.free_dim,
        "n_params": weights.n_params,
        "effective_dim": weights.n_params - group.dim,
        "qk_group": str(qk),
        "qk_dim": qk.dim,
        "qk_group_without_rotary": str(qk_without_rotary),
        "qk_dim_without_rotary": qk_without_rotary.dim,
        "group_dim_without_rotary": symmetry(_without_rotary(arch)).dim,
        "tied": sorted(weights.names.on_disk[name] for name in weights if arch.tied(name)),
        "spaces": [
            {"name": name, "size": one.n, "group": str(one), "dim": one.dim} for name, one in group.groups.items()
        ],
    }
    if weights.note:
        facts["note"] = weights.note
    if arch.copied_tensors:
        facts["copied"] = sum(prod(arch.shapes[name]) for name in arch.copied_tensors)
    unread = [name for name, rows in arch.unread.items() if name in arch.tensors and rows is None]
    if unread:
        facts["unread"] = sorted(weights.names.on_disk[name] for name in unread)
    emit(facts, info_lines(facts), json)


def check_command(model: Model, seed: Seed = 0, json: Json = False) -> None:
    """Compare outputs before and after random symmetries, and measure the group's dimension. Exit 1 if not ok."""
    from isobasin.symmetries.check import check
    from isobasin.weights import load

    result = check(load(model), seed=seed)
    facts = {
        "max_error": result.max_error,
        "tolerance": result.tolerance,
        "per_space": dict(result.per_space),
        "nullity_measured": result.nullity.dim if result.nullity else None,
        "nullity_predicted": result.nullity_predicted,
        "nullity_gap": result.nullity.gap if result.nullity else None,
        "run_in": result.dtype,
        "ok": result.ok,
    }
    emit(facts, check_lines(facts), json)
    if not result.ok:
        raise typer.Exit(1)


def families_command(
    json: Json = False,
    draft: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Draft a family file for this checkpoint instead.")
    ] = None,
) -> None:
    """List the model types: the symmetry group of a well-known model, the classes covered, symmetries not used."""
    if draft is not None:
        _print_draft(draft, json)
        return
    from isobasin.arch import FAMILIES
    from isobasin.symmetries import Symmetry, group_of

    rows = []
    for name, family in FAMILIES.items():
        arch = family.example_architecture()
        groups = {
            n: group_of(space) for n, space in arch.spaces.items() if space.role == "stream" or space.layer is not None
        }
        formula = Symmetry(arch, groups, {}).formula
        rows.append(
            {"family": name, "positions": arch.positions, "example": family.example[0], "group": formula}
            | {"classes": [f"{family.stem}{head}" for head in family.heads] if not family.own else []}
            | {"not_used": list(family.unused)}
        )
    emit({"families": rows}, family_lines(rows), json)


def family_lines(rows: list[dict[str, Any]], width: int | None = None) -> list[str]:
    """A few lines for each model type, wrapped at the width of the terminal; as they are where there is none."""
    width = get_terminal_size((0, 0)).columns if width is None else width
    columns = {key: max(len(row[key]) for row in rows) for key in ("family", "positions", "example")}
    lines = []
    for row in rows:
        first = " ".join(f"{row[key]:<{n}}" for key, n in columns.items())
        fits = not width or len(first) + 1 + len(row["group"]) <= width
        lines.append(f"{first} {row['group']}" if fits else first.rstrip())
        parts = {"group": "" if fits else row["group"], "classes": ", ".join(row["classes"])}
        for label, text in (parts | {"not used": "; ".join(row["not_used"])}).items():
            if text:
                lines += _wrapped(f"    {label:<10}", text, width)
    return lines


def _wrapped(label: str, text: str, width: int) -> list[str]:
    if not width:
        return [label + text]
    return wrap(text, width, initial_indent=label, subsequent_indent=" " * len(label), break_long_words=False)


def _print_draft(model: str, as_json: bool) -> None:
    from isobasin.arch.draft import draft_family
    from isobasin.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model)
    shapes = {name: tuple(info.shape) for name, info in checkpoint.infos.items()}
    source = draft_family(checkpoint.config, shapes)
    emit({"draft": source}, source.removesuffix("\n").split("\n"), as_json)


def _without_rotary(arch: "Architecture") -> "Architecture":
    """The same tensors without rotary positions, which make the group smaller."""
    from isobasin.arch import HeadSpace

    spaces = {name: _without_positions(s) if isinstance(s, HeadSpace) else s for name, s in arch.spaces.items()}
    return replace(arch, spaces=spaces)


def _without_positions(heads: "HeadSpace") -> "HeadSpace":
    """The heads without rotary positions; behind a norm on queries and keys these make no difference to the
    group, and columns that all heads share exist because of them."""
    return heads if heads.qk_norm or heads.shared_rotary else replace(heads, rotary=0)


def info_lines(facts: dict[str, Any]) -> list[str]:
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
    if "note" in f:
        lines.append(f"note        {f['note']}")
    if "unread" in f:
        more = f" and {len(f['unread']) - 1} more" if len(f["unread"]) > 1 else ""
        lines.append(f"unread      {f['unread'][0]}{more}: this class does not read them, so no comparison does")
    if "copied" in f:
        lines.append(f"copied      {f['copied']:,} parameters outside the language model: nothing moves or aligns them")
    return lines


def check_lines(facts: dict[str, Any]) -> list[str]:
    width = max(map(len, facts["per_space"]), default=0)
    spaces = [f"  {name:<{width}}  {error:.1e}" for name, error in facts["per_space"].items()]
    agrees = "=" if facts["nullity_measured"] == facts["nullity_predicted"] else "≠"
    block = "attention block: nullity not measured (norms on queries and keys, or latent attention)"
    if facts["nullity_measured"] is not None:
        block = (
            f"attention block: predicted nullity {facts['nullity_predicted']} {agrees} measured "
            f"{facts['nullity_measured']} (gap {facts['nullity_gap']:.0e})"
        )
    return [
        f"largest change of outputs, relative, by space{'' if facts['run_in'] == 'float32' else ', in float64'}:",
        *spaces,
        f"largest of all {facts['max_error']:.1e}, allowed {facts['tolerance']:.1e}",
        block,
        "ok"
        if facts["ok"]
        else "NOT ok: the family does not describe this model; correct your family file, or report it",
    ]
