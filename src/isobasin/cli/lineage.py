"""The command `lineage`."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobasin.cli.options import Force, PrintOptions, choice, with_options
from isobasin.cli.output import emit, existing, measured_cost, progress, reserve_outputs
from isobasin.errors import printable

if TYPE_CHECKING:
    from isobasin.compare.lineage import Lineage


@with_options
def lineage_command(
    *,
    models: Annotated[list[str], typer.Argument(metavar="MODEL…", help="Two or more models, of any shapes.")],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Write a page with the tree and a heat map."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="One of the models: its relatives come from it.")
    ] = None,
    engine: Annotated[str, choice("local, ray", "local (processes) or ray (RAY_ADDRESS).")] = "local",
    workers: Annotated[
        int | None, typer.Option(min=1, max=1024, metavar="N", help="Tasks at a time; by default one per core.")
    ] = None,
    force: Force = False,
    show: PrintOptions,
) -> None:
    """Find out how checkpoints are related: copies, merges and of what, pruned or shortened models, relatives."""
    from isobasin.compare.lineage import lineage
    from isobasin.files import check_output_file

    if output is not None:
        reserve_outputs(output)
        check_output_file(output, force=force, kind="page", inputs=existing(*models))
    with measured_cost() as cost, progress(quiet=show.silent) as on_progress:
        named = None if base is None else models.index(base) if base in models else base
        found = lineage(
            list(models), base=named, engine=engine, workers=workers, watch=partial(on_progress, "comparing")
        )
    facts: dict[str, Any] = {**found.to_dict(), "seconds": cost["seconds"]}
    if output is not None:
        from isobasin.report.lineage_page import write_lineage_page

        facts["page"] = str(write_lineage_page(found, output, force=force))
    emit(facts, lineage_lines(found, facts), show.json)


def lineage_lines(found: "Lineage", facts: dict[str, Any]) -> list[str]:
    """The trees, one line for each model, and what is left."""
    width = max([len(row.name) + 2 * row.depth for row in found.outline], default=0)
    lines = []
    for row in found.outline:
        name = "  " * row.depth + row.name
        relation = "" if row.edge is None else f"{row.edge.words}  {row.edge.distance:.2g}"
        lines.append(f"{name:<{width}}  {relation}".rstrip())
    lines += [f"{name}: related to none of the others" for name in found.unrelated]
    lines += [f"{e.parents[0]} and {e.child}: undecided, {e.evidence}" for e in found.edges_of("undecided")]
    lines += [f"{facts['page']}: open it in any browser"] if "page" in facts else []
    return [printable(line) for line in lines]
