"""Answers that can be acted on: verdicts in words, places, texts and warnings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import isobasin as ib
from isobasin.cli import run
from isobasin.model import ModelConfig, Transformer
from isobasin.weights import Weights

SIZES = {"d_model": 16, "n_heads": 2, "d_ff": 24, "d_vocab": 256, "n_positions": 16, "n_layers": 2}


def model(folder: Path, seed: int) -> Weights:
    Transformer(ModelConfig.preset("llama", **SIZES), seed=seed).save(folder)
    return ib.load(folder)


def with_noise(weights: Weights, names: dict[str, float]) -> Weights:
    """The same model with noise on some tensors, relative to their size."""
    rng = torch.Generator().manual_seed(0)
    tensors = {name: weights[name].clone() for name in weights}
    for name, share in names.items():
        noise = torch.randn(tensors[name].shape, generator=rng)
        tensors[name] += share * tensors[name].norm() * noise / noise.norm()
    return ib.load(tensors, weights.config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model; a copy, rounded; a relative; a distant one; a model that differs in two layers; an unrelated one."""
    place = tmp_path_factory.mktemp("answers")
    a = model(place / "a", 0)
    ib.scramble(a).apply(a).save(place / "copy")
    a.save(place / "rounded", dtype="bfloat16")
    with_noise(a, {name: 0.3 for name in a if a[name].dim() > 1}).save(place / "tuned")
    with_noise(a, {name: 1.5 for name in a if a[name].dim() > 1}).save(place / "distant")
    with_noise(a, {"blocks.0.mlp.up.weight": 0.01, "blocks.1.attn.o.weight": 0.5}).save(place / "changed")
    model(place / "other", 1)
    return place


def printed(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> str:
    assert run([*map(str, words), "--quiet"]) == code
    return capsys.readouterr().out


def answered(capsys: pytest.CaptureFixture[str], *words: object, code: int = 0) -> dict[str, Any]:
    assert run([*map(str, words), "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("name", "verdict", "words"),
    [
        ("copy", "same", "the same model, up to the rounding of the stored types"),
        ("rounded", "same", "the same model"),
        ("tuned", "related", "a fine-tune or another close relative: 8 unrelated models score at most"),
        ("distant", "related", "a distant relative: 8 unrelated models score at most"),
        ("other", "unrelated", "unrelated: not clearly above the scores of 8 unrelated models"),
    ],
)
def test_distance_gives_a_verdict_in_words(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str, verdict: str, words: str
) -> None:
    assert f"verdict     {words}" in printed(capsys, "distance", folder / "a", folder / name)
    found = ib.distance(folder / "a", folder / name)
    assert (found.verdict, found.to_dict()["verdict"]) == (verdict, verdict)
    assert str(found).startswith(f"{verdict}: score ")


def test_one_unrelated_model_decides_nothing(folder: Path) -> None:
    found = ib.distance(folder / "a", folder / "tuned", null_samples=1)
    assert found.verdict == "undecided"
    assert "--null-samples 8" in found.verdict_text


def test_distance_explains_where_it_exceeds_that_of_the_stored_weights(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ib.distance(folder / "a", folder / "rounded")  # gains of one do not round, and are most of the norm
    assert found.naive is not None
    assert found.distance > found.naive
    assert "modulo symmetry exceeds as stored" in printed(capsys, "distance", folder / "a", folder / "rounded")
    assert "exceeds" not in printed(capsys, "distance", folder / "a", folder / "copy")


def test_equal_names_the_first_place_where_two_models_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "equal", folder / "a", folder / "changed", code=1)
    assert "they part first at layer 0, ff (blocks.0.mlp.up.weight" in text
    assert "and most at layer 1, heads (blocks.1.attn.o.weight" in text
    facts = answered(capsys, "equal", folder / "a", folder / "changed", code=1)
    assert facts["evidence"]["first_place"]["layer"] == 0
    assert facts["evidence"]["parts_at"]["layer"] == 1


def test_a_witness_is_shown_as_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = answered(capsys, "equal", folder / "a", folder / "other", code=1)
    witness = facts["evidence"]["witness"]
    ids = witness["input"]["input_ids"][0]
    assert witness["text"] == bytes(ids).decode("utf-8", "replace")  # the project's own model reads bytes
    assert "its text: " in printed(capsys, "equal", folder / "a", folder / "other", code=1)


def test_merge_says_before_it_writes_that_an_average_will_not_work(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = folder / "a"
    assert run(["merge", str(a), str(folder / "other"), "-o", str(tmp_path / "bad")]) == 0
    out, err = capsys.readouterr()
    assert "the average will probably be worse than the models: after alignment, layers of model 1" in err
    assert "the average will probably be worse than the models" in out
    facts = answered(capsys, "merge", a, folder / "copy", "-o", tmp_path / "good")
    assert facts["warning"] is None
    assert "warning" in repr(ib.merge([a, folder / "other"]))
    assert "after alignment" in ib.merge([a, folder / "other"], to="mean", rounds=1).warning
    assert "warning" not in repr(ib.merge([a, folder / "copy"]))


def test_a_merge_without_alignment_warns_of_models_that_lie_apart(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scrambled copy too: as stored it is as far away as an unrelated model. A fine-tune is not."""
    a = folder / "a"
    for other in ("other", "copy"):
        facts = answered(capsys, "merge", a, folder / other, "--no-align", "-o", tmp_path / other)
        assert "worse than the models: layers of model 1 (1" in facts["warning"]
        assert "align them first (leave out --no-align" in facts["warning"]
    recipe = tmp_path / "merge.yml"
    recipe.write_text(f"models: [{{model: {a}}}, {{model: {folder / 'other'}}}]\nmerge_method: linear\nalign: false\n")
    assert "worse than the models: layers of model 1" in printed(capsys, "merge", recipe, "-o", tmp_path / "yaml")
    assert "warning" in repr(ib.merge([a, folder / "other"], align=False))
    assert ib.merge([a, folder / "changed"], align=False).warning == ""
    assert ib.merge([a, folder / "changed", folder / "other"], align=False).warning.count("model 2 (") == 1
    grafted = ib.merge([a, folder / "other", folder / "other"], weights=[1, 1, -1], align=False)
    assert grafted.warning == ""  # a difference of two models, added to a third


def test_merge_measures_the_average_where_data_are_given(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "text.txt"
    data.write_text("some text to measure on. " * 20)
    words = ["merge", folder / "a", folder / "copy", "--data", data]
    facts = answered(capsys, *words, "-o", tmp_path / "aligned")
    assert facts["loss"]["merged"] == pytest.approx(facts["loss"]["models"][0], abs=1e-3)
    assert facts["warning"] is None
    monkeypatch.setattr("isobasin.path.barrier.CONNECTED_NATS", -10.0)  # an average that is never good enough
    facts = answered(capsys, *words, "-o", tmp_path / "worse")
    assert "the average is worse than the models: its loss on text" in facts["warning"]
    monkeypatch.undo()
    (tmp_path / "pixels.csv").write_text("no,labels\n")
    facts = answered(capsys, *words[:3], "--data", tmp_path / "pixels.csv", "-o", tmp_path / "more")
    assert "loss" in facts or facts["warning"] is None


def test_fingerprints_say_how_they_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fingerprint", "--help"]) == 0
    assert "Compare it with --compare" in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "not by ==" in repr(ib.fingerprint(folder / "a"))
    assert "says nothing" in str(ib.Fingerprint.__doc__)
