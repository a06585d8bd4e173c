"""What a person sees of a study: lines without a terminal, a table of cells on one."""

import io
from pathlib import Path

import pytest

from isobasin.study.engine.watching import Standing, watching
from isobasin.study.grid import read_grid
from isobasin.study.plan import CellPlan, plan_cell

GRID = """
name = "watched"
[[cells]]
model = "vit"
positions = ["learned", "rope"]
layers = 1
heads = 2
width = 16
dataset = "digits"
scope = "first-attention"
seeds = [1, 2]
[cells.pretrain]
steps = 3
[cells.finetune]
steps = 2
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def plans(tmp_path: Path) -> list[CellPlan]:
    path = tmp_path / "grid.toml"
    path.write_text(GRID)
    return [plan_cell(cell) for cell in read_grid(path).cells]


def test_lines_tell_what_is_done_and_what_failed(
    plans: list[CellPlan], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 7.0)
    with watching(plans, quiet=False) as (told, _):
        pretrain, first, second, pair = plans[0].jobs
        told("found", pretrain, "")
        told("started", first, "")
        told("done", first, "")
        told("started", second, "")
        told("failed", second, "no memory")
        told("blocked", pair, "")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "[2/8] finetune digits first-attention seed 1: done, 0.0 s",
        "[2/8] finetune digits first-attention seed 2: failed, 0.0 s: no memory",
    ]


def test_quiet_says_nothing(plans: list[CellPlan], capsys: pytest.CaptureFixture[str]) -> None:
    with watching(plans, quiet=True) as (told, standing):
        told("failed", plans[0].jobs[0], "no memory")
    assert capsys.readouterr() == ("", "")
    assert standing.count("failed") == 1


def test_a_cell_stands_as_its_jobs_do(plans: list[CellPlan]) -> None:
    standing, plan = Standing(plans), plans[0]
    assert standing.cell_state(plan) == "waiting"
    standing.tell("started", plan.jobs[0], "")
    assert standing.cell_state(plan) == "running"
    for job in plan.jobs:
        standing.tell("done", job, "")
    assert (standing.cell_state(plan), standing.cell_state(plans[1])) == ("done", "waiting")
    standing.tell("blocked", plan.jobs[-1], "")
    assert standing.cell_state(plan) == "failed"


def test_a_terminal_shows_a_table_of_cells(plans: list[CellPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "160"), ("LINES", "50")):
        monkeypatch.setenv(name, value)
    with watching(plans, quiet=False) as (told, _):
        told("started", plans[0].jobs[0], "")
        told("failed", plans[0].jobs[0], "no memory")
        told("started", plans[1].jobs[0], "")
    text = terminal.getvalue()
    assert "0 of 8 jobs done, 1 failed" in text
    assert "pretrain vit learned digits: failed" in text
    rows = [line for line in text.splitlines() if "vit rope 1×2×16 digits first-attention" in line]
    assert "running" in rows[-1]
    assert "0/4" in rows[-1]
