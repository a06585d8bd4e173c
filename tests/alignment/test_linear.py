"""Stage 2 for GL: planted elements, the recipe run to rest, derivatives, deficient heads."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from isobasin.alignment import head_linear
from isobasin.alignment.head_linear import (
    align_linear,
    align_linear_factors,
    align_matrices,
    head_grams,
    linear_residual,
)
from isobasin.alignment.head_newton import Grams, _frame, descend, linear_objective
from isobasin.alignment.reference import align_linear_recipe, descend_linear, loss_and_gradient, orthogonal_start
from isobasin.errors import IsobasinError


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def element(h: int, n: int, *, condition: float, seed: int) -> Tensor:
    left, right = (torch.linalg.qr(normal(h, n, n, seed=s)).Q for s in (seed, seed + 1))
    values = torch.logspace(-0.5, 0.5, n, base=condition, dtype=torch.float64)
    return left * values @ right


def pair(kind: str, h: int, d: int, n: int, *, seed: int) -> list[Tensor]:
    """Q_A, K_A, Q_B, K_B of h head pairs."""
    q, k, q2, k2 = (normal(h, d, n, seed=seed + i) for i in range(4))
    if kind == "unrelated":
        return [q, k, q2, k2]
    u = element(h, n, condition={"planted": 4.0, "noise": 4.0, "ill": 12.0}[kind], seed=seed + 4)
    noise = 0.0 if kind == "planted" else 0.1
    return [q, k, (q + noise * q2) @ u.mT, (k + noise * k2) @ torch.linalg.inv(u)]


def relative(heads: list[Tensor], u: Tensor) -> Tensor:
    return (linear_residual(*heads, u) / linear_residual(*heads[:2], *(0 * x for x in heads[:2]), u)).sqrt()


@settings(max_examples=25, deadline=None)
@given(h=st.integers(1, 4), n=st.integers(1, 7), extra=st.integers(0, 5), seed=st.integers(0, 10**6))
def test_planted_elements_come_back(h: int, n: int, extra: int, seed: int) -> None:
    heads = pair("planted", h, n + extra + 1, n, seed=seed)
    found = align_linear(head_grams(*heads))
    assert relative(heads, found.u).max() < 1e-7
    assert bool(found.converged.all())
    if n > 1:  # negative control: the orthogonal map alone can not undo a planted element of GL
        assert relative(heads, align_linear(head_grams(*heads), method="orthogonal").u).max() > 1e-3


def test_batch_shape_is_kept_and_heads_do_not_mix() -> None:
    heads = [x.reshape(2, 3, 9, 4) for x in pair("noise", 6, 9, 4, seed=3)]
    found = align_linear(head_grams(*heads))
    assert found.u.shape == (2, 3, 4, 4)
    assert found.objective.shape == found.steps.shape == found.converged.shape == found.deficient.shape == (2, 3)
    alone = align_linear(head_grams(*(x[1, 2] for x in heads)))
    assert torch.allclose(alone.objective, found.objective[1, 2], rtol=1e-12)
    assert not torch.allclose(alone.objective, found.objective[1, 1], rtol=1e-6)


@pytest.mark.parametrize("where", ["a", "b"])
def test_factors_recover_an_element_of_condition_a_million(where: str) -> None:
    q, k = normal(4, 30, 6, seed=0), normal(4, 30, 6, seed=1)
    u = element(4, 6, condition=1e6, seed=2)
    moved = [q @ u.mT, k @ torch.linalg.inv(u)]
    heads = [*moved, q, k] if where == "a" else [q, k, *moved]
    assert relative(heads, align_linear_factors(*heads).u).max() < 2e-9
    # negative control: Grams square the condition number and can not do it
    assert relative(heads, align_linear(head_grams(*heads)).u).max() > 2e-9


@pytest.mark.parametrize("kind", ["unrelated", "noise", "ill"])
def test_never_worse_than_the_recipe_at_rest(kind: str) -> None:
    heads = pair(kind, 90, 12, 4, seed=11)
    recipe = descend_linear(*heads, learning_rate=3e-2, max_steps=4000, tol=1e-8)
    assert int(recipe.converged.sum()) >= 70  # three kinds: more than 200 pairs
    for found in (align_linear(head_grams(*heads)), align_linear_factors(*heads)):
        assert bool(found.converged.all())
        assert bool((found.objective <= recipe.objective * (1 + 1e-9)).all())
    # negative control: the orthogonal start alone is worse nearly everywhere
    orthogonal = align_linear(head_grams(*heads), method="orthogonal").objective
    assert int((orthogonal > recipe.objective * (1 + 1e-9)).sum()) >= 85


def test_never_worse_than_any_start() -> None:
    heads = pair("unrelated", 40, 7, 5, seed=5)
    grams = head_grams(*heads)
    none, orthogonal, full = (align_linear(grams, method=m) for m in ("none", "orthogonal", "full"))
    stopped = align_linear(grams, max_steps=1)
    assert torch.equal(none.u, torch.eye(5, dtype=torch.float64).expand(40, 5, 5))
    assert torch.allclose(none.objective, linear_residual(*heads, none.u))
    assert bool((orthogonal.objective <= none.objective).all())
    assert bool((stopped.objective <= orthogonal.objective).all())
    assert bool((full.objective <= stopped.objective).all())
    assert bool(full.converged.all())
    assert not bool(stopped.converged.all())


def test_both_determinant_signs_are_tried() -> None:
    heads = pair("unrelated", 60, 6, 3, seed=8)
    grams = head_grams(*heads)
    start = orthogonal_start(*heads)
    signs = torch.linalg.det(align_linear(grams).u).sign()
    one_sign = descend(grams, start, max_steps=100, tol=1e-8)
    assert bool((torch.linalg.det(one_sign.u).sign() == torch.linalg.det(start).sign()).all())
    assert int((signs != torch.linalg.det(start).sign()).sum()) > 0


def test_gradient_by_finite_differences() -> None:
    heads = pair("unrelated", 3, 9, 4, seed=21)
    grams, u = head_grams(*heads), element(3, 4, condition=3.0, seed=30)
    x, step = normal(3, 4, 4, seed=40), 1e-5
    ahead, behind = (linear_residual(*heads, u + sign * step * x @ u) for sign in (1, -1))
    measured = (ahead - behind) / (2 * step)
    predicted = (-2 * _frame(grams, u).rhs * x).sum((-1, -2))  # what Newton's steps take for the gradient
    assert torch.allclose(measured, predicted, rtol=1e-7)
    assert not torch.allclose(measured, -predicted, rtol=1e-2)
    plain = loss_and_gradient(*heads, u)[1]  # the recipe's gradient is with respect to U itself
    assert torch.allclose((plain * (x @ u)).sum((-1, -2)), predicted, rtol=1e-10)


def relative_gradient(grams: Grams, u: Tensor) -> Tensor:
    """Between 0 and 1, the same for every scale of the weights."""
    frame = _frame(grams, u)
    return torch.linalg.matrix_norm(frame.rhs) / frame.size


def test_newton_converges_quadratically_where_gauss_newton_crawls() -> None:
    heads = pair("unrelated", 30, 20, 6, seed=50)
    grams = head_grams(*heads)
    run = descend(grams, orthogonal_start(*heads), max_steps=100, tol=1e-8)
    assert bool(run.converged.all())
    assert int(run.steps.max()) < 60
    assert relative_gradient(grams, run.u).max() < 1e-6
    assert relative_gradient(grams, orthogonal_start(*heads)).min() > 1e-4


@pytest.mark.parametrize("solver", ["grams", "factors"])
@pytest.mark.parametrize("case", ["rank", "zero", "one zero", "wide", "identical"])
def test_deficient_heads_follow_the_rule(case: str, solver: str) -> None:
    q, k, q2, k2 = pair("noise", 3, 9, 4, seed=60)
    if case == "rank":
        q, q2 = (torch.cat([x[..., :2], x[..., :2]], dim=-1) for x in (q, q2))
    if case == "zero":
        q, k, q2, k2 = (0 * x for x in (q, k, q2, k2))
    if case == "one zero":
        k2 = 0 * k2
    if case == "wide":
        q, k, q2, k2 = (x[..., :3, :] for x in (q, k, q2, k2))
    if case == "identical":
        q = torch.cat([q[..., :3], torch.zeros_like(q[..., :1])], dim=-1)
        q2, k2 = q, k
    heads = [q, k, q2, k2]
    found = align_linear(head_grams(*heads)) if solver == "grams" else align_linear_factors(*heads)
    assert bool(found.deficient.all())
    assert bool(torch.isfinite(found.u).all())
    assert bool(torch.isfinite(torch.linalg.cond(found.u)).all())
    none = linear_residual(*heads, torch.eye(4, dtype=torch.float64).expand(3, 4, 4))
    assert bool((linear_residual(*heads, found.u) <= none * (1 + 1e-12) + 1e-12).all())
    if case == "identical":
        assert torch.allclose(found.u, torch.eye(4, dtype=torch.float64).expand(3, 4, 4), atol=1e-9)
    healthy = align_linear(head_grams(*pair("noise", 3, 9, 4, seed=60)))
    assert not bool(healthy.deficient.any())


def test_a_deficient_planted_head_comes_back_on_its_range() -> None:
    q, k = normal(3, 9, 4, seed=70), normal(3, 9, 4, seed=71)
    q = torch.cat([q[..., :3], q[..., :1]], dim=-1)
    u = element(3, 4, condition=3.0, seed=72)
    heads = [q, k, q @ u.mT, k @ torch.linalg.inv(u)]
    for found in (align_linear(head_grams(*heads)), align_linear_factors(*heads)):
        assert bool(found.deficient.all())
        assert relative(heads, found.u).max() < 1e-5


def test_bad_input_is_named() -> None:
    grams = head_grams(*pair("noise", 1, 5, 2, seed=0))
    broken = Grams(grams.gq * torch.nan, *grams.blocks[1:])
    with pytest.raises(IsobasinError, match="NaN or infinity"):
        align_linear(broken)
    with pytest.raises(IsobasinError, match="expected 'full'"):
        align_linear(grams, method="best")  # type: ignore[arg-type]


def test_singular_elements_are_infinitely_far() -> None:
    grams = head_grams(*pair("noise", 1, 5, 2, seed=0))
    assert torch.isinf(linear_objective(grams, torch.zeros(1, 2, 2, dtype=torch.float64))).all()


def test_recipe_head_by_head_is_the_recipe_in_a_batch_and_stops_at_its_target() -> None:
    heads = pair("noise", 3, 8, 3, seed=80)
    single = align_linear_recipe(*heads, learning_rate=3e-2)
    assert torch.allclose(single.objective, descend_linear(*heads, learning_rate=3e-2).objective, rtol=1e-12)
    assert torch.allclose(single.objective, linear_residual(*heads, single.u), rtol=1e-10)
    early = align_linear_recipe(*heads, learning_rate=3e-2, target=single.objective * 1.01)
    assert bool((early.steps < single.steps).all())
    assert bool((early.objective <= single.objective * 1.01).all())


@pytest.mark.parametrize("solver", ["grams", "factors", "both"])
def test_a_head_with_nothing_on_one_side_comes_back_on_the_other(solver: str) -> None:
    v, o = normal(3, 20, 4, seed=80), torch.zeros(3, 20, 4, dtype=torch.float64)
    heads = (v, o, v @ element(3, 4, condition=3.0, seed=81).mT, o)
    solve = {"grams": lambda *x: align_linear(head_grams(*x)), "factors": align_linear_factors, "both": align_matrices}
    found = solve[solver](*heads)
    assert bool(found.deficient.all())
    assert linear_residual(*heads, found.u).max() < 1e-9
    assert linear_residual(*heads, torch.eye(4, dtype=torch.float64).expand(3, 4, 4)).min() > 1e-2


def test_heads_wider_than_their_matrices_are_solved_where_they_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four matrices of 3 rows reach 12 of 40 columns: the element is found there, and is the identity elsewhere."""
    heads = pair("planted", 2, 3, 40, seed=3)
    sizes = []
    inner = head_linear.align_linear

    def counted(grams: Grams, **options: object) -> object:
        sizes.append(grams.gq.shape[-1])
        return inner(grams, **options)

    monkeypatch.setattr(head_linear, "align_linear", counted)
    found = align_matrices(*heads)
    assert sizes == [12]
    assert float(found.objective.max()) < 1e-12
    assert float(linear_residual(*heads, found.u).max()) < 1e-9
    beside = torch.linalg.svd(torch.cat(heads, -2)).Vh[:, 12:]
    assert torch.allclose(beside @ found.u, beside, atol=1e-9)
    assert bool(found.deficient.all())
