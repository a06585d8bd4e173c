"""`isobasin study`: mistakes, a small study from end to end; in full also killed and resumed, and on Ray."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from isobasin.cli import run
from isobasin.files import AtomicOutput
from isobasin.study.store import read_json

FULL = os.environ.get("ISOBASIN_SLOW", "0") == "1"
DIGITS = Path(__file__).parents[2] / "examples/study/digits.toml"
ISOBASIN = [sys.executable, "-c", "from isobasin.cli import main; main()", "study"]
TINY = """
name = "tiny"
[[cells]]
model = "vit"
positions = "rope"
layers = 1
heads = 2
width = 16
dataset = "digits"
scope = "first-attention"
seeds = [1, 2]
points = 3
samples = 60
ablations = ["stage2"]
[cells.pretrain]
steps = 3
batch = 16
[cells.finetune]
steps = 2
batch = 16
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (TINY.replace("width", "widht"), [], "unknown key 'widht'"),
        (TINY.replace("seeds = [1, 2]", "seeds = []"), [], "seeds is [], expected a list of at least two"),
        (TINY.replace('"vit"', '"resnet"'), [], "model is 'resnet', expected one of vit"),
        (TINY.replace('"digits"', '"cifar10"'), ["--data", "."], "data set 'cifar10'"),
        (TINY.replace('"digits"', '"no/such/folder"'), [], "data set 'no/such/folder'"),
        (TINY, ["--data", "missing"], "--data missing: no such folder"),
        (TINY, ["--engine", "slurm"], "--engine 'slurm' is unknown, expected one of local, ray"),
        (TINY, ["--workers", "0"], "--workers 0, expected 1 or more"),
        (TINY, ["--device", "abacus"], "--device 'abacus' is unknown"),
        (TINY, ["--only", "llama"], "--only 'llama' fits none of 1 cells"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    text: str,
    more: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    code = run(["study", "run", str(written(tmp_path, text)), "-o", str(tmp_path / "out"), *more])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_no_study_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("mine")
    assert run(["study", "run", str(written(tmp_path, TINY)), "-o", str(tmp_path / "out")]) == 2
    assert "holds no study.json, so it is no study" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]
    assert run(["study", "report", str(tmp_path / "out")]) == 2


