"""One descent for every scope: attention alone is the same problem with the stream held, and splits by layers."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from align_subjects import held, model, moved_outputs, scrambled, worst_tensor

import tiny
from isobasin.alignment import descent
from isobasin.alignment.align import align
from isobasin.alignment.candidates import AlignOptions, align_part
from isobasin.alignment.descent import _as_copy, from_embeddings, solve, sweep
from isobasin.alignment.heads import HeadMatch, match_heads
from isobasin.alignment.matchers import ActivationMatching, WeightMatching
from isobasin.alignment.problem import AlignmentProblem
from isobasin.alignment.reference import ReferenceMatching
from isobasin.alignment.result import Alignment
from isobasin.alignment.verification import combined
from isobasin.arch import HeadSpace
from isobasin.errors import IsobasinError
from isobasin.model import ModelConfig, Transformer
from isobasin.runtime import random_inputs
from isobasin.symmetries import heads_group, symmetry
from isobasin.symmetries.attention import AttentionMatrices
from isobasin.symmetries.normal_form import normalize
from isobasin.symmetries.transform import Transform
from isobasin.weights import Weights, load

pytestmark = pytest.mark.hf

CPU = torch.device("cpu")
CASES = ("gpt2-lm-untied", "bert-classifier", "vit-no-qkv-bias", "llama-gqa", "gpt_neox-no-attention-bias")
ATTENTION = WeightMatching(scope="all-attention")


def numbers(transform: Transform) -> dict[str, torch.Tensor]:
    """All numbers of a transform."""
    found = {f"{n} {k}": t for n, g in transform.elements.items() for k, t in g.tensors().items()}
    values = {n: (v.before, v.after) for n, v in transform.gauge.items()}
    return found | {f"{n} {k}": t for n, pair in values.items() for k, t in zip(("before", "after"), pair)}


def same(one: Transform, other: Transform) -> bool:
    """Bitwise the same transform."""
    a, b = numbers(one), numbers(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def same_result(one: Alignment, other: Alignment) -> bool:
    return same(one.transform, other.transform) and replace(one, transform=other.transform) == other


def posed(name: str, scope: str, a: Weights | None = None, b: Weights | None = None) -> AlignmentProblem:
    a, b = a or model(name), b or model(name, seed=1)
    return AlignmentProblem(a, b, symmetry(b.arch).scoped(scope), WeightMatching(scope), CPU)


# -- without further arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2-lm-tied", "llama-gqa"])
def test_two_models_are_all_it_needs(name: str) -> None:
    pair = scrambled(model(name), "model")
    found = align(pair.b, to=pair.a)
    assert worst_tensor(pair.b, pair.a) > 0.5
    assert worst_tensor(found.transform.apply(pair.b), pair.a) <= 1e-4
    assert found.max_output_change is not None
    assert same_result(found, align(pair.b, to=pair.a, matcher=WeightMatching(scope="model")))
    assert not same_result(found, align(pair.b, to=pair.a, matcher=ATTENTION))


def test_models_may_be_folders(tmp_path: Path) -> None:
    pair = scrambled(model("llama-gqa"), "model")
    pair.a.save(tmp_path / "a")
    pair.b.save(tmp_path / "b")
    found = align(str(tmp_path / "b"), to=tmp_path / "a")
    assert same_result(found, align(pair.b, to=pair.a))
    assert found.distance_after <= 1e-5 < found.distance_before


# -- the stream held ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_with_the_stream_held_layers_are_independent(name: str) -> None:
    """Each part solved alone gives bitwise what the whole call finds for its layer."""
    whole = posed(name, "all-attention")
    layers = range(whole.arch.sizes.n_layers)
    assert len(layers) > 1
    assert not whole.moves_stream
    parts = list(whole.independent_parts())
    assert [list(part.part.groups) for part in parts] == [[f"heads{i}"] for i in layers]
    options = AlignOptions()
    dtypes = replace(whole.b, exact=False).output_dtypes(options.dtype)
    alone = [align_part(part, dtypes, options) for part in reversed(parts)]
    found = align(whole.b, to=whole.a, matcher=ATTENTION)
    assert same_result(combined(whole, alone[::-1]), found)
    for one in alone:
        ((heads, _),) = one.squares.items()
        mine = {n: t for n, t in numbers(found.transform).items() if n in numbers(one.transform)}
        assert mine.keys() == numbers(one.transform).keys()
        assert all(torch.equal(numbers(one.transform)[n], t) for n, t in mine.items())
        assert set(one.transform.elements) == {heads}
    assert found.distance_after < found.distance_before


@pytest.mark.parametrize("name", CASES)
def test_a_layer_does_not_see_the_others(name: str) -> None:
    """What is found for the first layer stays, bit for bit, when another layer of B is another model's."""
    a, b, other = model(name), model(name, seed=1), model(name, seed=2)
    last = b.arch.sizes.n_layers - 1
    mixed = held(b, {n: other[n] for n in b.arch.blocks[f"heads{last}"]})
    one, two = (align(m, to=a, matcher=ATTENTION).transform for m in (b, mixed))
    first, second = (t.elements["heads0"].tensors() for t in (one, two))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not same(one, two)  # negative control: the layer that was replaced moves otherwise


