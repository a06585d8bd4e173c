"""The ablations: Stage 1's place among all permutations, each layer re-initialised, and the causal control."""

import os
from pathlib import Path

import pytest
import torch
from study_subjects import MEASURED, context, folder_of, reparametrised

from isobasin.arch import HeadSpace
from isobasin.files import strict_json
from isobasin.groups import RotaryCommutant
from isobasin.model import Transformer
from isobasin.study import reinitialise
from isobasin.study.ablations import (
    MAX_PERMUTATIONS,
    FixedHeadAligner,
    control,
    excess,
    head_permutations,
    heads,
    layers,
    normalised,
    random_reparametrisation,
)
from isobasin.study.pairs import PathEvaluator
from isobasin.weights import load

SCOPES = ("first-attention", "model", *(["all-attention"] if os.environ.get("ISOBASIN_SLOW") == "1" else []))


@pytest.mark.parametrize("scope", SCOPES)
def test_planted_heads_are_found_among_all(tmp_path: Path, scope: str) -> None:
    a = folder_of("rope")
    b = reparametrised(a, tmp_path / "b", scope)
    found = heads(MEASURED | {"scope": scope, "points": 3, "seed": 0}, [a, b], tmp_path, context(tmp_path))
    assert len(found["permutations"]) == len(found["loss"]) == len(found["curves"]) == 24
    assert len({str(places) for places in found["permutations"]}) == 24
    assert (found["rank"], found["normalised"]) == (1, pytest.approx(0.0))
    assert found["loss"][found["chosen"]] == pytest.approx(found["curves"][0][0], abs=1e-4), "the line is flat there"
    assert sorted(found["loss"])[1] > min(found["loss"]) + 0.005, "every other permutation is worse"
    assert found["naive"] > 0.1
    assert strict_json(found) == found


def test_one_layer_of_four_heads_is_tried_in_full_and_more_by_chance() -> None:
    four = [HeadSpace("heads0", 4, 4, 8)]
    every = head_permutations(four, {"heads0": (0, 1, 2, 3)}, seed=0)
    assert len({each["heads0"] for each in every}) == 24
    eight = [HeadSpace("heads0", 8, 8, 8)]
    chosen = {"heads0": (7, 6, 5, 4, 3, 2, 1, 0)}
    some = head_permutations(eight, chosen, seed=0)
    assert some[0] == chosen
    assert len({each["heads0"] for each in some}) == MAX_PERMUTATIONS
    assert head_permutations(eight, chosen, seed=0) == some != head_permutations(eight, chosen, seed=1)
    two = [HeadSpace(f"heads{i}", 2, 2, 8) for i in range(2)]
    assert len(head_permutations(two, {"heads0": (0, 1), "heads1": (0, 1)}, seed=0)) == 4, "there are no more"


def test_an_arrangement_goes_where_it_is_told_and_keeps_the_function(tmp_path: Path) -> None:
    a, b = (load(folder_of("sinusoidal", seed) / "model") for seed in (0, 1))
    aligner = FixedHeadAligner(a, b, "first-attention")
    transform = aligner.transform({"heads0": (2, 0, 3, 1)})
    assert transform.elements["heads0"].head_permutation.tolist() == [2, 0, 3, 1]
    path = PathEvaluator.of(MEASURED, a, context(tmp_path), n_points=3)
    assert path.output_change(b, transform.apply(b)) < 1e-5
    assert path.output_change(b, a) > 0.1, "the check finds nothing"


@pytest.mark.parametrize(
    ("method", "best", "naive", "expected"), [(1.0, 1.0, 3.0, 0.0), (3.0, 1.0, 3.0, 100.0), (1.0, 1.0, 1.0, None)]
)
def test_the_normalised_loss(method: float, best: float, naive: float, expected: float | None) -> None:
    assert normalised(method, best, naive) == expected


def test_the_excess_is_the_rise_over_the_first_end() -> None:
    assert excess([1.0, 3.0, 2.0]) == 2.0


def test_a_reinitialised_layer_is_what_reinitialise_makes(tmp_path: Path) -> None:
    folder = folder_of("rope")
    settings = MEASURED | {"seeds": [3, 4]}
    found = layers(settings, [folder], tmp_path, context(tmp_path))
    fresh = reinitialise(Transformer.load(folder / "model"), "first-attention", seed=4)
    fresh.save(tmp_path / "fresh" / "model")
    model, other = load(folder / "model"), load(tmp_path / "fresh" / "model")
    path = PathEvaluator.of(settings, model, context(tmp_path), n_points=3)
    ends = path.curve(other).metrics["loss"]
    assert found["before"] == pytest.approx(ends[0], rel=1e-6)
    assert found["draws"][0][1] == pytest.approx(ends[-1], rel=1e-6)
    assert found["draws"][0][0] != pytest.approx(ends[-1], rel=1e-3), "another seed draws another layer"
    assert found["loss"] == [pytest.approx(sum(draws) / 2) for draws in found["draws"]]
    assert len(found["loss"]) == 2


@pytest.mark.parametrize(
    ("positions", "inside", "outside"), [("rope", "H4", "GL4"), ("sinusoidal", "GL4", "queries alone")]
)
def test_only_what_lies_inside_the_group_is_reverted(tmp_path: Path, positions: str, inside: str, outside: str) -> None:
    settings = MEASURED | {"scope": "all-attention", "points": 3, "seed": 0}
    found = control(settings, [folder_of(positions)], tmp_path, context(tmp_path))
    for side, name in (("inside", inside), ("outside", outside)):
        assert set(found[side]["element"]) == {name}
        assert min(before for before, _ in found[side]["distance"]) > 0.1
        assert max(found[side]["output_change"]) < 1e-5, "alignment itself changes no function"
    assert max(found["inside"]["function_change"]) < 1e-5
    assert min(found["outside"]["function_change"]) > 1e-2
    assert min(naive for naive, _ in found["inside"]["excess"]) > 0.01
    assert min(aligned for _, aligned in found["outside"]["excess"]) > 0.1
    assert max(aligned for _, aligned in found["inside"]["excess"]) < 1e-5
    assert max(after for _, after in found["inside"]["distance"]) < 1e-5
    assert min(after for _, after in found["outside"]["distance"]) > 0.1, "outside, the way back is not in the group"
    assert strict_json(found) == found


def test_a_reparametrisation_inside_lies_in_h_and_one_outside_does_not() -> None:
    model = load(folder_of("rope") / "model")
    group = RotaryCommutant(4)
    for side, expected in (("inside", True), ("outside", False)):
        _, queries, keys = random_reparametrisation(model, side, 0, seed=2)  # type: ignore[arg-type]
        near = group.project(keys).matrix()
        assert torch.allclose(near, keys, atol=1e-9) == expected
        product = queries.mT @ keys
        assert torch.allclose(product, torch.eye(4, dtype=product.dtype).expand_as(product), atol=1e-9), "QKᵀ stays"
