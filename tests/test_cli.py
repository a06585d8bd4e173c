"""The contract of the command line: answers, exit codes, what is written and what is not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny
from isobasin import __version__
from isobasin.arch import FAMILIES, Architecture, parse
from isobasin.cli import run
from isobasin.cli.info import family_lines
from isobasin.groups import Permutation
from isobasin.model import ModelConfig, Transformer
from isobasin.symmetries import SCOPES
from isobasin.symmetries.transform import Transform
from isobasin.symmetries.transform_file import save_transform
from isobasin.weights import load
from refusals import check_refused

pytestmark = pytest.mark.hf

Answer = Callable[..., dict[str, Any]]
ISOBASIN = "from isobasin.cli import main; main()"
HEAVY = ("torch", "transformers", "scipy", "matplotlib")
COMMANDS = ("info", "check", "scramble", "apply", "invert", "families")
SEEN = 0.1  # a change of weights that nobody can miss


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Run a command with --json: exit code as expected, one strict JSON object and nothing else; that object."""

    def call(*arguments: object, code: int = 0) -> dict[str, Any]:
        capsys.readouterr()
        found = run([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert found == code, err
        assert out.count("\n") == 1, out
        facts = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert isinstance(facts, dict)
        return facts

    return call


def saved(folder: Path, case: str, **options: Any) -> Path:
    tiny.save(tiny.case(case), folder, **options)
    return folder


def own(folder: Path, preset: str = "llama", **settings: Any) -> Path:
    sizes = {"n_layers": 2, "d_model": 24, "d_ff": 40, "n_positions": 16, "d_vocab": 30}
    Transformer(ModelConfig.preset(preset, **(sizes | settings)), seed=3).save(folder)
    return folder


def change(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Per tensor, ‖found − expected‖ / ‖expected‖."""
    assert found.keys() == expected.keys()
    norm = torch.linalg.vector_norm
    return {n: float(norm(found[n].double() - t.double()) / norm(t.double())) for n, t in expected.items()}


def tensors(folder: Path) -> dict[str, Tensor]:
    return tiny.read(folder)[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


# -- each command ----------------------------------------------------------------------------------------------------


def test_info(tmp_path: Path, answer: Answer) -> None:
    facts = answer("info", saved(tmp_path / "m", "llama-gqa"))
    expected = {"family": "llama", "positions": "rope", "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "d_head": 6}
    assert {key: facts[key] for key in expected} == expected
    assert facts["group"] == "O(24) × 3·[S2 ≀ (S2 × H6 × GL6)] × 3·ℝ*≀S40"
    assert facts["group_dim"] == facts["element_dim"] + facts["free_dim"]
    assert facts["element_dim"] == 24 * 23 // 2 + 3 * 2 * (6 + 36) + 3 * 40
    assert facts["n_params"] == sum(t.numel() for t in tensors(tmp_path / "m").values())
    assert facts["effective_dim"] == facts["n_params"] - facts["group_dim"]
    assert [space["name"] for space in facts["spaces"]] == [
        "resid",
        *(f"{s}{i}" for s in ("heads", "ff") for i in range(3)),
    ]
    assert facts["tied"] == []
    tied = answer("info", saved(tmp_path / "tied", "llama-tied"))
    assert tied["tied"] == ["model.embed_tokens.weight"]


def test_info_shows_what_rotary_positions_cost(
    tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The own llama, d_head 6, 4 heads, 2 layers: each head's Q–K group shrinks from GL6 (36) to H6 (6)."""
    rope = answer("info", own(tmp_path / "rope", positions="rope"))
    none = answer("info", own(tmp_path / "none", positions="none"))
    assert (none["qk_group"], none["qk_dim"], rope["qk_group"], rope["qk_dim"]) == ("GL6", 36, "H6", 6)
    assert (rope["qk_group_without_rotary"], rope["qk_dim_without_rotary"]) == ("GL6", 36)
    assert none["group_dim"] - rope["group_dim"] == 2 * 4 * (36 - 6)
    assert rope["group_dim_without_rotary"] == none["group_dim"]
    assert run(["info", str(tmp_path / "rope")]) == 0
    words = capsys.readouterr().out
    assert "GL6 (dimension 36) shrinks to H6 (6)" in words
    assert f"from {none['group_dim']:,} to {rope['group_dim']:,}" in words
    assert run(["info", str(tmp_path / "none")]) == 0
    assert "shrinks" not in capsys.readouterr().out


@pytest.mark.parametrize("model", ["llama-biases", "gpt2-lm-tied", "bert-masked-lm-tied", "vit-bare", "own"])
def test_check_says_yes(model: str, tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    folder = own(tmp_path / "m") if model == "own" else saved(tmp_path / "m", model)
    facts = answer("check", folder, "--seed", 1)
    assert facts["ok"] is True
    assert facts["max_error"] == max(facts["per_space"].values()) <= facts["tolerance"]
    assert {"heads0", "heads1", "ff0", "ff1", "resid", "free"} <= facts["per_space"].keys()
    assert facts["nullity_measured"] == facts["nullity_predicted"] > 0
    assert run(["check", str(folder)]) == 0
    words = capsys.readouterr().out
    assert f"predicted nullity {facts['nullity_predicted']} = measured {facts['nullity_measured']}" in words
    assert words.endswith("\nok\n")


def test_check_says_no(
    tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A family whose output projection moves like the values, not against them, is not invariant."""
    folder, right = saved(tmp_path / "m", "llama-gqa"), FAMILIES["llama"]

    def wrong(config: Mapping[str, Any]) -> Architecture:
        arch = right.describe(config)
        return replace(arch, tensors={**arch.tensors, "model.layers.0.self_attn.o_proj.weight": parse("resid vo0:q")})

    monkeypatch.setitem(FAMILIES, "llama", replace(right, describe=wrong))
    facts = answer("check", folder, code=1)
    assert facts["ok"] is False
    assert facts["per_space"]["heads0"] > SEEN
    assert facts["per_space"]["heads1"] <= facts["tolerance"]
    assert run(["check", str(folder)]) == 1
    assert "NOT ok" in capsys.readouterr().out


def test_families(answer: Answer) -> None:
    rows = answer("families")["families"]
    assert [row["family"] for row in rows] == list(FAMILIES)
    assert {"gpt2", "bert", "vit", "llama", "mistral", "qwen2", "phi3", "gpt_neox", "isobasin"} <= set(FAMILIES)
    assert all(row["group"] and row["positions"] and row["example"] for row in rows)
    plain = family_lines(rows, 0)
    for width in (80, 120):  # of a terminal
        wrapped = family_lines(rows, width)
        assert max(map(len, wrapped)) <= width < max(map(len, plain))
        assert "\n".join(wrapped).replace("    group     ", "").split() == "\n".join(plain).split()


def test_scramble_apply_and_invert_answer(tmp_path: Path, answer: Answer) -> None:
    folder, t = saved(tmp_path / "m", "llama-gqa"), tmp_path / "t"
    facts = answer("scramble", folder, "-o", tmp_path / "out", "--save-transform", t)
    unstable = ("max_weight_change", "max_output_change", "outputs_compared")
    assert {k: v for k, v in facts.items() if k not in unstable} == {
        "output": str(tmp_path / "out"), "exact": False, "dtype": "float32", "transform": str(t),
    }  # fmt: skip
    before, after = tensors(folder), tensors(tmp_path / "out")
    largest = max(float((after[n].double() - before[n].double()).abs().max()) for n in before)
    assert facts["max_weight_change"] == pytest.approx(largest)
    assert answer("invert", t, "-o", tmp_path / "back") == {"output": str(tmp_path / "back")}
    again = answer("apply", t, folder, "-o", tmp_path / "again")
    assert again == {k: v for k, v in facts.items() if k != "transform"} | {"output": str(tmp_path / "again")}


def test_words_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "m", "llama-gqa")
    assert run(["scramble", str(folder), "-o", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"{tmp_path / 'out'}: the same function, weights changed by up to ")
    assert err == ""
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"
    assert run(["families"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert len(lines) == len(FAMILIES)


# -- there and back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", [
    "gpt2-lm-untied", "gpt2-lm-tied", "bert-masked-lm-tied", "vit-classifier", "llama-biases", "mistral-gqa",
    "gpt_neox-quarter-rotary", "own",
])  # fmt: skip
def test_the_way_back_restores_the_weights(model: str, tmp_path: Path, answer: Answer) -> None:
    folder = own(tmp_path / "m") if model == "own" else saved(tmp_path / "m", model)
    t, back = tmp_path / "t", tmp_path / "back"
    answer("scramble", folder, "-o", tmp_path / "there", "--save-transform", t, "--seed", 7)
    answer("invert", t, "-o", back)
    answer("apply", back, tmp_path / "there", "-o", tmp_path / "home")
    off = change(tensors(tmp_path / "home"), tensors(folder))
    assert max(off.values()) <= 1e-6, max(off, key=off.__getitem__)
    assert max(change(tensors(tmp_path / "there"), tensors(folder)).values()) > SEEN
    answer("apply", t, tmp_path / "there", "-o", tmp_path / "farther")  # not back, but on
    assert max(change(tensors(tmp_path / "farther"), tensors(folder)).values()) > SEEN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_identity_and_permutations_are_bitwise(dtype: torch.dtype, tmp_path: Path, answer: Answer) -> None:
    folder = saved(tmp_path / "m", "llama-gqa", dtype=dtype)
    spaces = load(folder).arch.spaces
    for name, elements in {"same": {}, "permuted": {"ff0": Permutation(40).sample(seed=2)}}.items():
        transform = Transform("llama", dict(spaces), elements)
        save_transform(transform, tmp_path / f"{name}.t")
        save_transform(transform.inverse(), tmp_path / f"{name}.back")
        facts = answer("apply", tmp_path / f"{name}.t", folder, "-o", tmp_path / name)
        assert (facts["exact"], facts["dtype"]) == (True, str(dtype).removeprefix("torch."))
        assert (facts["max_weight_change"] > 0) == (name == "permuted")
        answer("apply", tmp_path / f"{name}.back", tmp_path / name, "-o", tmp_path / f"{name}-home")
        home, before = tensors(tmp_path / f"{name}-home"), tensors(folder)
        assert all(torch.equal(home[n], before[n]) and home[n].dtype == dtype for n in before)
        assert json.loads((tmp_path / name / "config.json").read_text()) == tiny.read(folder)[1]
    moved = tensors(tmp_path / "permuted")["model.layers.0.mlp.up_proj.weight"]
    before = tensors(folder)["model.layers.0.mlp.up_proj.weight"]
    assert not torch.equal(moved, before)
    assert sorted(moved[:, 0].tolist()) == sorted(before[:, 0].tolist())


# -- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "source", "written"), [
    ("auto", "bfloat16", "float32"), ("auto", "float32", "float32"), ("keep", "bfloat16", "bfloat16"),
    ("keep", "float32", "float32"), ("float32", "bfloat16", "float32"), ("bfloat16", "float32", "bfloat16"),
    ("float16", "float32", "float16"), ("auto", "float64", "float64"),
])  # fmt: skip
def test_dtype(policy: str, source: str, written: str, tmp_path: Path, answer: Answer) -> None:
    folder = saved(tmp_path / "m", "llama-gqa", dtype=getattr(torch, source))
    facts = answer("scramble", folder, "-o", tmp_path / "out", "--dtype", policy)
    found, config = tiny.read(tmp_path / "out")
    assert facts["dtype"] == written
    assert {str(tensor.dtype) for tensor in found.values()} == {f"torch.{written}"}
    assert config["dtype"] == written


def test_a_config_that_names_another_type_follows_what_is_written(tmp_path: Path, answer: Answer) -> None:
    """transformers would load float32 weights in the bfloat16 that config.json names: scrambled, another function."""
    folder = saved(tmp_path / "m", "llama-gqa")
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    for policy, expected in (("auto", "float32"), ("float32", "float32"), ("keep", "bfloat16")):
        answer("scramble", folder, "-o", tmp_path / policy, "--dtype", policy)
        assert tiny.read(tmp_path / policy)[1]["dtype"] == expected


def test_max_shard_size(tmp_path: Path, answer: Answer) -> None:
    folder = saved(tmp_path / "m", "llama-gqa")
    answer("scramble", folder, "-o", tmp_path / "one")
    answer("scramble", folder, "-o", tmp_path / "many", "--max-shard-size", "8KB")
    shards = list((tmp_path / "many").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    assert [file.name for file in (tmp_path / "one").glob("*.safetensors")] == ["model.safetensors"]
    one, many = tensors(tmp_path / "one"), tensors(tmp_path / "many")
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert one.keys() == many.keys()


def test_force_replaces_the_output(tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = saved(tmp_path / "m", "llama-gqa"), tmp_path / "out"
    answer("scramble", folder, "-o", out, "--max-shard-size", "8KB")
    first = contents(out)
    assert run(["scramble", str(folder), "-o", str(out), "--seed", "1"]) == 2
    assert contents(out) == first
    answer("scramble", folder, "-o", out, "--seed", 1, "--force")
    assert "model-00001-of-00005.safetensors" not in contents(out)
    assert "model.safetensors" in contents(out)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["m", "out"]


def test_the_seed_decides_everything(tmp_path: Path, answer: Answer) -> None:
    folder = saved(tmp_path / "m", "gpt2-lm-tied")
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        answer("scramble", folder, "-o", tmp_path / name, "--seed", seed, "--save-transform", tmp_path / f"{name}.t")
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert (tmp_path / "a.t").read_bytes() == (tmp_path / "b.t").read_bytes()
    assert max(change(tensors(tmp_path / "c"), tensors(tmp_path / "a")).values()) > SEEN


MOVED: Mapping[str, Callable[[str], bool]] = {
    "first-attention": lambda name: "layers.0.self_attn" in name,
    "all-attention": lambda name: "self_attn" in name,
    "first-block": lambda name: "layers.0." in name,
    "model": lambda name: True,
}


@pytest.mark.parametrize("scope", SCOPES)
def test_scope(scope: str, tmp_path: Path, answer: Answer) -> None:
    folder = saved(tmp_path / "m", "llama-gqa")
    answer("scramble", folder, "-o", tmp_path / "out", "--scope", scope)
    off = change(tensors(tmp_path / "out"), tensors(folder))
    assert {name for name, size in off.items() if size} == {name for name in off if MOVED[scope](name)}
    inputs = tiny.case("llama-gqa").inputs(0)
    before, after = (tiny.logits(tiny.load(place), inputs) for place in (folder, tmp_path / "out"))
    assert float((after - before).abs().max() / before.abs().max()) <= 3e-5


# -- spellings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        *((command, *names) for command in ("align", "path", "merge") for names in (("rate", "lr"), ("start", "init"))),
        ("distance", "draws", "null-samples"),
    ],
)
def test_old_spellings_of_options_are_accepted_and_hidden(
    command: str, old: str, new: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both spellings reach the same option, which refuses nothing but the other faults of the line; help shows one."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"--{new} " in text
    assert f"--{old} " not in text
    for words in ([f"--{old}", "0"], [f"--{old}=0"], [f"--{new}", "0"]):
        assert run([command, *words]) == 2
        assert "Missing" in capsys.readouterr().err
    assert run(["info", "nowhere", f"--{old}", "0"]) == 2
    assert f"No such option: --{old}" in capsys.readouterr().err


def test_an_old_spelling_has_the_same_effect(
    tmp_path: Path, answer: Answer, capsys: pytest.CaptureFixture[str]
) -> None:
    a = own(tmp_path / "a")
    found = [answer("distance", a, a, flag, 2)["null"] for flag in ("--draws", "--null-samples")]
    assert found[0] == found[1]
    assert found[0]["draws"] == 2
    words = ["align", a, "--to", a, "-o", tmp_path / "out", "--matcher", "learned", "--data", "self"]
    for flag in ("--start", "--init"):
        check_refused([*map(str, words), flag, "activations"], "--init activations needs data", capsys)


# -- the program -----------------------------------------------------------------------------------------------------


def program(*arguments: str, script: str = ISOBASIN, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | environment, check=False)


def test_the_package_is_the_program_too() -> None:
    command = [sys.executable, "-m", "isobasin"]
    done = subprocess.run([*command, "info", "nowhere"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("isobasin: ")
    assert "nowhere" in done.stderr
    assert "Usage: isobasin" in subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout


def test_help_loads_nothing_heavy() -> None:
    """One process asks for every help; the control then runs a command, which does load torch."""
    script = f"""
import contextlib, io, json, sys
from isobasin.cli import run
from isobasin.cli.app import app
commands = [command.name or command.callback.__name__ for command in app.registered_commands]
heavy = lambda: [name for name in {HEAVY!r} if name in sys.modules]
said = {{}}
for command in ("", *commands):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = run([*command.split(), "--help"])
    said[command] = [code, out.getvalue(), heavy()]
with contextlib.redirect_stdout(io.StringIO()):
    run(["families"])
print(json.dumps([said, heavy()]))
"""
    done = program(script=script)
    assert done.returncode == 0, done.stderr
    said, afterwards = json.loads(done.stdout)
    assert done.stderr == ""
    assert said.keys() >= {"", *COMMANDS}
    for command, (code, text, heavy) in said.items():
        assert (code, heavy) == (0, []), command
        assert "Usage: isobasin" in text
        assert "--help" in text
    assert all(command in said[""][1] for command in COMMANDS)
    assert "torch" in afterwards


def test_threads_without_work_sleep() -> None:
    """torch reads the variable when it is imported; a value of the user stays."""
    script = "import atexit, os, sys; from isobasin.cli import main; assert 'torch' not in sys.modules;"
    script += "atexit.register(lambda: print(os.environ['OMP_WAIT_POLICY'])); main()"
    policy = os.environ.get("OMP_WAIT_POLICY")
    assert program("--version", script=script).stdout.splitlines()[1] == (policy or "passive")
    assert program("--version", script=script, OMP_WAIT_POLICY="active").stdout.splitlines()[1] == "active"


def test_a_pipe_that_nobody_reads_is_no_error() -> None:
    command = [sys.executable, "-c", ISOBASIN, "families"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")


def test_a_terminal_without_the_letters() -> None:
    done = program("families", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "llama" in done.stdout
    assert done.stdout.isascii()


SLOW = """
import sys, time
from isobasin.checkpoint import CheckpointWriter
write = CheckpointWriter.write
def slow(self, name, tensor, **options):
    write(self, name, tensor, **options)
    print("writing", file=sys.stderr, flush=True)
    time.sleep(60)
CheckpointWriter.write = slow
from isobasin.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_leaves_nothing(number: int, tmp_path: Path) -> None:
    """A signal after the first tensor was written: 130, one line, no output, no transform, no temporary folder."""
    folder = saved(tmp_path / "m", "llama-gqa")
    before = sorted(tmp_path.rglob("*"))
    command = ["scramble", str(folder), "-o", str(tmp_path / "deep/out"), "--save-transform", str(tmp_path / "t")]
    arguments = [sys.executable, "-c", SLOW, *command]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stdout is not None
        assert process.stderr.readline() == "writing\n"
        assert sorted(tmp_path.rglob("*")) != before  # it was at work
        process.send_signal(number)
        said, printed = process.stderr.read(), process.stdout.read()
    assert process.returncode == 130
    assert (said, printed) == ("isobasin: interrupted; no unfinished output is left\n", "")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_traceback_only_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(tmp_path)]) == 2
    quiet = capsys.readouterr().err
    monkeypatch.setenv("ISOBASIN_DEBUG", "1")
    assert run(["info", str(tmp_path)]) == 2
    loud = capsys.readouterr().err
    assert "Traceback" not in quiet
    assert "Traceback (most recent call last)" in loud
    assert loud.endswith(quiet)


def test_our_own_mistakes_say_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(path: object) -> None:
        raise ZeroDivisionError("by\nnothing")

    monkeypatch.setattr("isobasin.weights.open_checkpoint", fail)
    assert run(["info", "x"]) == 4
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("isobasin: internal error, ZeroDivisionError: by nothing; please report it")
    assert err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["study"]])
def test_without_a_command_the_help_is_printed_whole(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words) == 2
    out, err = capsys.readouterr()
    lines = (out + err).splitlines()
    assert any(line.startswith("Usage: isobasin") for line in lines)
    assert len(lines) > 10
    assert "shows how" not in err
