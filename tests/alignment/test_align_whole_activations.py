"""Whole models by activations: which coordinates go together over the same inputs, beside the weights."""

import os
from pathlib import Path

import pytest
import torch
from isobasin.match.overlap import empty
from isobasin.match.spaces import match_space
from isobasin.match.sweep import Board
from torch import Tensor

import isobasin as ib
import tiny
from isobasin.alignment.activation_term import ActivationTerm
from isobasin.alignment.activations import correlations
from isobasin.alignment.align import align
from isobasin.alignment.matchers import ActivationMatching
from isobasin.errors import IsobasinError
from isobasin.groups import HeadsElement, Monomial
from isobasin.runtime import change, outputs, random_inputs
from isobasin.symmetries import symmetry
from isobasin.symmetries.normal_form import NormalForm
from isobasin.weights import Weights

pytestmark = pytest.mark.hf

CPU = torch.device("cpu")
FULL = os.environ.get("ISOBASIN_SLOW") == "1"
FAMILIES = ["llama-gqa", "gpt2-lm-tied", "bert-classifier", "vit-classifier"]
FAMILIES += ["gpt2-lm-untied", "gpt_neox-half-rotary"] if FULL else []


def saved(name: str, place: Path, seed: int = 0) -> Weights:
    tiny.save(tiny.case(name), place / f"m{seed}", seed=seed)
    return ib.load(place / f"m{seed}")


def farthest(a: Weights, b: Weights) -> float:
    names = [n for n in a if not a.arch.tensors[n].buffer]
    return max(float((a[n].double() - b[n].double()).norm() / a[n].double().norm()) for n in names)


def matcher(a: Weights, b: Weights, pull: float = 1.0) -> ActivationMatching:
    return ActivationMatching(scope="model", agreements=correlations(a, b, random_inputs(a, n=60)), pull=pull)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_disguise_shows_in_the_agreements_of_every_space(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    disguise = ib.scramble(model, scope="model", seed=3)
    tables = correlations(model, disguise.apply(model), random_inputs(model, n=60))
    back, itself = disguise.inverse(), correlations(model, model, random_inputs(model, n=60))
    assert set(tables) == set(symmetry(model.arch).groups)
    for space, element in back.elements.items():
        rows = torch.arange(len(tables[space]))
        if isinstance(element, HeadsElement):
            met = tables[space][rows, element.head_permutation]
        elif isinstance(element, Monomial):
            met = tables[space][rows, element.index] * element.scale.sign()
        else:
            met = (element.matrix() @ tables[space].mT).diagonal()
        torch.testing.assert_close(met, itself[space].diagonal(), rtol=1e-3, atol=1e-3)
        assert not torch.allclose(tables[space].diagonal(), met, atol=0.1)  # where it is, it does not agree


@pytest.mark.parametrize(("name", "pull"), [*((name, 1.0) for name in FAMILIES), ("llama-gqa", 100.0)])
def test_a_model_scrambled_whole_comes_back(name: str, pull: float, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    disguised = ib.scramble(model, scope="model", seed=3).apply(model)
    found = align(disguised, to=model, matcher=matcher(model, disguised, pull))
    assert farthest(model, disguised) > 0.5
    assert farthest(model, found.transform.apply(disguised)) <= 1e-4


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2-lm-untied", "bert-classifier"])
def test_unrelated_models_keep_their_function_and_the_objective_never_rises(name: str, tmp_path: Path) -> None:
    a, b = saved(name, tmp_path, 0), saved(name, tmp_path, 1)
    found = align(b, to=a, matcher=matcher(a, b))
    moved, inputs = found.transform.apply(b), random_inputs(b)
    assert change(outputs(b, inputs), outputs(moved, inputs)) <= 1e-5 * b.arch.sizes.n_layers
    assert change(outputs(b, inputs), outputs(a, inputs)) > 1e-2
    assert len(found.history) > 1
    assert all(later <= earlier for earlier, later in zip(found.history, found.history[1:]))


def agreed(a: Weights, b: Weights, by: ActivationMatching) -> Tensor:
    """How far the units of the first layer agree once matched."""
    element = align(b, to=a, matcher=by).transform.elements["ff0"]
    assert isinstance(element, Monomial)
    return by.agreements["ff0"][torch.arange(element.n), element.index].mean()


def test_the_harder_the_pull_the_more_units_agree(tmp_path: Path) -> None:
    a, b = (saved("gpt2-lm-untied", tmp_path, seed) for seed in (0, 1))
    none, some, all_of_it = (agreed(a, b, matcher(a, b, pull)) for pull in (0.0, 1.0, 1000.0))
    assert none < some <= all_of_it + 1e-9
    best = match_space(a.arch.spaces["ff0"], empty(len(_table(a, b)), _table(a, b)).joined(_table(a, b)))  # type: ignore[arg-type]
    assert isinstance(best, Monomial)
    assert all_of_it == pytest.approx(float(_table(a, b)[torch.arange(best.n), best.index].mean()), abs=1e-6)


def _table(a: Weights, b: Weights) -> Tensor:
    return correlations(a, b, random_inputs(a, n=60))["ff0"]


def test_the_objective_counts_what_is_missing(tmp_path: Path) -> None:
    a, b = (saved("llama-gqa", tmp_path, seed) for seed in (0, 1))
    part, by = symmetry(b.arch), matcher(a, b)
    models = [NormalForm(m, part, torch.float64, CPU) for m in (a, b)]
    agreement = ActivationTerm.of(by.agreements, 0.5, *models)
    with_it, without = Board(*models, by, agreement), Board(*models, by)
    state = with_it.identity
    missing = sum(agreement.missing(name, g) for name, g in state.items())
    assert with_it.sweep(state)[0] - without.sweep(state)[0] == pytest.approx(missing)
    assert missing > 0
    table = by.agreements["ff0"]
    worth = agreement.worth["ff0"]
    assert agreement.missing("ff0", state["ff0"]) == pytest.approx(2 * worth * float(len(table) - table.trace()))


def test_a_sign_that_only_activations_see(tmp_path: Path) -> None:
    """Gated units have signs: where the weights say nothing, the agreement decides."""
    space = saved("llama-untied", tmp_path).arch.spaces["ff0"]
    table = -torch.eye(space.size, dtype=torch.float64).roll(1, 0)  # type: ignore[union-attr]
    found = match_space(space, empty(len(table), table).joined(table))  # type: ignore[arg-type]
    assert isinstance(found, Monomial)
    assert bool((found.scale == -1).all())
    assert torch.equal(found.index, torch.arange(len(table)).roll(1))
    other = match_space(space, empty(len(table), table).joined(-table))  # type: ignore[arg-type]
    assert isinstance(other, Monomial)
    assert bool((other.scale == 1).all())


def test_no_inputs_at_all(tmp_path: Path) -> None:
    model = saved("llama-untied", tmp_path)
    with pytest.raises(IsobasinError, match="holds no inputs: expected at least one"):
        correlations(model, model, [])
