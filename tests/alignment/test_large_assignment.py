"""Large assignments against scipy's optimum, and their bounds against everything that could make them lie."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.groups.assignment import DENSE_BELOW, assign_certified, upper_bound

SPARSE = 1  # dense_below: even the smallest table goes the way of the large ones
WAYS = pytest.mark.parametrize("dense_below", [SPARSE, DENSE_BELOW], ids=["sparse", "dense"])
KINDS = ["gaussian", "constant", "integers", "copies", "negative", "ranges", "dead", "hubs"]


def table(kind: str, n: int, *, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    plain, other = (torch.randn(n, n, generator=rng, dtype=torch.float64) for _ in range(2))
    match kind:
        case "constant":
            plain = torch.full_like(plain, float(plain[0, 0]))
        case "integers":
            plain = plain.round()
        case "copies":
            half = torch.arange(n) // 2
            plain = plain[half][:, half]
        case "negative":
            plain = -100 - plain.abs()
        case "ranges":
            plain = plain * 10 ** (4 * other)
        case "dead":
            plain[: n // 3], plain[:, n // 4 : n // 2] = 0, 0
        case "hubs":
            plain = plain * torch.exp(2 * other[:, :1]) * torch.exp(2 * other[:1])
    return plain.to(dtype)


def related(n: int, *, seed: int, kept: float, noise: float) -> tuple[Tensor, Tensor]:
    """Similarities of n units with a shuffled, noisy copy of the first `kept` of them; and the shuffle, undone."""
    rng = torch.Generator().manual_seed(seed)
    a, fresh = (torch.randn(n, 64, generator=rng) for _ in range(2))
    same = (torch.arange(n) < kept * n).unsqueeze(-1)
    order = torch.randperm(n, generator=rng)
    return a @ torch.where(same, a + noise * fresh, fresh)[order].T, torch.argsort(order)


def worth(benefit: Tensor, index: Tensor) -> float:
    return math.fsum(benefit.double()[torch.arange(len(index)), index].tolist())


def optimum(benefit: Tensor) -> float:
    return worth(benefit, torch.as_tensor(linear_sum_assignment(benefit.numpy(), maximize=True)[1]))


@WAYS
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(n=st.integers(1, 60), seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_the_value_is_scipys_and_the_bound_holds(
    kind: str, dense_below: int, n: int, seed: int, dtype: torch.dtype
) -> None:
    benefit = table(kind, n, seed=seed, dtype=dtype)
    before, best = benefit.clone(), optimum(benefit)
    found = assign_certified(benefit.requires_grad_(), tolerance=0, dense_below=dense_below)
    benefit = benefit.detach()
    rounding = 1e-13 * n * float(benefit.abs().max())
    assert found.index.sort().values.tolist() == list(range(n))
    assert found.value == worth(benefit, found.index)
    assert abs(found.value - best) <= rounding
    assert found.bound >= max(found.value, best - rounding)
    gap = n * max(10, n) * torch.finfo(dtype).eps * float(benefit.abs().max())  # n prices, each a sum of up to n
    assert found.bound - found.value <= gap
    assert torch.equal(benefit, before)
    # negative control: the same pairs read backwards are worth less, unless all are worth the same
    assert worth(benefit, found.index.flip(0)) <= found.value + rounding


def test_a_reading_by_favourites_alone_is_not_the_answer() -> None:
    """Negative control of the comparison with scipy: the greedy reading of the same tables fails it."""
    short = 0
    for seed in range(5):
        benefit, taken = table("hubs", 40, seed=seed), []
        for row in benefit:
            taken.append(int(row.index_fill(0, torch.tensor(taken, dtype=torch.int64), -torch.inf).argmax()))
        short += worth(benefit, torch.tensor(taken)) < (1 - 1e-3) * assign_certified(benefit, dense_below=SPARSE).value
    assert short == 5


@pytest.mark.parametrize("tolerance", [0.05, 1e-3, 0.0])
@pytest.mark.parametrize("kind", ["gaussian", "copies", "dead", "hubs"])
def test_the_gap_to_the_optimum_is_at_most_the_certified_one(kind: str, tolerance: float) -> None:
    benefit = table(kind, 300, seed=3, dtype=torch.float32)
    found, best = assign_certified(benefit, tolerance=tolerance, dense_below=SPARSE), optimum(benefit)
    assert best <= found.bound
    assert best - found.value <= found.gap * found.value * (1 + 1e-9)
    assert found.gap <= max(tolerance, 1e-5)
    assert found.rounds >= 1


def test_any_prices_bound_the_optimum_but_only_good_ones_certify_it() -> None:
    benefit = table("gaussian", 50, seed=7)
    best, rng = optimum(benefit), np.random.default_rng(7)
    certified = assign_certified(benefit, tolerance=0, dense_below=SPARSE).bound
    assert certified - best <= 1e-9 * best
    for prices in (np.zeros(50), rng.random(50), -3 * rng.random(50), 1e6 * rng.random(50)):
        assert upper_bound(benefit, prices) > (1 + 1e-3) * best
        # negative control: prices that the rows were told and nobody pays bound nothing
        asked = np.abs(prices) + 1
        assert upper_bound(benefit, asked) - math.fsum(asked) < best


def test_rounding_to_float32_never_takes_the_bound_below_the_optimum() -> None:
    """At one price for all columns the bound is tight, so every digit that goes the wrong way shows."""
    benefit = torch.eye(30) * 0.1 + 1e4 / 3
    exact = optimum(benefit)
    prices = 1e7 * np.random.default_rng(1).random(40)
    assert all(upper_bound(benefit, np.full(30, price)) >= exact for price in prices)
    # negative control: the same sums with the prices as they were before they were rounded with the table
    plain = [30 * price + float((benefit - price).amax(1).double().sum()) for price in prices]
    assert min(plain) < exact < max(plain)


@pytest.mark.parametrize("noise", [0.1, 0.5])
@pytest.mark.parametrize("prices", [False, True], ids=["plain", "priced"])
def test_a_planted_permutation_is_recovered(noise: float, prices: bool) -> None:
    """Benefits that hang on the column alone move every row's favourite, and never the best permutation."""
    benefit, planted = related(700, seed=5, kept=1.0, noise=noise)
    if prices:
        benefit = benefit + 300 * torch.rand(700, generator=torch.Generator().manual_seed(6))
        assert len(benefit.argmax(1).unique()) < 350
    found = assign_certified(benefit, tolerance=0)
    assert torch.equal(found.index, planted)
    assert (found.rounds == 0) != prices
    half_related, planted = related(700, seed=5, kept=0.5, noise=noise)
    hits = assign_certified(half_related, tolerance=0).index == planted
    assert hits[:350].all()
    assert not hits.all()  # negative control: the other half has no partner to find


