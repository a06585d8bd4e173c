"""The laws over the project's own model, every switch of it, drawn by hypothesis; sizes of one included."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outside import Torn, Undual, act, step_outside
from subjects import change, held, moved
from torch import Tensor

import tiny
from isobasin.arch import HeadSpace, Space
from isobasin.errors import TransformError
from isobasin.groups import GL, Element, Heads, Matrix, RotaryCommutant
from isobasin.model import ModelConfig, Transformer
from isobasin.symmetries import group_of
from isobasin.symmetries.normal_form import normalize
from isobasin.symmetries.transform import Transform, scramble
from isobasin.weights import Weights, load

EXACT = 1e-9
SEEN = 1e-3
POSITIONS = ("none", "sinusoidal", "learned", "rope", "alibi")
seeds = st.integers(0, 2**31)


@st.composite
def configs(draw: st.DrawFn) -> ModelConfig:
    """Any allowed combination of switches, with sizes from one up."""
    positions, n_kv_heads = draw(st.sampled_from(POSITIONS)), draw(st.integers(1, 3))
    d_head = draw(st.integers(2 if positions == "rope" else 1, 5))
    settings = {
        "d_model": draw(st.integers(1, 8)),
        "n_layers": draw(st.integers(1, 3)),
        "n_heads": n_kv_heads * draw(st.integers(1, 3)),
        "n_kv_heads": n_kv_heads,
        "d_head": d_head,
        "d_ff": draw(st.integers(1, 6)),
        "positions": positions,
        "norm": draw(st.sampled_from(["layer", "rms"])),
        "post_norm": draw(st.booleans()),
        "feed_forward": draw(st.sampled_from(["gelu", "swiglu"])),
        "causal": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "rotary_dims": 2 * draw(st.integers(1, d_head // 2)) if positions == "rope" else None,
        "rotary_layout": draw(st.sampled_from(["half", "interleaved"])),
        "norm_eps": 1e-3,
    }
    return ModelConfig(**settings, **draw(ends()))


@st.composite
def ends(draw: st.DrawFn) -> dict[str, Any]:
    """Tokens or patches in, a classifier or words out."""
    if draw(st.booleans()):
        return {"image_size": 4, "patch_size": 2, "n_channels": draw(st.integers(1, 2)), "n_classes": 3}
    tokens = {"d_vocab": 9, "n_positions": 6}
    return tokens | draw(st.sampled_from([{"n_classes": 1}, {"n_classes": 4}, {"tied": True}, {}]))


def inputs_of(config: ModelConfig, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    if config.d_vocab is not None:
        return torch.randint(config.d_vocab, (4, config.n_positions), generator=rng)
    size = config.image_size
    return torch.randn(4, config.n_channels, size, size, generator=rng, dtype=torch.float64)


def through_a_folder(model: Transformer) -> Weights:
    with TemporaryDirectory() as folder:
        model.save(folder)
        return held(load(Path(folder)))


def said(config: ModelConfig, weights: Weights, inputs: Tensor) -> Tensor:
    """What the module says with these tensors in it."""
    model = Transformer(config).double()
    model.load_state_dict({name: weights[name] for name in weights})
    with torch.no_grad():
        return model(inputs)


def off(found: Tensor, expected: Tensor) -> float:
    """max |difference|, relative where outputs are large: behind a LayerNorm of one feature they are all zero."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


def generic(config: ModelConfig, seed: int) -> Weights:
    return through_a_folder(tiny.randomize(Transformer(config).double(), seed))


# -- the function stays ---------------------------------------------------------------------------------------


@given(configs(), seeds)
@settings(max_examples=60, deadline=None)
def test_a_scrambled_model_says_the_same_and_comes_back(config: ModelConfig, seed: int) -> None:
    weights, inputs = generic(config, seed), inputs_of(config, seed)
    transform = scramble(weights, seed=seed)
    there = moved(transform, weights)
    assert off(said(config, there, inputs), said(config, weights, inputs)) <= EXACT
    assert max(change(moved(transform.inverse(), there), weights).values()) <= EXACT
    moving = [n for n in weights if ".attn." in n and n.endswith(".weight")]
    assert all(not torch.equal(there[name], weights[name]) for name in moving)


@given(configs(), seeds)
@settings(max_examples=20, deadline=None)
def test_a_composition_is_one_after_the_other(config: ModelConfig, seed: int) -> None:
    weights = generic(config, seed)
    first, second = scramble(weights, seed=seed), scramble(weights, seed=seed + 1)
    one_by_one = moved(second, moved(first, weights))
    assert max(change(moved(second.compose(first, weights.arch), weights), one_by_one).values()) <= EXACT
    assert max(change(moved(first, weights), one_by_one).values()) > EXACT


# -- one step outside changes it ------------------------------------------------------------------------------

