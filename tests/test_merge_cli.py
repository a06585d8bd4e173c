"""`isobasin merge`: flags, YAML files, facts, refusals; and mergekit beside it, where it is installed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import tiny
from isobasin.cli import run
from isobasin.cli.merge import merge_lines
from isobasin.errors import IsobasinError
from isobasin.merging.recipe import MergeRecipe, parse_recipe, read_recipe
from refusals import check_refused, everything

ROOT = Path(__file__).resolve().parents[1]
MERGEKIT = Path(os.environ.get("ISOBASIN_MERGEKIT", ROOT / ".venv-mergekit/bin/mergekit-yaml"))
NAME = "llama-gqa"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    for seed in range(3):
        tiny.save(tiny.case(NAME), place / f"m{seed}", seed=seed, dtype=torch.bfloat16)
    tiny.save(tiny.case("llama-untied"), place / "other")
    (place / "m1" / "tokenizer.json").write_text('{"of": "m1"}')
    return place


def said(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    code = run([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    facts = json.loads(out)
    assert isinstance(facts, dict)
    return facts


def scrambled(folders: Path, out: Path) -> Path:
    code = run(["scramble", str(folders / "m0"), "-o", str(out), "--scope", "all-attention", "--dtype", "float32"])
    assert code == 0
    return out


@pytest.mark.hf
def test_aligned_by_default(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = scrambled(folders, tmp_path / "copy")
    pair = [str(folders / "m0"), str(copy)]
    facts = said(["merge", *pair, "-o", str(tmp_path / "out")], capsys)
    assert facts["aligned"] is True
    assert (facts["method"], facts["dtype"], facts["rounds"]) == ("linear", "float32", 1)
    assert (facts["scope"], facts["matcher"], facts["to"]) == ("model", "weights", 0)
    assert [row["model"] for row in facts["distances"]] == pair
    assert facts["distances"][1]["after"] < 1e-5 < 0.1 < facts["distances"][1]["before"]
    assert facts["seconds"] > 0
    assert facts["peak_rss_mb"] > 0
    naive = said(["merge", *pair, "--no-align", "-o", str(tmp_path / "naive")], capsys)
    assert naive["aligned"] is False
    assert naive["distances"][1] == {"model": str(copy), "before": None, "after": None}
    original = load_file(folders / "m0" / "model.safetensors")
    far = {}
    for name in ("out", "naive"):
        found = load_file(tmp_path / name / "model.safetensors")
        far[name] = max(float((found[n] - original[n].float()).norm() / original[n].float().norm()) for n in original)
    assert far["out"] < 1e-5 < 0.1 < far["naive"]
    assert run(["merge", *pair, "-o", str(tmp_path / "out"), "--force", "--quiet", "--scope", "all-attention"]) == 0
    assert "aligned to model 0, scope all-attention" in capsys.readouterr().out


@pytest.mark.hf
def test_a_file_says_the_same_as_flags(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    m0, m1, m2 = (folders / f"m{i}" for i in range(3))
    file = tmp_path / "merge.yml"
    file.write_text(
        f"models:\n  - model: {m0}\n    parameters: {{weight: 0.5}}\n  - model: {m1}\n  - model: {m2}\n"
        f"parameters: {{weight: 0.25}}\nmerge_method: linear\nalign: false\ntokenizer_source: {m1}\ndtype: float32\n"
    )
    facts = said(["merge", str(file), "-o", str(tmp_path / "file")], capsys)
    flags = ["--weights", "0.5,0.25,0.25", "--no-align", "--dtype", "float32"]
    said(["merge", str(m0), str(m1), str(m2), *flags, "-o", str(tmp_path / "flags")], capsys)
    assert facts["weights"] == [0.5, 0.25, 0.25]
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("file", "flags"))
    assert all(torch.equal(first[n], second[n]) for n in first)
    assert (tmp_path / "file" / "tokenizer.json").read_text() == '{"of": "m1"}'
    assert not (tmp_path / "flags" / "tokenizer.json").exists()
    card = (tmp_path / "file" / "README.md").read_text().split("```yaml\n")[1].split("\n```\n")[0]
    (tmp_path / "again.yml").write_text(card)
    said(["merge", str(tmp_path / "again.yml"), "-o", str(tmp_path / "again")], capsys)
    assert (tmp_path / "again" / "README.md").read_text().split("```yaml\n")[1] == (
        tmp_path / "file" / "README.md"
    ).read_text().split("```yaml\n")[1]
    third = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(first[n], third[n]) for n in first)


@pytest.mark.hf
def test_a_plain_merge_imports_no_more_than_it_needs(folders: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from isobasin.cli import run; code = run(sys.argv[1:]); "
        "print(code, [m for m in ('transformers', 'scipy', 'matplotlib') if m in sys.modules], file=sys.stderr)"
    )
    arguments = ["merge", str(folders / "m0"), str(folders / "m1"), "-o", str(tmp_path / "out"), "--json"]
    aligned = ["--scope", "first-attention", "--verify", "none"]
    for flags, expected in (["--no-align"], "0 []"), (aligned, "0 ['scipy']"):
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments, *flags, "--force"], capture_output=True, text=True, timeout=300
        )
        assert done.stderr.strip() == expected


@pytest.mark.hf
def test_models_that_were_learned_together(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ids = tmp_path / "ids.npy"
    np.save(ids, np.random.default_rng(0).integers(0, tiny.VOCABULARY, (20, 7)))
    words = ["merge", *(str(folders / name) for name in ("m0", "m1", "m2")), "--matcher", "learned"]
    words += ["--scope", "all-attention"]
    facts = said([*words, "--data", str(ids), "--steps", "2", "-o", str(tmp_path / "out")], capsys)
    assert (facts["matcher"], facts["scope"], facts["to"]) == ("learned", "all-attention", 0)
    assert facts["learning"][0] is None
    assert [lesson["learned_from"] for lesson in facts["learning"][1:]] == [str(ids)] * 2
    assert all(lesson["kept"] in lesson["held_out_barrier"] for lesson in facts["learning"][1:])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "matcher `learned`" in card
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    assert f"  model 2: learned from  {ids}" in merge_lines(facts)


def refused(folders: Path) -> list[tuple[list[str], str]]:
    m0, m1, other = (str(folders / name) for name in ("m0", "m1", "other"))
    return [
        ([m0], "1 model to merge: expected two or more"),
        ([m0, other], "only models of the same architecture can be aligned"),
        ([m0, str(folders / "nothing")], "neither a folder nor a model"),
        ([m0, m1, "--weights", "1,x"], "--weights '1,x': expected numbers with commas"),
        ([m0, m1, "--weights", "1,2,3"], "3 weights for 2 models"),
        ([m0, m1, "--weights=-1,1"], "add up to 0"),
        ([m0, m1, "--method", "ties"], "align first .* then mergekit"),
        ([m0, m1, "--to", "median"], "align to 'median': expected mean, or the number of a model from 0 to 1"),
        ([m0, m1, "--to", "2"], "align to 2"),
        ([m0, m1, "--no-align", "--to", "mean"], "--no-align: nothing is aligned"),
        ([m0, m1, "--scope", "everything"], "--scope 'everything' is not available"),
        ([m0, m1, "--matcher", "magic"], "--matcher 'magic' is not available"),
        ([m0, m1, "--matcher", "activations"], "--matcher activations needs --data"),
        ([m0, m1, "--matcher", "learned"], "--matcher learned needs --data"),
        ([m0, m1, "--matcher", "learned", "--data", "self", "--to", "mean"], "align to the mean: what lowers losses"),
        ([m0, m1, "--dtype", "int8"], "dtype 'int8' is unknown"),
        ([m0, m1, "--max-shard-size", "big"], "is not a size"),
        ([m0, m1, "--device", "moon"], "--device 'moon' is no device"),
        ([str(folders / "gone.yml")], "gone.yml can not be read .*expected a YAML file"),
        ([str(folders / "m0" / "config.json"), "--no-align"], "--no-align together with .*: say it in the file"),
        ([str(folders / "m0" / "model.safetensors")], "not UTF-8 text|not the YAML expected"),
    ]


@pytest.mark.hf
def test_refusals_leave_everything_as_it_was(folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = everything(folders)
    for arguments, message in refused(folders):
        check_refused(["merge", *arguments, "-o", str(tmp_path / "out")], message, capsys)
    for name in ("m0", "m1"):
        pair = [str(folders / "m0"), str(folders / "m1"), "--no-align"]
        check_refused(["merge", *pair, "-o", str(folders / name), "--force"], "is the input", capsys)
    assert everything(folders) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.hf
def test_a_tokenizer_of_other_words_is_refused(
    folders: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "words"
    source.mkdir()
    file = tmp_path / "merge.yml"
    models = "".join(f"  - model: {folders / name}\n" for name in ("m0", "m1"))
    file.write_text(f"models:\n{models}merge_method: linear\nalign: false\ntokenizer_source: {source}\n")
    (source / "config.json").write_text('{"vocab_size": 7}')
    arguments = ["merge", str(file), "-o", str(tmp_path / "out")]
    check_refused(arguments, "has a vocabulary of 7, the models one of 30", capsys)
    (source / "config.json").write_text('{"vocab_size": 30}')
    assert run([*arguments, "--quiet"]) == 0


GOOD = "models:\n- model: a\n- model: b\nmerge_method: linear\n"


def test_what_a_file_means() -> None:
    assert parse_recipe(GOOD, "f") == MergeRecipe(("a", "b"), align=True)
    slerp = parse_recipe(
        "models: [{model: a}]\nbase_model: b\nmerge_method: slerp\nparameters: {t: 0.3}\nalign: false\n", "f"
    )
    assert slerp == MergeRecipe(("a", "b"), method="slerp", t=0.3, to=1)
    assert slerp.shares == (0.3, 0.7)
    full = parse_recipe(
        "models:\n- {model: a, parameters: {weight: 1e-3}}\n- model: b\nmerge_method: linear\nbase_model: b\n"
        "parameters: {weight: 2, normalize: false}\ndtype: float16\ntokenizer_source: base\n"
        "align: {scope: first-attention, matcher: reference, to: 1}\n",
        "f",
    )
    assert full == MergeRecipe(
        ("a", "b"),
        (1e-3, 2.0),
        normalize=False,
        dtype="float16",
        tokenizer_source="b",
        align=True,
        to=1,
        scope="first-attention",
        matcher="reference",
    )
    assert parse_recipe(full.to_yaml(), "f") == full
    assert parse_recipe(f"{GOOD}align: {{to: mean}}\n", "f").to == "mean"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{GOOD}slices: []\n", "the key 'slices' is not one of .*; for more, align first .*, then mergekit"),
        (f"{GOOD}out_dtype: float32\n", "the key 'out_dtype' .* then mergekit"),
        (f"{GOOD}parameters: {{density: 0.5}}\n", r"the key parameters.'density' .* then mergekit"),
        (f"{GOOD}align: {{device: cpu}}\n", r"the key align.'device' .* then mergekit"),
        (
            "models: [{model: a, layer_range: [0, 2]}]\nmerge_method: linear\n",
            r"models\[0\].'layer_range' .* then mergekit",
        ),
        ("models: [{model: a, parameters: {t: 1}}]\nmerge_method: linear\n", r"models\[0\].parameters.'t' .* mergekit"),
        (
            f"{GOOD}parameters: {{weight: [0, 1]}}\n",
            r"parameters.weight holds \[0, 1\].*gradients and filters align first",
        ),
        (f"{GOOD}parameters: {{weight: [{{filter: x, value: 1}}]}}\n", "gradients and filters align first"),
        (f"{GOOD}parameters: {{weight: true}}\n", "parameters.weight holds True, expected a number"),
        (f"{GOOD}parameters: {{weight: heavy}}\n", "parameters.weight holds 'heavy', expected a number"),
        (f"{GOOD}parameters: {{weight: .nan}}\n", "expected an ordinary finite number"),
        (f"{GOOD}parameters: {{normalize: 1}}\n", "parameters.normalize holds 1, expected true or false"),
        (f"{GOOD}parameters: [1]\n", r"parameters holds \[1\], expected keys with values"),
        (f"{GOOD}parameters: {{t: 0.5}}\n", "t belongs to slerp"),
        (f"{GOOD}dtype: 32\n", "dtype holds 32, expected a word"),
        (f"{GOOD}dtype: int4\n", "dtype 'int4' is unknown"),
        (f"{GOOD}align: 3\n", "align holds 3, expected keys"),
        (f"{GOOD}align: {{to: [1]}}\n", r"align.to holds \[1\]"),
        (f"{GOOD}align: {{to: 5}}\n", "align to 5"),
        (f"{GOOD}base_model: b\nalign: {{to: mean}}\n", "align.to is mean, but base_model is b"),
        (f"{GOOD}tokenizer_source: union\n", "tokenizer_source union is not available; align first"),
        (
            "models:\n- {model: a, parameters: {weight: 1}}\nmerge_method: linear\nbase_model: c\n",
            "base_model c is not among",
        ),
        (GOOD.replace("linear", "ties"), "'ties' is not one of linear, slerp; for others align first .* then mergekit"),
        (GOOD.replace("linear", "slerp"), "parameters.t is missing"),
        (f"{GOOD.replace('linear', 'slerp')}parameters: {{t: 1, weight: 1}}\n", "weight belongs to linear"),
        (f"{GOOD.replace('linear', 'slerp')}parameters: {{t: 1, normalize: true}}\n", "normalize belongs to linear"),
        (
            "models:\n- {model: a, parameters: {weight: 1}}\n- model: b\nmerge_method: linear\n",
            r"models\[1\] has no param",
        ),
        ("models: []\nmerge_method: linear\n", r"models holds \[\], expected a list"),
        ("models: a\nmerge_method: linear\n", "models holds 'a', expected a list"),
        ("models: [a, b]\nmerge_method: linear\n", r"models\[0\] holds 'a', expected keys"),
        ("models: [{parameters: {}}]\nmerge_method: linear\n", r"models\[0\] names no model"),
        ("models: [{model: [a]}]\nmerge_method: linear\n", r"models\[0\].model holds \['a'\], expected a word"),
        ("models: [{model: a}, {model: b}]\n", "merge_method is missing"),
        ("- a\n- b\n", r"f holds \['a', 'b'\], expected keys"),
        ("", "f holds nothing, expected keys"),
        (f"{GOOD}merge_method: slerp\n", "f, line 5: .*the key 'merge_method' occurs twice"),
        (f"x: &a [1]\n{GOOD}y: *a\n", "anchors and aliases are not accepted"),
        ("models: [\n", "f, line 2: not the YAML expected"),
        ("a: !!python/object/apply:os.system [ls]\n", "not the YAML expected .*could not determine a constructor"),
        ("[" * 5000, "not the YAML expected"),
        ("a: \0\n", "not the YAML expected"),
        ("{[1]: 2}\n", "not the YAML expected"),
    ],
)
def test_files_that_mean_nothing(text: str, message: str) -> None:
    with pytest.raises(IsobasinError, match=message) as caught:
        parse_recipe(text, "f")
    assert str(caught.value).startswith("f")
    assert len(str(caught.value)) < 500


def test_a_file_too_large_or_in_another_encoding(tmp_path: Path) -> None:
    file = tmp_path / "m.yml"
    file.write_text(GOOD)
    assert read_recipe(file).models == ("a", "b")
    file.write_text(GOOD + "#" * 2**20)
    with pytest.raises(IsobasinError, match="expected a recipe of at most"):
        read_recipe(file)
    file.write_bytes(GOOD.replace("a", "é").encode("latin-1"))
    with pytest.raises(IsobasinError, match="is not UTF-8 text"):
        read_recipe(file)


BESIDE = {
    "two": (NAME, ["bfloat16"] * 2, "weight: [0.7, 0.3]", "linear", "bfloat16"),
    "three, not normalised": (NAME, ["float16"] * 3, "weight: [0.3, 0.2, 0.7]", "linear-raw", "float16"),
    "three in float32": (NAME, ["float32"] * 3, "weight: [1, 2, 4]", "linear", None),
    "rounded first": (NAME, ["float32"] * 2, "weight: [0.9, 0.3]", "linear", "bfloat16"),
    "mixed types": (NAME, ["bfloat16", "float32"], "weight: [0.9, 0.3]", "linear", None),
    "tied": ("llama-tied", ["bfloat16"] * 2, "weight: [0.6, 0.4]", "linear", None),
    "slerp": (NAME, ["bfloat16"] * 2, "t: 0.3", "slerp", "bfloat16"),
    "slerp in float32": (NAME, ["float32"] * 2, "t: 0.3", "slerp", None),
}


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.skipif(
    not MERGEKIT.exists(), reason="mergekit is not installed: bench/merge.py does, or ISOBASIN_MERGEKIT"
)
@pytest.mark.parametrize("label", BESIDE if os.environ.get("ISOBASIN_SLOW") == "1" else ["two", "slerp"])
def test_bit_for_bit_what_mergekit_writes(label: str, tmp_path: Path) -> None:
    name, dtypes, numbers, method, dtype = BESIDE[label]
    paths = [tmp_path / f"m{seed}" for seed in range(len(dtypes))]
    for seed, (path, each) in enumerate(zip(paths, dtypes)):
        tiny.save(tiny.case(name), path, seed=seed, dtype=getattr(torch, each))
    key, value = numbers.split(": ")
    weights = json.loads(value) if key == "weight" else [None] * len(paths)
    lines = ["models:"]
    for path, weight in zip(paths, weights):
        lines += [f"  - model: {path}", *([] if weight is None else [f"    parameters: {{weight: {weight}}}"])]
    lines += [f"merge_method: {method.split('-')[0]}"]
    lines += [f"base_model: {paths[1]}", f"parameters: {{{numbers}}}"] if method == "slerp" else []
    lines += ["parameters: {normalize: false}"] if method == "linear-raw" else []
    lines += [f"dtype: {dtype}"] if dtype else []
    theirs = tmp_path / "theirs.yml"
    theirs.write_text("\n".join(lines) + "\n")
    ours = tmp_path / "ours.yml"
    ours.write_text("\n".join([*lines, "align: false"]) + "\n")
    done = subprocess.run(
        [MERGEKIT, theirs, tmp_path / "theirs", "--quiet"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert run(["merge", str(ours), "-o", str(tmp_path / "ours"), "--quiet"]) == 0
    expected, found = (tiny.read(tmp_path / side)[0] for side in ("theirs", "ours"))
    assert set(found) == set(expected)
    assert all(found[n].dtype == expected[n].dtype for n in found)
    assert all(torch.equal(found[n].view(torch.uint8), expected[n].view(torch.uint8)) for n in found)
    first = tiny.read(paths[0])[0]
    assert any(not torch.equal(found[n].float(), first[n].float()) for n in found)
