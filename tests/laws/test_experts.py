"""The order of experts: a permutation that moves the rows of the router and the tensors of whole experts."""

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import isobasin as ib
import model_types as mt
from isobasin.alignment.verification import LayerCheck
from isobasin.arch import Architecture, Space
from isobasin.arch.architecture import _validate
from isobasin.arch.registry import FAMILIES
from isobasin.compare.canonical import canonical_point
from isobasin.compare.fingerprint import compare_fingerprints, fingerprint
from isobasin.groups import Monomial
from isobasin.learn.path_loss import LinearPath
from isobasin.path.evaluation import FlatModel
from isobasin.symmetries import symmetry
from isobasin.symmetries.transform import Transform, scramble
from isobasin.symmetries.transform_file import load_transform, save_transform
from isobasin.weights import Weights

pytestmark = pytest.mark.hf

EXACT, SEEN = 1e-9, 1e-3
MODELS = ("mixtral-untied", "mixtral-tied", "qwen2_moe-untied", "qwen3_moe-untied", "olmoe-untied")
MODELS += ("gpt_oss-untied",) if os.environ.get("ISOBASIN_SLOW") == "1" else ()
every = pytest.mark.parametrize("name", MODELS)


def order(*index: int) -> Monomial:
    return Monomial(torch.tensor(index), torch.ones(len(index), dtype=torch.float64))


def held(weights: Weights, changes: Mapping[str, Tensor] | None = None) -> Weights:
    return replace(weights, tensors={n: weights[n] for n in weights} | dict(changes or {}))


def exchange(weights: Weights) -> Transform:
    """Every layer's experts in another order."""
    elements = dict.fromkeys(weights.arch.expert_spaces, order(2, 0, 1))
    return Transform(weights.arch.family, dict(weights.arch.spaces), elements)


def with_old_routers(moved: Weights, weights: Weights) -> Weights:
    """The negative control: experts exchanged without the rows of their router."""
    return held(
        moved, {name: weights[name] for space in weights.arch.expert_spaces for name in weights.arch.blocks[space]}
    )


def error(name: str, moved: Weights) -> float:
    model, start = mt.built(name), mt.weights(name)
    x = mt.inputs(start)
    before = mt.outputs(start, model, x)
    return float((mt.outputs(moved, model, x) - before).abs().max() / before.abs().max())


def largest_difference(a: Weights, b: Weights) -> float:
    return max(float((a[n].double() - b[n].double()).norm() / (a[n].double().norm() + 1)) for n in a)


@every
def test_experts_may_change_places_with_the_rows_of_their_router(name: str) -> None:
    a = mt.weights(name)
    transform = exchange(a)
    b = held(transform.apply(a))
    assert transform.exact
    assert error(name, b) <= EXACT
    assert error(name, with_old_routers(b, a)) > SEEN
    moved = {n for n in a if not torch.equal(a[n], b[n])}
    experts = {n for each in a.arch.expert_tensors.values() for names in each for n in names}
    assert moved == experts | {n for space in a.arch.expert_spaces for n in a.arch.blocks[space]}


@every
def test_a_scramble_permutes_experts_and_transforms_compose(name: str) -> None:
    a = mt.weights(name)
    first, second = scramble(a, seed=2), scramble(a, seed=4)
    assert not any(each.elements["experts0"].is_identity for each in (first, second))
    there = first.apply(a)
    assert largest_difference(held(a), held(first.inverse().apply(there))) <= EXACT
    both = second.compose(first, a.arch)
    in_turn, at_once = held(second.apply(there)), held(both.apply(a))
    assert largest_difference(in_turn, at_once) <= EXACT
    # Without regard to where experts go, products of elements are another transform.
    plain = {space: second.elements[space] @ g for space, g in first.elements.items()}
    assert largest_difference(in_turn, held(replace(both, elements=plain).apply(a))) > SEEN