def test_a_start_changes_the_time_and_never_the_value() -> None:
    benefit = table("gaussian", 640, seed=11, dtype=torch.float32)
    cold = assign_certified(benefit, tolerance=0)
    kept = assign_certified(benefit, start=cold.index)
    assert torch.equal(kept.index, cold.index)
    assert kept.rounds == 0
    assert cold.rounds > 0
    other = torch.randperm(640, generator=torch.Generator().manual_seed(1))
    found = assign_certified(benefit, start=other, tolerance=0)
    assert found.rounds > 0  # negative control: a bad start is not kept
    assert found.value == pytest.approx(cold.value, rel=1e-12)
    assert assign_certified(benefit, start=other, tolerance=100.0).value >= worth(benefit, other)


def test_the_same_table_gives_the_same_answer() -> None:
    for kind in ("dead", "hubs"):
        one, two = (assign_certified(table(kind, 520, seed=2, dtype=torch.float32), tolerance=0.01) for _ in range(2))
        assert torch.equal(one.index, two.index)
        assert (one.value, one.bound, one.rounds) == (two.value, two.bound, two.rounds)
    assert "520 pairs worth" in str(one)
    assert not torch.equal(one.index, assign_certified(table("hubs", 520, seed=3, dtype=torch.float32)).index)


@WAYS
def test_a_table_of_zeros_is_certified(dense_below: int) -> None:
    """No share of zero can be missing: the gap is none, or it is infinite."""
    assert assign_certified(torch.zeros(30, 30), dense_below=dense_below).gap == 0
    uneven = torch.tensor([[1.0, -1.0], [1.0, -1.0]])  # worth zero, and its favourites would be worth two
    assert assign_certified(uneven, dense_below=dense_below).bound < 1e-6


def test_bad_tables_are_named() -> None:
    with pytest.raises(IsobasinError, match="expected a square table"):
        assign_certified(torch.zeros(2, 3))
    with pytest.raises(IsobasinError, match="expected a square table"):
        assign_certified(torch.zeros(0, 0))
    with pytest.raises(IsobasinError, match="expected float32 or float64"):
        assign_certified(torch.zeros(2, 2, dtype=torch.bfloat16))
    for bad in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(IsobasinError, match="NaN or infinity"):
            assign_certified(torch.eye(3).index_fill(0, torch.tensor([1]), bad))
    with pytest.raises(IsobasinError, match="not a permutation of 3 units"):
        assign_certified(torch.eye(3), start=torch.tensor([0, 0, 2]))
    with pytest.raises(IsobasinError, match="expected 0"):
        assign_certified(torch.eye(3), tolerance=-1.0)
