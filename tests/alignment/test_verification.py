"""A wrong element is refused before anything is stored: by its group, and by the outputs of every layer."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from align_subjects import held, model, moved_outputs, scrambled

import tiny
from isobasin.alignment import descent, verification
from isobasin.alignment.align import align
from isobasin.alignment.heads import HeadMatch, match_heads
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.problem import AlignmentProblem
from isobasin.alignment.verification import EXACT, LayerCheck, require_unchanged
from isobasin.arch import HeadSpace
from isobasin.errors import VerificationError
from isobasin.groups import GL
from isobasin.symmetries import SCOPES, symmetry
from isobasin.symmetries.attention import AttentionMatrices
from isobasin.symmetries.transform import Transform, scramble
from isobasin.weights import Weights

pytestmark = pytest.mark.hf

CPU = torch.device("cpu")


def outside(matcher: WeightMatching, a: AttentionMatrices, b: AttentionMatrices, heads: HeadSpace) -> HeadMatch:
    """An element of GL where only H is allowed: it keeps QKᵀ and changes what the layer computes."""
    found = match_heads(a, b, heads)
    return replace(found, element=replace(found.element, qk=GL(heads.d_head).sample(heads.n_kv_heads, seed=1)))


def no_check(*_: Any) -> None:
    """In place of a check that a test takes away."""


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Heads are matched by elements outside their group, and every step seems to come closer."""
    monkeypatch.setattr(WeightMatching, "match", outside)
    distances = iter(range(10**6 - 1, 0, -1))
    monkeypatch.setattr(verification, "_squares", lambda *_: (1e6, float(next(distances)), 1.0))
    objectives = iter(range(10**6, 0, -1))
    monkeypatch.setattr(AlignmentProblem, "objective", lambda *_: float(next(objectives)))
    return monkeypatch


@pytest.mark.parametrize("scope", SCOPES)
def test_an_element_outside_its_group_is_refused(scope: str, wrong: pytest.MonkeyPatch) -> None:
    pair = scrambled(model("llama-gqa"), "all-attention")
    with pytest.raises(VerificationError, match=r"heads0: the element found is not in S2 ≀"):
        align(pair.b, to=pair.a, matcher=WeightMatching(scope))


@pytest.mark.parametrize("scope", SCOPES)
def test_a_layer_whose_outputs_change_is_refused(scope: str, wrong: pytest.MonkeyPatch) -> None:
    pair = scrambled(model("llama-gqa"), "all-attention")
    wrong.setattr(descent, "check_element", no_check)
    wrong.setattr(Transform, "check_elements", no_check)
    with pytest.raises(VerificationError, match=r"layer 0: the alignment found would change what this layer adds"):
        align(pair.b, to=pair.a, matcher=WeightMatching(scope))


@pytest.mark.parametrize("scope", SCOPES)
def test_without_the_checks_the_function_changes(scope: str, wrong: pytest.MonkeyPatch) -> None:
    """The negative control: something had to refuse the element."""
    pair = scrambled(model("llama-gqa"), "all-attention")
    wrong.setattr(descent, "check_element", no_check)
    wrong.setattr(Transform, "check_elements", no_check)
    wrong.setattr(verification, "require_unchanged", no_check)
    found = align(pair.b, to=pair.a, matcher=WeightMatching(scope))
    assert found.max_output_change is not None
    assert found.max_output_change > 1e-3
    moved = found.transform.apply(pair.b)
    assert moved_outputs(moved, pair.b, tiny.case("llama-gqa").inputs(0)) > 1e-3


@pytest.mark.parametrize("scope", SCOPES)
def test_not_verified_is_said(scope: str) -> None:
    pair = scrambled(model("gpt2-bare"), scope)
    found = align(pair.b, to=pair.a, matcher=WeightMatching(scope), verify=False)
    assert found.max_output_change is None
    assert "not verified" in str(found)
    checked = align(pair.b, to=pair.a, matcher=WeightMatching(scope))
    assert checked.max_output_change is not None
    assert checked.max_output_change <= EXACT


# -- the check of a layer ----------------------------------------------------------------------------------------------


def tensors_of(weights: Weights, layer: int) -> list[str]:
    """The matrices of a layer."""
    arch = weights.arch
    blocks = [arch.blocks[s.name] for s in arch.spaces.values() if s.layer == layer]
    return [n for names in blocks for n in names if len(arch.shapes[n]) > 1]


@pytest.mark.parametrize("case", tiny.CASES, ids=lambda c: c.name)
def test_the_check_lets_every_symmetry_pass_and_sees_a_change_of_any_matrix(case: tiny.Case) -> None:
    weights = model(case.name)
    planted = scramble(weights, seed=3)
    check, moved = LayerCheck.of(weights, symmetry(weights.arch), planted, CPU), held(planted.apply(weights))
    for layer in range(weights.arch.sizes.n_layers):
        (change,) = check.changes(layer, moved)
        assert change <= 1e-9
        require_unchanged(layer, change)
        for name in tensors_of(weights, layer):
            (seen,) = check.changes(layer, held(moved, {name: 1.01 * moved[name]}))
            assert seen > EXACT, name
            with pytest.raises(VerificationError, match=f"layer {layer}: the alignment found would change"):
                require_unchanged(layer, seen)


def test_a_change_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(VerificationError, match="layer 3: the alignment found would change"):
        require_unchanged(3, float("nan"))
    require_unchanged(3, 0.0)