@every
def test_exchanged_experts_are_aligned_equal_and_share_fingerprint_and_canonical_point(name: str) -> None:
    a = mt.weights(name)
    b = held(exchange(a).apply(a))
    wrong = with_old_routers(b, a)
    found = ib.align(b, to=a)
    assert found.distance_before > 0.1
    assert found.distance_after <= EXACT
    assert ib.equivalent(a, b).answer == "same"
    assert compare_fingerprints(fingerprint(a), fingerprint(b)).equal
    point, same, other = (held(ib.canonical(each).apply(each)) for each in (a, b, wrong))
    assert largest_difference(point, same) <= EXACT
    assert error(name, point) <= EXACT
    assert ib.align(wrong, to=a).distance_after > SEEN
    assert ib.equivalent(a, wrong).answer == "different"
    assert not compare_fingerprints(fingerprint(a), fingerprint(wrong)).equal
    assert largest_difference(point, other) > SEEN


def test_distances_do_not_count_the_order_of_experts() -> None:
    a = mt.weights("qwen2_moe-untied")
    b = held(exchange(a).apply(a))
    found, other = (ib.distance(a, each, null_samples=2) for each in (b, with_old_routers(b, a)))
    assert found.distance <= EXACT
    assert found.naive is not None
    assert found.naive > 0.1
    assert other.distance > SEEN


def test_experts_are_paired_where_embeddings_do_not_span_the_stream() -> None:
    config = {**mt._RMS, **mt._EXPERTS, "vocab_size": 7, "num_local_experts": 5}
    a = ib.load(mt.ModelType("few words", "mixtral", "MixtralForCausalLM", config).build())
    b = held(scramble(a, seed=2).apply(a))
    assert ib.align(b, to=a).distance_after <= 1e-6
    assert compare_fingerprints(fingerprint(a), fingerprint(b)).equal
    assert largest_difference(*(held(ib.canonical(each).apply(each)) for each in (a, b))) <= 1e-6


def test_experts_that_a_router_does_not_tell_apart_are_in_doubt() -> None:
    a = mt.weights("mixtral-untied")
    routers = [name for space in a.arch.expert_spaces for name in a.arch.blocks[space]]
    rows = {name: a[name][torch.tensor([0, 0, 2])] for name in routers}
    doubts = canonical_point(held(a, rows)).doubts
    assert {doubt.space for doubt in doubts} >= set(a.arch.expert_spaces)
    assert canonical_point(a).unique


def test_one_block_is_aligned_with_its_experts() -> None:
    a = mt.weights("mixtral-untied")
    first = next(iter(a.arch.expert_spaces))
    b = held(Transform(a.arch.family, dict(a.arch.spaces), {first: order(1, 2, 0)}).apply(a))
    found = ib.align(b, to=a, matcher=ib.WeightMatching(scope="first-block"))
    assert found.distance_before > 0.1
    assert found.distance_after <= EXACT
    assert error("mixtral-untied", found.transform.apply(b)) <= EXACT


def test_the_check_of_layers_sees_experts_without_the_rows_of_their_router() -> None:
    a = mt.weights("mixtral-untied")
    transform = exchange(a)
    b = held(transform.apply(a))
    check = LayerCheck.of(a, symmetry(a), transform, torch.device("cpu"))
    right, wrong = check.changes(0, b, with_old_routers(b, a))
    assert right <= EXACT
    assert wrong > SEEN


def test_merging_pairs_experts() -> None:
    a = mt.weights("mixtral-untied")
    b = held(scramble(a, seed=3).apply(a))
    assert largest_difference(held(ib.merge([a, b], matcher=ib.WeightMatching()).weights), held(a)) <= 1e-6


def test_learning_and_explanations_are_refused_where_experts_share_a_parameter() -> None:
    a = mt.weights("mixtral-untied")
    with pytest.raises(ib.IsobasinError, match="learning and --explain are not supported for mixtral"):
        LinearPath.between(a, a, symmetry(a), {}, torch.device("cpu"))
    with pytest.raises(ib.IsobasinError, match="learning and --explain are not supported for mixtral"):
        _ = FlatModel.of(a).places


