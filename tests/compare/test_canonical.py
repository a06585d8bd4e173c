"""The canonical point: the same function, the same weights for the whole orbit, and itself its own canonical point."""

from pathlib import Path

import pytest
import torch
from compared_models import (
    CASES,
    FULL,
    held,
    moved,
    noisy,
    output_difference,
    own_model,
    scrambled,
    stored,
    tiny_model,
    weight_difference,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

import tiny
from isobasin.compare.canonical import SWAMPED, canonical, canonical_point
from isobasin.compare.stream_frame import fixed_numbers
from isobasin.model import ModelConfig, Transformer
from isobasin.symmetries import coordinate
from isobasin.weights import Weights

EXACT = 1e-9
SAME = 1e-4
seeds = st.integers(0, 2**31)


def point(weights: Weights) -> Weights:
    return moved(canonical(weights), weights)


@pytest.mark.hf
@pytest.mark.parametrize("name", CASES)
def test_a_whole_orbit_has_one_canonical_point(name: str) -> None:
    weights = tiny_model(name)
    found = point(weights)
    assert output_difference(weights, found, tiny.case(name).inputs(0)) <= EXACT
    assert weight_difference(found, weights) > 0.1, "it was canonical before: nothing was tested"
    assert weight_difference(point(scrambled(weights)), found) <= SAME
    assert weight_difference(point(found), found) <= SAME
    assert weight_difference(point(tiny_model(name, 1)), found) > 0.1
    assert weight_difference(point(scrambled(noisy(weights, 1e-2))), found) > SAME


@pytest.mark.hf
@pytest.mark.parametrize("name", ["gpt2-lm-untied", "bert-masked-lm-tied", "vit-no-qkv-bias", "llama-gqa"])
def test_transformers_loads_it_and_gives_the_same_outputs(name: str, tmp_path: Path) -> None:
    case = tiny.case(name)
    tiny.save(case, tmp_path / "model")
    model = case.build()
    weights = tiny_model(name)
    canonical(weights).apply(weights).save(tmp_path / "plain")
    for file in (tmp_path / "model").glob("config.json"):
        (tmp_path / "plain" / file.name).write_bytes(file.read_bytes())
    again = type(model).from_pretrained(tmp_path / "plain", attn_implementation="eager").eval()
    inputs = case.inputs(0)
    expected, found = tiny.logits(model, inputs), tiny.logits(again, inputs)
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max().clamp(min=1))
    other = case.build(seed=1)
    assert float((tiny.logits(other, inputs) - expected).abs().max()) > 1e-2


@st.composite
def configs(draw: st.DrawFn, smallest: int) -> ModelConfig:
    """Any switches; with `smallest` 1 also sizes at which heads and streams are degenerate."""
    positions, kv = draw(st.sampled_from(["none", "sinusoidal", "learned", "rope", "alibi"])), draw(st.integers(1, 2))
    narrow = smallest == 1
    d_head = draw(st.integers(2 if positions == "rope" else 1, 4)) if narrow else 2
    sizes = {
        "d_model": draw(st.integers(1, 8)) if narrow else 8,
        "n_layers": draw(st.integers(1, 2)),
        "n_heads": kv * draw(st.integers(1, 2)),
        "n_kv_heads": kv,
        "d_head": d_head,
        "d_ff": draw(st.integers(smallest, 6)),
        "rotary_dims": 2 if positions == "rope" else None,
        "norm_eps": 1e-3,
    }
    switches = {
        "positions": positions,
        "norm": draw(st.sampled_from(["layer", "rms"])),
        "post_norm": draw(st.booleans()),
        "feed_forward": draw(st.sampled_from(["gelu", "swiglu"])),
        "bias": draw(st.booleans()),
    }
    ends = draw(st.sampled_from([{"d_vocab": 9}, {"d_vocab": 9, "tied": True}, {"d_vocab": 3, "n_classes": 2}]))
    return ModelConfig(**sizes, **switches, **ends, n_positions=6)


