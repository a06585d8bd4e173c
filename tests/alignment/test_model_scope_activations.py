"""Scope `model` with activations: which coordinates go together over the same inputs, beside the weights."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tiny
from isobasin.alignment.activations import correlations
from isobasin.alignment.align import align
from isobasin.alignment.descent import sweep
from isobasin.alignment.matchers import ActivationHeadMatcher, ActivationMatching, WeightMatching
from isobasin.alignment.problem import ActivationTerm, AlignmentProblem
from isobasin.errors import IsobasinError
from isobasin.groups import HeadsElement, Monomial, Overlap
from isobasin.runtime import output_difference, outputs, random_inputs
from isobasin.symmetries import group_of, symmetry
from isobasin.symmetries.transform import scramble
from isobasin.weights import Weights, load

pytestmark = pytest.mark.hf

CPU = torch.device("cpu")
FULL = os.environ.get("ISOBASIN_SLOW") == "1"
FAMILIES = ["llama-gqa", "gpt2-lm-tied", "bert-classifier", "vit-classifier"]
FAMILIES += ["gpt2-lm-untied", "gpt_neox-half-rotary"] if FULL else []


def saved(name: str, place: Path, seed: int = 0) -> Weights:
    tiny.save(tiny.case(name), place / f"m{seed}", seed=seed)
    return load(place / f"m{seed}")


def farthest(a: Weights, b: Weights) -> float:
    names = [n for n in a if not a.arch.tensors[n].buffer]
    return max(float((a[n].double() - b[n].double()).norm() / a[n].double().norm()) for n in names)


def matcher(a: Weights, weight: float = 1.0) -> ActivationMatching:
    return ActivationMatching(random_inputs(a, n=60), scope="model", activation_weight=weight)


def tables_of(a: Weights, b: Weights) -> dict[str, Tensor]:
    return correlations(a, b, random_inputs(a, n=60))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_correlations_of_every_space_show_the_planted_element(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    planted = scramble(model, scope="model", seed=3)
    tables, itself = tables_of(model, planted.apply(model)), tables_of(model, model)
    assert set(tables) == set(symmetry(model.arch).groups)
    for space, element in planted.inverse().elements.items():
        rows = torch.arange(len(tables[space]))
        if isinstance(element, HeadsElement):
            paired = tables[space][rows, element.head_permutation]
        elif isinstance(element, Monomial):
            paired = tables[space][rows, element.index] * element.scale.sign()
        else:
            paired = (element.matrix() @ tables[space].mT).diagonal()
        torch.testing.assert_close(paired, itself[space].diagonal(), rtol=1e-3, atol=1e-3)
        assert not torch.allclose(tables[space].diagonal(), paired, atol=0.1)  # unmoved coordinates do not correlate


@pytest.mark.parametrize(("name", "weight"), [*((name, 1.0) for name in FAMILIES), ("llama-gqa", 100.0)])
def test_a_model_scrambled_whole_comes_back(name: str, weight: float, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    copy = scramble(model, scope="model", seed=3).apply(model)
    found = align(copy, to=model, matcher=matcher(model, weight))
    assert farthest(model, copy) > 0.5
    assert farthest(model, found.transform.apply(copy)) <= 1e-4


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2-lm-untied", "bert-classifier"])
def test_unrelated_models_keep_their_function_and_the_objective_never_rises(name: str, tmp_path: Path) -> None:
    a, b = saved(name, tmp_path, 0), saved(name, tmp_path, 1)
    found = align(b, to=a, matcher=matcher(a))
    moved, inputs = found.transform.apply(b), random_inputs(b)
    assert output_difference(outputs(b, inputs), outputs(moved, inputs)) <= 1e-5 * b.arch.sizes.n_layers
    assert output_difference(outputs(b, inputs), outputs(a, inputs)) > 1e-2
    assert len(found.history) > 1
    assert all(later <= earlier for earlier, later in zip(found.history, found.history[1:]))


def correlation_of_units(a: Weights, b: Weights, weight: float) -> float:
    """The mean correlation of the units of the first layer that were matched."""
    element = align(b, to=a, matcher=matcher(a, weight)).transform.elements["ff0"]
    assert isinstance(element, Monomial)
    return float(tables_of(a, b)["ff0"][torch.arange(element.n), element.index].mean())


def test_the_larger_the_weight_of_activations_the_larger_the_correlation_of_units(tmp_path: Path) -> None:
    a, b = (saved("gpt2-lm-untied", tmp_path, seed) for seed in (0, 1))
    none, some, most = (correlation_of_units(a, b, weight) for weight in (0.0, 1.0, 1000.0))
    assert none < some <= most + 1e-9
    table = tables_of(a, b)["ff0"]
    best = group_of(a.arch.spaces["ff0"]).nearest(Overlap.empty(len(table), table).with_benefit(table))
    assert isinstance(best, Monomial)
    assert most == pytest.approx(float(table[torch.arange(best.n), best.index].mean()), abs=1e-6)


def test_the_objective_has_the_activation_term(tmp_path: Path) -> None:
    a, b = (saved("llama-gqa", tmp_path, seed) for seed in (0, 1))
    tables = tables_of(a, b)
    both = AlignmentProblem(a, b, symmetry(b.arch), ActivationHeadMatcher({}, tables, activation_weight=0.5), CPU)
    weights_alone = AlignmentProblem(a, b, symmetry(b.arch), WeightMatching(), CPU)
    state, term = both.identity, both.activation_term
    missing = sum(term.missing(name, g) for name, g in state.items())
    assert sweep(both, state)[0] - sweep(weights_alone, state)[0] == pytest.approx(missing)
    assert missing > 0
    worth = ActivationTerm.of(tables, 1.0, both.form_a, both.form_b).worth["ff0"] / 2
    assert term.worth["ff0"] == pytest.approx(worth)
    expected = 2 * worth * float(len(tables["ff0"]) - tables["ff0"].trace())
    assert term.missing("ff0", state["ff0"]) == pytest.approx(expected)


def test_a_sign_that_only_activations_see(tmp_path: Path) -> None:
    """Gated units have signs: where the weights say nothing, the correlations decide."""
    group = group_of(saved("llama-untied", tmp_path).arch.spaces["ff0"])
    table = -torch.eye(group.n, dtype=torch.float64).roll(1, 0)
    nothing = Overlap.empty(len(table), table)
    found, other = (group.nearest(nothing.with_benefit(t)) for t in (table, -table))
    assert isinstance(found, Monomial)
    assert bool((found.scale == -1).all())
    assert torch.equal(found.index, torch.arange(len(table)).roll(1))
    assert isinstance(other, Monomial)
    assert bool((other.scale == 1).all())


def test_matching_by_weights_alone_has_no_activation_term(tmp_path: Path) -> None:
    a, b = (saved("llama-gqa", tmp_path, seed) for seed in (0, 1))
    problem = AlignmentProblem(a, b, symmetry(b.arch), WeightMatching(), CPU)
    assert problem.activation_term == ActivationTerm()
    assert all(problem.activation_term.missing(name, g) == 0 for name, g in problem.identity.items())


def test_no_inputs_at_all(tmp_path: Path) -> None:
    model = saved("llama-untied", tmp_path)
    with pytest.raises(IsobasinError, match="holds no inputs: expected at least one"):
        correlations(model, model, [])
