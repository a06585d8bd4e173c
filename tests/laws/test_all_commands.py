"""Every command runs for every model type, from a folder that transformers wrote."""

import json
import os
from pathlib import Path

import pytest

import model_types as mt
from isobasin.cli import run

pytestmark = pytest.mark.hf

FIRST = list({each.family: each.name for each in reversed(mt.MODEL_TYPES)}.values())[::-1]
# Half a minute each: the others run in the slow version.
SHORT = ("olmo2-untied",)
NAMES = FIRST if os.environ.get("ISOBASIN_SLOW") == "1" else [name for name in FIRST if name in SHORT]


@pytest.mark.parametrize("name", NAMES)
def test_every_command_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c = (tmp_path / each for each in "abc")
    mt.save(name, a)
    mt.save(name, c, seed=1)

    def call(*arguments: object, code: int = 0) -> dict:
        found = run([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert found == code, (arguments, out[-300:], err)
        return json.loads(out)

    assert call("info", a)["group"]
    assert call("check", a)["ok"]
    call("scramble", a, "-o", b, "--save-transform", tmp_path / "t", "--quiet")
    call("apply", tmp_path / "t", a, "-o", tmp_path / "applied", "--quiet")
    aligned = call("align", b, "--to", a, "-o", tmp_path / "aligned", "--quiet")
    assert aligned["distance_after"] < 1e-4 < aligned["distance_before"]
    call("merge", a, b, "-o", tmp_path / "merged", "--quiet")
    assert call("equal", a, tmp_path / "merged", "--quiet")["verdict"] == "same"
    assert call("equal", a, c, "--quiet", code=1)["verdict"] == "different"
    assert call("distance", a, b, "--quiet")
    call("canonical", a, "-o", tmp_path / "canonical", "--quiet")
    prints = [call("fingerprint", each)["fingerprint"] for each in (a, b, c)]
    assert run(["fingerprint", str(b), "--compare", prints[0]]) == 0
    assert run(["fingerprint", str(c), "--compare", prints[0]]) == 1
    capsys.readouterr()
