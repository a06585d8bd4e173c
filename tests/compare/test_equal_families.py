"""Every family: a scrambled copy is the same, a cast one the same at its precision, a changed one different."""

import os

import pytest
import torch
from compared_models import matrices, output_difference, perturbed, scrambled_file, tiny_model

import isobasin as ib
import tiny

pytestmark = pytest.mark.hf

# One of nearly each family in `make test`, all in `make test-all`.
FULL = os.environ.get("ISOBASIN_SLOW", "0") == "1"
SOME = ("gpt2-bare", "bert-bare-no-pooler", "vit-bare-no-pooler", "llama-bare", "gpt_neox-full-rotary")
CASES = [c.name for c in tiny.CASES if c.name in SOME or FULL]

every_case = pytest.mark.parametrize("name", CASES)


@pytest.mark.parametrize("name", CASES if FULL else ["mistral-gqa"])
def test_a_scrambled_copy_is_the_same(name: str) -> None:
    a = tiny_model(name)
    found = ib.equivalent(a, scrambled_file(a))
    assert found.answer == "same", str(found)
    assert found.precision == "float32"
    assert found.evidence.kind == "group"
    assert found.transform is not None
    assert found.outputs.difference < 1e-4
    assert "up to rounding of float32" in found.reason


@every_case
def test_a_scrambled_copy_in_a_narrow_type_is_the_same_at_that_precision(name: str) -> None:
    a = tiny_model(name)
    found = ib.equivalent(a, scrambled_file(a, torch.bfloat16))
    assert (found.answer, found.precision) == ("same", "bfloat16"), str(found)
    assert "up to rounding of bfloat16" in found.reason
    assert max(r.distance for r in found.evidence.residuals) > 1e-4  # it is a copy that was rounded


@every_case
def test_one_matrix_changed_by_a_thousandth_is_different_with_a_witness(name: str) -> None:
    a = tiny_model(name)
    changed = matrices(a)[len(name) % len(matrices(a))]
    b = scrambled_file(perturbed(a, changed))
    found = ib.equivalent(a, b)
    assert found.answer == "different", str(found)
    assert found.witness is not None
    assert found.witness.difference > 10 * found.witness.rounding
    # Run again by formulas of our own, in float64: the difference is real.
    assert output_difference(a, b, found.witness.inputs) == pytest.approx(found.witness.difference, rel=0.05)
    assert output_difference(a, scrambled_file(a), found.witness.inputs) < 1e-5 < found.witness.difference
    assert found.largest_residual is not None
    assert found.largest_residual.ratio > 100
    assert changed in found.largest_residual.tensor or shares_space(a, changed, found.largest_residual.tensor)


@pytest.mark.parametrize(("name", "module"), [("gpt2-one-head", "h.1.attn.c_proj"), ("gpt2-bare", "h.0.mlp.c_proj")])
def test_a_matrix_is_named_before_the_bias_it_reaches_and_a_bias_by_itself(name: str, module: str) -> None:
    """An output bias takes up what the bias before it sends through the matrix; both belong to the layer."""
    a = tiny_model(name)
    (weight,) = (n for n in a if n.endswith(f"{module}.weight"))
    bias = a.arch.bias_of(weight)
    assert bias is not None
    layer = int(module.split(".")[1])
    for changed in (weight, bias):
        found = ib.equivalent(a, scrambled_file(perturbed(a, changed)))
        assert found.answer == "different", str(found)
        assert found.largest_residual is not None
        assert (found.largest_residual.tensor, found.largest_residual.layer) == (changed, layer)


def shares_space(a: ib.Weights, one: str, other: str) -> bool:
    """Whether two tensors belong to one space beside the stream."""
    spaces = [
        {a.arch.space_of(t).name for role in a.arch.tensors[n].roles for axis in role.axes for t in axis.terms}
        for n in (one, other)
    ]
    return bool((spaces[0] & spaces[1]) - {"resid"}) or spaces[0] == spaces[1]
