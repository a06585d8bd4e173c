"""The demo, made tiny: every output is there and is what it says; nothing in the way is overwritten."""

import html
import json
from pathlib import Path

import pytest
import torch

from isobasin.demo import MODEL, OUTPUTS, DemoConfig, run_demo
from isobasin.errors import IsobasinError
from isobasin.model import Transformer
from isobasin.study import scope_parameters
from isobasin.study.trainer import TrainingRecipe

TINY = DemoConfig(
    pretraining=TrainingRecipe(steps=6, batch_size=16),
    finetuning=TrainingRecipe(steps=3, batch_size=16),
    n_points=5,
    max_samples=100,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object], list[tuple[str, int, int]]]:
    out = tmp_path_factory.mktemp("demo") / "out"
    told: list[tuple[str, int, int]] = []
    facts = run_demo(out, config=TINY, on_progress=lambda *said: told.append(said))
    return out, facts, told


def test_everything_is_written_and_the_numbers_agree(made: tuple[Path, dict, list]) -> None:
    out, facts, _ = made
    assert sorted(p.name for p in out.iterdir()) == sorted(OUTPUTS)
    result = json.loads((out / "path.json").read_text("utf-8"))
    assert len(result["lambdas"]) == 5
    assert result["task"]["n_samples"] == 100
    assert facts["barrier"] == result["barrier"]["A-B"]
    assert {row["path"] for row in facts["table"]} == {"naive", "aligned"}
    assert result["alignment"]["A-B"]["scope"] == "all-attention"
    assert facts["distance_after"] < facts["distance_before"]
    page = html.unescape((out / "report.html").read_text("utf-8"))
    assert facts["sentence"] in page


def test_the_models_are_what_their_names_say(made: tuple[Path, dict, list]) -> None:
    out, _, _ = made
    models = {name: Transformer.load(out / name) for name in ("pretrained", "A", "B", "B_aligned", "merged")}
    assert models["A"].config == MODEL
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(models["B_aligned"](images), models["B"](images), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(models["A"](images), models["B"](images), rtol=1e-4, atol=1e-5)
    weights = {name: dict(model.named_parameters()) for name, model in models.items()}
    inside = scope_parameters(models["A"], "all-attention")
    moved = {n for n, p in weights["B"].items() if not torch.equal(p, weights["B_aligned"][n])}
    assert moved == inside
    for name, merged in weights["merged"].items():
        torch.testing.assert_close(merged, (weights["A"][name] + weights["B_aligned"][name]) / 2)


def test_progress_reaches_its_end_in_every_stage(made: tuple[Path, dict, list]) -> None:
    _, _, told = made
    last = {stage: (done, of) for stage, done, of in told}
    stages = ["pretraining", "fine-tuning A", "fine-tuning B", "aligning", "naive path", "aligned path", "merging"]
    assert sorted(last) == sorted([*stages, "report"])
    assert told[0][0] == "pretraining"
    assert told[-1] == ("report", 1, 1)
    assert all(done == of for done, of in last.values())
    assert last["pretraining"] == (6, 6)


def test_a_folder_in_use_is_refused_before_anything_is_trained(made: tuple[Path, dict, list], tmp_path: Path) -> None:
    out, _, _ = made
    told: list[str] = []
    (tmp_path / "other" / "A").mkdir(parents=True)
    (tmp_path / "other" / "A" / "thesis.tex").touch()
    with pytest.raises(IsobasinError, match=r"A holds thesis\.tex, which no checkpoint of isobasin has"):
        run_demo(tmp_path / "other", force=True, on_progress=lambda *_: pytest.fail("trained before it was refused"))
    with pytest.raises(IsobasinError, match=r"holds pretrained, A, B.*already; use --force"):
        run_demo(out, config=TINY, on_progress=lambda *said: told.append(said[0]))
    assert told == []


def test_the_same_seed_gives_the_same_numbers_and_another_does_not(
    made: tuple[Path, dict, list], tmp_path: Path
) -> None:
    _, facts, _ = made
    again = run_demo(tmp_path / "again", config=TINY)
    assert again["barrier"] == facts["barrier"]
    assert again["accuracy"] == facts["accuracy"]
    other = run_demo(tmp_path / "other", seed=5, config=TINY)
    assert other["barrier"] != facts["barrier"]


def test_an_interruption_stops_both_models_and_gives_the_threads_back(tmp_path: Path) -> None:
    before, told, raised = torch.get_num_threads(), [], []
    long = DemoConfig(
        pretraining=TrainingRecipe(steps=1, batch_size=8), finetuning=TrainingRecipe(steps=10_000, batch_size=8)
    )

    def interrupt(stage: str, done: int, of: int) -> None:
        told.append(stage)
        if stage == "fine-tuning A" and "fine-tuning B" in told:  # one of the two may start much later than the other
            raised.append(len(told))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        run_demo(tmp_path / "out", config=long, on_progress=interrupt)
    after = told[raised[0] :]
    assert len(raised) == 1
    assert "fine-tuning A" not in after
    assert after.count("fine-tuning B") < 1000  # of the 10,000 that it would make
    assert torch.get_num_threads() == before
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["pretrained"]


def test_the_command_prints_what_it_found(made: tuple[Path, dict, list]) -> None:
    from isobasin.cli.demo import demo_lines

    _, facts, _ = made
    lines = demo_lines(facts)
    assert facts["sentence"] in lines
    row = facts["table"][0]
    assert any(f"{row['middle']:.4f}" in line for line in lines)
