"""`isobasin path --matcher learned`: data of its own, a run that goes on, and what the result says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_path_cli import read, words, write_model

import isobasin as ib
from isobasin.cli import run
from isobasin.cli.options import DataOptions, LearnOptions, LearnSetup
from isobasin.cli.path import check_disjoint
from isobasin.data import shipped
from isobasin.errors import IsobasinError
from isobasin.learn.data import generate

FLAGS = [
    "--align",
    "--scope",
    "all-attention",
    "--matcher",
    "learned",
    "--steps",
    "3",
    "--rate",
    "0.01",
    "--stage2",
    "none",
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A model that is nearly sure of what comes next, two scrambled copies of it, and text that it wrote."""
    drawn = ib.load(write_model(tmp_path / "drawn", 0, n_layers=1))
    state = drawn.state_dict("float32")
    a = ib.load(state | {"head.weight": 3 * state["head.weight"]}, dict(drawn.config))
    a.save(tmp_path / "a")
    for seed, name in enumerate("bc"):
        ib.scramble(a, scope="all-attention", seed=seed).apply(a).save(tmp_path / name, dtype="float32")
    for seed, name in enumerate(("ids", "lessons", "other")):
        np.save(tmp_path / f"{name}.npy", generate(a, 12, 8, seed=seed).numpy())
    return tmp_path


def hidden(place: Path) -> list[str]:
    return sorted(p.name for p in place.iterdir() if p.name.startswith("."))


def learned(place: Path, *more: str, **options: Any) -> list[str]:
    return words(place, *FLAGS, "--learn-data", str(place / "lessons.npy"), *more, **options)


def test_what_was_learned_is_measured_and_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(learned(place, "--held-out", str(place / "other.npy"))) == 0
    result = read(place)
    found = result["alignment"]["A-B"]
    assert found["matcher"] == "learned"
    assert set(found["held_out_barrier"]) == {"naive", "start", "learned"}
    assert found["learned_from"] == str(place / "lessons.npy")
    assert found["decided_by"] == str(place / "other.npy")
    heights = found["held_out_barrier"]
    assert heights["learned"] < heights["start"] <= heights["naive"]
    barrier = result["barrier"]["A-B"]
    assert barrier["aligned"]["loss"] < barrier["naive"]["loss"]  # on data that nobody learned from
    ends = [result["curves"]["A-B"][path]["loss"] for path in ("naive", "aligned")]
    assert ends[0][-1] == pytest.approx(ends[1][-1], abs=1e-4)  # B's function is what it was
    assert "A-B  learned from  " in capsys.readouterr().out
    assert hidden(place) == []
    assert run(["report", str(place / "path.json"), "-o", str(place / "page.html")]) == 0


def test_an_interrupted_run_does_not_learn_again(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from isobasin.path import pairs

    assert run(learned(place, out="whole.json", models="abc")) == 0
    evaluate_line = pairs.evaluate_line

    def interrupted(*args: Any, **options: Any) -> Any:
        if options["name"] == "A-C/aligned":
            raise KeyboardInterrupt
        return evaluate_line(*args, **options)

    monkeypatch.setattr(pairs, "evaluate_line", interrupted)
    assert run(learned(place, models="abc")) == 130
    assert ".path.json.A-B.isobasin-learning" in hidden(place)
    assert ".path.json.A-C.isobasin-learning" in hidden(place)
    monkeypatch.undo()
    capsys.readouterr()
    assert run(learned(place, models="abc")) == 0
    said = capsys.readouterr().err
    assert said.count("going on from step 3") == 2  # the third pair had not begun
    assert "finished points" in said
    assert read(place)["curves"] == read(place, "whole.json")["curves"]
    assert hidden(place) == []


def test_learning_from_the_models_own_text(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(place, *FLAGS, "--learn-data", "self", "--learn-samples", "8", "--json")) == 0
    found = json.loads(capsys.readouterr().out)["alignment"]["A-B"]
    assert found["learned_from"] == found["decided_by"] == "text that the two models wrote themselves"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "--learn-data {}/ids.npy: has no train split apart from what is measured"),
        (
            ["--learn-data", "{}/ids.npy"],
            "has no train split apart from what is measured; give other data, or self",
        ),
        (["--learn-data", "{}/a/../ids.npy"], "has no train split"),
        (["--learn-data", "{}/other.npy", "--held-out", "{}/ids.npy"], "--held-out {}/ids.npy is --data itself"),
        (["--learn-data", "{}/other.npy", "--held-out", "{}/other.npy"], "is --learn-data itself"),
        (["--learn-data", "{}/nothing.npy"], "nothing.npy: no such file"),
        (["--learn-data", "{}/other.npy", "--start", "here"], "--init 'here' is not available"),
    ],
)
def test_what_is_measured_is_not_learned_from(
    more: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words(place, *FLAGS, *(word.format(place) for word in more))) == 2
    said = capsys.readouterr().err
    assert message.format(place) in said
    assert said.count("\n") == 1
    assert not (place / "path.json").exists()


def test_several_processes_belong_to_align(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(learned(place)) == 2
    assert "`isobasin path` runs in one process" in capsys.readouterr().err


def test_data_with_a_train_split_are_their_own_lessons() -> None:
    """The digits that ship have both splits in one folder."""
    sizes = {"image_size": 28, "patch_size": 14, "n_channels": 1, "d_model": 8, "d_ff": 8, "n_layers": 1, "n_heads": 2}
    config = ib.ModelConfig.preset("vit", **sizes)
    models = [ib.load(ib.Transformer(config, seed=k).state_dict(), config.to_dict()) for k in range(2)]
    digits = shipped("mnist")
    reading = DataOptions(max_samples=20)
    check_disjoint(digits, reading, LearnSetup(LearnOptions(), reading, digits, "--learn-data"), models, seed=0)
    elsewhere = LearnSetup(LearnOptions(held_out=digits), reading, Path("elsewhere"))
    with pytest.raises(IsobasinError, match="what decides can not be measured on too"):
        check_disjoint(digits, reading, elsewhere, models, seed=0)
