"""Scope `model` on unusual models: what is equal, empty, dead, single, narrow or not a number."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny
from isobasin.alignment.align import align
from isobasin.alignment.matchers import WeightMatching
from isobasin.cli import run
from isobasin.errors import IsobasinError
from isobasin.runtime import output_difference, outputs, random_inputs
from isobasin.symmetries.transform import scramble
from isobasin.weights import Weights, load

pytestmark = pytest.mark.hf

MATCHER = WeightMatching(scope="model")
Tensors = dict[str, Tensor]


def model(spoil: Callable[[Tensors], None] = lambda t: None, seed: int = 0, **config: object) -> Weights:
    """A Llama of two layers of 6 × 2 heads' width, with weights to spoil in place."""
    settings = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 16,
        "intermediate_size": 21,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 30,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
    } | config
    from transformers import LlamaConfig, LlamaForCausalLM

    made = tiny.randomize(LlamaForCausalLM(LlamaConfig(**settings)), seed)
    tensors = {name: t.clone() for name, t in made.state_dict().items()}
    spoil(tensors)
    return load(tensors, settings)


def layer(i: int, word: str) -> str:
    return f"model.layers.{i}.{word}.weight"


def equal_layers(t: Tensors) -> None:
    for name in [n for n in t if n.startswith("model.layers.0.")]:
        t[name.replace("layers.0", "layers.1")] = t[name].clone()


def zero_layer(t: Tensors) -> None:
    for name in [n for n in t if n.startswith("model.layers.1.") and "norm" not in n]:
        t[name].zero_()


def dead_units(t: Tensors) -> None:
    for word in ("gate_proj", "up_proj"):
        t[layer(0, f"mlp.{word}")][3:7] = 0
    t[layer(0, "mlp.down_proj")][:, 5:9] = 0


def equal_units(t: Tensors) -> None:
    for word in ("gate_proj", "up_proj"):
        t[layer(0, f"mlp.{word}")][:] = t[layer(0, f"mlp.{word}")][:1].clone()
    t[layer(0, "mlp.down_proj")][:] = t[layer(0, "mlp.down_proj")][:, :1].clone()


def equal_heads(t: Tensors) -> None:
    for word, rows in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
        t[layer(0, f"self_attn.{word}")][:] = t[layer(0, f"self_attn.{word}")][:4].repeat(rows, 1)
    t[layer(0, "self_attn.o_proj")][:] = t[layer(0, "self_attn.o_proj")][:, :4].repeat(1, 4)


def zero_embeddings(t: Tensors) -> None:
    t["model.embed_tokens.weight"].zero_()


def zero_ends(t: Tensors) -> None:
    zero_embeddings(t)
    t["lm_head.weight"].zero_()


def zero_gains(t: Tensors) -> None:
    t[layer(0, "input_layernorm")][2:5] = 0


SPOILED: dict[str, Callable[[Tensors], None]] = {
    f.__name__: f
    for f in (
        equal_layers,
        zero_layer,
        dead_units,
        equal_units,
        equal_heads,
        zero_embeddings,
        zero_ends,
        zero_gains,
    )
}
FULL = os.environ.get("ISOBASIN_SLOW") == "1"  # else every second one
SIZES: dict[str, dict[str, object]] = {
    "one layer": {"num_hidden_layers": 1},
    "one kv head": {"num_key_value_heads": 1},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "one unit": {"intermediate_size": 1},
    "few words": {"vocab_size": 3},  # fewer than the stream is wide: the ends do not determine its map
}


def check_sound(a: Weights, b: Weights) -> float:
    """B's function is kept, and B is no farther from A than it was; how far it still is."""
    found = align(b, to=a, matcher=MATCHER)
    moved = found.transform.apply(b)
    assert all(bool(torch.isfinite(moved[name]).all()) for name in moved)
    inputs = random_inputs(b)
    assert output_difference(outputs(b, inputs), outputs(moved, inputs)) <= 2e-5
    assert found.distance_after <= found.distance_before
    return found.distance_after


@pytest.mark.parametrize("name", list(SPOILED)[:: 1 if FULL else 2])
def test_spoiled_models_come_closer_and_keep_their_function(name: str) -> None:
    a, b = model(SPOILED[name]), model(SPOILED[name], seed=1)
    check_sound(a, b)
    copy = scramble(a, scope="model", seed=3).apply(a)
    left = check_sound(a, copy)
    if name not in ("zero_gains", "zero_ends"):  # there the stream's map is not what embeddings say
        assert left <= 1e-4


@pytest.mark.parametrize("name", list(SIZES)[:: 1 if FULL else 2])
def test_odd_sizes_come_back(name: str) -> None:
    a = model(**SIZES[name])
    check_sound(a, model(seed=1, **SIZES[name]))
    copy = scramble(a, scope="model", seed=3).apply(a)
    if name != "few words":
        assert check_sound(a, copy) <= 1e-4


def test_a_copy_stored_in_bfloat16_comes_back_to_its_rounding(tmp_path: Path) -> None:
    """Rounding after a rotation is noise on every weight: permutations are found all the same."""
    a = model()
    scramble(a, scope="model", seed=3).apply(a).save(tmp_path / "b", dtype="bfloat16")
    b = load(tmp_path / "b")
    assert b.dtype == torch.bfloat16
    found = align(b, to=a, matcher=MATCHER)
    assert found.distance_after < 0.02 < 0.5 < found.distance_before
    wrong = align(model(seed=1), to=a, matcher=MATCHER)
    assert wrong.distance_after > 0.5  # the control: an unrelated model does not come that near


def test_the_same_folder_on_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = model()
    a.save(tmp_path / "a")
    words = ["align", str(tmp_path / "a"), "--to", str(tmp_path / "a"), "-o", str(tmp_path / "out"), "--json"]
    assert run(words) == 0
    out = load(tmp_path / "out")
    assert all(torch.equal(out[name], a[name]) for name in a)
    assert '"distance_after": 0.0' in capsys.readouterr().out


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_nan_is_refused_and_nothing_written(side: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    for name, seed in (("a", 0), ("b", 1)):
        model(seed=seed).save(tmp_path / name)
    file = tmp_path / side / "model.safetensors"
    tensors = load_file(file)
    tensors[layer(1, "mlp.up_proj")][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    words = ["align", str(tmp_path / "b"), "--to", str(tmp_path / "a"), "-o", str(tmp_path / "out")]
    assert run(words) == 2
    said = capsys.readouterr().err
    assert "mlp.up_proj" in said
    assert "NaN" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"intermediate_size": 20}, "d_ff: A has 21, B has 20"),
        ({"num_hidden_layers": 1}, "n_layers: A has 2, B has 1"),
    ],
)
def test_other_shapes_are_refused(config: dict[str, object], message: str) -> None:
    with pytest.raises(IsobasinError, match=message):
        align(model(**config), to=model(), matcher=MATCHER)


def test_sweeps_can_not_be_shared_by_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["align", "b", "--to", "a", "-o", str(tmp_path / "out"), "--workers", "2"]
    assert run(words) == 2
    assert "--workers 2 with scope model: sweeps go block after block" in capsys.readouterr().err
