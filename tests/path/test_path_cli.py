"""`isobasin path`: the result file, going on after an interruption, NaN, triples, and wrong input."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import isobasin as ib
from isobasin.cli import run
from isobasin.path.evaluation import FlatModel

CONFIG = {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 24, "d_vocab": 19, "n_positions": 8}


def write_model(folder: Path, seed: int, *, scale: float = 0.5, **changes: Any) -> Path:
    model = ib.Transformer(ib.ModelConfig.preset("llama", **{**CONFIG, **changes}), seed=seed)
    rng = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=rng) * scale)
    model.save(folder)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for k, name in enumerate("abc"):
        write_model(tmp_path / name, k)
    rng = np.random.default_rng(0)
    np.save(tmp_path / "ids.npy", rng.integers(0, 19, (6, 8)))
    return tmp_path


def words(place: Path, *more: str, models: str = "ab", out: str = "path.json") -> list[str]:
    folders = [str(place / m) for m in models]
    return ["path", *folders, "--data", str(place / "ids.npy"), "-o", str(place / out), "--points", "5", *more]


def read(place: Path, name: str = "path.json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / name).read_text())
    return found


def test_the_result_stands_alone(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(place, "--align", "--explain", "--plane", "3", "--json")) == 0
    printed = json.loads(capsys.readouterr().out)
    result = read(place)
    assert {k: v for k, v in printed.items() if k != "output"} == result
    assert result["lambdas"] == [0.0, 0.25, 0.5, 0.75, 1.0]
    for path in ("naive", "aligned"):
        assert set(result["curves"]["A-B"][path]) == {"loss", "accuracy", "perplexity"}
        assert all(len(v) == 5 for v in result["curves"]["A-B"][path].values())
        assert set(result["barrier"]["A-B"][path]) == set(result["curves"]["A-B"][path])
    ends = [result["curves"]["A-B"][path]["loss"] for path in ("naive", "aligned")]
    assert ends[0][0] == ends[1][0]
    assert ends[0][-1] == pytest.approx(ends[1][-1], abs=1e-5)
    assert ends[0][2] != ends[1][2]
    assert result["alignment"]["A-B"]["distance_after"] < result["alignment"]["A-B"]["distance_before"]
    assert [c["name"] for c in result["explain"]["A-B"]["naive"]["components"]][:2] == ["attention", "feed-forward"]
    assert len(result["plane"]["A-B"]["loss"]) == 3
    assert len({m["sha256"] for m in result["models"].values()}) == 2
    assert {"version", "command", "seed", "device", "torch"} <= set(result["provenance"])
    assert [p.name for p in place.iterdir() if p.name.startswith(".")] == []


def test_three_models_make_three_pairs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words(place, "--align", "--scope", "all-attention", models="abc")) == 0
    result = read(place)
    assert list(result["curves"]) == ["A-B", "A-C", "B-C"]
    assert all(set(c) == {"naive", "aligned"} for c in result["curves"].values())
    assert "A-C  aligned" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_from_its_finished_points(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words(place, out="whole.json")) == 0
    score, calls = FlatModel.metric_sums, []

    def interrupted(self: Any, batches: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return score(self, batches)

    monkeypatch.setattr(FlatModel, "metric_sums", interrupted)
    assert run(words(place)) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert not (place / "path.json").exists()
    calls.clear()
    calls.extend([1] * 10)  # past the interruption; counting starts at 10
    assert run(words(place)) == 0
    assert len(calls) == 12  # three of five points were kept
    assert "going on from 3 finished points" in capsys.readouterr().err
    assert read(place)["curves"] == read(place, "whole.json")["curves"]
    assert [p.name for p in place.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("what", ["model", "data", "flag"])
def test_nothing_stale_is_reused(
    what: str, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score, calls = FlatModel.metric_sums, []

    def interrupted(self: Any, batches: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(self, batches)

    monkeypatch.setattr(FlatModel, "metric_sums", interrupted)
    assert run(words(place)) == 130
    more: list[str] = []
    if what == "model":
        write_model(place / "b", 9)
    elif what == "data":
        np.save(place / "ids.npy", np.random.default_rng(1).integers(0, 19, (6, 8)))
    else:
        more = ["--seq-len", "4"]
    capsys.readouterr()
    assert run(words(place, *more)) == 0
    assert "going on" not in capsys.readouterr().err
    monkeypatch.undo()
    assert run(words(place, *more, out="fresh.json")) == 0
    assert read(place)["curves"] == read(place, "fresh.json")["curves"]


def test_what_is_not_finite_is_null_with_its_lambda(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two huge ends of opposite sign are finite, and so is their middle; a weight that overflows is not."""
    model = ib.Transformer.load(place / "b")
    model.head.weight.data.fill_(3e38)  # type: ignore[union-attr]
    model.norm.weight.data.fill_(10.0)  # type: ignore[union-attr]
    model.save(place / "b")
    assert run(words(place, "--json")) == 0
    printed = capsys.readouterr().out
    result = json.loads(printed, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    losses = result["curves"]["A-B"]["naive"]["loss"]
    assert losses[0] is not None
    assert losses[-1] is None
    assert result["barrier"]["A-B"]["naive"]["loss"] is None
    named = {row["lambda"] for row in result["not_finite"] if row["metric"] == "loss"}
    assert named == {lam for lam, loss in zip(result["lambdas"], losses) if loss is None}


WRONG = [
    (["--points", "1"], "--points 1: expected 2 or more"),
    (["--max-samples", "0"], "--max-samples 0: expected 1 or more"),
    (["--plane", "5"], "--plane needs --align"),
    (["--task", "image"], "image"),
    (["--device", "tpu"], "--device 'tpu' is no device"),
    (["--align", "--scope", "everything"], "--scope 'everything' is not available"),
]


@pytest.mark.parametrize(("more", "message"), WRONG, ids=lambda x: x[-1] if isinstance(x, list) else "")
def test_wrong_flags_are_one_line(
    more: list[str], message: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words(place, *more)) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not (place / "path.json").exists()


def test_wrong_places_and_models_are_one_line(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(place / "wide", 0, d_model=32)
    (place / "taken.json").write_text('{"kind": "isobasin.path"}')
    (place / "other.json").write_text("{}")
    for arguments, message in (
        (words(place, models="a"), "1 models given, expected two or three"),
        ([*words(place, models="a"), str(place / "wide")], "only models of the same architecture"),
        (words(place, out="taken.json"), "already there; choose another name, or use --force to replace it"),
        (words(place, "--force", out="other.json"), "not a path result of isobasin, so it is not replaced"),
        (words(place, out="nowhere/path.json"), "no such folder for path.json; create it first"),
        (words(place, out="a/path.json"), "lies inside the input"),
        (words(place, out="b"), "a folder, expected the name of a file"),
    ):
        assert run(arguments) == 2
        said = capsys.readouterr().err
        assert message in said
        assert said.count("\n") == 1
    assert (place / "taken.json").read_text() == '{"kind": "isobasin.path"}'
    assert (place / "other.json").read_text() == "{}"
    assert run(words(place, "--force", out="taken.json")) == 0
    assert read(place, "taken.json")["kind"] == "isobasin.path"
