"""The normal form of a scope: one for all scrambled copies of a model, and never larger for a gain that is small."""

from dataclasses import replace

import pytest
import torch
from subjects import change, distance, held, moved, said, subject

from isobasin.symmetries import symmetry
from isobasin.symmetries.mean_coordinates import ReaderMean
from isobasin.symmetries.normal_form import to_normal_form
from isobasin.symmetries.transform import scramble
from isobasin.weights import Weights

pytestmark = pytest.mark.hf

WITH_BIAS = ["gpt2-lm-untied", "bert-classifier", "vit-classifier"]
WITHOUT = ["vit-no-qkv-bias", "gpt_neox-no-attention-bias"]  # of such a reader some rows are free, or none


def means(weights: Weights, scope: str) -> list[ReaderMean]:
    found = [c for c in symmetry(weights).scoped(scope).coordinates.values() if isinstance(c, ReaderMean)]
    assert found, "attention of this family reads a LayerNorm"
    return found


def with_gains(weights: Weights, scope: str, *gains: float) -> Weights:
    """The same with these gains, and no others as small, in the norms that a scope reads."""
    changed = {}
    for mean in means(weights, scope):
        gain = weights[mean.norm.gain].clone()
        gain[: len(gains)] = torch.tensor(gains)
        changed[mean.norm.gain] = gain
    return held(weights, changed)


def growth(flat: Weights, weights: Weights, scope: str) -> float:
    """How many times larger the readers of a scope are, weight and bias together."""
    names = {name for mean in means(weights, scope) for name in (mean.reader.weight, mean.reader.bias) if name}
    sizes = [sum(float(m[name].double().square().sum()) for name in names) for m in (flat, weights)]
    return (sizes[0] / sizes[1]) ** 0.5


@pytest.mark.parametrize("name", WITH_BIAS)
@pytest.mark.parametrize("gain", [0.05, 1e-4, 0.0])
def test_small_gains_in_front_of_a_scope_make_nothing_large(name: str, gain: float) -> None:
    weights = with_gains(subject(name).weights, "first-attention", gain, -gain)
    coordinates = symmetry(weights).scoped("first-attention").coordinates
    flat = moved(to_normal_form(weights, coordinates), weights)
    assert growth(flat, weights, "first-attention") <= 1
    outputs = [said(m, subject(name).inputs) for m in (flat, weights)]
    assert distance(*outputs) < 1e-9

    folded = {n: replace(c, folded=True) if isinstance(c, ReaderMean) else c for n, c in coordinates.items()}
    wrong = moved(to_normal_form(weights, folded), weights)  # as if the norm were part of the scope
    assert not growth(wrong, weights, "first-attention") <= 1 + 1e-3


@pytest.mark.parametrize("name", WITH_BIAS + WITHOUT)
@pytest.mark.parametrize("scope", ["first-attention", "model"])
def test_all_scrambled_copies_have_one_normal_form(name: str, scope: str) -> None:
    weights = with_gains(subject(name).weights, "first-attention", 0.2, -0.3)
    planted = scramble(weights, scope=scope, seed=3)
    copy = moved(replace(planted, elements={}), weights)
    coordinates = symmetry(weights).scoped(scope).coordinates
    first, second = (moved(to_normal_form(m, coordinates), m) for m in (weights, copy))
    assert max(change(copy, weights).values()) > 0.1
    assert max(change(second, first).values()) < 1e-6