@pytest.mark.parametrize("name", ["gpt2-lm-untied", "llama-gqa"])
def test_one_visit_of_each_block_is_enough_where_the_stream_is_held(name: str) -> None:
    problem = posed(name, "all-attention")
    state = solve(problem)
    assert state.converged
    assert len(state.history) == 1
    _, proposed, _ = sweep(problem, state.elements)
    left = [sweep(problem, elements)[0] for elements in (problem.identity, state.elements, proposed)]
    assert left[0] == state.square
    assert left[1] < left[0]
    assert left[2] == pytest.approx(left[1], rel=1e-9)


@pytest.mark.parametrize("name", ["gpt2-lm-untied", "llama-gqa"])
def test_the_whole_model_is_one_problem(name: str) -> None:
    problem = posed(name, "model")
    assert problem.moves_stream
    assert list(problem.independent_parts()) == [problem]
    assert len(solve(problem).history) > 1
    block = posed(name, "first-block")
    assert [set(part.part.groups) for part in block.independent_parts()] == [{"heads0", "ff0"}]


@pytest.mark.parametrize("name", ["gpt2-lm-untied", "llama-gqa"])
def test_heads_are_matched_alike_in_every_scope(name: str) -> None:
    """With gains folded, a sweep of the whole model from the identity matches heads as the scope of attention does."""
    a, b = (held(normalize(m).apply(m)) for m in (model(name), model(name, seed=1)))
    whole, attention = posed(name, "model", a, b), posed(name, "all-attention", a, b)
    _, one, _ = sweep(whole, whole.identity)
    two = solve(attention).elements
    assert set(two) < set(one)
    for space, element in two.items():
        for key, tensor in element.tensors().items():
            torch.testing.assert_close(one[space].tensors()[key], tensor, rtol=1e-6, atol=1e-6)
    moved = {**whole.identity, "resid": one["resid"]}
    _, elsewhere, _ = sweep(whole, moved)  # negative control: heads see where the stream is
    assert any(not torch.allclose(elsewhere[n].vo.value, g.vo.value, atol=1e-3) for n, g in two.items())  # type: ignore[attr-defined]


# -- only if closer ----------------------------------------------------------------------------------------------------


