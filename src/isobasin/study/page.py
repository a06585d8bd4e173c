"""The report of a study: tables, figures and one self-contained page, from its JSON alone."""

from importlib import resources
from pathlib import Path

from isobasin.errors import IsobasinError
from isobasin.files import write_text
from isobasin.report.markup import Html, joined
from isobasin.report.page import assembled

from .figures import write_figures
from .page_sections import (
    contents,
    control_part,
    curves_part,
    heads_part,
    intro,
    layers_part,
    models_part,
    positions_part,
    runs_part,
    scope_parts,
    stage2_part,
    sweeps_part,
)
from .results import Study, read_study
from .store import read_json, write_json
from .tables import summary_row

PAGE, SUMMARY, FIGURES = "report.html", "summary.json", "figures"


def write_study_report(folder: Path, output: Path | None = None, *, figures: bool = True) -> Path:
    """Write report.html, summary.json and figures/ into the folder; `output` is another place for the page.

    >>> write_study_report(Path("results/digits"))  # doctest: +SKIP
    PosixPath('results/digits/report.html')
    """
    folder = Path(folder)
    place = folder / PAGE if output is None else Path(output)
    study = read_study(folder)
    _check_place(place)
    drawn = _drawn_before(folder)
    if figures:
        made = {path.name for path in write_figures(study, folder / FIGURES)}
        for name in drawn - made:
            (folder / FIGURES / name).unlink(missing_ok=True)
        drawn = made
    rows = [summary_row(cell) for cell in study.cells]
    write_json(folder / SUMMARY, {"name": study.name, "cells": rows, "figures": sorted(drawn)})
    write_text(place, render(study))
    return place


def _drawn_before(folder: Path) -> set[str]:
    """Figures of an earlier report: those that are not drawn again would be of cells that are no more."""
    try:
        names = read_json(folder / SUMMARY)["figures"]
        return {name for name in names if Path(name).name == name}
    except (IsobasinError, KeyError, TypeError):
        return set()


def _check_place(place: Path) -> None:
    if place.is_dir():
        raise IsobasinError(f"{place}: a folder, expected the name of a page to write")
    if not place.parent.is_dir():
        raise IsobasinError(f"{place.parent}: no such folder for {place.name}; create it first")


def render(study: Study) -> str:
    """The text of the page."""
    anchors = {id(cell): f"cell-{i + 1}" for i, cell in enumerate(study.cells)}
    parts: list[tuple[str, str, Html]] = scope_parts(study, anchors)
    for name, anchor, made in (
        ("Absolute against RoPE", "positions", positions_part(study)),
        ("Stage 2", "stage2", stage2_part(study)),
        ("Stage 1", "heads", heads_part(study)),
        ("Layers", "layers", layers_part(study)),
        ("Control", "control", control_part(study)),
        ("Sweeps", "sweeps", sweeps_part(study)),
        ("Curves", "curves", curves_part(study, anchors)),
        ("Models", "models", models_part(study)),
        ("Runs", "runs", runs_part(study)),
    ):
        if made is not None:
            parts.append((name, anchor, made))
    links = contents([(name, anchor) for name, anchor, _ in parts])
    body = joined([intro(study), links, *(made for _, _, made in parts)])
    rows = [summary_row(cell) for cell in study.cells]
    style = resources.files("isobasin.study").joinpath("page.css").read_text("utf-8")
    return assembled(
        f"{study.name}: which models are linearly connected?", body, charts=[], results=[rows], more_style=style
    )
