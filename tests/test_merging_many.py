"""Joint alignment: copies come back to one point, cycles are the identity, the objective never rises."""

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

import isobasin as ib
import tiny
from isobasin.alignment.align import align
from isobasin.errors import IsobasinError
from isobasin.merging.joint_alignment import JointAlignment, align_many
from isobasin.runtime import output_difference, outputs, random_inputs
from isobasin.symmetries.transform import Transform
from isobasin.weights import Weights

WHOLE = ib.WeightMatching(scope="model")
ROUGH = ib.WeightMatching(scope="model", stage2="orthogonal")  # where any element will do
QUICK = ib.WeightMatching(scope="first-attention", stage2="orthogonal")
SIZES = {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 12, "d_vocab": 11, "n_positions": 8}


def held(model: Weights) -> Weights:
    """As a float32 file would hold it, in memory."""
    return ib.load(model.state_dict("float32"), dict(model.config))


def small(preset: str, seed: int) -> Weights:
    """A model of our own with every parameter drawn at random."""
    config = ib.ModelConfig.preset(preset, **SIZES)
    return ib.load(tiny.randomize(ib.Transformer(config), seed).state_dict(), config.to_dict())


def farthest(a: Weights, b: Weights) -> float:
    """The largest relative distance of a tensor."""
    names = [n for n in a if not a.arch.tensors[n].buffer]
    return max(float((a[n].double() - b[n].double()).norm() / a[n].double().norm()) for n in names)


def moved_outputs(before: Weights, after: Weights) -> float:
    inputs = random_inputs(before)
    return output_difference(outputs(before, inputs), outputs(after, inputs))


def around(steps: Sequence[Transform], model: Weights) -> Weights:
    for step in steps:
        moved = step.apply(model)
        model = moved.held(moved)
    return model


def check_one_point(many: JointAlignment, original: Weights) -> None:
    """Every copy lies where model 0 does, and so does their mean."""
    assert all(farthest(original, m) <= 1e-4 for m in (*many.transported, many.mean))
    assert all(farthest(original, m) > 0.5 for m in many.models[1:])
    assert all(d.after <= 1e-4 < 0.1 < d.before for d in many.distances[1:])
    assert many.transported[0] is many.models[0]


# One layer each in `make test`; heads, and two layers, in `make test-all`.
COPIED = ["llama-bare", "bert-bare-no-pooler", "vit-bare-no-pooler", "gpt2-bare"]
WITH_HEADS = ["llama-gqa", "bert-classifier", "vit-classifier", "gpt2-lm-tied", "gpt2-lm-untied", "gpt_neox-tied"]


@pytest.mark.hf
@pytest.mark.parametrize("name", COPIED + (WITH_HEADS if os.environ.get("ISOBASIN_SLOW") == "1" else []))
def test_scrambled_copies_come_back_to_one_point(name: str) -> None:
    a = ib.load(tiny.case(name).build())
    copies = [a, *(held(ib.scramble(a, scope="model", seed=seed).apply(a)) for seed in (3, 4))]
    many = align_many(copies, to="mean", matcher=WHOLE)
    check_one_point(many, a)
    assert many.rounds == 1  # nothing is left to gain
    with pytest.raises(AssertionError, match="assert False"):
        check_one_point(replace(many, transforms=(many.transforms[0],) * 3), a)
    there = many.between(1, 2).apply(copies[1])
    assert farthest(copies[2], there) <= 1e-4  # in its own gauge, gains and all
    assert farthest(copies[2], copies[1]) > 0.5


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def unrelated(request: pytest.FixtureRequest) -> JointAlignment:
    models = [small(request.param, seed) for seed in range(3)]
    return align_many(models, to="mean", matcher=ROUGH, rounds=2)


def test_a_cycle_is_the_identity_by_construction(unrelated: JointAlignment) -> None:
    models, between = unrelated.models, unrelated.between
    for i, j, k in ((0, 1, 2), (2, 1, 0)):
        cycle = [between(i, j), between(j, k), between(k, i)]
        there = around(cycle[:2], models[i])
        assert farthest(models[i], around(cycle[2:], there)) <= 1e-9
        assert farthest(models[i], there) > 0.1  # on the way it is elsewhere
        assert farthest(between(i, k).apply(models[i]), there) <= 1e-9
        assert moved_outputs(models[i], there) <= 1e-5
    assert farthest(models[0], between(0, 0).apply(models[0])) == 0


def test_pairs_that_know_nothing_of_each_other_make_no_cycle() -> None:
    models = [small("llama", seed) for seed in range(3)]
    alone = [align(models[i], to=models[j], matcher=QUICK).transform for i, j in ((0, 1), (1, 2), (2, 0))]
    assert farthest(models[0], around(alone, models[0])) > 0.1


def test_the_objective_never_rises(unrelated: JointAlignment) -> None:
    before, after = unrelated.history
    assert after < before
    assert all(d.after < d.before for d in unrelated.distances)
    assert all(moved_outputs(m, t) <= 1e-5 for m, t in zip(unrelated.models, unrelated.transported))
    assert moved_outputs(unrelated.models[0], unrelated.transported[1]) > 1e-2  # the models do differ
    assert "aligned to their mean in 2 rounds" in str(unrelated)


def test_to_one_model_that_is_not_the_first() -> None:
    models = [small("llama", seed) for seed in range(2)]
    many = align_many(models, to=1, matcher=QUICK)
    assert many.transported[1] is models[1]
    assert many.history == ()
    found = align(models[0], to=models[1], matcher=QUICK).transform.apply(models[0])
    assert all(torch.equal(many.transported[0][n], found[n]) for n in found)
    assert farthest(models[0], around([many.between(0, 1), many.between(1, 0)], models[0])) <= 1e-9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": 2}, "align to 2: expected mean, or the number of a model from 0 to 1"),
        ({"to": "median"}, "align to 'median': expected mean"),
        ({"to": "mean", "rounds": 0}, "rounds 0: expected 1 or more"),
        ({"aligner": align}, "a matcher and an aligner are given, expected at most one of the two"),
        ({"matcher": None, "aligner": align, "to": "mean"}, "align to the mean: what lowers losses"),
    ],
)
def test_choices_that_make_no_sense(options: dict[str, object], message: str) -> None:
    models = [small("llama", 0)] * 2
    with pytest.raises(IsobasinError, match=message):
        align_many(models, **{"matcher": WHOLE, **options})  # type: ignore[arg-type]


def test_one_model_and_models_out_of_reach() -> None:
    models = [small("llama", 0)] * 2
    with pytest.raises(IsobasinError, match="1 model to align: expected two or more"):
        align_many(models[:1], matcher=WHOLE)
    many = JointAlignment(tuple(models), (Transform("isobasin", dict(models[0].arch.spaces)),) * 2, ())
    with pytest.raises(IsobasinError, match="model 2: expected a number from 0 to 1"):
        many.between(0, 2)