def logits(config: ModelConfig, weights: Weights) -> torch.Tensor:
    model = Transformer(config).double()
    model.load_state_dict({name: weights[name] for name in weights})
    with torch.no_grad():
        return model(torch.arange(12).reshape(2, 6) % (config.d_vocab or 1))


@given(configs(1), seeds)
@settings(max_examples=100 if FULL else 8, deadline=None)
def test_the_function_stays_whatever_the_sizes(config: ModelConfig, seed: int) -> None:
    weights = own_model(config, seed, torch.float64)
    expected = logits(config, weights)
    largest = float(expected.abs().max().clamp(min=1))
    assert float((logits(config, point(weights)) - expected).abs().max()) <= 1e-8 * largest


CONSTANT = ModelConfig(
    d_model=8, n_layers=1, n_heads=1, d_head=2, d_ff=3, d_vocab=9, n_positions=6, positions="none", norm="layer",
    post_norm=True, feed_forward="gelu", causal=False, bias=True, norm_eps=1e-3,
)  # fmt: skip
"""Its head has no bias: it holds a constant along the last norm's shift, which the stream's sign must not see."""


@given(configs(3), seeds)
@example(CONSTANT, 1)
@example(CONSTANT, 2)
@example(CONSTANT, 5)
@settings(max_examples=100 if FULL else 8, deadline=None)
def test_scrambled_copies_meet_under_every_switch(config: ModelConfig, seed: int) -> None:
    weights = own_model(config, seed, torch.float64)
    assert weight_difference(point(scrambled(weights, seed % 1000)), point(weights)) <= SAME


def test_a_head_that_writes_nothing_and_equal_heads_keep_the_function() -> None:
    config = ModelConfig.preset("llama", d_model=12, n_layers=1, n_heads=2, d_ff=8, d_vocab=16, n_positions=6)
    weights = own_model(config, 0, torch.float64)
    name = "blocks.0.attn.o.weight"
    empty = held(weights, {name: torch.zeros_like(weights[name])})
    twice = held(weights, {n: _doubled(weights[n], n) for n in weights if ".attn." in n})
    for model in (empty, twice):
        assert float((logits(config, point(model)) - logits(config, model)).abs().max()) <= EXACT
    assert float((logits(config, empty) - logits(config, twice)).abs().max()) > 1e-3


SIZES = {"d_model": 8, "n_layers": 1, "n_heads": 1, "d_ff": 6, "d_vocab": 19, "n_positions": 6}


@pytest.mark.parametrize(
    "settings",
    [
        {"d_head": 8, "norm": "layer"},  # keys, centred, have rank 7 of 8
        {"d_head": 10, "norm": "rms", "bias": False},  # more columns than rows: Q, K, V and O have rank 8 of 10
        {"n_heads": 3, "n_kv_heads": 1, "d_head": 8, "norm": "layer", "positions": "alibi", "post_norm": True},
        {"d_model": 15, "n_heads": 4, "n_kv_heads": 1, "d_head": 2, "d_ff": 11, "d_vocab": 5, "n_classes": 3}
        | {"norm": "rms", "positions": "alibi"},  # tables and their images under the layers span 12 of 15 directions
    ],
)
def test_deficient_heads_and_streams_have_one_point(settings: dict[str, object]) -> None:
    weights = own_model(ModelConfig(**(SIZES | settings)), 1, torch.float64)  # type: ignore[arg-type]
    found = canonical_point(weights)
    expected = moved(found.transform, weights)
    assert found.unique
    for seed in range(3):
        assert weight_difference(point(scrambled(weights, seed)), expected) <= 1e-8
    assert weight_difference(point(scrambled(noisy(weights, 1e-2))), expected) > 1e-3


def test_what_is_not_unique_is_said() -> None:
    weights = own_model(ModelConfig(**SIZES, norm="rms", feed_forward="gelu"), 0, torch.float64)  # type: ignore[arg-type]
    assert canonical_point(weights).unique
    rounded = canonical_point(stored(weights, torch.bfloat16))
    assert not rounded.unique, "sort keys of a bfloat16 file are closer than its rounding"
    idle = held(weights, {"blocks.0.attn.o.weight": torch.zeros_like(weights["blocks.0.attn.o.weight"])})
    (doubt,) = canonical_point(idle).doubts
    assert doubt.space == "heads0"
    assert doubt.to_dict()["uncertainty"] == 1.0


