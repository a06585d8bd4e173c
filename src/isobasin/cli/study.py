"""The commands of `study`, and `demo`: train, align, measure and report."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from isobasin.cli.help import HELP_NAMES, Command, Group
from isobasin.cli.options import Json, PrintOptions, choice, with_options
from isobasin.cli.output import emit, number, progress

study = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    context_settings=HELP_NAMES,
    rich_markup_mode=None,
    help="Experiments: a grid of models, trained, aligned, measured.",
)


@study.command("run", cls=Command)
@with_options
def run_command(
    *,
    grid: Annotated[Path, typer.Argument(metavar="GRID.toml", help="The cells: models, data, scopes, seeds.")],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FOLDER", help="The study; finished cells in it are not run again."),
    ],
    data: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The data sets; some ship with the package.")
    ] = None,
    engine: Annotated[str, choice("local, ray", "local (processes) or ray (RAY_ADDRESS).")] = "local",
    workers: Annotated[
        int | None, typer.Option(max=1024, metavar="N", help="Jobs at a time; by default one per core, four per GPU.")
    ] = None,
    device: Annotated[str, choice("auto, cpu, cuda", "{}, cuda:1, …")] = "auto",
    only: Annotated[str | None, typer.Option(metavar="TEXT", help="Only cells whose name contains this text.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Run cells again that failed in an earlier run.")] = False,
    keep_weights: Annotated[
        bool,
        typer.Option("--keep-weights/--drop-weights", help="Keep the models after the measurement."),
    ] = True,
    show: PrintOptions,
) -> None:
    """Run a grid and write its page; an interrupted run continues. Exit 1 if a cell failed."""
    import shlex

    from isobasin.report.study_page import write_study_report
    from isobasin.study.run import RunConfig, run_study

    setting = RunConfig(
        data=data,
        engine=engine,
        workers=workers,
        device=device,
        only=only,
        retry=retry,
        keep_weights=keep_weights,
        quiet=show.silent,
    )
    found = run_study(grid, output, setting, command=shlex.join(["isobasin", *sys.argv[1:]]))
    facts = found | {"output": str(output), "report": str(write_study_report(output, None))}
    emit(facts, study_lines(facts), show.json)
    if facts["failed"]:
        raise typer.Exit(1)


@study.command("report", cls=Command)
def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a study, or a packed one, DIR.jsonl.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="The page; DIR/report.html if left out.")
    ] = None,
    json: Json = False,
) -> None:
    """Write the tables, the figures and the page again, from the JSON of a study alone."""
    from isobasin.report.study_page import write_study_report

    with progress(quiet=json) as on_progress:
        report = str(write_study_report(folder, output, watch=partial(on_progress, "drawing figures")))
    emit({"report": report}, [f"{report}: open it in any browser"], json)


Converted = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="PATH", help="Where to write; else beside the study.")
]


@study.command("pack", cls=Command)
def pack_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of a finished study.")],
    output: Converted = None,
    json: Json = False,
) -> None:
    """Write a finished study as one file, DIR.jsonl, which `study report` reads like the folder."""
    from isobasin.study.store import pack

    packed = str(pack(folder, output))
    emit({"output": packed}, [packed], json)


@study.command("unpack", cls=Command)
def unpack_command(
    file: Annotated[Path, typer.Argument(metavar="NAME.jsonl", help="A packed study.")],
    output: Converted = None,
    json: Json = False,
) -> None:
    """Write the folder of a packed study again, so that `study run` can continue it."""
    from isobasin.study.store import unpack

    folder = str(unpack(file, output))
    emit({"output": folder}, [folder], json)


def study_lines(facts: dict[str, Any]) -> list[str]:
    """A table of the cells, and the path of the page."""
    rows = [_row(cell) for cell in facts["cells"]]
    head = ("cell", "models", "naive", "aligned", "share", "")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in [head, *rows]]
    return [*lines, f"{facts['report']}: open it in any browser"]


def _row(cell: dict[str, Any]) -> tuple[str, ...]:
    """The row of a cell, with the numbers of its first matcher."""
    label = next(iter(cell["barrier"]), None)
    barrier, share = (cell[name].get(label) for name in ("barrier", "share"))
    connected = "connected" if cell["connected"].get(label) else "not connected"
    verdict = connected if cell["status"] == "done" else ": ".join(filter(None, [cell["status"], cell["why"]]))
    return (
        cell["cell"],
        _quality(cell),
        number(cell["naive"], ".4f"),
        number(barrier, ".4f"),
        number(share, ".1%"),
        verdict,
    )


def _quality(cell: dict[str, Any]) -> str:
    for name in ("bits_per_byte", "accuracy"):
        if cell[name] is not None:
            mean = cell[name]["mean"]
            return f"{mean:.1%}" if name == "accuracy" else f"{mean:.3f} bits"
    return "–"
