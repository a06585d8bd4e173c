"""Planted elements come back: for every family and switch, exactly, and under noise no worse than they were."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from align_subjects import (
    Pair,
    acted,
    head_order_back,
    identity,
    model,
    moved_outputs,
    own_inputs,
    own_model,
    rounded,
    scope_tensors,
    scrambled,
    squared_distance,
    with_noise,
    worst_tensor,
)
from torch import Tensor

import tiny
from isobasin.alignment.align import align
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.result import Alignment
from isobasin.arch import HeadSpace
from isobasin.groups import GL, Matrix, RotaryCommutant
from isobasin.model import ModelConfig
from isobasin.symmetries.attention import attention_matrices
from isobasin.views import AsFloat64
from isobasin.weights import Weights

pytestmark = pytest.mark.hf

BACK = 1e-5  # a float32 file that has come back
EXACT = 1e-9  # the function in float64, before anything is rounded
SEEN = 0.1  # a distance that nobody can miss

every_case = pytest.mark.parametrize("name", [case.name for case in tiny.CASES])


def aligned(pair: Pair, scope: str = "all-attention", **choices: Any) -> tuple[Alignment, Weights]:
    found = align(pair.b, to=pair.a, matcher=WeightMatching(scope=scope, **choices))
    return found, found.transform.apply(pair.b)


def check_comes_back(pair: Pair, inputs: Mapping[str, Tensor], scope: str = "all-attention") -> None:
    """Every tensor of A again, the very heads, the function of B; and B was somewhere else."""
    found, moved = aligned(pair, scope)
    assert worst_tensor(rounded(moved), pair.a) <= BACK
    assert found.distance_after <= BACK
    assert (found.head_permutation, found.kv_head_permutation) == head_order_back(pair.planted)
    assert moved_outputs(moved, pair.b, inputs) <= EXACT
    assert found.max_output_change is not None
    assert found.max_output_change <= 1e-6
    assert found.distance_before > SEEN
    assert worst_tensor(pair.b, pair.a) > SEEN


def check_under_noise(pair: Pair, inputs: Mapping[str, Tensor]) -> None:
    """The right heads, at most the planted element's distance, the function of the noisy B."""
    noisy = with_noise(pair)
    found, moved = aligned(noisy)
    assert (found.head_permutation, found.kv_head_permutation) == head_order_back(pair.planted)
    planted = squared_distance(noisy.planted.inverse().apply(noisy.b), noisy.a)
    assert squared_distance(moved, noisy.a) <= planted * (1 + 1e-9)
    assert planted > 0
    assert moved_outputs(moved, noisy.b, inputs) <= EXACT
    assert moved_outputs(noisy.b, pair.b, inputs) > 1e-3


@every_case
def test_a_scrambled_model_comes_back(name: str) -> None:
    check_comes_back(scrambled(model(name), "all-attention"), tiny.case(name).inputs(0))


@every_case
def test_the_first_layer_comes_back(name: str) -> None:
    check_comes_back(scrambled(model(name), "first-attention", seed=2), tiny.case(name).inputs(0), "first-attention")


@every_case
def test_under_noise_the_heads_are_right_and_nothing_is_lost(name: str) -> None:
    check_under_noise(scrambled(model(name), "all-attention", seed=3), tiny.case(name).inputs(0))


@pytest.mark.parametrize("name", ["gpt2-three-heads", "llama-gqa", "gpt_neox-quarter-rotary"])
def test_a_narrow_scope_leaves_the_other_layers_alone(name: str) -> None:
    pair = scrambled(model(name), "all-attention")
    found, moved = aligned(pair, "first-attention")
    assert len(found.per_layer) == len(found.head_permutation) == 1
    for layer in range(pair.a.arch.sizes.n_layers):
        mine = [n for n in scope_tensors(pair.a) if f".{layer}." in n]
        near = all(torch.allclose(moved[n].float(), pair.a[n], atol=1e-5) for n in mine)
        same = all(torch.equal(moved[n], pair.b[n]) for n in mine)
        assert (near, same) == ((True, False) if layer == 0 else (False, True))


# -- the switches of our own model -----------------------------------------------------------------------------------

_SIZES = {"d_model": 16, "n_layers": 2, "n_heads": 4, "d_head": 6, "d_ff": 12, "norm_eps": 1e-3}
_TOKENS = _SIZES | {"d_vocab": 9, "n_positions": 8}
_ROPE = _TOKENS | {"positions": "rope"}
SWITCHES: Mapping[str, dict[str, Any]] = {
    "none": _TOKENS,
    "sinusoidal": _TOKENS | {"positions": "sinusoidal", "causal": True},
    "learned-rms": _TOKENS | {"positions": "learned", "norm": "rms"},
    "alibi": _TOKENS | {"positions": "alibi"},
    "alibi-gqa": _TOKENS | {"positions": "alibi", "n_kv_heads": 2, "bias": False},
    "rope": _ROPE,
    "rope-interleaved": _ROPE | {"rotary_layout": "interleaved", "norm": "rms", "feed_forward": "swiglu"},
    "rope-partial": _ROPE | {"rotary_dims": 4},
    "rope-partial-interleaved": _ROPE | {"rotary_dims": 2, "rotary_layout": "interleaved", "causal": True},
    "rope-gqa": _ROPE | {"n_kv_heads": 2, "bias": False},
    "rope-partial-mqa": _ROPE | {"n_kv_heads": 1, "rotary_dims": 4, "norm": "rms"},
    "gqa": _TOKENS | {"n_kv_heads": 2},
    "mqa": _TOKENS | {"n_kv_heads": 1, "bias": False},
    "no-bias-rms": _TOKENS | {"bias": False, "norm": "rms"},
    "no-bias": _TOKENS | {"bias": False},
    "post-norm": _TOKENS | {"post_norm": True, "positions": "learned"},
    "post-norm-rms-rope": _ROPE | {"post_norm": True, "norm": "rms", "bias": False},
    "patches": _SIZES | {"image_size": 4, "patch_size": 2, "n_channels": 2, "n_classes": 4, "positions": "learned"},
    "one-of-each": _TOKENS | {"n_heads": 1, "n_layers": 1, "d_head": 1},
}


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("noise", [False, True])
def test_every_switch_comes_back(switches: str, noise: bool) -> None:
    config = ModelConfig(**SWITCHES[switches])
    pair = scrambled(own_model(config), "all-attention")
    check = check_under_noise if noise else check_comes_back
    check(pair, own_inputs(config))
    if config.positions == "alibi":
        still = tuple(range(config.n_heads))
        assert head_order_back(pair.planted)[0] == (still, still)