def test_equal_units_are_no_doubt_but_units_with_equal_keys_are() -> None:
    weights = own_model(ModelConfig(**SIZES, norm="rms"), 0, torch.float64)  # type: ignore[arg-type]
    up, bias, down = (f"blocks.0.mlp.{name}" for name in ("up.weight", "up.bias", "down.weight"))
    twice = {name: weights[name].clone() for name in (up, bias, down)}
    twice[up][1], twice[bias][1], twice[down][:, 1] = twice[up][0], twice[bias][0], twice[down][:, 0]
    assert canonical_point(held(weights, twice)).unique
    turned = {name: tensor.clone() for name, tensor in twice.items()}
    frame = canonical_point(held(weights, twice)).transform.elements["resid"].tensors()["matrix"]
    key = (fixed_numbers("unit blocks.0.mlp.up", 8) @ frame) * weights["blocks.0.norm2.weight"]
    across = torch.linalg.svd(key[None])[2][1]  # changes the unit, not its key
    turned[up][1] += 0.3 * across
    doubts = canonical_point(held(weights, turned)).doubts
    assert [doubt.space for doubt in doubts] == ["ff0"]
    assert doubts[0].uncertainty > 0.01


def _doubled(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The second of two heads made equal to the first."""
    axis = 1 if ".o." in name else 0
    half = tensor.chunk(2, dim=axis)[0]
    return torch.cat([half, half], dim=axis)


def test_fixed_numbers_never_change() -> None:
    found = fixed_numbers("a label", 4, 2)
    assert torch.equal(found, fixed_numbers("a label", 4, 2))
    assert not torch.equal(found, fixed_numbers("another", 4, 2))
    assert found.flatten()[:2].tolist() == [-0.658247111449043, 1.202452918945443]
    large = fixed_numbers("large", 10_000)
    assert abs(float(large.mean())) < 0.05
    assert float(large.var()) == pytest.approx(1, abs=0.05)


@pytest.mark.hf
@pytest.mark.parametrize(
    ("name", "tensor", "space"),
    [
        ("gpt2-lm-untied", "h.1.mlp.c_proj.weight", "ff1"),
        ("bert-relu", "layer.1.output.dense.weight", "ff1"),
        ("gpt2-lm-untied", "h.1.attn.c_proj.weight", "heads1"),
    ],
)
def test_weights_that_means_of_a_copy_swamp_are_in_doubt(
    name: str, tensor: str, space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of another program may add means of 0.02 behind a LayerNorm, whose rounding in float32 is as large as
    weights of 1e-8; ours keep them near the size of the weights."""
    model = tiny_model(name)
    assert not [doubt for doubt in canonical_point(model).doubts if doubt.reason == SWAMPED]
    name = next(n for n in model if n.endswith(tensor))
    tiny_weights = stored(held(model, {name: model[name].double() * 1e-8}), torch.float32)
    found = [doubt for doubt in canonical_point(tiny_weights).doubts if doubt.reason == SWAMPED]
    assert [doubt.space for doubt in found] == [space]
    ours = stored(scrambled(tiny_weights), torch.float32)
    monkeypatch.setattr(coordinate, "LARGEST_MEAN", 1e30)
    copy = stored(scrambled(tiny_weights), torch.float32)
    theirs, of_ours = (weight_difference(point(each), point(tiny_weights)) for each in (copy, ours))
    assert theirs > 1e-3 > of_ours


@pytest.mark.hf
def test_small_weights_behind_a_norm_that_keeps_the_mean_are_in_no_doubt() -> None:
    model = tiny_model("llama-gqa")
    name = next(n for n in model if n.endswith("layers.1.mlp.down_proj.weight"))
    small = stored(held(model, {name: model[name].double() * 1e-8}), torch.float32)
    assert canonical_point(small).unique
    copy = stored(scrambled(small), torch.float32)
    assert weight_difference(point(copy), point(small)) < SAME
