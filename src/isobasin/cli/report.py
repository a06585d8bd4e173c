"""The command `report`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from isobasin.cli.options import Force, Json
from isobasin.cli.output import emit


def report_command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH.json…", help="Results of `isobasin path`.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write, report.html for instance.")],
    force: Force = False,
    json: Json = False,
) -> None:
    """Write one self-contained page: verdict, table, curves, the barrier by component, provenance."""
    facts = report_facts(paths, output, force)
    emit(facts, report_lines(facts), json)


def report_facts(paths: Sequence[Path], output: Path, force: bool) -> dict[str, Any]:
    """Write the page, after all results have been read and checked."""
    from isobasin.report import read_result, verdict, write_report

    results = [read_result(path) for path in paths]
    written = write_report(results, output, force=force)
    pairs = [
        {"file": str(path), "pair": pair.key, "verdict": found.state, "sentence": found.sentence}
        for path, result in zip(paths, results)
        for pair in result.pairs
        for found in [verdict(pair)]
    ]
    return {"output": str(written), "pairs": pairs}


def report_lines(facts: dict[str, Any]) -> list[str]:
    return [*(pair["sentence"] for pair in facts["pairs"]), f"{facts['output']}: open it in any browser"]
