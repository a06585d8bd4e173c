"""One step outside the group changes the function: without this the laws over the families would prove nothing.

Every check comes as a pair: the move inside the group, which nothing sees, and its neighbour outside, which is seen.
"""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from outside import Torn, Undual, act, step_outside
from subjects import Subject, held, moved, subject
from torch import Tensor

import tiny
from isobasin.arch import HeadSpace, Space
from isobasin.groups import GL, Heads, Matrix, RotaryCommutant
from isobasin.symmetries import group_of, symmetry
from isobasin.symmetries.coordinate import Coordinate
from isobasin.symmetries.norm_coordinates import NormCoordinate
from isobasin.symmetries.normal_form import normalize
from isobasin.views import AsFloat64
from isobasin.weights import Weights

pytestmark = pytest.mark.hf

EXACT = 1e-9
SEEN = 1e-3

every_case = pytest.mark.parametrize("name", [case.name for case in tiny.CASES])
ROTARY = [case.name for case in tiny.CASES if case.family in ("llama", "mistral", "qwen2", "phi3", "gpt_neox")]
ABSOLUTE = [case.name for case in tiny.CASES if case.name not in ROTARY]
MANY_HEADS = [case.name for case in tiny.CASES if "one-head" not in case.name]
GROUPED = [
    "llama-gqa",
    "llama-biases",
    "llama-head-dim",
    "mistral-gqa",
    "mistral-head-dim",
    "mistral-window",
    "qwen2-gqa",
    "qwen2-tied",
    "qwen2-classifier",
    "phi3-gqa",
    "phi3-half-rotary",
    "phi3-tied",
]


def heads_of(s: Subject) -> tuple[HeadSpace, Heads]:
    space = s.weights.arch.spaces["heads0"]
    group = group_of(space)
    assert isinstance(space, HeadSpace)
    assert isinstance(group, Heads)
    return space, group


# -- spaces ---------------------------------------------------------------------------------------------------


@every_case
def test_each_space_allows_its_group_and_nothing_more(name: str) -> None:
    s = subject(name)
    flat = moved(normalize(s.weights), s.weights)
    assert s.error(flat) <= EXACT
    groups = symmetry(s.weights.arch).groups
    for space in s.weights.arch.spaces.values():
        if isinstance(space, Space) and space.name in groups:
            group, outside = groups[space.name], step_outside(space.kind, space.size)
            assert s.error(act(flat, {space.name: group.sample(seed=3)})) <= EXACT, space.name
            assert not group.contains(outside)
            assert s.error(act(flat, {space.name: outside})) > SEEN, space.name


# -- heads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_positions_refuse_gl_and_the_other_layout(name: str) -> None:
    s = subject(name)
    space, group = heads_of(s)
    inside = replace(group.identity(), qk=group.qk.sample(space.n_kv_heads, seed=1))
    assert s.error(act(s.weights, {"heads0": inside})) <= EXACT
    # Q Kᵀ of every head stays: only the positions see the difference.
    outside = replace(inside, qk=GL(space.d_head).sample(space.n_kv_heads, seed=1))
    assert s.error(act(s.weights, {"heads0": outside})) > SEEN
    wrong = RotaryCommutant(space.rotary, not space.interleaved).sample(space.n_kv_heads, seed=1).matrix()
    padded = torch.eye(space.d_head, dtype=torch.float64).repeat(space.n_kv_heads, 1, 1)
    padded[:, : space.rotary, : space.rotary] = wrong
    assert s.error(act(s.weights, {"heads0": replace(inside, qk=Matrix(padded))})) > SEEN


@pytest.mark.parametrize("name", ABSOLUTE)
def test_absolute_positions_allow_gl_on_either_face_but_not_its_transpose(name: str) -> None:
    s = subject(name)
    space, group = heads_of(s)
    factor = GL(space.d_head).sample(space.n_kv_heads, seed=1)
    for face in ("qk", "vo"):
        inside = replace(group.identity(), **{face: factor})
        assert s.error(act(s.weights, {"heads0": inside})) <= EXACT
        assert s.error(act(s.weights, {"heads0": inside}, Undual)) > SEEN


@pytest.mark.parametrize("name", MANY_HEADS)
def test_heads_permute_whole_or_not_at_all(name: str) -> None:
    s = subject(name)
    space, group = heads_of(s)
    still = group.identity()
    rolled = (
        replace(still, kv=still.kv.roll(1))
        if space.n_kv_heads > 1
        else replace(still, queries=still.queries.roll(1, dims=1))
    )
    assert s.error(act(s.weights, {"heads0": rolled})) <= EXACT
    assert s.error(act(s.weights, {"heads0": rolled}, Torn)) > SEEN


