"""The campaign of canonical points in short: no other point without a word, nothing lost behind gains of zero."""

import canonical
import pytest
import torch
from canonical import ZeroResult, point_difference, summary, try_points, try_zero, with_gains, zero_model
from compared_models import held, own_model, scrambled


@pytest.mark.parametrize("seed", [1, 126, 158])  # a head as wide as its stream, a stream no table spans, a constant
def test_copies_of_a_random_model_share_point_and_fingerprint(seed: int) -> None:
    weights = own_model(canonical.random_config(seed), seed, torch.float64)
    found = try_points(f"own {seed}", weights, copies=2)
    assert not found.wrong, found
    assert not found.doubts
    assert found.control > 1e-3
    assert found.control_different


@pytest.mark.parametrize(
    ("name", "place", "operations"),
    [
        ("rms", "one", ("inverse", "align copy", "equal, copy", "fingerprint")),
        ("layer", "one of the last norm", ("scramble", "inverse", "canonical", "align copy")),
        ("layer", "all of a norm", ("inverse", "canonical", "fingerprint")),
        ("layer post-norm", "two of every norm", ("inverse", "align copy", "canonical")),
    ],
)
def test_operations_keep_a_model_with_gains_of_zero(name: str, place: str, operations: tuple[str, ...]) -> None:
    found = try_zero(name, place, 0.0, operations)
    assert not found.failures
    assert found.tried == len(operations)


@pytest.mark.parametrize("gain", [1e-10, 1e-42])
def test_tiny_gains_do_not_overflow(gain: float) -> None:
    operations = ("scramble", "inverse", "canonical", "fingerprint", "check")
    assert not try_zero("layer", "two of every norm", gain, operations).failures


def test_the_campaign_reports_what_fails() -> None:
    """Negative controls: a moved point, a broken operation."""
    weights = zero_model("rms")
    other = held(weights, {"embed.tokens.weight": weights["embed.tokens.weight"] + 0.1})
    assert point_difference(other, weights) > 0.01
    assert point_difference(scrambled(weights), weights) > 0.1
    result = ZeroResult("rms", "one", 0.0)
    result.attempt("broken", lambda: str(1 / 0))
    result.attempt("right", lambda: "")
    assert "ZeroDivisionError" in result.failures["broken"]
    assert len(summary([], [result])["gains of zero"]["failures"]) == 1


def test_gains_are_where_they_are_asked_for() -> None:
    found = with_gains(zero_model("layer"), "all", [2, 7], 0.0)
    assert all(int((found[norm.gain] == 0).sum()) == 2 for norm in found.arch.norms.values())
