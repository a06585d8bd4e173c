"""What files, names, options and the operating system can do to a command: exit code 2 and one line, never 4."""

import json
import os
import pickle
import re
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import isobasin as ib
import tiny
from isobasin.cli import run
from isobasin.errors import MAX_LINE, IsobasinError, brief, one_line, printable, system_problem
from isobasin.merging.recipe import read_recipe
from isobasin.model import ModelConfig, Transformer
from isobasin.runtime import image_shape, max_length, run_module, vocabulary_size
from isobasin.study.config import read_grid
from isobasin.study.store import stored_studies
from isobasin.tasks.datasets import _rank
from isobasin.tasks.images import PictureFiles, read_cifar, read_idx
from isobasin.tasks.task import label_names
from isobasin.tasks.text import class_numbers, load_array, read_ids, read_table, read_text
from isobasin.weights import load
from refusals import check_refused

pytestmark = pytest.mark.hf

MAIN = "from isobasin.cli import main; main()"
LONG = "x" * 300
ESCAPE = "\x1b[31m"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    tiny.save(tiny.case("gpt2-lm-tied"), root / "gpt2")
    tiny.save(tiny.case("llama-gqa"), root / "sharded", max_shard_size="8KB")
    return root


def program(*arguments: object, script: str = MAIN, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, text=True, timeout=120, check=False, **options)


def written(file: Path, content: bytes | str) -> Path:
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


# -- streams and limits ----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["fingerprint", "MODEL"], ["--help"], ["--version"], ["align", "--help"]])
def test_standard_output_that_is_full(arguments: list[str], models: Path) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = program(*(models / "gpt2" if word == "MODEL" else word for word in arguments), stdout=full)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "No space left" in done.stderr or "no space left" in done.stderr


@pytest.mark.parametrize("arguments", [["families"], ["--help"]], ids=" ".join)
def test_standard_output_that_is_closed(arguments: list[str]) -> None:
    done = program(*arguments, stdout=None, preexec_fn=lambda: os.close(1))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "standard output is closed: open it" in done.stderr


def test_standard_error_that_is_closed_or_full() -> None:
    assert program("info", "/dev/null", stderr=None, preexec_fn=lambda: os.close(2)).returncode == 2
    if Path("/dev/full").exists():
        with open("/dev/full", "w", encoding="utf-8") as full:
            assert program("info", stderr=full).returncode == 2


def test_help_in_a_locale_of_ascii() -> None:
    done = program("align", "--help", env=os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "200"})
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\u2026" in done.stdout


def test_help_that_nobody_reads_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = program("--help", stdout=writing)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_too_little_address_space(models: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (300 * 2**20,) * 2)

    done = program("info", models / "gpt2", preexec_fn=limit)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert "not enough memory: close other programs" in done.stderr


def test_a_warning_of_a_library_does_not_come_before_our_line() -> None:
    script = f"""
import logging, sys, warnings, isobasin.weights
def noisy(path):
    warnings.warn("a page of advice")
    logging.getLogger("PIL").error("a page of logs")
    raise isobasin.errors.IsobasinError("the one line")
import isobasin.errors
isobasin.weights.load = noisy
{MAIN}"""
    done = program("info", "x", script=script)
    assert (done.returncode, done.stderr) == (2, "isobasin: the one line\n")
    loud = program("info", "x", script=script, env=os.environ | {"ISOBASIN_DEBUG": "1"})
    assert "a page of advice" in loud.stderr
    assert "a page of logs" in loud.stderr


