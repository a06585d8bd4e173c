"""The README's own words: its first example runs, and its commands exist."""

import re
from pathlib import Path

import pytest
import torch

import isobasin as ib
from isobasin.cli.app import app

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def first_block() -> str:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_first_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = first_block()
    assert len(source.splitlines()) <= 15
    config = ib.ModelConfig.preset("llama", d_model=64, n_layers=2, n_heads=4, d_ff=128, d_vocab=50)
    ib.Transformer(config, seed=0).save(tmp_path / "path/to/checkpoint")
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    names: dict[str, object] = {"print": lambda value: said.append(str(value))}
    exec(compile(source, "README.md", "exec"), names)

    promised = re.search(r"# (O\(64\).*), dimension", source)
    assert promised is not None
    assert said[0].startswith(promised[1])
    model, moved, back = names["model"], names["moved"], names["back"]
    assert isinstance(model, ib.Weights)
    assert isinstance(moved, ib.Weights)
    assert isinstance(back, ib.Weights)
    assert any(not torch.equal(moved[name], model[name].double()) for name in model)
    assert all(torch.allclose(back[name], model[name].double(), atol=1e-10) for name in model)
    found = names["found"]
    assert isinstance(found, ib.Alignment)
    assert said[1].startswith("distance 1.5")
    assert found.distance_after < 1e-12
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        before, after = (ib.Transformer.load(Path("path/to") / n)(tokens) for n in ("checkpoint", "scrambled"))
    assert torch.allclose(after, before, atol=1e-5 * float(before.abs().max()))


def test_the_table_of_commands_is_complete() -> None:
    told = set(re.findall(r"^\| `isobasin (\w+)", README, re.MULTILINE))
    there = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert told == there


def test_both_setup_commands_are_named() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