def random_match(matcher: WeightMatching, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch:
    """An element of the group that brings nothing closer."""
    return replace(match_heads(a, b, heads), element=heads_group(heads).sample(seed=heads.layer or 0))


def with_noise(a: Weights) -> Weights:
    rng = torch.Generator().manual_seed(4)
    return held(a, {n: a[n] + 1e-3 * torch.randn(a[n].shape, generator=rng) for n in a})


@pytest.mark.parametrize("name", ["gpt2-lm-untied", "llama-gqa"])
def test_what_is_farther_is_kept_only_if_asked_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = model(name)
    b = with_noise(a)
    monkeypatch.setattr(WeightMatching, "match", random_match)
    kept, left = (align(b, to=a, matcher=ATTENTION, only_if_closer=only) for only in (False, True))
    assert kept.distance_after > kept.distance_before == left.distance_before
    moved = kept.transform.apply(b)
    assert any(not torch.equal(moved[n], b[n]) for n in b)
    assert moved_outputs(moved, b, tiny.case(name).inputs(0)) <= 1e-9

    assert left.distance_after == left.distance_before
    assert (left.transform.elements, left.transform.gauge) == ({}, {})
    assert left.max_output_change == 0
    assert all(torch.equal(t, b[n]) and t.dtype == b[n].dtype for n, t in left.transform.apply(b).items())
    assert left.head_permutation == (tuple(range(a.arch.sizes.n_heads)),) * a.arch.sizes.n_layers


def test_what_is_closer_with_the_free_values_of_a_is_the_same_with_both() -> None:
    pair = scrambled(model("llama-gqa"), "model")
    one, two = (align(pair.b, to=pair.a, only_if_closer=only) for only in (False, True))
    assert same_result(one, two)
    assert one.distance_after < one.distance_before


# -- workers -----------------------------------------------------------------------------------------------------------


def matchers(a: Weights) -> Mapping[str, Any]:
    return {
        "weights": ATTENTION,
        "activations": ActivationMatching(random_inputs(a, n=5), scope="all-attention"),
        "reference": ReferenceMatching(max_steps=20),
    }


@pytest.mark.parametrize("matcher", ["weights", "activations", "reference"])
def test_two_workers_find_what_one_does(matcher: str, tmp_path: Path) -> None:
    for seed in (0, 1):
        tiny.save(tiny.case("llama-gqa"), tmp_path / f"m{seed}", seed=seed)
    a, b = (load(tmp_path / f"m{seed}") for seed in (0, 1))
    by = matchers(a)[matcher]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        done: list[tuple[int, int]] = []
        one = align(b, to=a, matcher=by)
        two = align(b, to=a, matcher=by, workers=2, watch=lambda *step: done.append(step))
    finally:
        torch.set_num_threads(threads)
    assert same_result(one, two)
    assert done == [(1, 3), (2, 3), (3, 3)]
    assert one.distance_after < one.distance_before


def test_workers_need_folders() -> None:
    with pytest.raises(IsobasinError, match="workers need both models as folders on disk"):
        align(model("llama-gqa", seed=1), to=model("llama-gqa"), matcher=ATTENTION, workers=2)


def test_rounding_does_not_choose_the_map_of_a_stream_wider_than_its_tables() -> None:
    """Embedding and head have 8 rows together: in the other 8 of 16 directions they say nothing about the map."""
    sizes = {"d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 4, "d_vocab": 4, "n_positions": 9}
    config = ModelConfig(positions="rope", norm="rms", bias=False, **sizes)  # type: ignore[arg-type]
    a, b = ({k: t.double() for k, t in Transformer(config, seed=s).state_dict().items()} for s in (0, 1))
    rng = torch.Generator().manual_seed(3)
    units = {k: 2e-16 * torch.randint(-1, 2, t.shape, generator=rng).double() for k, t in b.items()}
    rounded = {k: t * (1 + units[k]) for k, t in b.items()}
    to, whole = load(a, config.to_dict()), WeightMatching(scope="model", stage2="none")
    one, two = (align(load(x, config.to_dict()), to=to, matcher=whole) for x in (b, rounded))
    assert one.distance_after < 0.9 * one.distance_before
    assert one.distance_after == pytest.approx(two.distance_after, rel=1e-9)
    maps = [found.transform.elements["resid"].matrix() for found in (one, two)]
    assert float((maps[0] - maps[1]).abs().max()) < 1e-6


@pytest.mark.parametrize(("noise", "near"), [(0.1, True), (0.3, False)])
def test_the_short_way_of_copies_leads_where_the_long_one_does(
    noise: float, near: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On both sides of the threshold; what is farther takes the long way."""
    a = model("llama-gqa")
    b = scrambled(with_relative_noise(a, noise), "model").b
    problem = posed("llama-gqa", "model", a, b)
    assert (_as_copy(problem, from_embeddings(problem)[0]) is not None) == near
    found = []
    for threshold in (1.0, 0.0):
        monkeypatch.setattr(descent, "COPY_THRESHOLD", threshold)
        found.append(align(b, to=a, matcher=WeightMatching(scope="model")))
    short, long = found
    assert short.distance_after == pytest.approx(long.distance_after, rel=1e-3)
    assert short.distance_after < 0.3 < short.distance_before


def test_an_unrelated_model_is_no_copy() -> None:
    problem = posed("llama-gqa", "model")
    assert _as_copy(problem, from_embeddings(problem)[0]) is None


def with_relative_noise(a: Weights, share: float) -> Weights:
    """Every matrix with noise of this share of the deviation of its numbers."""
    rng = torch.Generator().manual_seed(5)
    noise = {n: share * a[n].std() * torch.randn(a[n].shape, generator=rng) for n in a if a[n].dim() > 1}
    return held(a, {n: a[n] + each for n, each in noise.items()})
