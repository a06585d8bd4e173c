"""Bad input through the command line: one line that says what, where and what to do; exit code 2; nothing written."""

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import isobasin as ib
import tiny
from isobasin.cli import run
from refusals import check_refused, everything

pytestmark = pytest.mark.hf

Break = Callable[[Path], None]
BASES = {
    "llama": ("llama-gqa", None),
    "sharded": ("llama-gqa", "8KB"),
    "neox": ("gpt_neox-half-rotary", None),
    "gpt2": ("gpt2-lm-tied", None),
    "bert": ("bert-classifier", None),
    "vit": ("vit-classifier", None),
}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sound folders, to be copied and broken."""
    root = tmp_path_factory.mktemp("sound")
    for name, (case, shard) in BASES.items():
        tiny.save(tiny.case(case), root / name, max_shard_size=shard)
    return root


# -- ways to break a folder ------------------------------------------------------------------------------------------


def config(**changes: Any) -> Break:
    """Set keys of config.json; `...` removes one."""

    def change(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if v is not ...}))

    return change


def tensors(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Break:
    def rewrite(folder: Path) -> None:
        save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")

    return rewrite


def without(name: str) -> Break:
    return tensors(lambda found: {k: t for k, t in found.items() if k != name})


def added(name: str) -> Break:
    return tensors(lambda found: found | {name: torch.ones(2, 2)})


def filled(name: str, value: float) -> Break:
    def fill(found: dict[str, Tensor]) -> dict[str, Tensor]:
        found[name].flatten()[3] = value
        return found

    return tensors(fill)


def cast(name: str, dtype: torch.dtype) -> Break:
    return tensors(lambda found: found | {name: found[name].to(dtype)})


def text(name: str, content: str) -> Break:
    return lambda folder: void((folder / name).write_text(content))


def void(_: object) -> None:
    """Breaks give nothing back."""


def missing(name: str) -> Break:
    return lambda folder: (folder / name).unlink()


def truncated(name: str) -> Break:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - 100)


def index(entries: dict[str, Any]) -> Break:
    """Put tensors into files by the index; `...` is the file of another tensor."""

    def rewrite(folder: Path) -> None:
        file = folder / "model.safetensors.index.json"
        found = json.loads(file.read_text())
        other = next(iter(found["weight_map"].values()))
        places = {name: other if place is ... else place for name, place in entries.items()}
        file.write_text(json.dumps(found | {"weight_map": found["weight_map"] | places}))

    return rewrite


def binary(change: Callable[[bytes], bytes]) -> Break:
    """Change the file's bytes: 8 of the header's length, the header, the data."""
    file = "model.safetensors"
    return lambda folder: void((folder / file).write_bytes(change((folder / file).read_bytes())))


def length(n: int) -> Break:
    return binary(lambda data: struct.pack("<Q", n) + data[8:])


def lie(truth: bytes, instead: bytes) -> Break:
    return binary(lambda data: data.replace(truth, instead, 1))


def replaced_by(content: str) -> Break:
    def replace(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.write_text(content)

    return replace


EMBEDDING = "model.embed_tokens.weight"


def shard(i: int, damage: Callable[[str], Break]) -> Break:
    return lambda folder: damage(sorted(file.name for file in folder.glob("*.safetensors"))[i])(folder)


def pickled_code(folder: Path) -> None:
    missing("model.safetensors")(folder)
    torch.save({"x": Path("y")}, folder / "pytorch_model.bin")


# name: base, how to break it, what the one line must say
FILES: Mapping[str, tuple[str, Break, str]] = {
    "missing-shard": (
        "sharded",
        shard(0, missing),
        r"/model-00001-of-\d+.safetensors is named in .*not there: download",
    ),
    "truncated-shard": (
        "sharded",
        shard(1, truncated),
        r"/model-00002-of-\d+.safetensors is truncated: .* re-download",
    ),
    "absent": (
        "sharded",
        index({"x.weight": ...}),
        r"tensor 'x.weight' is not in .*, where the index puts it: re-down",
    ),
    "separator": (
        "sharded",
        index({EMBEDDING: "a/b.safetensors"}),
        r"index.json names the file 'a/b.safe.* plain name",
    ),
    "parent": ("sharded", index({EMBEDDING: ".."}), r"index.json names the file '\.\.', expected a plain name"),
    "parent-path": ("sharded", index({EMBEDDING: "../x.safetensors"}), r"names the file '\.\./x.safe.* a plain name"),
    "number": ("sharded", index({EMBEDDING: 7}), r"index.json names the file 7, expected a plain name"),
    "no-map": ("sharded", text("model.safetensors.index.json", "{}"), r"index.json has no weight_map"),
    "no-weights": ("llama", missing("model.safetensors"), r"holds no weights: expected one of model.safetensors"),
    "truncated": ("llama", truncated("model.safetensors"), r"/model.safetensors is truncated"),
    "empty-file": ("llama", text("model.safetensors", ""), r"/model.safetensors says .* 0 bytes, but the file has 0"),
    "long-header": ("llama", length(2**40), r"says that its header has 1099511627776 bytes, but the file has \d+; "),
    "longest-header": ("llama", length(2**64 - 1), r"says that its header has 18446744073709551615 bytes, but"),
    "short-header": ("llama", length(40), r"the header of .*/model.safetensors is not valid JSON .*: re-download"),
    "lying-shape": ("llama", lie(b"[30,24]", b"[31,24]"), r"tensor '\S+' 2880 bytes, but F32 of \[31, 24\] needs 2976"),
    "lying-dtype": ("llama", lie(b'"F32"', b'"F64"'), r"gives tensor '\S+' \d+ bytes, but F64 of"),
    "config-missing": ("llama", missing("config.json"), r"/config.json is missing or not a regular file"),
    "config-invalid": ("llama", text("config.json", "{"), r"/config.json is not valid JSON \(.*re-download"),
    "config-list": ("llama", text("config.json", "[1]"), r"/config.json holds a JSON list, expected an object"),
    "a-file": ("llama", replaced_by("x"), r"/model is a file, expected a checkpoint folder: give the folder"),
    "not-there": ("llama", shutil.rmtree, r"/model' is neither a folder nor a model in the local .*check the path"),
    "pickled-code": (
        "llama",
        pickled_code,
        r"/pytorch_model.bin can not be read safely \(.* convert it to safetensors",
    ),
    "quantised": ("llama", config(quantization_config={"bits": 4}), r"config.json has a quantization_config: dequant"),
    "float8": (
        "llama",
        cast("lm_head.weight", torch.float8_e4m3fn),
        r"'lm_head.weight' in .* is quantised \(F8_E4M3\)",
    ),
    "integers": ("llama", cast("lm_head.weight", torch.int8), r"lm_head.weight: found int8 numbers, .*: dequantise"),
}
ARCHITECTURES: Mapping[str, tuple[str, Break, str]] = {
    "type": (
        "llama",
        config(model_type="no_such_type"),
        r"config.json: model_type is 'no_such_type', expected one of the \d+ that `isobasin families` lists; for",
    ),
    "no-type": ("llama", config(model_type=...), r"config.json: model_type is None, expected one of"),
    "type-list": ("llama", config(model_type=["llama"]), r"config.json: model_type is \['llama'\], expected one of"),
    "uncovered": (
        "llama",
        added("model.adapter.weight"),
        r"model.adapter.weight: no pattern of family llama covers this",
    ),
    "extra-layer": ("llama", config(num_hidden_layers=1), r"model.layers.1\S+: no pattern of family llama covers"),
    "missing": ("llama", without("model.norm.weight"), r"model.norm.weight: missing from the checkpoint, expected by"),
    "no-layer": ("llama", config(num_hidden_layers=4), r"model.layers.3\S+: missing from the checkpoint"),
    "no-head": ("llama", without("lm_head.weight"), r"lm_head.weight: missing from the checkpoint.*complete"),
    "vocabulary": ("llama", config(vocab_size=31), r"weight: found shape 30×24, expected 31×24 from config.json"),
    "heads": ("llama", config(num_attention_heads=6, head_dim=6), r"q_proj.weight: found shape 24×24, expected 36×24"),
    "kv-heads": ("llama", config(num_key_value_heads=1), r"k_proj.weight: found shape 12×24, expected 6×24"),
    "feed-forward": ("llama", config(intermediate_size=41), r"gate_proj.weight: found shape 40×24, expected 41×24"),
    "width": ("llama", config(hidden_size=28), r"q_proj.weight: found shape 24×24, expected 24×28"),
    "positions": ("gpt2", config(n_positions=17), r"transformer.wpe.weight: found shape 16×24, expected 17×24"),
    "more-positions": ("bert", config(max_position_embeddings=17), r"position_.*: found shape 16×24, expected 17×24"),
    "types": ("bert", config(type_vocab_size=3), r"token_type_embeddings.weight: found shape 2×24, expected 3×24"),
    "image": ("vit", config(image_size=8), r"position_embeddings: found shape 1×10×24, expected 1×17×24"),
    "patch": ("vit", config(patch_size=3), r"projection.weight: found shape 24×3×2×2, expected 24×3×3×3"),
    "axes": ("llama", added("model.norm.weight"), r"model.norm.weight: found shape 2×2, expected 24 from"),
    "odd-rotary": ("llama", config(head_dim=5), r"rotary size 5 of d_head 5: expected an even number.* config.json"),
    "rotary-columns": (
        "neox",
        config(head_dim=64),
        r"config.json: head_dim and rotary_pct make \d+ rotary columns in heads of 8; correct head_dim",
    ),
    "rotary-fraction": (
        "neox",
        config(rope_parameters=None, rotary_pct=1.5),
        r"config.json: rotary_pct is 1.5, expected a fraction",
    ),
    "groups": ("llama", config(num_key_value_heads=3), r"4 query heads do not divide over 3 kv heads; .*config.json"),
    "division": ("gpt2", config(n_head=5), r"config.json: 5 heads do not divide a width of 24; correct one"),
    "negative": ("llama", config(intermediate_size=-40), r"config.json: intermediate_size is -40, expected a positive"),
    "zero": ("llama", config(num_attention_heads=0), r"config.json: num_attention_heads is 0, expected a positive"),
    "string": (
        "llama",
        config(hidden_size="24"),
        r"config.json: hidden_size is '24', expected a positive whole number",
    ),
    "float": ("llama", config(hidden_size=24.0), r"config.json: hidden_size is 24.0, expected a positive whole number"),
    "bool": ("llama", config(num_hidden_layers=True), r"config.json: num_hidden_layers is True, expected a positive"),
    "no-size": (
        "llama",
        config(hidden_size=...),
        r"config.json: hidden_size is None, expected a positive whole number",
    ),
    "flag": ("llama", config(tie_word_embeddings="no"), r"config.json: tie_word_embeddings is 'no', expected true or"),
    "table": ("llama", config(rope_parameters=[1]), r"config.json: rope_parameters is \[1\], expected an object"),
    "depth": ("llama", config(num_hidden_layers=10**9), r"config.json: num_hidden_layers is 10{9}, but .* 30 tensors"),
    "depth-of-gpt2": (
        "gpt2",
        config(n_layer=10**18),
        r"config.json: n_layer is 10{18}, but the checkpoint has 28 tens",
    ),
    "absurd-width": ("llama", config(hidden_size=4 * 10**15), r"q_proj.weight: found shape 24×24, expected \d+×40{15}"),
    "absurd-heads": (
        "gpt2",
        config(n_head=10**12, n_embd=10**12),
        r"c_attn.weight: found shape 24×72, expected 10{12}×",
    ),
    "absurd-image": ("vit", config(image_size=10**12), r"position_embeddings: found shape 1×10×24, expected 1×250+1×"),
}
# What only the data show: `info` reads none.
NUMBERS: Mapping[str, tuple[str, Break, str]] = {
    "nan": ("llama", filled("lm_head.weight", math.nan), r"'lm_head.weight' holds 1 NaN and 0 infinite .* found in .*"),
    "nan-in-a-norm": ("llama", filled("model.norm.weight", math.nan), r"tensor 'model.norm.weight' holds 1 NaN and 0"),
    "infinity": ("llama", filled("lm_head.weight", -math.inf), r"'lm_head.weight' holds 0 NaN and 1 infinite .*repair"),
}
BAD = FILES | ARCHITECTURES | NUMBERS


def copied(bases: Path, base: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(bases / base, tmp_path / "model"))


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_checkpoint(name: str, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, damage, pattern = BAD[name]
    folder = copied(bases, base, tmp_path)
    damage(folder)
    before = everything(tmp_path)
    out, transform = tmp_path / "deep" / "out", tmp_path / "t.safetensors"
    check_refused(["scramble", str(folder), "-o", str(out), "--save-transform", str(transform)], pattern, capsys)
    if name not in NUMBERS:
        check_refused(["info", str(folder)], pattern, capsys)
        check_refused(["info", str(folder), "--json"], pattern, capsys)
    assert everything(tmp_path) == before


# What only transformers, which `check` runs, can tell.
CHECKED: Mapping[str, tuple[str, Break, str]] = {
    "class": (
        "llama",
        config(architectures=["LlamaForNothing"]),
        r"names 'LlamaForNothing', whose head is not supported; expected one of Llama",
    ),
    "no-class": (
        "llama",
        config(architectures=["logging"]),
        r"config.json: architectures names 'logging', whose head is not supported",
    ),
    "activation": (
        "llama",
        config(hidden_act="sqrt3"),
        r"config.json: transformers makes no Llama\S+ of it \(",
    ),
    "rope": ("llama", config(rope_parameters={"rope_type": "x"}), r"config.json: transformers makes no Llama\S+ of it"),
    "left-at-random": (
        "bert",
        without("bert.pooler.dense.bias"),
        r"^isobasin: bert.pooler.dense.bias: transformers expects this tensor",
    ),
}


@pytest.mark.parametrize("name", list(CHECKED))
def test_a_model_that_transformers_does_not_run(
    name: str, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, damage, pattern = CHECKED[name]
    folder = copied(bases, base, tmp_path)
    damage(folder)
    check_refused(["check", str(folder)], pattern, capsys)


@pytest.mark.parametrize("base", list(BASES))
def test_the_sound_folders_are_accepted(
    base: str, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The negative control of the table: unbroken, nothing is refused."""
    assert run(["scramble", str(bases / base), "-o", str(tmp_path / "out")]) == 0
    assert run(["info", str(bases / base)]) == 0
    assert (tmp_path / "out" / "config.json").is_file()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mlp_bias": True}, r"gate_proj\.bias: transformers expects this bias \(mlp_bias is true\)"),
        ({"rms_norm_eps": "0.01"}, r"rms_norm_eps is '0\.01', expected a number"),
    ],
)
def test_a_config_that_the_weights_do_not_have_or_that_is_no_number_is_refused(
    change: dict[str, object], said: str
) -> None:
    model = tiny.case("llama-gqa").build()
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    assert ib.load(model.state_dict(), config=config).n_params > 0
    with pytest.raises(ib.IsobasinError, match=said):
        ib.load(model.state_dict(), config=config | change)


def test_a_quantised_model_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state holds types beside tensors."""
    model = tiny.case("llama-gqa").build()
    state = {**model.state_dict(), "lm_head.packed": torch.qint8}
    monkeypatch.setattr(type(model), "state_dict", lambda *_, **__: state)
    with pytest.raises(ib.IsobasinError, match=r"lm_head\.packed: is a dtype, expected a tensor"):
        ib.load(model)


def test_models_that_were_not_compared_are_not_called_unrelated() -> None:
    a = tiny.case("llama-gqa").build()
    config = {**a.config.to_dict(), "architectures": [type(a).__name__]}
    models = [ib.load(a.state_dict(), config=config | {"rms_norm_eps": eps}) for eps in (1e-3, 1e-5)]
    facts = ib.lineage(models).summary().facts
    assert "unrelated" not in facts
    assert "not compared with all" in facts


ENDING = """
import signal
from isobasin.cli import app
app.run = lambda arguments: 3
try:
    app.main()
except SystemExit as stop:
    print(stop.code, {signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} == {signal.SIG_IGN})
"""


def test_a_signal_while_python_ends_does_not_change_the_exit_code() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("3 True\n", "")
