"""Scope `model`: everything scrambled comes back, functions stay, the distance never rises from sweep to sweep."""

import json
import os
from pathlib import Path

import pytest
import torch

import tiny
from isobasin.alignment.align import align
from isobasin.alignment.descent import sweep
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.problem import AlignmentProblem
from isobasin.alignment.verification import EXACT, LayerCheck, require_unchanged
from isobasin.cli import run
from isobasin.errors import VerificationError
from isobasin.groups import HeadsElement, Monomial, Orthogonal
from isobasin.model import ModelConfig, Transformer
from isobasin.runtime import output_difference, outputs, random_inputs
from isobasin.symmetries import symmetry
from isobasin.symmetries.normal_form import NormalForm
from isobasin.symmetries.transform import Transform, scramble
from isobasin.views import AsFloat64, Tensors, View
from isobasin.weights import Weights, load

pytestmark = pytest.mark.hf

CPU = torch.device("cpu")
MATCHER = WeightMatching(scope="model")
# One of each kind in `make test`; all in `make test-all`.
SOME = {
    "gpt2-lm-tied",
    "bert-masked-lm-tied",
    "bert-relu",
    "vit-no-qkv-bias",
    "llama-gqa",
    "llama-biases",
    "gpt_neox-full-rotary",
}
CASES = [c for c in tiny.CASES if c.name in SOME or os.environ.get("ISOBASIN_SLOW") == "1"]


def saved(case: tiny.Case, place: Path, seed: int = 0) -> Weights:
    tiny.save(case, place / f"m{seed}", seed=seed)
    return load(place / f"m{seed}")


def named(name: str) -> tiny.Case:
    return next(c for c in tiny.CASES if c.name == name)


def farthest(a: Weights, b: Weights) -> float:
    """The largest relative distance of a tensor."""
    names = [n for n in a if not a.arch.tensors[n].buffer]
    return max(float((a[n].double() - b[n].double()).norm() / a[n].double().norm()) for n in names)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_model_scrambled_whole_comes_back_weight_for_weight(case: tiny.Case, tmp_path: Path) -> None:
    model = saved(case, tmp_path)
    planted = scramble(model, scope="model", seed=3)
    copy = planted.apply(model)
    found = align(copy, to=model, matcher=MATCHER)
    assert farthest(model, copy) > 0.5
    assert farthest(model, found.transform.apply(copy)) <= 1e-4
    assert found.distance_after <= 1e-6 < found.distance_before
    assert found.max_output_change is not None
    assert found.max_output_change <= 1e-5
    back = planted.inverse()
    for name, element in found.transform.elements.items():
        expected = back.elements[name]
        if isinstance(element, Monomial):
            assert torch.equal(element.index, expected.index)  # type: ignore[attr-defined]
        elif isinstance(element, HeadsElement):
            assert torch.equal(element.head_permutation, expected.head_permutation)  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_unrelated_models_come_closer_and_keep_their_function(case: tiny.Case, tmp_path: Path) -> None:
    a, b = saved(case, tmp_path, 0), saved(case, tmp_path, 1)
    found = align(b, to=a, matcher=MATCHER)
    moved = found.transform.apply(b)
    inputs = random_inputs(b)
    assert output_difference(outputs(b, inputs), outputs(moved, inputs)) <= 1e-5 * b.arch.sizes.n_layers
    assert output_difference(outputs(b, inputs), outputs(a, inputs)) > 1e-2  # the two do differ
    assert found.distance_after < found.distance_before
    assert all(later <= earlier for earlier, later in zip(found.history, found.history[1:]))


