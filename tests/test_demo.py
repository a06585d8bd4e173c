"""The demo: what ships gives the printed numbers; with training, made tiny; nothing in the way is overwritten."""

import html
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from isobasin.cli.demo import demo_lines
from isobasin.data import shipped
from isobasin.demo import MODEL, OUTPUTS, TRAINING, DemoConfig, run_demo
from isobasin.errors import IsobasinError
from isobasin.model import Transformer
from isobasin.study.trainer import TrainingRecipe

FULL = os.environ.get("ISOBASIN_SLOW", "0") == "1"
README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
TINY = DemoConfig(training=TrainingRecipe(steps=6, batch_size=16), steps=2, n_points=5, max_samples=100)
Made = tuple[Path, dict[str, Any], list[tuple[str, int, int]]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The demo with training, tiny."""
    out = tmp_path_factory.mktemp("demo") / "out"
    told: list[tuple[str, int, int]] = []
    facts = run_demo(out, train=True, config=TINY, on_progress=lambda *said: told.append(said))
    return out, facts, told


def test_everything_is_written_and_the_numbers_agree(made: Made) -> None:
    out, facts, _ = made
    assert sorted(p.name for p in out.iterdir()) == sorted(OUTPUTS)
    results = {name: json.loads((out / f"{name}.json").read_text("utf-8")) for name in ("path", "learned")}
    assert [len(result["lambdas"]) for result in results.values()] == [5, 5]
    assert [result["task"]["n_samples"] for result in results.values()] == [100, 100]
    assert [result["alignment"]["A-B"]["matcher"] for result in results.values()] == ["weights", "learned"]
    assert facts["barrier"] == results["path"]["barrier"]["A-B"] | {
        "learned": results["learned"]["barrier"]["A-B"]["aligned"]
    }
    assert {row["path"] for row in facts["table"]} == {"naive", "aligned", "learned"}
    assert facts["distance_after"] < facts["distance_before"]
    page = html.unescape((out / "report.html").read_text("utf-8"))
    assert facts["sentence"] in re.sub(r"<[^>]+>", "", page)  # terms are links
    assert "Are A and B linearly connected?" in page
    for matcher in ("weights", "learned"):
        assert f"A to B: scope model, matcher {matcher}, stage 2 orthogonal" in page


def test_the_models_are_what_their_names_say(made: Made) -> None:
    out, _, _ = made
    models = {name: Transformer.load(out / name) for name in ("A", "B", "B_aligned", "B_learned", "merged")}
    assert models["A"].config == MODEL
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    assert not torch.allclose(models["A"](images), models["B"](images), rtol=1e-4, atol=1e-5)
    weights = {name: dict(model.named_parameters()) for name, model in models.items()}
    for name in ("B_aligned", "B_learned"):
        torch.testing.assert_close(models[name](images), models["B"](images), rtol=1e-4, atol=1e-5)
        assert not torch.equal(weights[name]["head.weight"], weights["B"]["head.weight"])
    for name, merged in weights["merged"].items():
        torch.testing.assert_close(merged, (weights["A"][name] + weights["B_learned"][name]) / 2)


def test_progress_reaches_its_end_in_every_stage(made: Made) -> None:
    _, _, told = made
    last = {stage: (done, of) for stage, done, of in told}
    stages = ["training A", "training B", "aligning", "naive path", "aligned path", "learning", "learned path"]
    assert sorted(last) == sorted([*stages, "merging", "report"])
    assert told[0][0].startswith("training")
    assert told[-1] == ("report", 1, 1)
    assert all(done == of for stage, (done, of) in last.items() if stage != "aligning")  # sweeps: at most
    assert last["training A"] == (6, 6)


def test_a_folder_in_use_is_refused_before_anything_is_trained(made: Made, tmp_path: Path) -> None:
    out, _, _ = made
    told: list[str] = []
    (tmp_path / "other" / "A").mkdir(parents=True)
    (tmp_path / "other" / "A" / "thesis.tex").touch()
    with pytest.raises(IsobasinError, match=r"A holds thesis\.tex, which no checkpoint of isobasin has"):
        run_demo(tmp_path / "other", force=True, on_progress=lambda *_: pytest.fail("ran before it was refused"))
    with pytest.raises(IsobasinError, match=r"holds A, B, B_aligned.*already; use --force"):
        run_demo(out, config=TINY, on_progress=lambda *said: told.append(said[0]))
    assert told == []


def test_the_same_seed_gives_the_same_numbers_and_another_does_not(made: Made, tmp_path: Path) -> None:
    _, facts, _ = made
    again = run_demo(tmp_path / "again", train=True, config=TINY)
    assert again["barrier"] == facts["barrier"]
    assert again["accuracy"] == facts["accuracy"]
    other = run_demo(tmp_path / "other", train=True, seed=5, config=TINY)
    assert other["barrier"] != facts["barrier"]


def test_an_interruption_stops_both_models_and_gives_the_threads_back(tmp_path: Path) -> None:
    before, told, raised = torch.get_num_threads(), [], []
    long = DemoConfig(training=TrainingRecipe(steps=10_000, batch_size=8))

    def interrupt(stage: str, done: int, of: int) -> None:
        told.append(stage)
        if stage == "training A" and "training B" in told:  # one of the two may start much later than the other
            raised.append(len(told))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        run_demo(tmp_path / "out", train=True, config=long, on_progress=interrupt)
    after = told[raised[0] :]
    assert len(raised) == 1
    assert "training A" not in after
    assert after.count("training B") < 1000  # of the 10,000 that it would make
    assert torch.get_num_threads() == before
    assert list((tmp_path / "out").iterdir()) == []


# -- what ships --------------------------------------------------------------------------------------------------------


def readme_table() -> list[str]:
    block = re.search(r"\$ isobasin demo\n(.*?)```", README, re.DOTALL)
    assert block is not None
    return block[1].rstrip().splitlines()


def test_the_models_that_ship_are_of_the_demo_and_classify_digits() -> None:
    assert TRAINING.steps == 2000
    for name in "AB":
        model = Transformer.load(shipped("digits") / name)
        assert model.config == MODEL
        assert {p.dtype for p in model.parameters()} == {torch.float16}


DEMO = "import sys; from isobasin.cli import run; sys.exit(run(['demo', '-o', 'out', '--quiet']))"
ARITHMETIC = [{}, {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"}, {"ATEN_CPU_CAPABILITY": "avx2"}]


@pytest.mark.slow
@pytest.mark.parametrize("settings", ARITHMETIC if FULL else [], ids=lambda s: s.get("ATEN_CPU_CAPABILITY", "native"))
@pytest.mark.parametrize("threads", ["1", "2"])
def test_every_arithmetic_gives_the_table_of_the_readme(settings: dict[str, str], threads: str, tmp_path: Path) -> None:
    """Kernels without vector instructions, with AVX2 and with what the processor has; one thread and two."""
    environment = os.environ | settings | {"OMP_NUM_THREADS": threads}
    done = subprocess.run([sys.executable, "-c", DEMO], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:-1] == readme_table()[:-1]  # the last line has the time


def test_the_readme_shows_what_the_demo_prints(tmp_path: Path) -> None:
    """Without learning, which takes longer: the same lines but for the last row."""
    config = DemoConfig(steps=0)
    facts = run_demo(tmp_path / "out", config=config)
    lines, expected = demo_lines(facts), readme_table()
    assert lines[:4] == expected[:4]
    assert lines[4] != expected[4]
    assert "linearly connected" not in lines[4]
    assert expected[4].endswith("linearly connected")
