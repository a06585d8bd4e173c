"""The commands `study run` and `study report`. Nothing heavy is imported before a command runs."""

from pathlib import Path
from typing import Annotated

import typer

from isobasin.cli.app import Json, Quiet, app
from isobasin.cli.printing import emit

study = typer.Typer(no_args_is_help=True, help="The paper's experiments: a grid of models, trained, aligned, measured.")
app.add_typer(study, name="study")


@study.command("run")
def run_command(
    grid: Annotated[Path, typer.Argument(metavar="GRID.toml", help="The cells: models, data, scopes, seeds.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="The folder of the study; what is done there is not done again.")
    ],
    data: Annotated[Path | None, typer.Option(help="The root of the data sets; some ship with the package.")] = None,
    engine: Annotated[str, typer.Option(help="local (processes) or ray (a cluster, RAY_ADDRESS).")] = "local",
    workers: Annotated[int | None, typer.Option(help="Jobs at a time; by default one a core, four a GPU.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    only: Annotated[str | None, typer.Option(help="Only cells whose name holds this text.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed in an earlier run.")] = False,
    keep_weights: Annotated[
        bool, typer.Option("--keep-weights/--drop-weights", help="Whether the models stay when all is measured.")
    ] = True,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    """Fill a grid and write its page; a killed run goes on where it was. Exit 1 if a cell failed."""
    from isobasin.cli.studying import study_facts, study_lines
    from isobasin.study.run import Setting

    setting = Setting(
        data=data,
        engine=engine,
        workers=workers,
        device=device,
        only=only,
        retry=retry,
        keep_weights=keep_weights,
        quiet=quiet or json,
    )
    facts = study_facts(grid, output, setting)
    emit(facts, study_lines(facts), json)
    if facts["failed"]:
        raise typer.Exit(1)


@study.command("report")
def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a study.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The page to write; DIR/report.html if left out.")
    ] = None,
    json: Json = False,
) -> None:
    """Tables, figures and one page, from the JSON of a study alone."""
    from isobasin.cli.studying import page_facts

    facts = page_facts(folder, output)
    emit(facts, [f"{facts['report']}: open it in any browser"], json)
