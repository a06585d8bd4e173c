"""Bad transform files, outputs and options through the command line: refused in one line, and nothing is written."""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import tiny
from isobasin.cli import run
from refusals import check_refused, everything

pytestmark = pytest.mark.hf

Break = Callable[[Path], None]
CASES = {
    "llama": "llama-gqa",
    "other-family": "mistral-gqa",
    "other-size": "llama-head-dim",
    "tied": "llama-tied",
    "gpt2": "gpt2-lm-tied",
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few models, and a transform of the first."""
    root = tmp_path_factory.mktemp("sound")
    for name, case in CASES.items():
        tiny.save(tiny.case(case), root / name)
    arguments = ["scramble", str(root / "llama"), "-o", str(root / "moved"), "--save-transform", str(root / "t")]
    assert run(arguments) == 0
    return root


# -- transform files -------------------------------------------------------------------------------------------------


def part(name: str, change: Callable[[Tensor], Tensor | None]) -> Break:
    """Change one tensor of the file, or remove it (None)."""

    def rewrite(file: Path) -> None:
        tensors, metadata = read(file)
        changed = change(tensors.pop(name))
        save_file(tensors if changed is None else tensors | {name: changed.contiguous()}, file, metadata)

    return rewrite


def read(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name).clone() for name in opened.keys()}, opened.metadata()  # noqa: SIM118


ENTRY = "isobasin-transform"


def header(**changes: Any) -> Break:
    """Change what the file says about itself; `...` removes an entry."""

    def rewrite(file: Path) -> None:
        found = json.loads(read(file)[1][ENTRY]) | changes
        metadata(json.dumps({key: value for key, value in found.items() if value is not ...}))(file)

    return rewrite


def metadata(text: str) -> Break:
    return lambda file: save_file(read(file)[0], file, {ENTRY: text})


def space(name: str, **changes: Any) -> Break:
    """Change what the file says about a space of its architecture."""

    def rewrite(file: Path) -> None:
        spaces = json.loads(read(file)[1][ENTRY])["spaces"]
        header(spaces=spaces | {name: spaces[name] | changes})(file)

    return rewrite


def filled(value: float) -> Callable[[Tensor], Tensor]:
    def fill(tensor: Tensor) -> Tensor:
        tensor.view(-1)[1] = value
        return tensor

    return fill


def scaled(factor: float) -> Callable[[Tensor], Tensor]:
    """Columns scaled: a matrix of condition about `factor`, a list of scales that spans it."""
    return lambda tensor: torch.cat([tensor[..., :1] * factor, tensor[..., 1:]], dim=-1)


def stretched(u: Tensor) -> Tensor:
    """The first complex number of each head, 1e9 times as large."""
    return torch.cat([u[:, :1] * 1e9, u[:, 1:]], dim=1)


def unchanged(file: Path) -> None:
    """A sound file."""


def written(content: bytes) -> Break:
    def write(file: Path) -> None:
        file.write_bytes(content)

    return write


def replaced_by_a_model(file: Path) -> None:
    shutil.copyfile(file.parent / "llama" / "model.safetensors", file)


def removed(tensor: Tensor) -> None:
    """The part is left out."""


# name: how to break the file, what the one line must say
BAD: Mapping[str, tuple[Break, str]] = {
    "not-there": (os.unlink, r"/t: no such transform file"),
    "empty": (written(b""), r"/t: not a transform file \(.*\); expected what --save-transform writes"),
    "text": (written(b"to whom it may concern"), r"/t: not a transform file"),
    "truncated": (lambda file: os.truncate(file, file.stat().st_size - 8), r"/t: not a transform file"),
    "cut-in-the-header": (lambda file: os.truncate(file, 100), r"/t: not a transform file"),
    "a-model": (replaced_by_a_model, r"/t: not a transform of this program \(no entry isobasin-transform in its"),
    "version": (header(version="9"), r"/t: .* can not be read \(version '9', expected '1'\); make the transform again"),
    "no-version": (header(version=...), r"/t: its architecture can not be read \('version'\); make"),
    "no-spaces": (header(spaces=...), r"/t: its architecture can not be read"),
    "spaces-list": (header(spaces=[]), r"/t: its architecture can not be read"),
    "json": (metadata("{"), r"/t: its architecture can not be read \(.*make the transform again"),
    "list": (metadata("[]"), r"/t: its architecture can not be read"),
    "size-word": (space("resid", size="24"), r"/t: its architecture can not be read \(space resid is .*'24'"),
    "size-zero": (space("heads0", n_kv_heads=0), r"/t: its architecture can not be read \(space heads0 is"),
    "odd": (space("heads0", rotary=3), r"/t: its architecture can not be read \(space heads0 is"),
    "kind": (space("resid", kind="magic"), r"/t: its architecture can not be read \(space resid is"),
    "unknown-key": (space("resid", colour="red"), r"/t: its architecture can not be read \(.*colour"),
    "absurd-size": (space("resid", size=10**12), r"/t: element resid: not in O\(1000000000000\)"),
    "absurd-heads": (space("heads0", n_heads=10**12, n_kv_heads=10**12), r"/t: element heads0: part '.*' has shape"),
    "nan": (part("element/resid/matrix", filled(math.nan)), r"/t: element resid: not in O\(24\) .*make the transform"),
    "infinite": (part("element/heads1/vo.matrix", filled(math.inf)), r"/t: element heads1: not in"),
    "nan-value": (part("gauge/norm:f/after", filled(math.nan)), r"/t: coordinate norm:f: not finite; make the tran"),
    "not-orthogonal": (part("element/resid/matrix", scaled(1.1)), r"/t: element resid: not in O\(24\)"),
    "condition": (part("element/heads0/vo.matrix", scaled(1e9)), r"/t: element heads0: not in .*badly conditioned"),
    "condition-of-phases": (part("element/heads0/qk.u", stretched), r"/t: element heads0: scales from .*badly cond"),
    "condition-of-scales": (part("element/ff1/scale", scaled(1e-7)), r"/t: element ff1: scales from .* badly cond"),
    "zero-scale": (part("element/ff1/scale", scaled(0.0)), r"/t: element ff1: scales from 0.0e\+00 to .* badly cond"),
    "twice": (part("element/ff0/index", lambda index: index * 0), r"/t: element ff0: not in .*S40"),
    "fractions": (part("element/ff0/index", lambda index: index + 0.4), r"/t: element ff0: part 'index' holds float32"),
    "no-part": (part("element/heads0/kv", removed), r"/t: element heads0 is incomplete \('kv'\); make the transform"),
    "no-value": (part("gauge/norm:f/after", removed), r"/t: 'gauge/norm:f/after' is missing; make the transform"),
    "too-few-heads": (part("element/heads0/vo.matrix", lambda m: m[:1]), r"element heads0: part 'vo.matrix' has shape"),
    "too-few-axes": (part("element/resid/matrix", lambda m: m[0]), r"element resid: part 'matrix' has shape \(24,\)"),
    "not-square": (part("element/heads0/vo.matrix", lambda m: m[:, 1:]), r"part 'vo.matrix' has shape \(2, 5, 6\)"),
    "no-numbers": (part("element/ff0/scale", lambda s: s[:0]), r"element ff0: part 'scale' has shape \(0,\)"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_transform_file(name: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage, pattern = BAD[name]
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "t"
    damage(file)
    before = everything(tmp_path)
    check_refused(["apply", str(file), str(tmp_path / "llama"), "-o", str(tmp_path / "out")], pattern, capsys)
    check_refused(["invert", str(file), "-o", str(tmp_path / "back")], pattern, capsys)
    assert everything(tmp_path) == before


# These are sound in themselves, and do not fit the model.
UNFIT: Mapping[str, tuple[str, Break, str]] = {
    "family": (
        "other-family",
        unchanged,
        r"/t: .* for a llama model with 3 layers, .* is mistral with 2 layers",
    ),
    "sizes": (
        "other-size",
        unchanged,
        r"3 layers, width 24, 4/2 heads of 6, .* llama with 2 layers, .* of 10, .*; use",
    ),
    "gpt2": ("gpt2", unchanged, r"/t: the transform is for a llama model .*, the model is gpt2 with .*use a"),
    "tied": ("tied", unchanged, r"/t: the transform is for a llama model .*, the model is llama with"),
    "value": ("llama", part("gauge/norm:f/after", lambda v: v[..., :-1]), r"coordinate norm:f: .* shape .*, expected"),
}


@pytest.mark.parametrize("name", list(UNFIT))
def test_a_transform_for_another_model(
    name: str, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, change, pattern = UNFIT[name]
    file = Path(shutil.copyfile(sound / "t", tmp_path / "t"))
    change(file)
    before = everything(tmp_path)
    check_refused(["apply", str(file), str(sound / model), "-o", str(tmp_path / "out")], pattern, capsys)
    assert everything(tmp_path) == before


def test_the_sound_transform_is_accepted(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["apply", str(sound / "t"), str(sound / "llama"), "-o", str(tmp_path / "out")]) == 0
    assert run(["invert", str(sound / "t"), "-o", str(tmp_path / "back")]) == 0
    assert capsys.readouterr().err == ""
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (sound / "moved/model.safetensors").read_bytes()


# -- outputs and options ---------------------------------------------------------------------------------------------

# name: what comes after `scramble`, what the one line must say
OPTIONS: Mapping[str, tuple[str, str]] = {
    "full-output": ("llama -o moved", r"output /.*/moved exists and is not empty: choose another name, or"),
    "file-as-output": ("llama -o t --force", r"output /.*/t is a file, expected a folder: choose another name"),
    "no-checkpoint": (
        "llama -o letters --force",
        r"output .*letters holds a.txt, which no checkpoint of isobasin has",
    ),
    "inside": ("llama -o llama/out", r"output /.*/llama/out is the input llama or inside it: choose another folder"),
    "same": ("llama -o llama --force", r"output /.*/llama is the input llama or inside it"),
    "around": ("llama -o . --force", r"input llama lies inside the output /.*: choose another folder"),
    "scope": ("llama -o out --scope layer", r"scope 'layer' is unknown, expected one of first-attention, "),
    "dtype": ("llama -o out --dtype int4", r"dtype 'int4' is unknown: give one of keep, float32"),
    "device": ("llama -o out --device abacus", r"--device 'abacus' is no device; expected cpu, cuda or cuda:N"),
    "meta": ("llama -o out --device meta", r"--device 'meta' is no device; expected cpu, cuda or cuda:N"),
    "cuda": ("llama -o out --cuda", r"--device cuda: this machine has no such CUDA device; leave it out to use"),
    "far-cuda": ("llama -o out --device cuda:9", r"--device cuda:9: this machine has no such CUDA device"),
    "shard-size": ("llama -o out --max-shard-size many", r"max_shard_size 'many' is not a size: give bytes, or"),
    "no-shard-size": ("llama -o out --max-shard-size 0", r"max_shard_size '0' is not a size"),
    "negative-seed": ("llama -o out --seed -1", r"'--seed': .*greater than or equal to 0.*--help"),
    "absurd-seed": (
        "llama -o out --seed 99999999999999999999",
        r"'--seed': .*less than or equal to 9223372036854775807",
    ),
    "no-seed": ("llama -o out --seed x", r"'--seed': .*integer.*--help"),
    "no-output": ("llama", r"Missing option '?(-o|--output)"),
    "no-option": ("llama -o out --scpoe model", r"No such option: --scpoe"),
    "long-name": (f"{'x' * 5000} -o out", r"x+ can not be read \(File name too long\): expected a checkpoint folder"),
    "transform-there": (
        "llama -o out --save-transform t",
        r"t: already there; choose another name, or use --force to replace it",
    ),
    "transform-a-folder": ("llama -o out --save-transform letters --force", r"letters: a folder, expected the name of"),
    "transform-nowhere": ("llama -o out --save-transform no/t", r"no: no such folder .*; create it first"),
    "transform-in-input": (
        "llama -o out --save-transform llama/model.safetensors --force",
        r"--save-transform llama/model.safetensors: lies inside llama; choose a place beside it",
    ),
    "transform-in-output": (
        "llama -o moved --save-transform moved/t --force",
        r"--save-transform moved/t: lies inside moved; choose a place beside it",
    ),
}


@pytest.fixture
def here(sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the sound models, and something that is no model."""
    shutil.copytree(sound, tmp_path, dirs_exist_ok=True)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").write_text("dear")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    return tmp_path


@pytest.mark.parametrize("name", list(OPTIONS))
def test_a_bad_option(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, pattern = OPTIONS[name]
    before = everything(here)
    check_refused(["scramble", *arguments.split()], pattern, capsys)
    assert everything(here) == before


def test_a_failure_keeps_the_transform_that_was_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --force the old file goes only when the new model is in place."""
    before = everything(here)
    arguments = ["scramble", "llama", "-o", "out", "--save-transform", "t", "--force", "--seed", "5"]
    check_refused([*arguments, "--device", "abacus"], "is no device", capsys)
    assert everything(here) == before
    assert run(arguments) == 0
    assert (here / "t").read_bytes() != before["t"]
    assert everything(here).keys() - before.keys() == {"out", "out/config.json", "out/model.safetensors"} | {
        f"out/{name}" for name in ("generation_config.json",)
    }


def test_invert_and_apply_do_not_overwrite(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(here)
    check_refused(
        ["invert", "t", "-o", "t"], r"t: already there; choose another name, or use --force to replace it", capsys
    )
    check_refused(["invert", "t", "-o", "letters", "--force"], r"letters: a folder, expected", capsys)
    check_refused(["apply", "t", "llama", "-o", "moved"], r"/moved exists and is not empty", capsys)
    check_refused(["invert", "t", "-o", "t", "--force"], r"t: is the input t; choose another name", capsys)
    other = "other/model.safetensors"
    words = ["invert", "t", "-o", other, "--force"]
    shutil.copytree("llama", "other")
    kept = (here / other).read_bytes()
    check_refused(words, r"model\.safetensors: not a transform of isobasin, so it is not replaced", capsys)
    check_refused(["equal", "llama", "moved", "--save-transform", other, "--force"], "not a transform of", capsys)
    check_refused(["equal", "llama", "moved", "--save-witness", other, "--force"], "not a witness of", capsys)
    assert (here / other).read_bytes() == kept
    shutil.rmtree("other")
    assert everything(here) == before
    shutil.copy("t", "t2")
    assert run(["invert", "t", "-o", "t2", "--force"]) == 0
    assert (here / "t2").read_bytes() != before["t"]


def test_a_folder_that_may_not_be_read(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a refusal of the system itself where the tests do not run as root, who may read everything."""
    if os.geteuid():
        (here / "llama").chmod(0)
    else:
        monkeypatch.setattr(Path, "is_file", lambda self: _refuse(self))
    try:
        check_refused(["info", "llama"], r"llama.* can not be read \(?.*Permission denied|is missing or not", capsys)
    finally:
        monkeypatch.undo()
        (here / "llama").chmod(0o755)


def _refuse(path: Path) -> bool:
    raise PermissionError(13, "Permission denied", str(path))


COMMANDS = {
    "nonsense": r"No such command 'nonsense'",
    "info": r"Missing argument 'MODEL'",
    "apply t": r"Missing argument 'MODEL'",
    "check nowhere": r"'nowhere' is neither a folder nor a model in the local Hugging Face cache",
    "--scope": r"No such option: --scope",
}


@pytest.mark.parametrize("arguments", list(COMMANDS))
def test_a_bad_command(arguments: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check_refused(arguments.split(), COMMANDS[arguments], capsys)
