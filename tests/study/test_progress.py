"""What a person sees of a study: lines without a terminal, a table of cells on one."""

import io
from pathlib import Path

import pytest

from isobasin.study.config import read_grid
from isobasin.study.plan import CellPlan, plan_cell
from isobasin.study.run import Progress, show_progress

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
    with show_progress(plans, quiet=False) as (on_event, _):
        pretrain, first, second, pair = plans[0].jobs
        on_event("cached", pretrain, "")
        on_event("started", first, "")
        on_event("done", first, "")
        on_event("started", second, "")
        on_event("failed", second, "no memory")
        on_event("blocked", pair, "")
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "[2/8] finetune digits first-attention seed 1: done, 0.0 s",
        "[2/8] finetune digits first-attention seed 2: failed, 0.0 s: no memory",
    ]


def test_quiet_says_nothing(plans: list[CellPlan], capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(plans, quiet=True) as (on_event, progress):
        on_event("failed", plans[0].jobs[0], "no memory")
    assert capsys.readouterr() == ("", "")
    assert progress.count("failed") == 1


def test_a_cell_stands_as_its_jobs_do(plans: list[CellPlan]) -> None:
    progress, plan = Progress(plans), plans[0]
    assert progress.cell_state(plan) == "waiting"
    progress.update("started", plan.jobs[0])
    assert progress.cell_state(plan) == "running"
    for job in plan.jobs:
        progress.update("done", job)
    assert (progress.cell_state(plan), progress.cell_state(plans[1])) == ("done", "waiting")
    progress.update("blocked", plan.jobs[-1])
    assert progress.cell_state(plan) == "failed"


def test_a_terminal_shows_a_table_of_cells(plans: list[CellPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    for name, value in (("TERM", "xterm"), ("COLUMNS", "160"), ("LINES", "50")):
        monkeypatch.setenv(name, value)
    with show_progress(plans, quiet=False) as (on_event, _):
        on_event("started", plans[0].jobs[0], "")
        on_event("failed", plans[0].jobs[0], "no memory")
        on_event("started", plans[1].jobs[0], "")
    text = terminal.getvalue()
    assert "0 of 8 jobs done, 1 failed" in text
    assert "pretrain vit learned digits: failed" in text
    rows = [line for line in text.splitlines() if "vit rope 1×2×16 digits first-attention" in line]
    assert "running" in rows[-1]
    assert "0/4" in rows[-1]