def test_help_imports_no_torch() -> None:
    source = (
        "import sys; from isobasin.cli import run\n"
        "assert run(['study', 'run', '--help']) == 0\n"
        "print([name for name in ('torch', 'transformers', 'scipy', 'ray', 'isobasin.study') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert "--drop-weights" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def results(folder: Path) -> dict[str, Any]:
    """Every number of every job by the job's name, without how long it took."""
    found = {path.parent.name: read_json(path) for path in (folder / "done").glob("[!.]*/result.json")}
    for result in found.values():
        del result["seconds"], result["job"]["seconds"]
    return found


def test_a_study_from_end_to_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, command = tmp_path / "out", ["study", "run", str(written(tmp_path, TINY)), "--workers", "1"]
    assert run([*command, "-o", str(out), "--json"]) == 0
    facts = json.loads(capfd.readouterr().out)
    (cell,) = facts["cells"]
    assert facts["failed"] == []
    assert (cell["status"], cell["n_pairs"]) == ("done", 1)
    assert set(cell["barrier"]) == {"weights", "weights/none", "weights/orthogonal"}
    assert Path(facts["report"]) == out / "report.html"
    assert "<html" in Path(facts["report"]).read_text(encoding="utf-8")
    before = results(out)
    assert sorted(name.partition("-")[0] for name in before) == ["finetune", "finetune", "pair", "pretrain"]
    times = {path: path.stat().st_mtime_ns for path in (out / "done").rglob("*")}

    assert run([*command, "-o", str(out)]) == 0
    said = capfd.readouterr()
    assert "vit rope 1×2×16 digits first-attention" in said.out
    assert said.err == "", "nothing was left to do"
    assert {path: path.stat().st_mtime_ns for path in (out / "done").rglob("*")} == times
    study = read_json(out / "study.json")
    assert len(study["runs"]) == 2
    assert study["runs"][0]["version"]
    assert study["runs"][0]["seconds"] > 0

    harder = written(tmp_path, TINY.replace("samples = 60", "samples = 60\nrequire = { accuracy = 0.99 }"))
    assert run(["study", "run", str(harder), "-o", str(out), "--drop-weights", "--quiet"]) == 1
    assert "failed: seed 1: accuracy" in capfd.readouterr().out
    assert results(out) == before, "what a cell asks for changes no job"
    assert list((out / "done").glob("*/model")) == []
    assert run(["study", "report", str(out), "-o", str(tmp_path / "page.html"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"report": str(tmp_path / "page.html")}
    assert (tmp_path / "page.html").stat().st_size > 1000


def test_two_runs_do_not_share_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fcntl = pytest.importorskip("fcntl")
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run(["study", "run", str(written(tmp_path, TINY)), "-o", str(out)]) == 2
    assert "another run is at work there" in capsys.readouterr().err


def small_digits(tmp_path: Path) -> Path:
    """The grid of the example, with a few steps of training."""
    text = DIGITS.read_text(encoding="utf-8")
    small, n = re.subn(r"epochs = \d+", "steps = 30", text)
    assert n == 3
    for before, after in (("samples = 1000", "samples = 100"), ("points = 25", "points = 5"), ("0.85", "0.0")):
        assert before in small
        small = small.replace(before, after)
    return written(tmp_path, small)


def wait_for(condition: Any, seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.1)


def start(grid: Path, out: Path, *more: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([*ISOBASIN, "run", str(grid), "-o", str(out), "--quiet", *more])


def n_done(folder: Path) -> int:
    return len(list(folder.glob("done/[!.]*/result.json")))


def descendants(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # processes come and go
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            children += map(int, path.read_text().split())
    return [*children, *(found for child in children for found in descendants(child))]


def is_at_work(pid: int) -> bool:
    """Whether a process is a Ray worker inside one of our jobs: Ray names it by the function that it runs."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::attempt")
    except (FileNotFoundError, ProcessLookupError):
        return False


full = pytest.mark.skipif(not FULL, reason="the grid of the example several times: ISOBASIN_SLOW=1")


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The small grid, and its numbers without any disturbance."""
    folder = tmp_path_factory.mktemp("straight")
    grid = small_digits(folder)
    assert run(["study", "run", str(grid), "-o", str(folder / "out"), "--quiet"]) == 0
    expected = results(folder / "out")
    assert len(expected) == 2 + 6 + 6 + 12
    return grid, expected


@full
@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_numbers(straight: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    grid, expected = straight
    with start(grid, tmp_path / "out") as main:
        wait_for(lambda: n_done(tmp_path / "out") >= 8)
        main.send_signal(signal.SIGKILL)
    kept = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/done/[!.]*/result.json")}
    assert 8 <= len(kept) < len(expected)
    assert run(["study", "run", str(grid), "-o", str(tmp_path / "out"), "--quiet"]) == 0
    assert results(tmp_path / "out") == expected
    assert {path: path.stat().st_mtime_ns for path in kept} == kept, "done work was repeated"


@full
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="workers are looked up in /proc")
def test_ray_gives_the_same_numbers_though_a_worker_is_killed(
    straight: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'isobasin[cluster]'")
    grid, expected = straight
    victims: list[int] = []

    def found() -> bool:
        victims.extend(pid for pid in descendants(main.pid) if is_at_work(pid))
        return bool(victims)

    with start(grid, tmp_path / "out", "--engine", "ray", "--workers", "2") as main:
        wait_for(lambda: n_done(tmp_path / "out") >= 3)
        wait_for(found)
        os.kill(victims[0], signal.SIGKILL)
        assert main.wait() == 0
    assert results(tmp_path / "out") == expected


def test_an_interrupt_is_exit_code_130_and_leaves_what_is_done(tmp_path: Path) -> None:
    grid, out = written(tmp_path, TINY.replace("steps = 2", "steps = 100000")), tmp_path / "out"
    with subprocess.Popen([*ISOBASIN, "run", str(grid), "-o", str(out)], stderr=subprocess.PIPE, text=True) as main:
        wait_for(lambda: list(out.glob("done/pretrain-*/result.json")))
        main.send_signal(signal.SIGINT)
        _, err = main.communicate(timeout=60)
    assert main.returncode == 130
    assert err.splitlines()[-1].startswith("isobasin: interrupted")
    assert [path.name.partition("-")[0] for path in (out / "done").glob("[!.]*")] == ["pretrain"]


def test_what_killed_runs_left_is_gone_after_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at its first file, a run leaves no study.json; later, scratch folders of finished jobs."""
    grid, out = written(tmp_path, TINY), tmp_path / "out"
    monkeypatch.setattr("isobasin.study.run.execute", lambda *_, **__: None)
    out.mkdir()
    with AtomicOutput(out / "study.json") as unfinished:
        left = tmp_path / unfinished.new.parent.name
        shutil.copytree(unfinished.new.parent, left)
    left.rename(out / left.name)
    assert run(["study", "run", str(grid), "-o", str(out), "--quiet"]) == 0
    assert not (out / left.name).exists()
    jobs = set(re.findall(r"(?:pretrain|finetune)-\w+", (out / "study.json").read_text()))
    for name in jobs:
        (out / "scratch" / name).mkdir(parents=True)
    monkeypatch.setattr("isobasin.study.store.Store.is_complete", lambda store, job: job.kind == "pretrain")
    assert run(["study", "run", str(grid), "-o", str(out), "--quiet"]) == 0
    unfinished_jobs = {name for name in jobs if name.startswith("finetune")}
    assert {path.name for path in (out / "scratch").iterdir()} == unfinished_jobs
    assert 0 < len(unfinished_jobs) < len(jobs)


def test_what_a_killed_worker_left_half_written_is_gone_after_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run itself goes on when a worker is killed, so it is the one to clear up."""
    left = tmp_path / "out" / "done" / ".pair-0.isobasin-tmp-abc"
    monkeypatch.setattr("isobasin.study.run.execute", lambda *_, **__: left.mkdir(parents=True))
    run(["study", "run", str(written(tmp_path, TINY)), "-o", str(tmp_path / "out"), "--quiet"])
    assert left.parent.is_dir()
    assert not left.exists()
