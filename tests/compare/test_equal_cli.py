"""`isobasin equal`: exit codes, JSON, and the files it keeps."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_models import output_difference, perturbed, scrambled_file, small_model, tiny_model, with_tensors
from safetensors.torch import load_file

import isobasin as ib
from isobasin.cli import run
from isobasin.runtime import Runner, module_of, random_inputs

pytestmark = pytest.mark.hf

UP = "blocks.0.mlp.up.weight"


def answered(arguments: list[Any], capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = run(["equal", *map(str, arguments), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert isinstance(facts, dict)
    return code, facts


def test_same_exits_0_and_keeps_the_element(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = small_model(positions="rope", bias=False)
    a.save(tmp_path / "a")
    scrambled_file(a).save(tmp_path / "b", max_shard_size="1KB")
    element = tmp_path / "element.safetensors"
    code, facts = answered([tmp_path / "a", tmp_path / "b", "--save-transform", element], capsys)
    assert (code, facts["verdict"], facts["precision"]) == (0, "same", "float32")
    assert {r["space"] for r in facts["evidence"]["residuals"]} == {"resid", "heads", "ff"}
    assert facts["evidence"]["witness"] is None
    back = ib.load_transform(element).apply(ib.load(tmp_path / "b"))
    assert max(float((back[n] - a[n]).norm() / a[n].norm()) for n in a) < 1e-5
    assert run(["equal", str(tmp_path / "a"), str(tmp_path / "b"), "--save-transform", str(element)]) == 2
    assert "already there" in capsys.readouterr().err


def test_different_exits_1_and_keeps_the_witness(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = small_model()
    b = perturbed(a, UP)
    a.save(tmp_path / "a")
    b.save(tmp_path / "b")
    file = tmp_path / "witness.safetensors"
    code, facts = answered([tmp_path / "a", tmp_path / "b", "--save-witness", file], capsys)
    assert (code, facts["verdict"]) == (1, "different")
    assert facts["evidence"]["parts_at"]["space"] == "ff"
    assert facts["evidence"]["parts_at"]["layer"] == 0
    kept = load_file(file)
    witness = facts["evidence"]["witness"]
    assert kept["input_ids"].tolist() == witness["input"]["input_ids"]
    assert float(kept["output_a"][witness["place"]]) == pytest.approx(witness["output_a"])
    assert output_difference(a, b, {"input_ids": kept["input_ids"]}) == pytest.approx(witness["difference"], rel=0.05)


def test_undecided_exits_3_in_words_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, deep = small_model(bias=False), small_model(n_layers=2, bias=False)
    empty = {n: torch.zeros_like(deep[n]) for n in ("blocks.1.attn.o.weight", "blocks.1.mlp.down.weight")}
    a.save(tmp_path / "a")
    with_tensors(deep, {n: a[n] for n in a} | empty).save(tmp_path / "b")
    assert run(["equal", str(tmp_path / "a"), str(tmp_path / "b"), "--quiet"]) == 3
    printed = capsys.readouterr()
    assert printed.out.startswith("undecided: outputs agree on")
    assert "n_layers: A has 1, B has 2" in printed.out
    assert printed.err == ""


def test_mistakes_exit_2_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_model().save(tmp_path / "a")
    small_model(d_vocab=18).save(tmp_path / "b")
    for arguments, expected in (
        ([tmp_path / "a", tmp_path / "b"], "vocabulary: A has 17, B has 18"),
        ([tmp_path / "a", tmp_path / "none"], "none"),
        ([tmp_path / "a", tmp_path / "a", "--precision", "half"], "--precision 'half' is unknown"),
    ):
        assert run(["equal", *map(str, arguments)]) == 2
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1
        assert expected in lines[0]


def test_help_imports_no_torch() -> None:
    script = (
        "import sys; from isobasin.cli import run; code = run(['equal', '--help']); "
        "sys.exit(code or 10 * ('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--save-witness" in done.stdout


@pytest.mark.parametrize("name", ["llama-tied", "bert-pretraining", "vit-masked-image", "gpt2-classifier"])
def test_a_streamed_model_gives_the_same_outputs_and_holds_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny_model(name)
    inputs = random_inputs(weights, n=3)
    held = Runner(weights).run(inputs)
    monkeypatch.setattr("isobasin.runtime.MAX_LOADED_PARAMETERS", 0)
    streamed = Runner(weights)
    assert streamed.streamed
    assert all(torch.allclose(x, y, atol=1e-5, rtol=1e-5) for x, y in zip(held, streamed.run(inputs), strict=True))
    assert {p.device.type for p in streamed.module.parameters()} == {"meta"}
    assert {p.device.type for p in module_of(weights).parameters()} == {"cpu"}
    other = Runner(perturbed(weights, next(n for n in weights if n.endswith("weight")), 0.5))
    assert not torch.allclose(other.run(inputs)[0], held[0], atol=1e-5, rtol=1e-5)
