"""The laws of a group, run over every group and size (sizes of 1 included)."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from isobasin.groups import (
    GL,
    Element,
    Group,
    Heads,
    Matrix,
    MonomialGroup,
    Orthogonal,
    OrthogonalFixingOnes,
    PairSigns,
    Permutation,
    Phases,
    Product,
    RotaryCommutant,
    SignedPermutation,
    Trivial,
)
from isobasin.groups.group import is_singular, polar
from isobasin.groups.monomial import Scales

EXACT = 1e-10
sizes = st.integers(1, 6)
seeds = st.integers(0, 2**31)


@st.composite
def factors(draw: st.DrawFn) -> Group:
    n = draw(sizes)
    rotary = RotaryCommutant(2 * draw(st.integers(1, 3)), draw(st.booleans()))
    return draw(st.sampled_from([GL(n), rotary, Product((rotary, GL(n)))]))


@st.composite
def groups(draw: st.DrawFn) -> Group:
    n = draw(sizes)
    plain = [
        *(MonomialGroup(n, scales) for scales in ("none", "global", "signs", "positive", "nonzero")),
        Trivial(n),
        PairSigns(2 * n, draw(st.booleans()), draw(st.booleans())),
        Orthogonal(n),
        OrthogonalFixingOnes(n),
    ]
    blocks = draw(st.integers(1, 3))
    plain.append(MonomialGroup(n * blocks, blocks=blocks))
    shared = draw(st.sampled_from([None, GL(n), RotaryCommutant(2 * n, draw(st.booleans()))]))
    heads = Heads(draw(sizes), draw(st.integers(1, 3)), draw(factors()), draw(factors()), draw(st.booleans()), shared)
    return draw(st.one_of(st.sampled_from(plain), factors(), st.just(heads)))


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float = EXACT) -> bool:
    return bool((a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max())))


@given(groups(), seeds, seeds, seeds)
@settings(max_examples=150, deadline=None)
def test_axioms(group: Group, a: int, b: int, c: int) -> None:
    g, h, k = (group.sample(seed=s) for s in (a, b, c))
    e = group.identity()
    x = torch.randn(3, group.n, dtype=torch.float64, generator=torch.Generator().manual_seed(a))
    for member in (g, h, k, e, g @ h, g.inverse()):
        assert group.contains(member)
    assert near((g @ h).act(x), g.act(h.act(x)))
    assert near(((g @ h) @ k).act(x), (g @ (h @ k)).act(x))
    assert near((g @ g.inverse()).act(x), x)
    assert near((g.inverse() @ g).act(x), x)
    assert torch.equal(e.act(x), x)
    assert e.is_identity
    assert near(g.act(x), x @ g.matrix().mT)


@given(groups(), seeds)
@settings(max_examples=100, deadline=None)
def test_dual_keeps_the_pairing(group: Group, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 4, group.n, dtype=torch.float64, generator=rng)
    g = group.sample(seed=seed)
    assert near((g.act(x) * g.dual().act(y)).sum(-1), (x * y).sum(-1))
    assert near(g.dual().dual().act(x), g.act(x))


@given(groups(), seeds, st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_act_on_any_axis(group: Group, seed: int, axis: int) -> None:
    g = group.sample(seed=seed)
    x = torch.randn(2, 3, group.n, dtype=torch.float64)
    moved = x.movedim(-1, axis)
    assert near(g.act(moved, axis), g.act(x).movedim(-1, axis))


@given(groups(), seeds)
@settings(max_examples=60, deadline=None)
def test_saved_parts_rebuild_the_element(group: Group, seed: int) -> None:
    g = group.sample(seed=seed)
    x = torch.randn(group.n, dtype=torch.float64)
    assert torch.equal(group.element(g.tensors()).act(x), g.act(x))
    missing = dict(list(g.tensors().items())[1:])
    with pytest.raises(KeyError, match=r"index|kv|matrix|u|0"):
        group.element(missing)


@given(groups(), seeds)
@settings(max_examples=60, deadline=None)
def test_project_finds_a_member_again(group: Group, seed: int) -> None:
    g = group.sample(seed=seed)
    if isinstance(group, Heads):  # the matrix on keys and values does not show the order of the queries
        g = dataclasses.replace(g, queries=group.identity().queries)
    again = group.project(g.matrix())
    assert group.contains(again)
    assert near(again.matrix(), g.matrix(), 1e-7)
    noisy = group.project(g.matrix() + 0.3 * torch.randn(group.n, group.n, dtype=torch.float64))
    assert group.contains(noisy)


@given(groups(), seeds)
@settings(max_examples=60, deadline=None)
def test_the_same_seed_draws_the_same_element(group: Group, seed: int) -> None:
    state = torch.random.get_rng_state()
    assert torch.equal(group.sample(seed=seed).matrix(), group.sample(seed=seed).matrix())
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("group", [Permutation(7), SignedPermutation(7), MonomialGroup(7, "global")])
def test_permutations_and_signs_are_bitwise_exact(group: Group, dtype: torch.dtype) -> None:
    g = group.sample(seed=3)
    x = torch.randn(5, 7).to(dtype)
    assert g.exact
    assert torch.equal(g.inverse().act(g.act(x)), x)
    assert not torch.equal(g.act(x), x)


def test_continuous_elements_say_that_they_round() -> None:
    for group in (MonomialGroup(4, "nonzero"), Orthogonal(4), GL(4), RotaryCommutant(4)):
        assert not group.sample(seed=1).exact
        assert group.identity().exact


@pytest.mark.parametrize("interleaved", [False, True])
def test_h_commutes_with_rotary_positions_and_nothing_else_does(interleaved: bool) -> None:
    n, group = 6, RotaryCommutant(6, interleaved)
    angles = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64)
    turn = Phases(torch.polar(torch.ones(3, dtype=torch.float64), angles), interleaved).matrix()
    g = group.sample(seed=5).matrix()
    assert near(g @ turn, turn @ g)
    outside = GL(n).sample(seed=5).matrix()
    assert not near(outside @ turn, turn @ outside, 1e-2)
    wrong_layout = RotaryCommutant(n, not interleaved).sample(seed=5).matrix()
    assert not near(wrong_layout @ turn, turn @ wrong_layout, 1e-2)


@pytest.mark.parametrize(
    ("group", "other"),
    [
        (Orthogonal(4), GL(4)),
        (OrthogonalFixingOnes(4), Orthogonal(4)),
        (Permutation(4), SignedPermutation(4)),
        (SignedPermutation(4), MonomialGroup(4, "nonzero")),
        (MonomialGroup(4, "global"), SignedPermutation(4)),
        (MonomialGroup(4, "positive"), MonomialGroup(4, "nonzero")),
        (Trivial(4), Permutation(4)),
        (RotaryCommutant(4), RotaryCommutant(4, interleaved=True)),
        (Heads(3, 1, GL(2), GL(2), permute=False), Heads(3, 1, GL(2), GL(2))),
        (Heads(3, 2, RotaryCommutant(2), GL(2)), Heads(3, 2, GL(2), GL(2))),
    ],
)
def test_a_group_refuses_elements_of_another(group: Group, other: Group) -> None:
    assert any(not group.contains(other.sample(seed=s)) for s in range(8))
    assert group.contains(group.sample(seed=0))


def test_gl_refuses_what_float32_could_not_carry() -> None:
    bad = Matrix(torch.diag(torch.tensor([1.0, 1e-9], dtype=torch.float64)))
    assert not GL(2).contains(bad)
    assert GL(2).contains(GL(2).project(bad.value))
    assert not GL(2).contains(Matrix(torch.full((2, 2), torch.nan, dtype=torch.float64)))


@pytest.mark.parametrize(
    ("group", "dim"),
    [
        (Orthogonal(5), 10),
        (OrthogonalFixingOnes(5), 6),
        (GL(5), 25),
        (RotaryCommutant(6), 6),
        (Product((RotaryCommutant(2), GL(3))), 11),
        (Permutation(5), 0),
        (MonomialGroup(5, "nonzero"), 5),
        (Heads(2, 3, RotaryCommutant(4), GL(4)), 40),
    ],
)
def test_dimension(group: Group, dim: int) -> None:
    assert group.dim == dim


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@given(st.sampled_from(["none", "global", "signs", "positive", "nonzero"]), sizes, st.integers(-3, 2), seeds)
@settings(max_examples=60, deadline=None)
def test_permutations_act_as_every_element_does_bit_for_bit(
    dtype: torch.dtype, scales: Scales, n: int, axis: int, seed: int
) -> None:
    shape = [2, 3, 4]
    shape[axis] = n
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    g = MonomialGroup(n, scales).sample(seed=seed)
    found = g.act(x, axis)
    assert found.dtype == dtype
    assert torch.equal(found, Element.act(g, x, axis))
    if dtype == torch.float64 and not g.is_identity:
        assert not torch.equal(found, x)


# -- overlaps that say nothing about some directions ------------------------------------------------------------------


def singular_overlap(group: Group, rank: int, seed: int) -> torch.Tensor:
    """The product of two tables with fewer rows than columns; for the maps that fix the all-ones vector of rows without
    a mean, beside it."""
    rng = torch.Generator().manual_seed(seed)
    a, b = torch.randn(2, rank, group.n, generator=rng, dtype=torch.float64)
    if isinstance(group, OrthogonalFixingOnes):
        return (a - a.mean(1, keepdim=True)).mT @ (b - b.mean(1, keepdim=True)) + 1 / group.n
    return a.mT @ b


@settings(deadline=None)
@given(st.sampled_from([Orthogonal, OrthogonalFixingOnes]), st.integers(4, 40), st.integers(0, 3), seeds)
def test_what_a_singular_overlap_leaves_free_stays_near_the_identity(
    kind: type[Orthogonal | OrthogonalFixingOnes], n: int, rank: int, seed: int
) -> None:
    group = kind(n)
    overlap = singular_overlap(group, rank, seed)
    found = group.project(overlap)
    assert group.contains(found)
    # As good as any element: the trace is the sum of the singular values.
    assert near((overlap * found.matrix()).sum(), torch.linalg.svdvals(overlap).sum())
    # Of the elements that are as good, none is nearer to the identity.
    u, s, vt = torch.linalg.svd(overlap)
    free = s < 1e-8
    assert int(free.sum()) == n - rank - (kind is OrthogonalFixingOnes)
    turns = Orthogonal(int(free.sum())).sample(20, seed=seed).matrix()
    others = u[:, ~free] @ vt[~free] + u[:, free] @ turns @ vt[free]
    traces = torch.diagonal(others, dim1=1, dim2=2).sum(1)
    assert float(traces.max()) <= float(torch.trace(found.matrix())) + EXACT
    if rank == 0:
        assert near(found.matrix(), torch.eye(n, dtype=torch.float64))


@pytest.mark.parametrize("group", [Orthogonal(24), OrthogonalFixingOnes(24)])
def test_rounding_does_not_choose_where_a_singular_overlap_says_nothing(group: Group) -> None:
    overlap = singular_overlap(group, 10, seed=1)
    rng = torch.Generator().manual_seed(2)
    rounded = overlap * (1 + 2e-16 * torch.randint(-1, 2, overlap.shape, generator=rng).double())
    one, two = (group.project(x).matrix() for x in (overlap, rounded))
    assert near(one, two, 1e-8)
    assert not near(*(polar(x) for x in (overlap, rounded)), 1e-2)  # the control: without that choice it does


@pytest.mark.parametrize("rank", [0, 1, 10, 23, 24])
def test_singular_overlaps_are_seen_without_their_singular_values(rank: int) -> None:
    overlap = singular_overlap(Orthogonal(24), rank, seed=rank)
    assert is_singular(overlap) == (rank < 24)
    assert is_singular(overlap, beside=1e18)  # all of it is rounding of what was beside it
