"""Bad input to `align`: one line, exit code 2, nothing half-written."""

import errno
import json
import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from align_subjects import model
from safetensors.torch import load_file, save_file

import tiny
from isobasin.alignment.comparable import check_comparable
from isobasin.alignment.matchers import WeightMatching
from isobasin.arch import FAMILIES
from isobasin.checkpoint import CheckpointWriter
from isobasin.cli import run
from isobasin.model import ModelConfig, Transformer
from refusals import check_refused, everything

pytestmark = pytest.mark.hf

Break = Callable[[Path], None]


def config(**changes: Any) -> Break:
    """Set keys of config.json; `...` removes one."""

    def change(folder: Path) -> None:
        found = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in found.items() if v is not ...}))

    return change


def filled(name: str, value: float) -> Break:
    def fill(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        tensors[name].flatten()[3] = value
        save_file(tensors, folder / "model.safetensors")

    return fill


def sound(_: Path) -> None:
    """Nothing is broken."""


def arguments(b: Path, a: Path, out: Path, *more: str) -> list[str]:
    return ["align", str(b), "--to", str(a), "-o", str(out), "--quiet", "--scope", "all-attention", *more]


# -- two models that do not go together ------------------------------------------------------------------------------

# name: A, B, what is changed in B's config, what the one line must say
NOT_COMPARABLE: Mapping[str, tuple[str, str, Break, str]] = {
    "family": ("gpt2-lm-tied", "llama-untied", sound, r"family: A has gpt2, B has llama; only models of the same arch"),
    "near-family": ("llama-gqa", "mistral-gqa", sound, r"family: A has llama, B has mistral"),
    "depth": ("llama-untied", "llama-bare", sound, r"n_layers: A has 2, B has 1"),
    "heads": ("gpt2-lm-tied", "gpt2-one-head", sound, r"n_heads: A has 4, B has 1"),
    "kv-heads": ("llama-gqa", "llama-one-kv-head", sound, r"n_layers: A has 3, B has 2|n_kv_heads: A has 2, B has 1"),
    "kv-heads-only": ("llama-untied", "llama-one-kv-head", sound, r"n_kv_heads: A has 4, B has 1"),
    "head-size": ("mistral-gqa", "mistral-head-dim", sound, r"d_head: A has 6, B has 10"),
    "feed-forward": ("gpt2-lm-tied", "gpt2-inner", sound, r"d_ff: A has 96, B has 40"),
    "base": ("llama-untied", "llama-rope-theta", sound, r"rotary positions: A has .*10000.0.*, B has .*50.0"),
    "scaling": ("llama-untied", "llama-rope-linear", sound, r"rotary positions: A has .*default.*, B has .*linear"),
    "scaling-factor": (
        "llama-rope-linear",
        "llama-rope-linear",
        config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
        r"rotary positions: A has .*4.0.*, B has .*2.0",
    ),
    "rotary-columns": (
        "gpt_neox-sequential",
        "gpt_neox-sequential",
        config(rotary_pct=0.25, rope_parameters=...),
        r"space heads0: A has .*rotary=4.*, B has .*rotary=2",
    ),
    "window": ("mistral-gqa", "mistral-window", sound, r"config.json: sliding_window: A has None, B has 3"),
    "activation": ("bert-classifier", "bert-relu", sound, r"space ff0: A has .*, B has|hidden_act: A has gelu"),
    "eps": ("llama-untied", "llama-untied", config(rms_norm_eps=1e-5), r"rms_norm_eps: A has 0.001, B has 1e-05"),
    "scale": (
        "gpt2-lm-tied",
        "gpt2-lm-tied",
        config(scale_attn_weights=False),
        r"scale_attn_weights: A has True, B has False",
    ),
    "tied": ("llama-untied", "llama-tied", sound, r"space resid: A has .*, B has|lm_head.weight: A has"),
    "head": ("gpt2-bare", "gpt2-bare", config(n_layer=2), r"missing from the checkpoint"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_COMPARABLE)
def test_two_models_that_do_not_go_together(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, damage, pattern = NOT_COMPARABLE[name]
    tiny.save(tiny.case(first), tmp_path / "a")
    tiny.save(tiny.case(second), tmp_path / "b", seed=1)
    damage(tmp_path / "b")
    before = everything(tmp_path)
    keep = str(tmp_path / "t.safetensors")
    check_refused(
        arguments(tmp_path / "b", tmp_path / "a", tmp_path / "out", "--save-transform", keep), pattern, capsys
    )
    assert everything(tmp_path) == before


_OWN: dict[str, Any] = {
    "d_model": 8, "n_layers": 1, "n_heads": 2, "d_head": 4, "d_ff": 8, "d_vocab": 9, "n_positions": 6,
    "positions": "rope", "bias": False,
}  # fmt: skip
OWN: Mapping[str, tuple[dict[str, Any], str]] = {
    "layout": ({"rotary_layout": "interleaved"}, r"space heads0: A has .*interleaved=False.*, B has .*=True"),
    "columns": ({"rotary_dims": 2}, r"space heads0: A has .*rotary=4.*, B has .*rotary=2"),
    "base": ({"rope_theta": 100.0}, r"rotary positions: A has .*10000.0.*, B has .*100.0"),
    "positions": ({"positions": "none"}, r"space heads0: A has .*, B has|positions: A has rope, B has none"),
    "alibi": ({"positions": "alibi"}, r"space heads0: A has .*permutable=True.*, B has .*permutable=False"),
    "norm": ({"norm": "rms"}, r"space resid: A has .*, B has|norm: A has layer, B has rms"),
    "causal": ({"causal": True}, r"causal: A has False, B has True"),
    "width": ({"d_model": 12}, r"d_model: A has 8, B has 12"),
    "heads": ({"n_heads": 4}, r"n_heads: A has 2, B has 4"),
    "kv-heads": ({"n_kv_heads": 1}, r"n_kv_heads: A has 2, B has 1"),
    "vocabulary": ({"d_vocab": 10}, r"tensor embed.tokens.weight: A has \(9, 8\), B has \(10, 8\)"),
    "biases": ({"bias": True}, r"tensor \S+bias: A has absent, B has"),
    "units": ({"feed_forward": "swiglu"}, r"space ff0: A has|tensor \S+gate\S+: A has absent"),
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_two_of_our_own_models_that_do_not_go_together(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, pattern = OWN[name]
    Transformer(ModelConfig(**_OWN)).save(tmp_path / "a")
    Transformer(ModelConfig(**_OWN | changes), seed=1).save(tmp_path / "b")
    before = everything(tmp_path)
    check_refused(arguments(tmp_path / "b", tmp_path / "a", tmp_path / "out"), pattern, capsys)
    assert everything(tmp_path) == before
    Transformer(ModelConfig(**_OWN), seed=1).save(tmp_path / "c")  # unbroken, nothing is refused
    assert run(arguments(tmp_path / "c", tmp_path / "a", tmp_path / "out")) == 0


def test_a_base_that_no_rotary_position_reads_does_not_matter(tmp_path: Path) -> None:
    for name, theta in (("a", 10.0), ("b", 20.0)):
        plain = _OWN | {"positions": "none", "rope_theta": theta}
        Transformer(ModelConfig(**plain), seed=3).save(tmp_path / name)
    assert run(arguments(tmp_path / "b", tmp_path / "a", tmp_path / "out")) == 0


# Older files leave out what newer ones spell out: the same model, written by two versions of transformers.
SPELLINGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2-lm-tied", {"scale_attn_weights": ..., "activation_function": ...}),
    "llama": ("llama-rope-theta", {"rope_parameters": ..., "rope_theta": 50.0, "hidden_act": ...}),
    "llama-scaled": (
        "llama-rope-linear",
        {"rope_parameters": ..., "rope_theta": 10000, "rope_scaling": {"type": "linear", "factor": 4}},
    ),
    "neox": (
        "gpt_neox-sequential",
        {"rope_parameters": ..., "rotary_pct": 0.5, "rotary_emb_base": 10000, "hidden_act": ...},
    ),
    "bert": ("bert-classifier", {"hidden_act": ...}),
    "vit": ("vit-classifier", {"hidden_act": ...}),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_older_spellings_of_the_same_configuration_go_together(name: str) -> None:
    case, changes = SPELLINGS[name]
    a = model(case)
    older = {k: v for k, v in (dict(a.config) | changes).items() if v is not ...}
    assert older != a.config
    b = replace(a, config=older)
    assert check_comparable(a, b) is None
    assert check_comparable(b, a) is None


def test_the_defaults_are_those_of_transformers() -> None:
    import transformers

    for family in FAMILIES.values():
        assert family.settings or family.parts
        if family.own:
            fields = {f: ModelConfig.__dataclass_fields__[f].default for f in family.settings}
            assert fields == family.settings
        else:
            default = transformers.AutoConfig.for_model(family.name)
            assert {key: getattr(default, key) for key in family.settings} == family.settings


# -- places, numbers, flags ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sound")
    tiny.save(tiny.case("llama-gqa"), root / "a")
    tiny.save(tiny.case("llama-gqa"), root / "b", seed=1)
    return root


@pytest.fixture
def place(folders: Path, tmp_path: Path) -> Path:
    """A folder with A and B of its own, to be broken."""
    shutil.copytree(folders, tmp_path / "x")
    (tmp_path / "x" / "written").write_text("a file")
    return tmp_path / "x"


# name: what to add to the command line, what the one line must say; {} is the folder
FLAGS: Mapping[str, tuple[list[str], str]] = {
    "scope": (["--scope", "everything"], r"--scope 'everything' is not available, expected one of first-att"),
    "scope-model": (["--scope", "model", "--matcher", "reference"], r"--matcher reference aligns attention only: use"),
    "matcher": (["--matcher", "magic"], r"--matcher 'magic' is not available, expected one of weights, act"),
    "stage2": (["--stage2", "half"], r"--stage2 'half' is not available, expected one of none, orthogonal, full"),
    "head-distance": (["--head-distance", "l1"], r"--head-distance 'l1' is not available, expected one of complete"),
    "verify": (["--verify", "maybe"], r"--verify 'maybe' is not available, expected one of auto, layer, model, none"),
    "workers": (["--workers", "0"], r"--workers 0: expected 1 or more"),
    "workers-word": (["--workers", "two"], r"--workers"),
    "dtype": (["--dtype", "float8"], r"dtype 'float8' is unknown"),
    "shard": (["--max-shard-size", "many"], r"max_shard_size 'many' is not a size"),
    "device": (["--device", "tpu"], r"--device 'tpu' is no device"),
    "no-data": (["--matcher", "activations"], r"--matcher activations needs --data"),
    "seed": (["--seed", "-1"], r"--seed"),
    "flag": (["--fast"], r"--fast"),
    "transform-in-a": (["--save-transform", "{}/a/t.safetensors"], r"--save-transform .*/a/t.safetensors: lies inside"),
    "transform-in-b": (["--save-transform", "{}/b/t.safetensors"], r"--save-transform .*/b/t.safetensors: lies inside"),
    "transform-in-out": (["--save-transform", "{}/out/t"], r"no such folder for the transform|lies inside"),
    "transform-is-folder": (["--save-transform", "{}"], r"/x: a folder, expected the name of a file"),
    "transform-exists": (["--save-transform", "{}/written"], r"written: already there; choose another name"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLAGS)
def test_a_bad_flag(name: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more, pattern = FLAGS[name]
    before = everything(place)
    check_refused(
        arguments(place / "b", place / "a", place / "out", *(x.replace("{}", str(place)) for x in more)),
        pattern,
        capsys,
    )
    assert everything(place) == before


@pytest.mark.parametrize(
    ("out", "more", "pattern"),
    [
        ("a", ["--force"], r"output .*/a is the input .* or inside it"),
        ("b", ["--force"], r"output .*/b is the input .* or inside it"),
        ("a/inside", [], r"output .*/a/inside is the input .* or inside it"),
        ("b/inside", [], r"output .*/b/inside is the input .* or inside it"),
        (".", ["--force"], r"input .* lies inside the output|holds no config.json"),
        ("taken", [], r"output .*/taken exists and is not empty: choose another name"),
        ("file", ["--force"], r"output .*/file is a file, expected a folder"),
    ],
)
def test_a_bad_place(out: str, more: list[str], pattern: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "taken").mkdir()
    (place / "taken" / "config.json").write_text("{}")
    (place / "file").write_text("x")
    before = everything(place)
    check_refused(arguments(place / "b", place / "a", place / out, *more), pattern, capsys)
    assert everything(place) == before


def test_a_place_is_refused_before_anything_is_computed(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightMatching, "match", lambda *_: pytest.fail("computed in vain"))
    check_refused(arguments(place / "b", place / "a", place / "a"), r"is the input", capsys)


@pytest.mark.parametrize("which", ["a", "b"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none(which: str, value: float, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    filled(name, value)(place / which)
    before = everything(place)
    pattern = rf"tensor '{name}' holds {int(math.isnan(value))} NaN and {int(math.isinf(value))} infinite .*/{which}/"
    check_refused(arguments(place / "b", place / "a", place / "out"), pattern, capsys)
    assert everything(place) == before


def test_a_nan_outside_the_scope_is_found_when_it_is_written(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled("model.layers.2.mlp.up_proj.weight", math.nan)(place / "b")
    before = everything(place)
    keep = str(place / "t.safetensors")
    check_refused(
        arguments(place / "b", place / "a", place / "deep" / "out", "--save-transform", keep),
        r"mlp.up_proj.* NaN",
        capsys,
    )
    assert everything(place) == before


@pytest.mark.parametrize("method", ["write", "write_flat"])
def test_a_disk_that_becomes_full_leaves_nothing(
    method: str, place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    header = b'{"__metadata__":{"isobasin-transform":"older"}}'
    (place / "t.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    before = everything(place)
    honest, calls = getattr(CheckpointWriter, method), iter(range(10**6))

    def full(self: CheckpointWriter, *args: Any, **options: Any) -> None:
        with self._disk_errors():
            if next(calls) == 5:
                raise OSError(errno.ENOSPC, "No space left on device")
        honest(self, *args, **options)

    monkeypatch.setattr(CheckpointWriter, method, full)
    more = ("--save-transform", str(place / "t.safetensors"), "--force")
    check_refused(arguments(place / "b", place / "a", place / "out", *more), r"disk became full, nothing is", capsys)
    assert next(calls) == 6
    assert everything(place) == before
    assert run(arguments(place / "b", place / "a", place / "out", *more)) == 0  # with room again
    assert everything(place) != before
