"""The README: its first example runs, and its commands exist."""

import re
from pathlib import Path

import pytest
import torch

import isobasin as ib
from isobasin.cli.app import app
from isobasin.cli.study import study

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def first_block() -> str:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_first_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = first_block()
    assert len(source.splitlines()) <= 15
    assert "ib.align(b, to=a)\n" in source
    config = ib.ModelConfig.preset("llama", d_model=64, n_layers=2, n_heads=4, d_ff=128, d_vocab=256, n_positions=32)
    for seed, name in enumerate("ab"):
        ib.Transformer(config, seed=seed).save(tmp_path / "path/to" / name)
    (tmp_path / "path/to/text.txt").write_text("To be, or not to be, that is the question. " * 4)
    monkeypatch.chdir(tmp_path)
    printed: list[str] = []
    names: dict[str, object] = {"print": lambda value: printed.append(str(value))}
    exec(compile(source, "README.md", "exec"), names)

    expected = re.search(r"# (O\(64\).*), dimension", source)
    assert expected is not None
    assert printed[0].startswith(expected[1])
    distances = re.fullmatch(
        r"distance ([\d.]+) → ([\d.]+) of ‖A‖ over 5 parts; outputs moved by at most .*", printed[1]
    )
    assert distances is not None
    assert float(distances[2]) < float(distances[1])
    b, c, curve = names["b"], names["c"], names["curve"]
    assert isinstance(b, ib.Weights)
    assert isinstance(c, ib.Weights)
    assert isinstance(curve, ib.Curve)
    assert len(curve.lambdas) == 25
    tokens = torch.arange(12)[None]
    outputs = []
    for weights in (b, c):
        model = ib.Transformer(config)
        model.load_state_dict(weights.state_dict("float32"))
        with torch.no_grad():
            outputs.append(model(tokens))
    assert any(not torch.equal(c[name], b[name].double()) for name in b)
    assert torch.allclose(outputs[1], outputs[0], atol=1e-5 * float(outputs[0].abs().max()))
    assert Path("path/to/barrier.png").stat().st_size > 1000
    with torch.no_grad():
        ib.Transformer.load(Path("path/to/merged"))(tokens)


def test_the_table_of_commands_is_complete() -> None:
    documented = set(re.findall(r"^\| `isobasin (\w+)", README, re.MULTILINE))
    available = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert study in [group.typer_instance for group in app.registered_groups]
    available |= {str(group.name) for group in app.registered_groups}
    assert documented == available


def test_both_setup_commands_are_named() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
