"""The commands distance, canonical and fingerprint: answers, exit codes, and a figure."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import tiny
from isobasin.cli import run
from isobasin.compare.fingerprint import COUNT, fingerprint
from isobasin.errors import IsobasinError
from isobasin.model import ModelConfig, Transformer
from isobasin.report.figures import plot_similarity

SIZES = {"d_model": 16, "n_heads": 2, "d_ff": 24, "d_vocab": 20, "n_positions": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, n_layers, seed in (("a", 2, 0), ("other", 2, 1), ("deep", 3, 0)):
        Transformer(ModelConfig.preset("llama", **SIZES, n_layers=n_layers), seed=seed).save(folder / name)
    assert run(["scramble", str(folder / "a"), "-o", str(folder / "copy"), "--quiet"]) == 0
    return folder


def test_distance_answers_in_words_and_in_json(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, copy, other = (str(models / name) for name in ("a", "copy", "other"))
    assert run(["distance", a, copy, "--draws", "1", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["score"] >= 0.999
    assert set(facts["null"]) == {"draws", "seed", "quantiles", "largest"}
    assert {"layer", "space", "naive", "distance", "score"} <= set(facts["per_layer"][0])
    assert "layers" not in facts
    assert run(["distance", a, other, "--draws", "1", "--layers"]) == 0
    words = capsys.readouterr().out
    assert words.startswith("score       0.")
    assert "layers of B, and the most similar layer of A" in words


def test_distance_draws_layers_beside_layers(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, deep = str(models / "a"), str(models / "deep")
    figure = tmp_path / "layers.png"
    assert run(["distance", deep, a, "--draws", "1", "--plot", str(figure), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [len(facts["layers"]), len(facts["layers"][0])] == [3, 2]
    assert facts["plot"] == str(figure)
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert run(["distance", deep, a, "--draws", "1", "--plot", str(tmp_path / "layers.doc")]) == 2
    assert "expected .png, .svg or .pdf" in capsys.readouterr().err


def test_canonical_folders_of_copies_hold_the_same_weights(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from safetensors.torch import load_file

    found = []
    for name in ("a", "copy", "other"):
        assert run(["canonical", str(models / name), "-o", str(tmp_path / name), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["output"], facts["dtype"]) == (str(tmp_path / name), "float32")
        assert 0 <= facts["max_output_change"] <= 1e-5
        found.append(load_file(tmp_path / name / "model.safetensors"))
    a, copy, other = found
    assert all(float((copy[n] - a[n]).norm()) <= 1e-4 * float(a[n].norm()) for n in a)
    assert any(float((other[n] - a[n]).norm()) > 0.1 * float(a[n].norm()) for n in a)
    assert run(["canonical", str(models / "a"), "-o", str(tmp_path / "a")]) == 2
    assert "exists" in capsys.readouterr().err


def test_a_point_that_is_not_unique_is_reported(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["canonical", str(models / "a"), "-o", str(tmp_path / "sure"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["unique"] is True
    assert facts["doubts"] == []
    config = ModelConfig.preset("llama", **SIZES, n_layers=2)
    idle = Transformer(config, seed=0)
    idle.blocks[1].attn.o.weight.data.zero_()
    idle.save(tmp_path / "idle")
    assert run(["canonical", str(tmp_path / "idle"), "-o", str(tmp_path / "point"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["unique"] is False
    assert "heads1" in [doubt["space"] for doubt in facts["doubts"]]
    assert run(["canonical", str(tmp_path / "idle"), "-o", str(tmp_path / "again")]) == 0
    words = capsys.readouterr().out
    assert "not unique" in words
    assert "heads1: " in words


def test_a_fingerprint_that_rounding_may_change_is_undecided(
    models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, other = str(models / "a"), str(models / "other")
    assert run(["fingerprint", a, "--compare", other, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["equal"], facts["entries_uncertain"], facts["doubts"]) == (False, 0, [])
    monkeypatch.setattr(
        "isobasin.compare.fingerprint.fingerprint_with_errors", lambda w, *_, **__: (fingerprint(w), (1e3,) * COUNT)
    )
    assert run(["fingerprint", a, "--compare", other, "--json"]) == 3
    facts = json.loads(capsys.readouterr().out)
    assert facts["equal"] is None
    assert facts["doubts"][0].keys() == {"space", "reason", "uncertainty"}
    assert run(["fingerprint", a, "--compare", other]) == 3
    assert "undecided: " in capsys.readouterr().out


def test_fingerprints_compare_with_strings_files_and_models(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, copy, other, deep = (str(models / name) for name in ("a", "copy", "other", "deep"))
    assert run(["fingerprint", a]) == 0
    text = capsys.readouterr().out.strip()
    kept = tmp_path / "a.txt"
    kept.write_text(f"{text} the model of last week\n")
    marked = tmp_path / "b.txt"
    marked.write_text(f"{text}\n{text}\n", encoding="utf-8-sig")
    for target in (text, str(kept), str(marked), a):
        assert run(["fingerprint", copy, "--compare", target]) == 0
        assert "equal: no entry is more than one quantum away" in capsys.readouterr().out
    assert run(["fingerprint", other, "--compare", text, "--json"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["equal"] is False
    assert facts["largest_step"] > 1
    assert run(["fingerprint", deep, "--compare", text]) == 1
    assert "different shapes" in capsys.readouterr().out
    kept.write_text(f"{text}\n{facts['fingerprint']}\n")
    assert run(["fingerprint", copy, "--compare", str(kept)]) == 2
    assert "2 different fingerprints in one file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "the file is empty"), (b"\xff\xfe", "can not be read as text"), (b"hello", "no fingerprint")],
)
def test_a_file_without_a_fingerprint_is_a_mistake(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    (tmp_path / "f").write_bytes(content)
    assert run(["fingerprint", str(models / "a"), "--compare", str(tmp_path / "f")]) == 2
    assert message in capsys.readouterr().err


def test_a_figure_needs_the_matrix(tmp_path: Path) -> None:
    with pytest.raises(IsobasinError, match="no layer-to-layer matrix; ask for it"):
        plot_similarity({"score": 1.0, "null": {"largest": 0.0}}, tmp_path / "layers.png")
    assert not (tmp_path / "layers.png").exists()


def test_help_imports_no_torch() -> None:
    source = "import sys, isobasin.cli.distance; print('torch' in sys.modules, 'typer' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "True"]


@pytest.mark.hf
@pytest.mark.parametrize("change", [{"rms_norm_eps": 1}, {"use_return_dict": True}, "missing bias"])
def test_fingerprint_refuses_what_equal_refuses(
    change: dict[str, object] | str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A damaged config or a missing tensor is no other model: one line, the same from both commands."""
    for name in "ab":
        tiny.save(tiny.case("qwen2-gqa"), tmp_path / name)
    if isinstance(change, dict):
        file = tmp_path / "b" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    else:
        (file,) = (tmp_path / "b").glob("*.safetensors")
        tensors = {n: t for n, t in load_file(file).items() if not n.endswith("layers.0.self_attn.q_proj.bias")}
        save_file(tensors, file, metadata={"format": "pt"})
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    capsys.readouterr()  # the progress of transformers
    assert run(["equal", a, b, "--quiet"]) == 2
    expected = capsys.readouterr().err
    assert run(["fingerprint", a, "--compare", b]) == 2
    assert capsys.readouterr().err == expected


def test_too_little_memory_is_refused(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["equal", str(models / "a"), str(models / "b"), "--memory", "1B"]) == 2
    assert "--memory 1B: expected at least 1MB" in capsys.readouterr().err
