"""The report of a study: what it averages, what it calls connected, and what it does with cells that are not done."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from study_documents import MATCHERS, Written, full_study

from isobasin.cli import run
from isobasin.errors import IsobasinError
from isobasin.report.study_page import file_names, render, write_figures, write_study_report
from isobasin.report.svg import Dot, LogScale, Series, dot_strip, panel, ticks, value_range
from isobasin.report.text import NBSP
from isobasin.study.results import (
    Study,
    distance_cells,
    position_comparisons,
    read_study,
    scores,
    size_name,
    stage2_cells,
    study_title,
    summary_row,
    sweeps,
)


def one_cell(folder: Path, **settings: Any) -> Study:
    made = Written(folder)
    made.cell(**settings)
    return read_study(made.close())


def test_means_shares_and_the_rule(tmp_path: Path) -> None:
    (cell,) = one_cell(tmp_path, naive=0.5, shares={"weights": 0.06, "learned": 0.03}).cells
    found = scores(cell)
    assert found["naive"].mean == pytest.approx(0.55)
    assert found["weights"].mean == pytest.approx(0.033)
    assert found["weights"].share == pytest.approx(0.06)
    assert (found["weights"].n_connected, found["weights"].connected) == (0, False)
    assert (found["learned"].n_connected, found["learned"].connected) == (3, True)


def test_a_small_barrier_is_connected_whatever_its_share(tmp_path: Path) -> None:
    (cell,) = one_cell(tmp_path, naive=0.03, shares={"weights": 0.63}).cells
    found = scores(cell)["weights"]
    assert [round(each, 4) for each in found.each if each is not None] == [0.0189, 0.0208, 0.0227]
    assert (found.n_connected, found.connected) == (1, False), "every pair has to be"


def test_outputs_that_moved_are_no_alignment(tmp_path: Path) -> None:
    made = Written(tmp_path)
    made.cell(shares={"weights": 0.01})
    made.close()
    (cell,) = read_study(tmp_path).cells
    assert scores(cell)["weights"].connected
    for name in (each["job"] for each in cell.about["jobs"]["pairs"]):
        place = tmp_path / "done" / name / "result.json"
        place.write_text(
            place.read_text().replace('"output_change": {"weights": 2e-07}', '"output_change": {"weights": 0.2}')
        )
    (cell,) = read_study(tmp_path).cells
    assert not scores(cell)["weights"].connected
    assert "outputs moved by 0.2!" in render(read_study(tmp_path))


def test_a_pair_without_a_barrier_forbids_the_mean(tmp_path: Path) -> None:
    study = one_cell(tmp_path, naive=0.5)
    name = study.cells[0].about["jobs"]["pairs"][1]["job"]
    place = tmp_path / "done" / name / "result.json"
    found = json.loads(place.read_text())
    found["barrier"]["weights"]["loss"] = None
    found["curves"]["weights"]["loss"][7] = None
    place.write_text(json.dumps(found))
    (cell,) = read_study(tmp_path).cells
    assert scores(cell)["weights"].mean is None
    assert not scores(cell)["weights"].connected
    assert scores(cell)["naive"].mean is not None
    assert 'class="hole"' in render(read_study(tmp_path))


def test_what_is_not_done_is_shown_and_not_averaged(tmp_path: Path) -> None:
    study = read_study(full_study(tmp_path))
    states = {cell.about["cell"]: (cell.status, bool(scores(cell))) for cell in study.cells}
    assert states["bert rope imdb all-attention"] == ("failed", False)
    assert states["llama rope enwik8 all-attention"] == ("not filled", False)
    assert states["vit rope cifar10 model"] == ("done", True)
    text = render(study)
    assert "seed 2: accuracy 0.812, asked for ≥ 0.84" in text
    assert "7 of 9 cells are filled, 1 failed and not averaged, 1 not filled yet." in text
    row = next(row for row in map(summary_row, study.cells) if row["status"] == "failed")
    assert row["barrier"] == {}


def test_a_cell_that_says_done_but_lost_a_result_is_not_filled(tmp_path: Path) -> None:
    study = one_cell(tmp_path)
    assert study.cells[0].status == "done"
    shutil.rmtree(tmp_path / "done" / study.cells[0].about["jobs"]["pairs"][0]["job"])
    assert read_study(tmp_path).cells[0].status == "not filled"


def test_results_alone_say_the_same(tmp_path: Path) -> None:
    """Without study.json cells are put together from the jobs; what is not there is then not known to be missing."""
    full_study(tmp_path)
    before = {repr(sorted(_numbers(cell).items())) for cell in read_study(tmp_path).cells if cell.done}
    ablated = sum(bool(cell.ablations["heads"]) for cell in read_study(tmp_path).cells)
    (tmp_path / "study.json").unlink()
    study = read_study(tmp_path)
    after = {repr(sorted(_numbers(cell).items())) for cell in study.cells}
    assert before <= after
    assert sum(bool(cell.ablations["heads"]) for cell in study.cells) == ablated > 0
    assert [pair.seeds for pair in study.cells[0].pairs] == [(1, 2), (1, 3), (2, 3)]
    assert {cell.baseline for cell in study.cells if cell.about["model"] == "bert"} == {0.88}


def test_what_a_killed_worker_left_is_no_result(tmp_path: Path) -> None:
    full_study(tmp_path)
    (tmp_path / "study.json").unlink()
    before = len(read_study(tmp_path).cells)
    pair = next((tmp_path / "done").glob("pair-*"))
    shutil.copytree(pair, pair.with_name(f".unfinished-{pair.name}-0a1b"))
    study = read_study(tmp_path)
    assert (len(study.cells), [len(cell.pairs) for cell in study.cells]) == (before, [3] * before)


def _numbers(cell: Any) -> dict[str, Any]:
    keys = ("model", "dataset", "positions", "scope", "heads", "layers")
    row = summary_row(cell)
    return {key: row[key] for key in (*keys, "barrier", "accuracy", "baseline")}


def test_several_studies_are_one(tmp_path: Path) -> None:
    for name in ("first", "second"):
        made = Written(tmp_path / name)
        made.cell(model="vit" if name == "first" else "bert", dataset="imdb")
        made.close(name)
    study = read_study(tmp_path)
    assert [cell.about["model"] for cell in study.cells] == ["vit", "bert"]
    assert len(study.runs) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: None, "no study in it, expected study.json"),
        (lambda folder: (folder / "study.json").write_text("{"), "can not be read as JSON"),
        (
            lambda folder: (folder / "study.json").write_text('{"cells": [{"jobs": {"pairs": [1]}}]}'),
            "run the study again",
        ),
    ],
)
def test_a_folder_that_is_no_study_is_refused(tmp_path: Path, change: Any, said: str) -> None:
    change(tmp_path)
    with pytest.raises(IsobasinError, match=said):
        read_study(tmp_path)


def test_a_result_that_is_none_is_refused(tmp_path: Path) -> None:
    study = one_cell(tmp_path)
    name = study.cells[0].about["jobs"]["pairs"][0]["job"]
    (tmp_path / "done" / name / "result.json").write_text('{"lambdas": [0, 1], "curves": {"naive": {"loss": [1]}}}')
    with pytest.raises(IsobasinError, match="not the result of a pair; delete it"):
        read_study(tmp_path)


def _half_way(cell: Any, label: str) -> float:
    losses = [pair.facts["curves"][label]["loss"][12] for pair in cell.pairs]
    return float(sum(losses) / len(losses))


def test_a_cell_without_a_naive_barrier_has_no_share_and_spoils_no_mean(tmp_path: Path) -> None:
    made = Written(tmp_path)
    shares = {"weights/none": 0.8, "weights/orthogonal": 0.2, "weights": 0.1}
    made.cell(shares=shares)
    made.cell(dataset="imdb", model="bert", naive=0.0, shares=shares)
    study = read_study(made.close())
    assert scores(study.cells[1])["weights"].share is None
    said = "Mean over 1 cell with a re-initialised first attention (1 more has no naive barrier): none 80"
    assert said in render(study)


def test_a_frozen_rest_is_named(tmp_path: Path) -> None:
    made = Written(tmp_path)
    made.cell()
    made.cell(frozen=True)
    study = read_study(made.close())
    assert [size_name(cell).endswith("rest frozen") for cell in study.cells] == [False, True]
    assert [name.endswith("-frozen") for name in file_names(study.cells)] == [False, True]


def test_rows_of_the_ablations(tmp_path: Path) -> None:
    study = read_study(full_study(tmp_path))
    found = stage2_cells(study.cells)
    assert [round(found[0][1][name].share or 0, 3) for name in ("none", "orthogonal", "full")] == [0.75, 0.14, 0.1]
    assert len(found) == 4, "cells without all three stages have no row"
    made = Written(tmp_path / "whole")
    made.cell(scope="model")
    assert stage2_cells(read_study(made.close()).cells) == [], "nor have whole models"
    assert found[0][1]["full"].half == pytest.approx(_half_way(found[0][0], "weights"))
    text = render(study)
    assert "Mean over 4 cells with a re-initialised first attention: none 75" in text
    assert list(distance_cells(study.cells)[0][1]) == ["complete", "cosine"]
    facing = position_comparisons(study.cells)
    assert [(a.about["positions"], r.about["positions"]) for a, r in facing] == [("sinusoidal", "rope")] * 2
    (sweep,) = sweeps(study.cells)
    assert (sweep.what, [number for number, _ in sweep.cells]) == ("heads", [4, 8])


def test_cells_that_differ_in_training_do_not_face_each_other(tmp_path: Path) -> None:
    made = Written(tmp_path)
    made.cell(positions="rope", epochs=10)
    made.cell(positions="sinusoidal", epochs=20)
    made.cell(positions="rope", epochs=30)
    study = read_study(made.close())
    assert position_comparisons(study.cells) == []
    (sweep,) = sweeps(study.cells)
    assert (sweep.what, [number for number, _ in sweep.cells]) == ("steps", [1000, 3000])
    assert file_names(study.cells)[2] == f"{file_names(study.cells)[0]}-v2"


def test_a_sweep_over_training_time_varies_nothing_else(tmp_path: Path) -> None:
    made = Written(tmp_path)
    made.cell(epochs=10, layers=1)
    made.cell(epochs=30, layers=1)
    made.cell(epochs=50, layers=1, rate=2e-3)
    study = read_study(made.close())
    (sweep,) = sweeps(study.cells)
    assert (sweep.what, [number for number, _ in sweep.cells]) == ("steps", [1000, 3000])
    assert f"first-attention, 1 layer, 4 heads, d{NBSP}={NBSP}192: mean barrier (nats) against steps" in render(study)
    assert size_name(study.cells[0], but="heads") == f"1 layer, d{NBSP}={NBSP}192"


def rows_of(page: str) -> list[str]:
    """The rows of the tables of cells, as text."""
    tables = re.findall(r'<table class="study cells drawing".*?</table>', page)
    rows = [row for table in tables for row in re.findall(r"<tr.*?</tr>", table)[1:]]
    return [re.sub(r"<[^>]*>", " ", row) for row in rows]


def test_rows_of_a_sweep_say_what_varies(tmp_path: Path) -> None:
    made = Written(tmp_path)
    for epochs, layers in ((10, 6), (30, 6), (30, 2)):
        made.cell(epochs=epochs, layers=layers)
    made.cell(model="bert", dataset="imdb")
    rows = rows_of(render(read_study(made.close())))
    found = [re.search(r"varies: ([^<]*?)\s\s", row) for row in rows]
    assert [each[1] if each else None for each in found] == ["steps 1000", "layers 6, steps 3000", "layers 2", None]


def test_a_cell_without_a_naive_barrier_says_so(tmp_path: Path) -> None:
    made = Written(tmp_path)
    made.cell(naive=0.01)
    made.cell(model="bert", dataset="imdb", naive=0.8, shares={"weights": 0.01, "activations": 0.02, "learned": 0.01})
    made.cell(model="bert", dataset="imdb", positions="none", naive=0.8, shares={"weights": 0.5})
    rows = rows_of(render(read_study(made.close())))
    assert rows[0].rstrip().endswith("no naive barrier")
    assert rows[1].rstrip().endswith("weights, learned, activations")
    assert rows[2].rstrip().endswith("no")


def test_a_study_has_a_title_and_not_the_name_of_its_folder(tmp_path: Path) -> None:
    made = Written(tmp_path / "out-17")
    made.cell(model="bert", dataset="imdb:words-20000")
    folder = made.close("out-17")
    assert study_title(read_study(folder)) == "BERT on IMDB"
    assert "<h1>BERT on IMDB: which models are linearly connected?</h1>" in render(read_study(folder))
    made.cell(model="vit", dataset="mnist")
    assert study_title(read_study(made.close("out-17"))) == "BERT and ViT on IMDB and MNIST"
    swept = Written(tmp_path / "swept")
    swept.cell(heads=4)
    swept.cell(heads=8)
    assert study_title(read_study(swept.close())) == "ViT on CIFAR-10 against heads"
    table = json.loads((folder / "study.json").read_text("utf-8"))
    (folder / "study.json").write_text(json.dumps(table | {"title": "Which positions matter"}))
    assert study_title(read_study(folder)) == "Which positions matter"


def test_dots_of_small_barriers_are_all_seen() -> None:
    scale = LogScale.around([0.0, 0.3, 4.0])
    assert (scale.low, scale.high) == (0.001, 10.0)
    strip = dot_strip([Dot(0.0, True, "x")] * 9 + [Dot(0.3, False, "y")], scale, 0.02, "weights", label="z").source
    places = re.findall(r'cx="([^"]*)" cy="([^"]*)"', strip)
    assert len(set(places)) == 10
    assert sorted(float(x.rstrip("%")) for x, _ in places)[8] < scale.place(0.001), "left of the axis"
    assert (strip.count("filled"), strip.count("hollow")) == (9, 1)


def test_summary_and_page_are_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobasin.report.study_page.write_figures", lambda *_: [])  # takes long
    folder = full_study(tmp_path / "study")
    page = write_study_report(folder)
    assert page == folder / "report.html"
    rows = json.loads((folder / "summary.json").read_text("utf-8"))["cells"]
    assert len(rows) == 9
    first = rows[0]["barrier"]["weights"]
    assert first["each"] == pytest.approx([0.04, 0.044, 0.048])
    assert (first["share"], first["connected"]) == (pytest.approx(0.1), False)
    other = write_study_report(folder, tmp_path / "else.html")
    assert other.read_bytes() == page.read_bytes()
    with pytest.raises(IsobasinError, match=r"no such folder for page\.html"):
        write_study_report(folder, tmp_path / "none" / "page.html")


def test_figures_are_drawn_from_the_json_and_are_the_same_each_time(tmp_path: Path) -> None:
    study = one_cell(tmp_path, shares={"weights": 0.1})
    found = write_figures(study, tmp_path / "figures")
    assert [path.name for path in found] == [
        f"vit-cifar-10-rope-6x4x192-first-attention.{kind}" for kind in ("png", "svg")
    ]
    again = write_figures(study, tmp_path / "again")
    first, second = (path.read_text("utf-8") for path in (found[1], again[1]))
    assert first == second
    assert 'id="clip0"' in first  # not matplotlib's name, which hashes the last bits of a layout
    assert "url(#clip0)" in first
    assert not re.search(r"\bp[0-9a-f]{10}\b", first)


def test_a_report_replaces_only_pages_and_figures_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_cell(tmp_path / "study", shares={"weights": 0.1})
    notes, figures = tmp_path / "notes.html", tmp_path / "study" / "figures"
    photograph = figures / "vit-cifar-10-rope-6x4x192-first-attention.svg"
    figures.mkdir()
    for mine, kind in ((notes, "page"), (photograph, "figure")):
        mine.write_text("<?xml version='1.0'?><svg>MINE</svg>")
        assert run(["study", "report", str(tmp_path / "study"), "-o", str(notes)]) == 2
        said = capsys.readouterr().err
        assert f"{mine.name}: not a {kind} of isobasin, so it is not replaced" in said
        assert said.count("\n") == 1
        assert "MINE" in mine.read_text()
        assert list(figures.iterdir()) == [photograph][: kind == "figure"]
        mine.unlink()


def test_a_report_takes_its_old_figures_away_and_nothing_else(tmp_path: Path) -> None:
    one_cell(tmp_path, shares={"weights": 0.1})
    write_study_report(tmp_path)
    figures = tmp_path / "figures"
    (figures / "mine.svg").write_text("not of the study")
    summary = json.loads((tmp_path / "summary.json").read_text("utf-8"))
    first = {"vit-cifar-10-rope-6x4x192-first-attention.png", "vit-cifar-10-rope-6x4x192-first-attention.svg"}
    assert set(summary["figures"]) == first
    outside = tmp_path / "outside.svg"
    outside.write_text("elsewhere")
    # Removed by hand; a name that is none of ours; a file that is none of ours.
    summary["figures"] += ["gone.svg", "../outside.svg", "mine.svg"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    study = json.loads((tmp_path / "study.json").read_text("utf-8"))
    for cell in study["cells"]:
        cell["width"] = 96
    (tmp_path / "study.json").write_text(json.dumps(study))
    write_study_report(tmp_path)
    assert {path.name for path in figures.iterdir()} == {"mine.svg"} | {n.replace("192", "96") for n in first}
    assert outside.exists()


@pytest.mark.slow
def test_every_kind_of_figure_can_be_drawn(tmp_path: Path) -> None:
    """In the smoke run those of one cell; in full also those that compare cells."""
    kinds = ["vit", "heads-", "layers-", "control-", "stage2"]
    if os.environ.get("ISOBASIN_SLOW") == "1":
        study, kinds = read_study(full_study(tmp_path)), [*kinds, "bert", "llama", "positions", "sweep-heads-"]
    else:
        study = one_cell(tmp_path, ablations=("heads", "layers", "control"))
    found = {path.stem for path in write_figures(study, tmp_path / "figures")}
    assert [kind for kind in kinds if not any(name.startswith(kind) for name in found)] == []
    assert not any(name.startswith("nothing") for name in found)


def test_a_chart_has_gaps_where_a_number_is_missing() -> None:
    made = panel([0, 0.5, 1], [Series([1.0, None, 2.0], "naive")], (0, 3), ends=("a", "b"), below="λ", title="t").source
    assert made.count('class="hole"') == 1
    assert "M" in made.split('class="s-naive"')[0].rpartition('d="')[2][1:], "the line starts anew behind the gap"
    assert (
        'class="hole"'
        not in panel([0, 1], [Series([1.0, 2.0], "naive")], (0, 3), ends=("a", "b"), below="", title="").source
    )


def test_scales_hold_all_values_and_round_steps() -> None:
    low, high = value_range([[0.2, None], [0.9]])
    assert low < 0.2 < 0.9 < high
    assert value_range([[None]]) == (-0.07, 1.07)
    assert value_range([[2.0, 2.0]]) == (1.9, 2.1)
    assert ticks(-0.05, 1.0) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize("low", [0.0, 0.2, 2.7, 14.0, -3.0])
@pytest.mark.parametrize("width", [1.0, 1e-2, 1e-3, 1e-4, 1e-6])
def test_labels_of_narrow_ranges_differ_and_fit(low: float, width: float) -> None:
    made = panel([0, 1], [], value_range([[low, low + width]]), ends=("", ""), below="", title="").source
    found = re.findall(r'text-anchor="end">([^<]+)<', made)
    assert 2 <= len(found) == len(set(found))
    assert max(map(len, found)) <= 8
    numbers = [float(label.replace("−", "-")) for label in found]
    steps = [b - a for a, b in pairwise(numbers)]
    assert steps == pytest.approx([steps[0]] * len(steps), rel=0.05)


def test_hostile_words_stay_words(tmp_path: Path) -> None:
    name = "</script><script>window.pwned=1</script>"
    study = one_cell(tmp_path, dataset=name, status="failed", why=name)
    assert name not in render(study)
    assert MATCHERS["weights"] == 0.1, "the documents are shared, and nobody may have changed them"


def test_the_command_shows_progress_by_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a terminal would show is recorded instead."""
    told: list[tuple[str, int, int]] = []

    @contextmanager
    def recorded(*, quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
        yield lambda *step: None if quiet else told.append(step)

    monkeypatch.setattr("isobasin.cli.study.progress", recorded)
    monkeypatch.setattr("isobasin.report.figures.new_figure", lambda paths, *_, **__: list(paths))
    study = full_study(tmp_path / "study")
    assert run(["study", "report", str(study)]) == 0
    assert [step[0] for step in told] == ["drawing figures"] * len(told)
    assert [step[1] for step in told] == list(range(1, len(told) + 1))
    assert {step[2] for step in told} == {len(told)}
    assert len(told) > 3
    told.clear()
    assert run(["study", "report", str(study), "--json"]) == 0
    assert told == []