def test_transforms_made_before_experts_could_be_permuted_are_still_read(tmp_path: Path) -> None:
    a = mt.weights("mixtral-untied")
    whole = scramble(a, seed=2)
    spaces = {name: space for name, space in whole.spaces.items() if space.role != "experts"}
    old = replace(whole, spaces=spaces, elements={n: g for n, g in whole.elements.items() if n in spaces})
    save_transform(old, tmp_path / "old.safetensors")
    found = load_transform(tmp_path / "old.safetensors")
    assert found.spaces == spaces
    assert error("mixtral-untied", found.apply(a)) <= EXACT
    both = whole.compose(found, a.arch)
    assert largest_difference(held(both.apply(a)), held(whole.apply(found.apply(a)))) <= EXACT


def test_a_transform_file_keeps_which_units_belong_to_experts(tmp_path: Path) -> None:
    a = mt.weights("mixtral-untied")
    whole = scramble(a, seed=2)
    save_transform(whole, tmp_path / "t.safetensors")
    found = load_transform(tmp_path / "t.safetensors")
    assert found.spaces == whole.spaces
    assert largest_difference(held(a), held(found.inverse().apply(whole.apply(a)))) <= EXACT
    first = next(iter(a.arch.expert_spaces.values()))
    for members in (first.members[:2], (*first.members[:2], "resid"), (*first.members[:2], "ff9_9")):
        spaces = {**whole.spaces, first.name: replace(first, members=members)}
        save_transform(replace(whole, spaces=spaces), tmp_path / "bad.safetensors", force=True)
        with pytest.raises(ib.IsobasinError, match="has members"):
            load_transform(tmp_path / "bad.safetensors")


def test_experts_with_different_tensors_are_refused() -> None:
    a = mt.weights("mixtral-untied")
    shapes = dict(a.arch.shapes)
    bias = next(n for n in a.arch.expert_tensors["experts0"][1] if n.endswith("w3.weight")).replace("weight", "bias")
    whole = a.family.describe(a.config)
    with pytest.raises(ib.IsobasinError, match="experts0: expert 1 has tensors of shapes"):
        whole.bind({**shapes, bias: (a.arch.spaces["ff0_1"].size,)})  # type: ignore[union-attr]


def test_members_are_units_of_one_size() -> None:
    arch = mt.weights("mixtral-untied").arch
    assert {arch.spaces[member].role for member in arch.expert_spaces["experts0"].members} == {"units"}
    for wrong in (
        Space("experts0", 3, "signed", members=("ff0_0", "ff0_1", "ff0_2")),
        Space("experts0", 2, "permutation", members=("ff0_0", "resid")),
    ):
        with pytest.raises(ib.IsobasinError, match="space experts0: expected a permutation"):
            _validate(replace(arch, spaces={**arch.spaces, "experts0": wrong}))


# -- the cost of many experts ---------------------------------------------------------------------------------------


def calls(action: Callable[[], object]) -> int:
    """How many Python functions an action calls, steps of generators included."""
    n = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal n
        n += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return n


def described(n_experts: int) -> Architecture:
    """The architecture of a mixture with so many experts in each layer, bound to the shapes that it expects."""
    found = FAMILIES["qwen3_moe"].architecture(
        {**mt.weights("qwen3_moe-untied").config, "num_local_experts": n_experts}
    )
    wanted = {name: p for name, p in found.tensors.items() if not p.buffer and not p.optional}
    return found.bind({name: tuple(found.size_of(axis) or 9 for axis in p.roles[0].axes) for name, p in wanted.items()})


def test_work_grows_with_the_number_of_experts_and_not_with_its_square() -> None:
    """Deepseek 3 has 15,000 of them. The control is what walks over all tensors for every space."""

    def work(n: int) -> object:
        return symmetry(described(n)).formula, symmetry(described(n)).tensors

    def square(n: int) -> object:
        arch = described(n)
        return [[name for name in arch.tensors if space in arch.spaces_of(name)] for space in arch.spaces]

    few, many = 16, 96
    for action, grows in ((work, False), (square, True)):
        action(few)
        ratio = calls(lambda action=action: action(many)) / calls(lambda action=action: action(few))  # type: ignore[misc]
        assert (ratio > 1.5 * many / few) is grows, ratio
