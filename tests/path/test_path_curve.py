"""The barrier of a curve: a pure function of numbers."""

import math

import pytest

from isobasin.errors import IsobasinError
from isobasin.path.barrier import Barrier, Curve, barrier, grid, is_connected, midpoint


def test_grid_has_both_ends_exactly() -> None:
    points = grid(25)
    assert points[0] == 0.0
    assert points[-1] == 1.0
    assert len(points) == 25
    assert points[12] == 0.5
    with pytest.raises(IsobasinError, match="2 or more"):
        grid(1)


@pytest.mark.parametrize("n", range(2, 60))
def test_midpoint_is_a_half_or_the_point_just_before(n: int) -> None:
    assert midpoint(grid(n)) == (n - 1) // 2


def test_midpoint_of_unequal_steps_is_the_nearest() -> None:
    assert midpoint([0, 0.1, 0.2, 0.45, 1]) == 3
    assert midpoint([0, 0.6, 1]) == 1


def test_connected_is_a_small_barrier_or_a_small_share_of_the_naive_one() -> None:
    assert is_connected(0.02, None)
    assert is_connected(0.05, 1.0)
    assert is_connected(0.021, None) is False
    assert is_connected(0.06, 1.0) is False
    assert is_connected(None, 1.0) is None


def test_barrier_is_the_largest_rise_over_the_straight_line() -> None:
    lambdas = [0, 0.25, 0.5, 0.75, 1]
    assert barrier(lambdas, [1, 1.5, 4, 3, 2]) == Barrier(2.5, 0.5)
    assert barrier(lambdas, [1, 1.25, 1.5, 3.75, 2]) == Barrier(2.0, 0.75)


def test_barrier_is_never_below_zero() -> None:
    assert barrier([0, 0.5, 1], [1, 0.2, 1]) == Barrier(0.0, 0.0)
    assert barrier([0, 0.5, 1], [1, 1.0 + 1e-9, 1]).height > 0


def test_accuracy_falls_where_loss_rises() -> None:
    found = barrier([0, 0.5, 1], [0.9, 0.3, 0.7], rising=True)
    assert found.height == pytest.approx(0.5)
    assert barrier([0, 0.5, 1], [0.9, 0.95, 0.7], rising=True).height == 0


def test_what_is_not_finite_is_named_and_never_averaged_away() -> None:
    curve = Curve((0.0, 0.5, 1.0), {"loss": (1.0, math.nan, 1.0), "accuracy": (0.5, 0.4, math.inf)})
    assert curve.not_finite == [("loss", 0.5), ("accuracy", 1.0)]
    assert math.isnan(curve.barrier.height)
    assert curve.barrier.lam == 0.5
    assert "not finite at λ = 0.5" in str(curve)


def test_a_curve_says_what_it_is() -> None:
    curve = Curve((0.0, 0.5, 1.0), {"loss": (1.0, 3.0, 2.0), "accuracy": (0.9, 0.2, 0.7)})
    assert str(curve) == "loss 1 at A, 2 at B, 3 at the midpoint; barrier 1.5 at λ = 0.5"
    assert curve.barriers["accuracy"].height == pytest.approx(0.6)
