"""Assignments against brute force over every permutation of the group."""

from itertools import permutations, product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.groups.assignment import assign, assign_grouped


def costs(h: int, *, seed: int) -> Tensor:
    return torch.rand(h, h, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def wreath(groups: int, size: int) -> list[list[int]]:
    """Every permutation that keeps groups together."""
    inner = list(permutations(range(size)))
    return [
        [outer[g] * size + choice[g][i] for g in range(groups) for i in range(size)]
        for outer in permutations(range(groups))
        for choice in product(inner, repeat=groups)
    ]


@settings(max_examples=30, deadline=None)
@given(shape=st.sampled_from([(1, 1), (1, 4), (4, 1), (2, 2), (2, 3), (3, 2)]), seed=st.integers(0, 10**6))
def test_two_levels_reach_the_best_of_all_permutations(shape: tuple[int, int], seed: int) -> None:
    groups, size = shape
    cost = costs(groups * size, seed=seed)
    totals = [float(cost[range(groups * size), p].sum()) for p in wreath(groups, size)]
    found = assign_grouped(cost, groups)
    assert found.heads.tolist() in wreath(groups, size)
    assert (found.heads.reshape(groups, size) // size == found.groups.unsqueeze(-1)).all()
    assert abs(float(cost[range(groups * size), found.heads].sum()) - min(totals)) < 1e-12
    assert abs(found.cost - min(totals)) < 1e-12
    assert groups * size == 1 or max(totals) > min(totals) + 1e-6


def test_one_head_per_group_is_the_plain_assignment_and_groups_do_bind() -> None:
    cost = costs(6, seed=4)
    assert assign_grouped(cost, 6).heads.tolist() == assign(cost).tolist()
    assert assign_grouped(cost, 2).cost > assign_grouped(cost, 1).cost  # negative control: the groups matter


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_exact_ties_keep_the_identity(groups: int) -> None:
    equal = torch.full((4, 4), 0.1, dtype=torch.float64)
    assert assign(equal).tolist() == [0, 1, 2, 3]
    assert assign_grouped(equal, groups).heads.tolist() == [0, 1, 2, 3]
    tied = equal - torch.eye(4, dtype=torch.float64).roll(1, 0) * 1e-9
    assert assign(tied).tolist() == [3, 0, 1, 2]  # negative control: the slightest preference wins


def test_bad_tables_are_named() -> None:
    with pytest.raises(IsobasinError, match="expected a square table"):
        assign(torch.zeros(2, 3))
    with pytest.raises(IsobasinError, match="NaN or infinity"):
        assign(torch.full((2, 2), torch.nan))
    with pytest.raises(IsobasinError, match="expected a divisor of 4"):
        assign_grouped(torch.zeros(4, 4), 3)