def test_the_same_models_give_the_same_answer(tmp_path: Path) -> None:
    a, b = (saved(named("llama-gqa"), tmp_path, seed) for seed in (0, 1))
    one, two = (align(b, to=a, matcher=MATCHER).transform.apply(b) for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_model_beside_itself_stays_bitwise(tmp_path: Path) -> None:
    a = saved(named("gpt2-lm-untied"), tmp_path)
    found = align(a, to=a, matcher=MATCHER)
    moved = found.transform.apply(a)
    assert found.distance_before == found.distance_after == 0
    assert all(torch.equal(moved[name], a[name]) for name in a)


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2-lm-untied", "bert-classifier"])
def test_the_first_block_alone(name: str, tmp_path: Path) -> None:
    model = saved(named(name), tmp_path)
    copy = scramble(model, scope="first-block", seed=1).apply(model)
    found = align(copy, to=model, matcher=WeightMatching(scope="first-block"))
    assert farthest(model, copy) > 0.5
    assert farthest(model, found.transform.apply(copy)) <= 1e-4
    assert set(found.transform.elements) <= {"heads0", "ff0"}
    whole = scramble(model, scope="model", seed=1).apply(model)
    left = align(whole, to=model, matcher=WeightMatching(scope="first-block"))
    assert farthest(model, left.transform.apply(whole)) > 0.1  # what lies outside the scope stays where it is


def test_every_tensor_lies_in_exactly_one_block(tmp_path: Path) -> None:
    for case in tiny.CASES[::5]:
        weights = saved(case, tmp_path / case.name)
        names = [n for block in weights.arch.blocks.values() for n in block]
        assert len(names) == len(set(names))
        moving = {n for n, p in weights.arch.tensors.items() if any(axis.terms for r in p.roles for axis in r.axes)}
        assert set(names) == moving


def test_units_in_normal_form_are_balanced(tmp_path: Path) -> None:
    model = saved(named("llama-untied"), tmp_path)
    block = NormalForm(model, symmetry(model.arch), torch.float64, CPU).block("ff0")
    up = next(t for n, t in block.items() if "up_proj" in n).norm(dim=1)
    down = next(t for n, t in block.items() if "down_proj" in n).norm(dim=0)
    assert torch.allclose(up, down)
    assert not torch.allclose(model["model.layers.0.mlp.up_proj.weight"].norm(dim=1), down.float())


def test_a_sweep_measures_the_state_it_is_given(tmp_path: Path) -> None:
    a, b = (saved(named("llama-gqa"), tmp_path, seed) for seed in (0, 1))
    problem = AlignmentProblem(a, b, symmetry(b.arch), MATCHER, CPU)
    square, proposed, _ = sweep(problem, problem.identity)
    pairs = [(problem.form_a.block(s)[n], t) for s in b.arch.blocks for n, t in problem.form_b.block(s).items()]
    direct = sum(float((x - y).square().sum()) for x, y in pairs)
    assert square == pytest.approx(direct)
    assert sweep(problem, proposed)[0] < square


def test_an_element_outside_the_group_is_caught_layer_by_layer(tmp_path: Path) -> None:
    model = saved(named("llama-gqa"), tmp_path)
    good = scramble(model, scope="model", seed=2)
    check = LayerCheck.of(model, symmetry(model.arch), good, CPU)
    assert check.changes(0, good.apply(model))[0] <= EXACT
    heads = good.elements["heads1"]
    assert isinstance(heads, HeadsElement)
    rotation = Orthogonal(heads.qk.n).sample(len(heads.kv), seed=0)  # not in the group of rotary columns
    wrong = HeadsElement(heads.kv, heads.queries, rotation, heads.vo)
    bad = unchecked(model, Transform(good.family, good.spaces, {**good.elements, "heads1": wrong}, good.gauge))
    for layer in (0, 2):
        (change_of_layer,) = check.changes(layer, bad)
        require_unchanged(layer, change_of_layer)
        assert change_of_layer <= EXACT
    with pytest.raises(VerificationError, match="layer 1: the alignment found would change"):
        require_unchanged(1, check.changes(1, bad)[0])


def unchecked(model: Weights, transform: Transform) -> Tensors:
    """The moved model, whether or not the elements lie in their groups."""
    tensors: Tensors = AsFloat64(model)
    for stage in transform._stages(model.arch):
        tensors = View(tensors, stage)
    return tensors


def test_the_command_line_aligns_whole_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = saved(named("llama-gqa"), tmp_path)
    assert run(["scramble", str(model.path), "-o", str(tmp_path / "s"), "--quiet"]) == 0
    capsys.readouterr()
    align_it = ["align", str(tmp_path / "s"), "--to", str(model.path), "--scope", "model", "-o"]
    assert run([*align_it, str(tmp_path / "back"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {row["space"] for row in facts["per_layer"]} == {"resid", "heads", "ff"}
    assert len(facts["head_permutation"]) == model.arch.sizes.n_layers
    assert facts["distance_after"] < 1e-5 < facts["distance_before"]
    assert farthest(model, load(tmp_path / "back")) < 1e-4
    assert run([*align_it, str(tmp_path / "x"), "--matcher", "reference"]) == 2
    assert "aligns attention only" in capsys.readouterr().err


def test_models_in_memory_stay_as_they_are() -> None:
    config = ModelConfig(d_model=16, n_layers=1, n_heads=2, d_ff=24, d_vocab=11, n_positions=8, causal=True)
    states = [Transformer(config, seed=seed).double().state_dict() for seed in (0, 1)]
    kept = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    a, b = (load(state, config.to_dict()) for state in states)
    found = align(b, to=a, matcher=MATCHER)
    assert found.distance_after < found.distance_before
    for state, before in zip(states, kept):
        assert all(torch.equal(state[name], before[name]) for name in before)
