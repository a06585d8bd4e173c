"""A family of one's own: drafted from a checkpoint, proved or refuted by `check`, used by commands and by `load`."""

import json
from pathlib import Path

import pytest
import torch

import isobasin as ib
import tiny
from isobasin.arch import FAMILIES, user_family
from isobasin.cli import run
from isobasin.errors import IsobasinError

pytestmark = pytest.mark.hf

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SIZES |= {"intermediate_size": 40, "vocab_size": 50, "max_position_embeddings": 32, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def forgotten(known_families: None) -> None:
    for name in ("seed_oss", "helium", "qwen3"):  # as if they were not supported
        del FAMILIES[name]


def saved(folder: Path, stem: str, head: str = "ForCausalLM") -> Path:
    import transformers

    config = getattr(transformers, f"{stem}Config")(**SIZES)
    with torch.random.fork_rng(devices=[]):
        model = getattr(transformers, f"{stem}{head}")(config)
    tiny.randomize(model, 0).save_pretrained(folder)
    return folder


def drafted(model: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run(["families", "--draft", str(model)]) == 0
    return capsys.readouterr().out


def test_a_draft_is_proved_and_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = saved(tmp_path / "a", "SeedOss"), tmp_path / "family.py"
    assert run(["check", str(model)]) == 2
    assert "families --draft" in capsys.readouterr().err
    file.write_text(drafted(model, capsys))
    assert run(["check", str(model), "--family", str(file)]) == 0
    assert run(["scramble", str(model), "-o", str(tmp_path / "b"), f"--family={file}", "--quiet"]) == 0
    assert run(["equal", str(model), str(tmp_path / "b"), "--quiet"]) == 0
    assert ib.load(model, family=file).arch.family == "seed_oss"


@pytest.mark.parametrize(
    ("stem", "head", "found"),
    [
        ("EuroBert", "ForMaskedLM", "'EuroBertForMaskedLM', heads=('ForMaskedLM', 'Model')),"),  # not one of a decoder
        ("Qwen3", "ForCausalLM", "qk_norm=True, q_gain='model.layers.{i}.self_attn.q_norm.weight', "),
    ],
)
def test_a_draft_knows_the_head_and_norms_on_queries_and_keys(
    stem: str, head: str, found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, file = saved(tmp_path / "a", stem, head), tmp_path / "family.py"
    draft = drafted(model, capsys)
    assert found in draft
    file.write_text(draft)
    assert run(["check", str(model), "--family", str(file)]) == 0


def test_a_wrong_draft_is_refuted_and_corrected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Helium's rotary pairs are neighbours, which no name tells."""
    model, file = saved(tmp_path / "a", "Helium"), tmp_path / "family.py"
    draft = drafted(model, capsys)
    file.write_text(draft)
    assert run(["check", str(model), "--family", str(file)]) == 1
    assert "NOT ok" in capsys.readouterr().out
    assert run(["scramble", str(model), "-o", str(tmp_path / "b"), "--quiet"]) == 4  # nothing wrong is written
    assert not (tmp_path / "b").exists()
    file.write_text(draft.replace("d_head, d_head)", "d_head, d_head, interleaved=True)"))
    assert run(["check", str(model), "--family", str(file)]) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "no FAMILIES in it"),
        ("FAMILIES = (1,)", "no FAMILIES in it"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("def", "SyntaxError"),
        ("raise SystemExit", "SystemExit"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise BaseException('two\\nlines')", "BaseException: two lines"),
        (None, "no such file"),
    ],
)
def test_a_file_that_defines_nothing_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, message: str
) -> None:
    file = tmp_path / "family.py"
    if text is not None:
        file.write_text(text)
    assert run(["info", str(tmp_path), "--family", str(file)]) == 2
    assert message in capsys.readouterr().err
    assert run(["info", str(tmp_path), "--family"]) == 2


def test_a_process_finds_the_families_of_the_one_that_started_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = saved(tmp_path / "a", "SeedOss"), tmp_path / "family.py"
    file.write_text(drafted(model, capsys))
    monkeypatch.setenv(user_family.VARIABLE, str(file))
    assert ib.load(model).arch.family == "seed_oss"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('zz')", "KeyError: 'zz'"),
        ("1 / 0", "ZeroDivisionError"),
        ("raise SystemExit", "SystemExit"),
        ("return None", "returns None, expected an Architecture"),
        ("return 5", "returns 5, expected an Architecture"),
    ],
)
def test_a_function_that_fails_is_a_mistake_in_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, message: str
) -> None:
    model, file = saved(tmp_path / "a", "SeedOss"), tmp_path / "family.py"
    start, head, rest = drafted(model, capsys).partition("(config):\n")
    assert head
    file.write_text(f"{start}{head}    {body}\n{rest}")
    assert run(["info", str(model), "--family", str(file)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert str(file) in said
    assert said.count("\n") == 1


def test_an_interrupt_is_none_of_the_mistakes(tmp_path: Path) -> None:
    (tmp_path / "family.py").write_text("raise KeyboardInterrupt('stop')")
    with pytest.raises(KeyboardInterrupt, match="stop"):
        user_family.use_family(tmp_path / "family.py")


def test_json_stays_json_whatever_the_file_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, file = saved(tmp_path / "a", "SeedOss"), tmp_path / "family.py"
    draft = drafted(model, capsys)
    assert run(["families", "--draft", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"draft": draft}
    start, head, rest = draft.partition("(config):\n")
    file.write_text(f"print('at first')\n{start}{head}    print('later')\n{rest}")
    assert run(["info", str(model), "--family", str(file), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["family"] == "seed_oss"
    assert "at first" in printed.err
    assert "later" in printed.err


@pytest.mark.parametrize("name", ["\0", "x" * 5000, "not there"])
def test_a_file_that_is_no_file_is_named(name: str) -> None:
    with pytest.raises(IsobasinError, match="no such file; `isobasin families --draft MODEL` drafts one"):
        ib.load("model", family=name)
