"""Stage 1 costs: against the d × d products they never form, and under the groups they must not see."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from isobasin.alignment import head_cost
from isobasin.alignment.head_cost import complete_cost, cosine_cost, product_cost, singular_cost
from isobasin.errors import IsobasinError
from isobasin.groups.assignment import assign, assign_grouped
from isobasin.symmetries.attention import complex_pairs


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heads(h: int = 3, d: int = 9, n: int = 4, *, seed: int = 0) -> list[Tensor]:
    return [normal(h, d, n, seed=seed + i) for i in range(4)]


def distances(a: Tensor, b: Tensor) -> Tensor:
    return (a.unsqueeze(1) - b).square().flatten(2).sum(-1)


def turned(q: Tensor, angle: Tensor) -> Tensor:
    """Half-split columns rotated by one angle per pair."""
    pairs = complex_pairs(q, "half") * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag], dim=-1)


def linear_move(q: Tensor, k: Tensor, *, seed: int) -> tuple[Tensor, Tensor]:
    u = normal(len(q), q.shape[-1], q.shape[-1], seed=seed) + 3 * torch.eye(q.shape[-1], dtype=torch.float64)
    return q @ u.mT, k @ torch.linalg.inv(u)


def rotary_move(q: Tensor, k: Tensor, *, seed: int) -> tuple[Tensor, Tensor]:
    radius = normal(len(q), 1, q.shape[-1] // 2, seed=seed).exp()
    angle = normal(len(q), 1, q.shape[-1] // 2, seed=seed + 1)
    wide = torch.cat([radius, radius], dim=-1)
    return turned(q, angle) * wide, turned(k, angle) / wide


def test_product_cost_is_the_distance_of_products() -> None:
    qa, ka, qb, kb = heads()
    dense = distances(qa @ ka.mT, qb @ kb.mT)
    assert torch.allclose(product_cost(qa, ka, qb, kb), dense)
    ma, mb = (m - m.mean(-1, keepdim=True) for m in (qa @ ka.mT, qb @ kb.mT))
    assert torch.allclose(product_cost(qa, ka, qb, kb, centre=True), distances(ma, mb))
    assert not torch.allclose(product_cost(qa, ka, qb, kb, centre=True), dense)


def test_complete_cost_is_the_distance_at_every_offset() -> None:
    """S_j and T_j by the definition, and Q R_n Kᵀ built from them as from rotated columns."""
    qa, ka, qb, kb = heads()
    parts = [torch.cat(rotary_parts(q, k), dim=1) for q, k in ((qa, ka), (qb, kb))]
    assert torch.allclose(complete_cost(qa, ka, qb, kb, layout="half"), distances(*parts))
    assert not torch.allclose(complete_cost(qa, ka, qb, kb, layout="interleaved"), distances(*parts))
    theta = torch.tensor([0.7, 0.2], dtype=torch.float64)
    s, t = rotary_parts(qa, ka)
    cos, sin = theta.cos().reshape(1, 2, 1, 1), theta.sin().reshape(1, 2, 1, 1)
    rotated = turned(qa, (3 * theta).expand(1, 1, 2)) @ turned(ka, (2 * theta).expand(1, 1, 2)).mT
    sums = [(cos * s + sign * sin * t).sum(1) for sign in (1, -1)]
    assert any(torch.allclose(rotated, total) for total in sums)


def rotary_parts(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    j = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    half = q.shape[-1] // 2
    q2, k2 = (torch.stack([x[..., :half], x[..., half:]], dim=-1).transpose(1, 2) for x in (q, k))
    return q2 @ k2.mT, q2 @ j @ k2.mT


def test_partial_rotary_adds_the_rest() -> None:
    qa, ka, qb, kb = heads(n=6)
    parts = [
        torch.cat([*rotary_parts(q[..., :4], k[..., :4]), (q[..., 4:] @ k[..., 4:].mT).unsqueeze(1)], dim=1)
        for q, k in ((qa, ka), (qb, kb))
    ]
    assert torch.allclose(complete_cost(qa, ka, qb, kb, layout="half", rotary=4), distances(*parts))


@pytest.mark.parametrize("cost", [product_cost, singular_cost, cosine_cost])
def test_costs_do_not_see_the_linear_group(cost) -> None:
    qa, ka, qb, kb = heads()
    before = cost(qa, ka, qb, kb)
    assert torch.allclose(cost(qa, ka, *linear_move(qb, kb, seed=9)), before, rtol=1e-8)
    assert not torch.allclose(cost(qa, ka, linear_move(qb, kb, seed=9)[0], kb), before, rtol=1e-2)


def test_complete_cost_sees_what_rotation_sees_and_no_more() -> None:
    qa, ka, qb, kb = heads()
    before = complete_cost(qa, ka, qb, kb, layout="half")
    assert torch.allclose(complete_cost(qa, ka, *rotary_move(qb, kb, seed=9), layout="half"), before)
    # the trap: equal Q Kᵀ, another function
    moved = linear_move(qb, kb, seed=9)
    assert not torch.allclose(complete_cost(qa, ka, *moved, layout="half"), before, rtol=1e-2)
    assert torch.allclose(product_cost(qb, kb, *moved).diagonal(), torch.zeros(3, dtype=torch.float64), atol=1e-8)
    assert complete_cost(qb, kb, *moved, layout="half").diagonal().min() > 1.0


def test_singular_values_bound_the_product_from_below() -> None:
    qa, ka, qb, kb = heads()
    values = torch.linalg.svdvals(qa @ ka.mT)[:, :4]
    assert torch.allclose(head_cost.product_singular_values(qa, ka), values)
    below, above = singular_cost(qa, ka, qb, kb), product_cost(qa, ka, qb, kb)
    assert bool((below < above).all())
    assert below.max() > 0.1


def test_cosine_ignores_size_and_zero_heads_are_at_one() -> None:
    qa, ka, qb, kb = heads()
    assert torch.allclose(cosine_cost(qa, ka, 5 * qb, kb), cosine_cost(qa, ka, qb, kb))
    assert torch.allclose(cosine_cost(qa, ka, qa, ka).diagonal(), torch.zeros(3, dtype=torch.float64), atol=1e-12)
    assert torch.equal(cosine_cost(qa, ka, 0 * qb, kb), torch.ones(3, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    "cost", [product_cost, singular_cost, cosine_cost, lambda *x: complete_cost(*x, layout="half")]
)
def test_grouped_heads_are_repeated_heads(cost) -> None:
    """Four query heads on two kv heads cost what four full heads would, on either side of the product."""
    qa, _, qb, _ = heads(4, seed=1)
    ka, kb = normal(2, 9, 4, seed=20), normal(2, 9, 4, seed=21)
    full_a, full_b = ka.repeat_interleave(2, 0), kb.repeat_interleave(2, 0)
    assert torch.allclose(cost(qa, ka, qb, kb), cost(qa, full_a, qb, full_b))
    assert torch.allclose(cost(ka, qa, kb, qb), cost(full_a, qa, full_b, qb))
    assert not torch.allclose(cost(qa, ka, qb, kb), cost(qa, full_a.roll(1, 0), qb, full_b))


@pytest.mark.parametrize("chunk", [1, 100, 2**22])
def test_chunks_change_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    qa, ka, qb, kb = heads(5)
    dense = distances(qa @ ka.mT, qb @ kb.mT)
    monkeypatch.setattr(head_cost, "CHUNK", chunk)
    assert torch.allclose(product_cost(qa, ka, qb, kb), dense)


@pytest.mark.parametrize("cost", [product_cost, lambda *x: complete_cost(*x, layout="half")])
def test_noisy_scrambled_heads_find_their_partners(cost) -> None:
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    q, k, dq, dk = heads(6, 16, 4, seed=30)
    moved = rotary_move(q + 0.1 * dq, k + 0.1 * dk, seed=40)
    table = cost(q[order], k[order], *moved)
    assert assign(table).tolist() == order.tolist()
    within = torch.tensor([3, 2, 0, 1, 4, 5])  # keeps the pairs (0,1), (2,3), (4,5) together
    assert assign_grouped(cost(q[within], k[within], *moved), 3).heads.tolist() == within.tolist()
    assert assign_grouped(table, 3).heads.tolist() != order.tolist()


class Largest(TorchDispatchMode):
    """The size of the largest tensor made while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize(
    "cost", [product_cost, singular_cost, cosine_cost, lambda *x: complete_cost(*x, layout="half")]
)
def test_no_product_of_two_widths_is_formed(cost) -> None:
    d, (qa, ka, qb, kb) = 600, heads(4, 600, 4)
    with Largest() as seen:
        cost(qa, ka, qb, kb)
    assert seen.numel < d * d / 10
    with Largest() as seen:
        distances(qa @ ka.mT, qb @ kb.mT)
    assert seen.numel >= d * d


def test_head_counts_that_do_not_divide_are_named() -> None:
    qa, ka, qb, kb = heads(4)
    with pytest.raises(IsobasinError, match="4 heads share 3: expected a divisor"):
        product_cost(qa, ka[:3], qb, kb[:3])