def test_what_the_system_refuses_is_told_from_our_mistakes() -> None:
    assert system_problem(ZeroDivisionError("by nothing")) is None
    assert system_problem(OSError("a library's own error")) is None
    assert system_problem(RuntimeError("shapes differ")) is None
    found = [
        system_problem(OSError(28, "No space left on device", "/x")),
        system_problem(PermissionError(13, "Permission denied", "/x")),
        system_problem(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")),
        system_problem(MemoryError()),
        system_problem(RuntimeError("Symlink loop from '/x'")),
    ]
    words = ["/x: no space left to write: free", "/x: Permission denied", "not enough", "not enough", "leads to itself"]
    assert all(found[i] and words[i] in str(found[i]) for i in range(5)), found


# -- names -----------------------------------------------------------------------------------------------------------


def test_escape_characters_of_names_do_not_reach_the_terminal(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(models / "gpt2", tmp_path / f"{ESCAPE}m")
    out = tmp_path / f"{ESCAPE}\u202eo\nut"
    assert run(["scramble", str(folder), "-o", str(out)]) == 0
    said = capsys.readouterr().out
    assert r"\x1b[31m\u202eo\nut: " in said
    assert "\x1b" not in said
    assert out.is_dir()
    assert run(["info", str(tmp_path / ESCAPE)]) == 2
    (tmp_path / ESCAPE).mkdir()
    assert run(["info", str(tmp_path / ESCAPE)]) == 2
    said = capsys.readouterr().err
    assert said.count(r"\x1b[31m") == 2
    assert "\x1b" not in said


def test_printable_text_stays_as_it_is() -> None:
    assert printable("Q–K × é 你好\u00a0") == "Q–K × é 你好\u00a0"
    assert printable("a\tb\x1b\x9b\udcff\u2028") == r"a\tb\x1b\x9b\udcff\u2028"
    assert one_line("a\n b\x1b") == r"a b\x1b"
    assert len(one_line("start " + "x" * 10**5 + " end")) == MAX_LINE
    assert one_line("start " + "x" * 10**5 + " end").endswith(" end")
    assert brief(16**5000) == "a int too large to show"
    assert brief([1, 2]) == "[1, 2]"


NAMED = {  # commands with a name of 300 characters, and the start of the one line
    "info": ["info", LONG],
    "output": ["scramble", "MODEL", "-o", LONG],
    "transform": ["scramble", "MODEL", "-o", "out", "--save-transform", LONG],
    "apply": ["apply", LONG, "MODEL", "-o", "out"],
    "compare": ["fingerprint", "MODEL", "--compare", LONG],
    "merge": ["merge", LONG, "-o", "out"],
    "recipe": ["merge", f"{LONG}.yml", "-o", "out"],
    "grid": ["study", "run", LONG, "-o", "out"],
    "study-report": ["study", "report", LONG],
    "pack": ["study", "pack", LONG],
    "unpack": ["study", "unpack", LONG],
    "report": ["report", LONG, "-o", "out.html"],
    "data": ["path", "MODEL", "MODEL", "--data", LONG, "-o", "out.json"],
    "result": ["path", "MODEL", "MODEL", "--data", "ids.npy", "-o", LONG],
    "demo": ["demo", "-o", LONG],
    "plot": ["distance", "MODEL", "MODEL", "--plot", f"{LONG}.png"],
}


@pytest.mark.parametrize("name", list(NAMED))
def test_a_name_that_is_too_long(
    name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", np.arange(30))
    arguments = [str(models / "gpt2") if word == "MODEL" else word for word in NAMED[name]]
    check_refused(arguments, r"xxxxx.*(too long|neither a folder|no study|no such)", capsys)


@pytest.mark.parametrize("place", ["loop", "loop/inside"])
def test_an_output_that_is_a_loop_of_links(
    place: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    pattern = r"loop.*(a symbolic link that leads to itself|symbolic links)"
    check_refused(["scramble", str(models / "gpt2"), "-o", str(tmp_path / place)], pattern, capsys)


def test_names_that_are_not_utf8(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(models / "gpt2", tmp_path / os.fsdecode(b"m\xff"))
    out, ids = tmp_path / os.fsdecode(b"o\xff"), tmp_path / "ids.npy"
    np.save(ids, np.arange(30))
    assert run(["scramble", str(folder), "-o", str(out)]) == 0
    result = tmp_path / os.fsdecode(b"p\xff.json")
    assert run(["path", str(folder), str(out), "--data", str(ids), "-o", str(result), "--points", "2"]) == 0
    page = tmp_path / os.fsdecode(b"p\xff.html")
    assert run(["report", str(result), "-o", str(page)]) == 0
    assert r"o\udcff" in capsys.readouterr().out


# -- options at their limits -----------------------------------------------------------------------------------------

PATH = ["path", "MODEL", "MODEL", "--data", "ids.npy", "-o", "p.json", "--force"]
LIMITS = {
    "--points": PATH,
    "--plane": [*PATH, "--align", "--points", "2"],
    "--max-samples": [*PATH, "--points", "2"],
    "--batch-size": [*PATH, "--points", "2"],
    "--seq-len": [*PATH, "--points", "2"],
    "--learn-samples": [*PATH, "--points", "2"],
    "--steps": ["align", "MODEL", "--to", "MODEL", "-o", "o", "--matcher", "learned", "--data", "ids.npy", "--force"],
    "--workers": ["align", "MODEL", "--to", "MODEL", "-o", "o", "--force"],
    "--null-samples": ["distance", "MODEL", "MODEL"],
    "--seed": ["distance", "MODEL", "MODEL"],
    "--max-shard-size": ["scramble", "MODEL", "-o", "o", "--force"],
    "--to": ["merge", "MODEL", "MODEL", "-o", "o", "--force"],
}


@pytest.mark.parametrize("option", list(LIMITS))
def test_numbers_that_no_option_takes(
    option: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.save("ids.npy", np.arange(30))
    arguments = [str(models / "gpt2") if word == "MODEL" else word for word in LIMITS[option]]
    for value in ("-1", "10" + "0" * 30, "9" * 5000):
        check_refused([*arguments, f"{option}={value}"], option.strip("-").replace("-", "[-_ ]"), capsys)


def test_the_largest_seed(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, largest = str(models / "gpt2"), str(2**63 - 1)
    assert run(["distance", model, model, "--seed", largest, "--null-samples", "2"]) == 0
    assert run(["check", model, "--seed", largest]) == 0
    check_refused(["distance", model, model, "--seed", str(2**63)], "--seed.*less than or equal to", capsys)


# -- data ------------------------------------------------------------------------------------------------------------


def npy(descr: str, shape: tuple[int, ...], body: bytes = b"") -> bytes:
    head = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    head += " " * (63 - (len(head) + 10) % 64) + "\n"
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(head)) + head.encode() + body


def labels(file: Path) -> object:
    return class_numbers(read_table(file).labels, 2, {}, file)


def cifar(values: list[Any]) -> bytes:
    return pickle.dumps({b"data": np.zeros((len(values), 3072), np.uint8), b"labels": values}, protocol=2)


def picture(file: Path) -> object:
    return PictureFiles((file,))[0]


DATA: dict[str, tuple[str, bytes | str, Callable[[Path], object], str]] = {
    "csv-2^64": ("x.csv", "label,text\n18446744073709551617,a\n0,b\n", labels, "row 1 has the label '18446744073709"),
    "csv-5000": ("x.csv", f"label,text\n{'9' * 5000},a\n", labels, "row 1 has the label '9999"),
    "jsonl-2^64": (
        "x.jsonl",
        '{"label": 18446744073709551617, "text": "a"}',
        labels,
        "row 1 has the label 18446744073",
    ),
    "jsonl-1e300": ("x.jsonl", '{"label": 1e300, "text": "a"}', labels, "row 1 has the label 1000000"),
    "jsonl-5000": ("x.jsonl", f'{{"label": {"9" * 5000}, "text": "a"}}', labels, "not JSON, one object a line"),
    "jsonl-surrogate": ("x.jsonl", '{"label": 1, "text": "\\ud800"}', labels, "row 1 holds a lone surrogate"),
    "text-surrogate": ("x.jsonl", '{"text": "\\uDFFF"}', read_text, "row 1 holds a lone surrogate"),
    "jsonl-list": ("x.jsonl", '{"label": 1, "text": ["a"]}', labels, r"row 1 has the text \['a'\]; expected a string"),
    "cifar-2^70": ("test_batch", cifar([2**70, 1]), lambda f: read_cifar([f]), "expected a whole number for each"),
    "cifar-scalar": (
        "test_batch",
        pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": np.zeros((), int)}, protocol=2),
        lambda f: read_cifar([f]),
        "expected a CIFAR batch",
    ),
    "pickle-size": (
        "test_batch",
        b"\x80\x02cbuiltins\nlist\n(cbuiltins\nbytearray\n(J\x00\x00\x00\x10tRtR.",
        lambda f: read_cifar([f]),
        "a pickle that is refused",
    ),
    "pickle-array": (
        "test_batch",
        b"\x80\x02cnumpy\nndarray\n(J\x00\x00\x00\x10\x85tR.",
        lambda f: read_cifar([f]),
        "a pickle that is refused",
    ),
    "npy-8-PiB": ("x.npy", npy("<i8", (2**50,)), load_array, "not a plain numpy array of numbers"),
    "npy-2^80": ("x.npy", npy("<i8", (2**40, 2**40)), load_array, "not a plain numpy array of numbers"),
    "ids-folder": ("x.txt/y.bin", "", lambda f: read_ids(f.parent.with_suffix(".npy"), 8), "no such file or folder"),
    "idx-promise": (
        "i",
        b"\0\0\x08\x03" + struct.pack(">3I", 1000, 1000, 1000),
        read_idx,
        r"axes \(1000, 1000, 1000\), which it does not hold",
    ),
    "picture": ("x.png", b"\x89PNG\r\n\x1a\n" + b"\0" * 40, picture, "not a picture"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(DATA))
def test_hostile_data(name: str, tmp_path: Path) -> None:
    file, content, read, pattern = DATA[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    with pytest.raises(IsobasinError, match=pattern):
        read(written(tmp_path / file, content))


def test_sound_data_are_accepted(tmp_path: Path) -> None:
    """The negative control of the table."""
    assert list(labels(written(tmp_path / "x.csv", "label,text\n1,a\n0,b\n"))) == [1, 0]  # type: ignore[call-overload]
    emoji = '{"label": 1, "text": "\\ud83d\\ude00"}\n{"label": 0, "text": "b", "other": {}}'
    assert read_table(written(tmp_path / "x.jsonl", emoji)).texts == ("😀", "b")
    assert read_cifar([written(tmp_path / "test_batch", cifar([3, 4]))])[1].tolist() == [3, 4]
    assert load_array(written(tmp_path / "x.npy", npy("<i8", (2,), bytes(16)))).tolist() == [0, 0]
    assert load_array(written(tmp_path / "e.npy", npy("<i8", (0,)))).tolist() == []


def test_rows_with_keys_of_their_own_take_no_square_of_memory(tmp_path: Path) -> None:
    import tracemalloc

    file = written(tmp_path / "x.jsonl", "\n".join(f'{{"k{i}": 1, "text": "a", "label": 1}}' for i in range(3000)))
    tracemalloc.start()
    assert len(read_table(file)) == 3000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20e6  # one list per key has 9 million entries


def test_labels_are_ordered_whatever_their_digits() -> None:
    assert sorted(["--5", "10", "9", "-1", "9" * 5000, "b"], key=_rank) == ["-1", "9", "10", "--5", "9" * 5000, "b"]


# -- grids and recipes -----------------------------------------------------------------------------------------------

GRID = """name = "x"
[[cells]]
model = "vit"
layers = 1
heads = 2
width = 8
dataset = "digits"
scope = "model"
seeds = [1, 2]
[cells.pretrain]
steps = 1
"""
GRIDS = {
    "deep": ("layers = 1", f"layers = {'[' * 2000}", "is not TOML: maximum recursion"),
    "digits": ("layers = 1", f"layers = {'9' * 5000}", "is not TOML: Exceeds the limit"),
    "hexadecimal": ("layers = 1", f"layers = 0x{'f' * 5000}", "layers is a int too large to show, expected a whole"),
    "layers": ("layers = 1", "layers = 4611686018427387904", "layers is 4611686018427387904, expected a whole number"),
    "seed": ("[1, 2]", f"[1, {2**63}]", "seeds is .*, expected a list of at least two whole numbers from 0 to 9223372"),
    "many-seeds": ("[1, 2]", str(list(range(2000))), "expected a list of at least two whole .* at most 1000"),
    "escape": ('"digits"', '"\\u001b[31m"', "dataset is .*, expected a name in quotes"),
    "false": ("steps = 1", "steps = false", "steps is False, expected a whole number"),
    "matcher": (
        "layers = 1",
        'layers = 1\nmatchers = [{matcher = "learned", steps = "x"}]',
        "steps is 'x', expected a",
    ),
    "dots": ("layers = 1", f"{'a.' * 9000}a = 1", "line 4 has more than 300 dots"),
    "long": ("layers = 1", "#" * 2**17, "bytes, expected a TOML file of at most 65536"),
    "product": (
        "steps = 1",
        "steps = 1\n" + "\n".join(f"{key} = {[0.5] * 100}" for key in ("rate", "decay", "warmup")),
        "its lists span 1000000 cells, expected at most 10000",
    ),
}


@pytest.mark.parametrize("name", list(GRIDS))
def test_a_hostile_grid(name: str, tmp_path: Path) -> None:
    before, after, pattern = GRIDS[name]
    assert before in GRID
    with pytest.raises(IsobasinError, match=pattern):
        read_grid(written(tmp_path / "g.toml", GRID.replace(before, after)))


def test_the_largest_seed_of_a_grid(tmp_path: Path) -> None:
    (cell,) = read_grid(written(tmp_path / "g.toml", GRID.replace("[1, 2]", f"[1, {2**63 - 1}]"))).cells
    config = ModelConfig(d_model=8, n_layers=1, n_heads=2, d_ff=8, d_vocab=16, n_positions=8)
    assert Transformer(config, seed=cell.seeds[1]).config == config


RECIPE = "models:\n- model: a\n- model: b\nmerge_method: linear\n"
RECIPES = {
    "latin-1": (RECIPE.replace("b", "é").encode("latin-1"), "is not UTF-8 text"),
    "utf-16": (RECIPE.encode("utf-16"), "is not UTF-8 text"),
    "surrogate": (RECIPE.replace("model: b", 'model: "\\ud800"'), "expected a word"),
    "escape": (RECIPE.replace("model: b", 'model: "\\e[31m"'), "expected a word"),
    "tag-int": (RECIPE.replace("model: b", "model: !!int ''"), "not the YAML expected"),
    "tag-bool": (RECIPE.replace("model: b", "model: !!bool x"), "not the YAML expected"),
    "tag-time": (RECIPE.replace("model: b", "model: !!timestamp x"), "not the YAML expected"),
    "hexadecimal": (RECIPE.replace("model: b", f"model: 0x{'f' * 5000}"), "a int too large to show, expected a word"),
    "deep": ("[" * 3000, "not the YAML expected"),
}


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_hostile_recipe(name: str, tmp_path: Path) -> None:
    content, pattern = RECIPES[name]
    with pytest.raises(IsobasinError, match=pattern):
        read_recipe(written(tmp_path / "r.yml", content))


def test_the_sound_grid_and_recipe_are_accepted(tmp_path: Path) -> None:
    assert len(read_grid(written(tmp_path / "g.toml", GRID)).cells) == 1
    assert read_recipe(written(tmp_path / "r.yml", RECIPE)).models == ("a", "b")


# -- checkpoints -----------------------------------------------------------------------------------------------------


def changed(folder: Path, name: str, **changes: Any) -> Path:
    file = folder / name
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


CONFIGS = {
    "surrogate": ({"note": "\ud800"}, "config.json is not valid JSON .*surrogates not allowed"),
    "vocabulary": ({"vocab_size": "30"}, "vocab_size is '30', expected a positive whole number"),
    "positions": ({"max_position_embeddings": [1]}, r"max_position_embeddings is \[1\], expected a positive whole"),
    "classes": ({"id2label": {str(2**70): "a"}}, "id2label has a key that is no number"),
}


def read_settings(folder: Path) -> object:
    weights = load(folder)
    return vocabulary_size(weights), max_length(weights), label_names([weights])


@pytest.mark.parametrize("name", list(CONFIGS))
def test_a_hostile_config(name: str, models: Path, tmp_path: Path) -> None:
    changes, pattern = CONFIGS[name]
    folder = changed(shutil.copytree(models / "sharded", tmp_path / "m"), "config.json", **changes)
    with pytest.raises(IsobasinError, match=pattern):
        read_settings(folder)


@pytest.mark.parametrize("size", ["8", [4, 4, 4], [4, 0], 2.5])
def test_an_image_size_that_is_none(size: object, tmp_path: Path) -> None:
    tiny.save(tiny.case("vit-classifier"), tmp_path)
    weights = load(tmp_path)
    assert image_shape(weights) is not None
    with pytest.raises(IsobasinError, match=r"image_size is .*, expected one or two positive whole numbers"):
        image_shape(replace(weights, config=dict(weights.config) | {"image_size": size}))


def test_a_config_of_many_levels(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = shutil.copytree(models / "gpt2", tmp_path / "m")
    config = (folder / "config.json").read_text().rstrip().removesuffix("}")
    (folder / "config.json").write_text(f'{config}, "x": {"[" * 900}{"]" * 900}}}')
    check_refused(["scramble", str(folder), "-o", str(tmp_path / "o")], "nested more than 64 levels", capsys)


def test_tensors_in_other_shards_than_the_index_says(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(models / "sharded", tmp_path / "m")
    index = "model.safetensors.index.json"
    places = json.loads((folder / index).read_text())["weight_map"]
    names = list(places)
    turned = dict(zip(names, [places[name] for name in names[1:] + names[:1]]))
    assert turned != places
    check_refused(["info", str(changed(folder, index, weight_map=turned))], "where the index puts it", capsys)


def test_a_compressed_pickle_does_not_expand(tmp_path: Path) -> None:
    import zipfile

    import torch

    config = ModelConfig(d_model=8, n_layers=1, n_heads=2, d_ff=8, d_vocab=16, n_positions=8)
    Transformer(config).save(tmp_path / "m")
    torch.save(load(tmp_path / "m").state_dict("float32"), tmp_path / "m" / "pytorch_model.bin")
    (tmp_path / "m" / "model.safetensors").unlink()
    assert len(load(tmp_path / "m")) > 3
    with zipfile.ZipFile(tmp_path / "m" / "pytorch_model.bin") as stored:
        content = {info.filename: stored.read(info) for info in stored.infolist()}
    with zipfile.ZipFile(tmp_path / "m" / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed:
        for name, data in content.items():
            packed.writestr(name, data)
    with pytest.raises(IsobasinError, match=r"it is compressed, expected what torch\.save writes"):
        load(tmp_path / "m")


@pytest.mark.parametrize("key", ["n_layers", "d_ff", "n_positions", "d_vocab"])
def test_a_config_that_claims_more_than_the_tensors_hold(key: str, tmp_path: Path) -> None:
    config = ModelConfig(
        d_model=8, n_layers=1, n_heads=2, d_ff=8, d_vocab=16, n_positions=8, positions="learned", causal=True
    )
    Transformer(config).save(tmp_path)
    assert Transformer.load(tmp_path).config == config
    with pytest.raises(IsobasinError, match=f"{key} gives 4611686018427387904, the tensors hold"):
        Transformer.load(changed(tmp_path, "config.json", **{key: 2**62}))


def test_a_packed_study_of_many_levels(tmp_path: Path) -> None:
    written(tmp_path / "x.jsonl", '{"study": ' + "[" * 3000)
    with pytest.raises(IsobasinError, match="is not a packed study"):
        stored_studies(tmp_path)


# -- biases that transformers ignores, outputs that are not compared -------------------------------------------------


@pytest.mark.hf
@pytest.mark.parametrize(
    ("name", "bias", "like"),
    [
        ("qwen2-gqa", "model.layers.0.self_attn.o_proj.bias", "model.norm.weight"),
        ("mistral-gqa", "model.layers.1.mlp.down_proj.bias", "model.norm.weight"),
        ("phi3-gqa", "model.layers.0.self_attn.o_proj.bias", "model.norm.weight"),
        ("gpt2-classifier", "score.bias", None),
        ("gpt_neox-classifier", "score.bias", None),
        ("llama-classifier", "score.bias", None),
    ],
)
def test_a_bias_that_transformers_does_not_load_is_refused(name: str, bias: str, like: str | None) -> None:
    model = tiny.case(name).build(seed=0)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    tensors = model.state_dict()
    ib.load(tensors, config)
    wrong = tensors | {bias: torch.zeros_like(tensors[like]) if like else torch.zeros(tiny.LABELS)}
    with pytest.raises(ib.IsobasinError, match=re.escape(bias)):
        ib.load(wrong, config)


@pytest.mark.hf
def test_a_class_with_outputs_that_are_not_compared_is_refused() -> None:
    model = tiny.case("gpt2-lm-tied").build(seed=0)
    config = model.config.to_dict() | {"architectures": ["GPT2DoubleHeadsModel"]}
    with pytest.raises(ib.IsobasinError, match=r"GPT2DoubleHeadsModel.*, whose head is not supported"):
        ib.load(model.state_dict(), config)
    weights = ib.load(model)

    class TwoOutputs(torch.nn.Module):
        def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"logits": torch.zeros(1, 3), "mc_logits": torch.zeros(1, 2)}

    with pytest.raises(ib.IsobasinError, match="also puts out mc_logits, which is not compared"):
        run_module(weights, TwoOutputs(), {})


@pytest.mark.hf
def test_keys_of_other_kinds_of_models_do_not_keep_a_pair_from_being_compared() -> None:
    model = tiny.case("gpt2-lm-tied").build(seed=0)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    a, b = (ib.load(model.state_dict(), config | extra) for extra in ({}, {"num_channels": 3, "image_size": 224}))
    assert ib.equivalent(a, b).answer == "same"