_SIZES = {"d_model": 8, "n_layers": 2, "n_heads": 4, "d_head": 4, "d_ff": 6, "norm_eps": 1e-3}
_TOKENS = _SIZES | {"d_vocab": 9, "n_positions": 6}
ENDS: dict[str, dict[str, Any]] = {
    "lm": _TOKENS,
    "tied": _TOKENS | {"tied": True},
    "classifier": _TOKENS | {"n_classes": 4},
    "patches": _SIZES | {"image_size": 4, "patch_size": 2, "n_channels": 2, "n_classes": 4},
}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("post_norm", [False, True])
@pytest.mark.parametrize("feed_forward", ["gelu", "swiglu"])
@pytest.mark.parametrize("bias", [False, True])
def test_each_space_allows_its_group_and_nothing_more(
    ends: str, norm: str, post_norm: bool, feed_forward: str, bias: bool
) -> None:
    config = ModelConfig(
        **ENDS[ends], norm=norm, post_norm=post_norm, feed_forward=feed_forward, bias=bias, positions="learned"
    )
    weights, inputs = generic(config, 1), inputs_of(config, 1)
    flat, expected = moved(normalize(weights), weights), said(config, weights, inputs)
    assert off(said(config, flat, inputs), expected) <= EXACT
    for name in ("resid", "ff0"):
        space = weights.arch.spaces[name]
        assert isinstance(space, Space)
        inside, outside = group_of(space).sample(seed=3), step_outside(space.kind, space.size)
        assert off(said(config, act(flat, {name: inside}), inputs), expected) <= EXACT
        assert not group_of(space).contains(outside)
        assert off(said(config, act(flat, {name: outside}), inputs), expected) > SEEN


def heads_of(weights: Weights) -> tuple[HeadSpace, Heads]:
    space = weights.arch.spaces["heads0"]
    group = group_of(space)
    assert isinstance(space, HeadSpace)
    assert isinstance(group, Heads)
    return space, group


ROPE: list[dict[str, Any]] = [
    {"rotary_layout": layout, "rotary_dims": r, "n_kv_heads": kv}
    for layout in ("half", "interleaved")
    for r in (4, 6)
    for kv in (1, 2, 4)
]


@pytest.mark.parametrize("switches", ROPE, ids=str)
def test_rotary_positions_refuse_gl_and_the_other_layout(switches: dict[str, Any]) -> None:
    config = ModelConfig(**_TOKENS | {"d_head": 6, "positions": "rope"} | switches)
    weights, inputs = generic(config, 2), inputs_of(config, 2)
    expected = said(config, weights, inputs)
    space, group = heads_of(weights)
    assert (space.rotary, space.interleaved) == (config.rotary_dims, config.rotary_layout == "interleaved")

    def error(qk: Element) -> float:
        return off(said(config, act(weights, {"heads0": replace(group.identity(), qk=qk)}), inputs), expected)

    n_kv = space.n_kv_heads
    assert error(group.qk.sample(n_kv, seed=1)) <= EXACT
    assert error(GL(space.d_head).sample(n_kv, seed=1)) > SEEN
    wrong = RotaryCommutant(space.rotary, not space.interleaved).sample(n_kv, seed=1).matrix()
    padded = torch.eye(space.d_head, dtype=torch.float64).repeat(n_kv, 1, 1)
    padded[:, : space.rotary, : space.rotary] = wrong
    assert error(Matrix(padded)) > SEEN


@pytest.mark.parametrize("positions", [p for p in POSITIONS if p != "rope"])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_without_rotary_positions_each_head_allows_gl_and_its_dual_only(positions: str, n_kv_heads: int) -> None:
    config = ModelConfig(**_TOKENS, positions=positions, n_kv_heads=n_kv_heads)
    weights, inputs = generic(config, 3), inputs_of(config, 3)
    expected = said(config, weights, inputs)
    for face in ("qk", "vo"):
        factor = GL(4).sample(n_kv_heads, seed=1)
        element = {"heads0": replace(heads_of(weights)[1].identity(), **{face: factor})}
        assert off(said(config, act(weights, element), inputs), expected) <= EXACT
        assert off(said(config, act(weights, element, Undual), inputs), expected) > SEEN


@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_heads_permute_whole_or_not_at_all_and_under_alibi_never(positions: str, n_kv_heads: int) -> None:
    config = ModelConfig(**_TOKENS, positions=positions, n_kv_heads=n_kv_heads)
    weights, inputs = generic(config, 4), inputs_of(config, 4)
    expected = said(config, weights, inputs)
    still = heads_of(weights)[1].identity()
    swaps = [replace(still, queries=still.queries.roll(1, dims=1))] if n_kv_heads < 4 else []
    swaps += [replace(still, kv=still.kv.roll(1))] if n_kv_heads > 1 else []
    for swap in swaps:
        error = off(said(config, act(weights, {"heads0": swap}), inputs), expected)
        assert error > SEEN if positions == "alibi" else error <= EXACT
        assert off(said(config, act(weights, {"heads0": swap}, Torn), inputs), expected) > SEEN
        transform = Transform(weights.arch.family, dict(weights.arch.spaces), {"heads0": swap})
        if positions == "alibi":
            with pytest.raises(TransformError, match="element heads0: not in"):
                transform.apply(weights)
        else:
            assert off(said(config, moved(transform, weights), inputs), expected) <= EXACT


def test_the_group_of_alibi_keeps_every_head_in_its_place() -> None:
    weights = generic(ModelConfig(**_TOKENS, positions="alibi"), 5)
    plain = generic(ModelConfig(**_TOKENS, positions="none"), 5)
    drawn, free = (scramble(w, seed=1).elements["heads0"] for w in (weights, plain))
    assert torch.equal(drawn.head_permutation, torch.arange(4))
    assert not torch.equal(free.head_permutation, torch.arange(4))


def test_the_laws_see_a_model_that_was_not_moved_by_a_symmetry() -> None:
    config = ModelConfig(**_TOKENS, positions="rope")
    weights, inputs = generic(config, 6), inputs_of(config, 6)
    nudged = held(weights, {"blocks.0.attn.q.weight": 1.01 * weights["blocks.0.attn.q.weight"]})
    assert off(said(config, nudged, inputs), said(config, weights, inputs)) > 1e-6
    assert max(change(nudged, weights).values()) > 1e-3