def test_a_scramble_moves_heads_where_they_may_move() -> None:
    """The negative control of the permutations above: they are not all the identity."""
    for name in ("none", "rope-gqa", "rope-partial-interleaved"):
        queries, _ = head_order_back(scrambled(own_model(ModelConfig(**SWITCHES[name])), "all-attention").planted)
        assert any(q != tuple(sorted(q)) for q in queries)


# -- what must not come back -----------------------------------------------------------------------------------------


def turned_inside_heads(a: Weights, seed: int = 1) -> Weights:
    """Q and K of every head by a matrix of GL and its dual: every product QKᵀ stays as it is."""
    elements = {}
    for name, still in identity(a).items():
        space = a.arch.spaces[name]
        assert isinstance(space, HeadSpace)
        elements[name] = replace(still, qk=GL(space.d_head).sample(space.n_kv_heads, seed=seed))
    return rounded(acted(a, elements))


def products(a: Weights) -> list[Tensor]:
    found = []
    for heads in a.arch.heads():
        m = attention_matrices(a.arch, heads, AsFloat64(a))
        found.append(m.q @ m.k.repeat_interleave(heads.group_size, 0).mT)
    return found


@pytest.mark.parametrize(
    ("name", "back"),
    [
        ("gpt2-lm-untied", True),
        ("bert-classifier", True),
        ("llama-untied", False),
        ("llama-biases", False),
        ("gpt_neox-full-rotary", False),
        ("gpt_neox-half-rotary", False),
    ],
)
def test_rotary_positions_tell_gl_from_h_though_the_products_are_equal(name: str, back: bool) -> None:
    a = model(name)
    pair = Pair(a, turned_inside_heads(a), scrambled(a, "all-attention").planted)
    for before, after in zip(products(a), products(pair.b), strict=True):
        assert float((before - after).abs().max() / before.abs().max()) <= 1e-5
    found, moved = aligned(pair)
    assert (worst_tensor(rounded(moved), a) <= BACK) == back
    assert (found.distance_after < SEEN) == back
    assert moved_outputs(moved, pair.b, tiny.case(name).inputs(0)) <= EXACT
    assert (moved_outputs(pair.b, a, tiny.case(name).inputs(0)) <= 1e-5) == back


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("right", [True, False])
def test_an_element_of_the_other_layout_does_not_come_back(layout: str, right: bool) -> None:
    config = ModelConfig(**_ROPE | {"rotary_layout": layout, "rotary_dims": 4})
    a = own_model(config)
    elements = {}
    for name, still in identity(a).items():
        turn = torch.eye(6, dtype=torch.float64).repeat(4, 1, 1)
        turn[:, :4, :4] = RotaryCommutant(4, (layout == "interleaved") == right).sample(4, seed=3).matrix()
        elements[name] = replace(still, qk=Matrix(turn))
    pair = Pair(a, rounded(acted(a, elements)), scrambled(a, "all-attention").planted)
    found, moved = aligned(pair)
    assert (worst_tensor(rounded(moved), a) <= BACK) == right
    assert (found.distance_after < 0.05) == right
    assert moved_outputs(moved, pair.b, own_inputs(config)) <= EXACT


@pytest.mark.parametrize("name", ["gpt2-lm-untied", "llama-gqa", "gpt_neox-half-rotary"])
def test_without_stage_2_it_is_worse_than_the_planted_element(name: str) -> None:
    """The negative control of the objective: the test above can fail."""
    noisy = with_noise(scrambled(model(name), "all-attention", seed=3))
    planted = squared_distance(noisy.planted.inverse().apply(noisy.b), noisy.a)
    rest = [squared_distance(aligned(noisy, stage2=s)[1], noisy.a) for s in ("none", "orthogonal", "full")]
    assert rest[0] > rest[1] > planted > rest[2]


@pytest.mark.parametrize("name", ["llama-untied", "vit-classifier"])
def test_another_model_does_not_come_back(name: str) -> None:
    a, b = model(name), model(name, seed=1)
    found, moved = aligned(Pair(a, b, scrambled(a, "all-attention").planted))
    assert SEEN < found.distance_after < found.distance_before
    assert moved_outputs(moved, b, tiny.case(name).inputs(0)) <= EXACT
    assert moved_outputs(moved, a, tiny.case(name).inputs(0)) > 1e-3