def swapped_queries(weights: Weights, first: int, second: int) -> Weights:
    """Two query heads of layer 0 change places, in the queries and in the output projection."""
    at, d_head = "model.layers.0.self_attn", weights.arch.sizes.d_head
    order = torch.arange(weights.arch.sizes.n_heads)
    order[[first, second]] = order[[second, first]]
    rows = (order[:, None] * d_head + torch.arange(d_head)).flatten()
    changes = {f"{at}.o_proj.weight": weights[f"{at}.o_proj.weight"][:, rows]}
    for name in ("q_proj.weight", "q_proj.bias", "qkv_proj.weight"):  # fused, the queries come first
        if (tensor := weights.get(f"{at}.{name}")) is not None:
            changes[f"{at}.{name}"] = torch.cat([tensor[rows], tensor[len(rows) :]])
    return held(weights, changes)


@pytest.mark.parametrize("name", GROUPED)
def test_query_heads_permute_inside_their_group_only(name: str) -> None:
    s = subject(name)
    last = s.weights.arch.sizes.n_heads - 1
    assert s.error(swapped_queries(s.weights, 0, 1)) <= EXACT
    assert s.error(swapped_queries(s.weights, 0, last)) > SEEN


def test_with_one_kv_head_all_query_heads_permute() -> None:
    s = subject("llama-one-kv-head")
    assert s.error(swapped_queries(s.weights, 0, 3)) <= EXACT
    assert s.error(swapped_queries(subject("llama-untied").weights, 0, 3)) > SEEN


# -- free coordinates -----------------------------------------------------------------------------------------


def drawn(coordinate: Coordinate, tensors: Mapping[str, Tensor], rng: torch.Generator) -> Tensor:
    """A value well away from the present one; gains stay away from zero."""
    before = coordinate.read(tensors)
    value = coordinate.sample(before, rng)
    return value if isinstance(coordinate, NormCoordinate) else before + 5 * (value - before)


def cancelled(weights: Weights) -> set[str]:
    """Key biases without rotary positions: dropping what they should take over is not seen, for they never are."""
    return {name for name in weights if name.endswith(("self.key.bias", "attention.key.bias"))}


@every_case
def test_each_free_coordinate_is_free_and_each_compensation_is_needed(name: str) -> None:
    s = subject(name)
    weights, tensors = s.weights, AsFloat64(s.weights)
    rng = torch.Generator().manual_seed(0)
    usable = [c for c in symmetry(weights.arch).coordinates.values() if c.usable(tensors)]
    assert len(usable) > weights.arch.sizes.n_layers
    for coordinate in usable:
        changes = {n: f(tensors) for n, f in coordinate.set(drawn(coordinate, tensors, rng)).items()}
        assert set(changes) <= coordinate.touches
        assert s.error(held(weights, changes)) <= EXACT, coordinate.name
        if len(changes) == 1 or (set(changes) & cancelled(weights) and coordinate.name.startswith("mean:")):
            continue
        for dropped in changes.keys() - cancelled(weights):
            kept = {n: t for n, t in changes.items() if n != dropped}
            assert s.error(held(weights, kept)) > SEEN, (coordinate.name, dropped)


@pytest.mark.parametrize(
    "name", ["gpt2-bare", "gpt2-lm-tied", "bert-masked-lm-tied", "vit-no-qkv-bias", "gpt_neox-full-rotary"]
)
def test_a_free_coordinate_is_set_where_the_weights_are(name: str) -> None:
    """Values of a transform lie on the processor. Meta tensors stand in for an accelerator: they refuse to meet them
    too. (Norms look for gains of zero, which a meta tensor can not say.)"""
    weights = subject(name).weights
    elsewhere = {n: weights[n].double().to("meta") for n in weights}
    free = [c for c in symmetry(weights.arch).coordinates.values() if not isinstance(c, NormCoordinate)]
    assert free
    for coordinate in free:
        value = torch.zeros(coordinate.shapes[0], dtype=torch.float64)
        for change in coordinate.set(value).values():
            assert change(elsewhere).device.type == "meta", coordinate.name
    with pytest.raises(RuntimeError, match="device"):
        next(iter(elsewhere.values())) * weights[next(iter(elsewhere))].double()


def test_the_lists_of_cases_are_what_they_say() -> None:
    for name in ROTARY + ABSOLUTE:
        space, _ = heads_of(subject(name))
        assert (space.rotary > 0) == (name in ROTARY)
        assert (space.n_heads > 1) == (name in MANY_HEADS)
        assert (1 < space.n_kv_heads < space.n_heads) == (name in GROUPED)
