"""Stage 2 for rotary pairs: the global minimum, by a dense search that knows nothing of the method."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isobasin.alignment.head_rotary import PairConstants, align_rotary, complex_pairs, pair_constants, rotary_objective
from isobasin.alignment.reference import align_rotary_recipe
from isobasin.errors import IsobasinError


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def complex_normal(*shape: int, seed: int) -> Tensor:
    return torch.complex(normal(*shape, seed=seed), normal(*shape, seed=seed + 10**7))


Constants = tuple[Tensor, Tensor, Tensor, Tensor]


def random_pairs(count: int, *, seed: int, rows: int = 3) -> Constants:
    """Pairs of unequal scales; few rows, so that γ is often large."""
    qa, ka, qb, kb = (complex_normal(count, rows, seed=seed + i) for i in range(4))
    qb, kb = qb * normal(count, 1, seed=seed + 4).exp(), kb * normal(count, 1, seed=seed + 5).exp()
    squares = [x.abs().square().sum(-1) for x in (qb, kb)]
    return squares[0], squares[1], (qa.conj() * qb).sum(-1), (ka.conj() * kb).sum(-1)


def two_minima(count: int, *, seed: int) -> Constants:
    """Opposed γ of about equal size, large against η: F has a minimum on either side."""
    one = torch.ones(count, dtype=torch.float64)
    size = 1 + 3 * normal(count, seed=seed).abs()
    lean = 1 + 0.1 * normal(count, seed=seed + 1)
    turn = torch.polar(one, 0.05 * normal(count, seed=seed + 2))
    return one, one, size + 0j, -size * lean * turn


def degenerate(count: int, *, seed: int) -> Constants:
    """Equal sizes, exactly (anti)parallel, one or both γ zero, and the triple root |γ| = 1 + k."""
    one, size = torch.ones(count, dtype=torch.float64), normal(count, seed=seed).abs()
    kind = torch.arange(count) % 6
    zero = torch.zeros_like(size)
    gq = torch.where(kind == 3, zero, torch.where(kind == 5, 2 * one, size))
    gk = torch.stack([size, -size, zero, size, 1e-9 * size, 2 * one])[kind, torch.arange(count)]
    return one, one, gq + 0j, torch.where((kind == 2) | (kind == 3), 0 * gk, gk) + 0j


def dense_search(constants: Constants) -> Tensor:
    """g on a grid of log x, then a finer grid around the best point, twice: no derivative, no bracket."""
    eta_q, eta_k, gamma_q, gamma_k = constants
    centre = (eta_k / eta_q).log() / 2
    width = 16.0
    for points in (2001, 201, 201, 201):
        grid = centre.unsqueeze(-1) + torch.linspace(-width, width, points, dtype=torch.float64)
        x = grid.exp()
        inside = (x.sqrt() * gamma_q.unsqueeze(-1) + gamma_k.unsqueeze(-1) / x.sqrt()).abs()
        g = x * eta_q.unsqueeze(-1) + eta_k.unsqueeze(-1) / x - 2 * inside
        least, where = g.min(-1)
        centre = grid.gather(-1, where.unsqueeze(-1)).squeeze(-1)
        width = 2 * width / (points - 1) * 2
    return least


@pytest.mark.parametrize(
    ("draw", "count"),
    [(random_pairs, 6000), (two_minima, 2500), (degenerate, 1500)],
    ids=["random", "two", "degenerate"],
)
def test_equals_a_dense_global_search(draw, count: int) -> None:
    constants = draw(count, seed=1)
    found = align_rotary(*constants)
    scale = (constants[0] * constants[1]).sqrt() + constants[2].abs() + constants[3].abs()
    excess = (found.objective - dense_search(constants)) / scale
    assert bool(torch.isfinite(found.u.abs()).all())
    assert excess.max() < 1e-14
    assert excess.min() > -1e-6  # and the search is a fair one: it lands at the same place
    shaken = rotary_objective(found.u * 1.01, *constants)
    assert bool((shaken >= found.objective - 1e-14 * scale).all())
    assert ((shaken - found.objective) / scale).median() > 1e-6


def test_two_minima_are_two_and_brent_misses_some() -> None:
    constants = two_minima(400, seed=3)
    found = align_rotary(*constants)
    mirrored = align_rotary(constants[1], constants[0], constants[3], constants[2])
    assert torch.allclose(found.objective, mirrored.objective, rtol=1e-12)  # q and k change places
    brent = rotary_objective(align_rotary_recipe(*constants), *constants)
    excess = (brent - found.objective) / found.objective.abs()
    assert excess.min() > -1e-12
    assert int((excess > 1e-3).sum()) > 10


def test_never_worse_than_brent() -> None:
    constants = random_pairs(1000, seed=5)
    brent = rotary_objective(align_rotary_recipe(*constants), *constants)
    found = align_rotary(*constants).objective
    assert bool((found <= brent + 1e-9 * brent.abs()).all())
    assert int((brent - found < 1e-6 * (1 + brent.abs())).sum()) > 950  # and mostly the same minimum


def test_the_factor_is_two_and_not_four() -> None:
    constants = random_pairs(1000, seed=7)
    two, four = (rotary_objective(align_rotary_recipe(*constants, factor=f), *constants) for f in (2.0, 4.0))
    norm = 6.0  # E‖q_A‖² + E‖k_A‖² is 12 for three complex rows; half of it keeps the relative change honest
    assert int((four > two + 0.01 * norm).sum()) > 300
    assert int((two > four + 0.01 * norm).sum()) < 20  # Brent's own missed minima


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 3), min_size=0, max_size=3),
    d=st.integers(1, 5),
    pairs=st.integers(1, 4),
    layout=st.sampled_from(["half", "interleaved"]),
    seed=st.integers(0, 10**6),
)
def test_planted_elements_come_back_in_either_layout(shape, d: int, pairs: int, layout, seed: int) -> None:
    qa, ka = complex_normal(*shape, d, pairs, seed=seed), complex_normal(*shape, d, pairs, seed=seed + 1)
    u = torch.polar(normal(*shape, pairs, seed=seed + 2).clamp(-1, 1).exp(), normal(*shape, pairs, seed=seed + 3))
    heads = [qa, ka, qa * u.unsqueeze(-2), ka / u.unsqueeze(-2).conj()]
    constants = pair_constants(*(columns(x, layout) for x in heads), layout=layout)
    found = align_rotary(constants.eta_q, constants.eta_k, constants.gamma_q, constants.gamma_k)
    assert found.u.shape == (*shape, pairs)
    assert found.u.dtype == torch.complex128
    assert found.objective.dtype == torch.float64
    assert torch.allclose(found.u * u, torch.ones_like(u), atol=1e-7)
    assert torch.allclose(found.objective + constants.norm_a, torch.zeros_like(constants.norm_a), atol=1e-9)


def columns(pairs: Tensor, layout: str) -> Tensor:
    if layout == "half":
        return torch.cat([pairs.real, pairs.imag], dim=-1)
    return torch.stack([pairs.real, pairs.imag], dim=-1).flatten(-2)


def test_constants_and_objective_are_the_distance_between_matrices() -> None:
    heads = [normal(2, 7, 6, seed=i) for i in range(4)]
    constants = pair_constants(*heads, layout="half")
    u = complex_normal(2, 3, seed=9)
    qa, ka, qb, kb = (complex_pairs(x, "half") for x in heads)
    direct = (qa - qb * u.unsqueeze(-2)).abs().square().sum(-2) + (ka - kb / u.unsqueeze(-2).conj()).abs().square().sum(
        -2
    )
    assert torch.allclose(direct, objective(u, constants))
    assert not torch.allclose(direct, objective(u, pair_constants(*heads, layout="interleaved")))


def objective(u: Tensor, c: PairConstants) -> Tensor:
    return c.norm_a + rotary_objective(u, c.eta_q, c.eta_k, c.gamma_q, c.gamma_k)


def test_vanishing_norms_follow_the_rule() -> None:
    eta_q = torch.tensor([0.0, 0.0, 4.0, 4.0, 0.0, 4.0], dtype=torch.float64)
    eta_k = torch.tensor([9.0, 9.0, 0.0, 0.0, 0.0, 64.0], dtype=torch.float64)
    gamma_q = torch.tensor([0, 0, 2j, 0, 0, 0], dtype=torch.complex128)
    gamma_k = torch.tensor([3j, 0, 0, 0, 0, 0], dtype=torch.complex128)
    u = align_rotary(eta_q, eta_k, gamma_q, gamma_k).u
    expected = torch.tensor([-3j, 1, -0.5j, 1, 1, 2], dtype=torch.complex128)
    assert torch.allclose(u, expected)


def test_extreme_scales_stay_finite() -> None:
    scale = torch.tensor([1e-60, 1e-30, 1.0, 1e30, 1e60], dtype=torch.float64)
    eta_q, eta_k = (x.flatten() for x in torch.meshgrid(scale, scale, indexing="ij"))
    found = align_rotary(eta_q, eta_k, eta_q.sqrt() + 0j, 1j * eta_k.sqrt())
    assert bool(torch.isfinite(found.u.abs()).all())
    assert bool(torch.isfinite(found.objective).all())
    balanced = 2 * (eta_q * eta_k).sqrt()  # L at the balanced radius, less what γ could still win
    assert bool((found.objective <= balanced * (1 + 1e-12)).all())
    assert found.objective.min() < -0.99


def test_bad_layouts_are_named() -> None:
    with pytest.raises(IsobasinError, match="3 rotary columns"):
        complex_pairs(normal(2, 3, seed=0), "half")
    with pytest.raises(IsobasinError, match="expected 'half' or 'interleaved'"):
        # without the type checks of these tests, which would refuse the word first
        inspect.unwrap(complex_pairs)(normal(2, 4, seed=0), "other")
