"""The README: its examples run and print what it shows, and its commands exist. `isobasin demo`: see test_demo."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import isobasin as ib
from isobasin.cli import run
from isobasin.cli.app import app
from isobasin.cli.study import study
from isobasin.data import shipped

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


def console() -> list[tuple[str, str]]:
    """Every command of the console blocks, and what the README shows below it."""
    blocks = re.findall(r"```console\n(.*?)```", README, re.DOTALL)
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE) if part]
    return [(part.partition("\n")[0].partition("  #")[0].strip(), part.partition("\n")[2]) for part in parts]


def shown_as(expected: str, printed: str) -> bool:
    """Whether this was printed; `…` stands for anything on a line, and alone on a line for more lines."""
    pattern = re.escape(expected.rstrip()).replace("\\\n…", r"(\n.*)*").replace("…", r"[^\n]*")
    return re.fullmatch(pattern, printed.rstrip()) is not None


def test_what_is_shown_is_compared() -> None:
    assert shown_as("a … c\n…", "a b c\nd\ne")
    assert not shown_as("a … c\n…", "a b d\ne")
    assert not shown_as("a", "a\nb")


def test_every_command_runs_and_prints_what_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ib.ModelConfig.preset("llama", d_model=16, n_layers=1, n_heads=2, d_ff=24, d_vocab=256, n_positions=16)
    for seed, name in enumerate("AB"):
        ib.Transformer(config, seed=seed).save(tmp_path / f"runs/seed{seed}")
        shutil.copytree(shipped("digits") / name, tmp_path / "isobasin-demo" / name)
    (tmp_path / "test.txt").write_text("To be, or not to be, that is the question. " * 4)
    monkeypatch.chdir(tmp_path)
    commands = console()
    assert len(commands) > 8
    for command, expected in commands:
        words = shlex.split(command)
        if words[0] in ("pip", "make") or command == "isobasin demo":
            continue
        assert words[0] == "isobasin"
        capsys.readouterr()
        code = run(words[1:])
        out, err = capsys.readouterr()
        assert code == (1 if expected.startswith("different") else 0), (command, err)
        assert not expected or shown_as(expected, out), (command, out)


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
