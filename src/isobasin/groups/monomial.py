"""Permutations, with signs or scales: one nonzero number in each row and column.

They are the maps that commute with an elementwise nonlinearity: units of a feed-forward layer, and the
stream where a gain can not be folded away.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from isobasin.groups.assignment import assign, assign_grouped, best_permutation
from isobasin.groups.group import (
    FLOAT,
    TOLERANCE,
    DifferentiableElement,
    Element,
    Group,
    Overlap,
    generator,
    signs,
    spread,
)
from isobasin.shapes import Float, Int

Scales = Literal["none", "global", "signs", "positive", "nonzero"]


@dataclass(frozen=True, eq=False)
class Monomial(Element):
    """(g x)[i] = scale[i] · x[index[i]]."""

    index: Int[Tensor, " n"]
    scale: Float[Tensor, " n"]

    @property
    def n(self) -> int:
        return self.index.shape[0]

    def __matmul__(self, other: "Monomial") -> "Monomial":
        return Monomial(other.index[self.index], self.scale * other.scale[self.index])

    def inverse(self) -> "Monomial":
        back = torch.argsort(self.index)
        return Monomial(back, 1 / self.scale[back])

    def dual(self) -> "Monomial":
        return Monomial(self.index, 1 / self.scale)

    def permutation_part(self) -> "Monomial":
        return Monomial(self.index, torch.ones_like(self.scale))

    def tensors(self) -> dict[str, Tensor]:
        return {"index": self.index, "scale": self.scale}

    @cached_property
    def exact(self) -> bool:
        return bool((self.scale.abs() == 1).all())

    @cached_property
    def _keeps_places(self) -> bool:
        return torch.equal(self.index, torch.arange(self.n))

    @cached_property
    def is_identity(self) -> bool:
        return self._keeps_places and bool((self.scale == 1).all())

    def act(self, x: Tensor, axis: int = -1) -> Tensor:
        """As every element does, bit for bit, but without what a permutation can do without: slices are picked in the
        type they have, signs are set in it, and nothing is multiplied by ones."""
        if not self._keeps_places:
            x = x.index_select(axis, self.index.to(x.device))
        if bool((self.scale == 1).all()):
            return x
        scale = self.scale.to(x.device).view([self.n if k == axis % x.ndim else 1 for k in range(x.ndim)])
        return x * scale.to(x.dtype) if self.exact else (x * scale).to(x.dtype)

    def act_in_type(self, x: Tensor, axis: int = -1, *, dual: bool = False) -> Tensor:
        scale = self.scale.to(x).reshape([-1 if k == axis % x.ndim else 1 for k in range(x.ndim)])
        moved = x.index_select(axis, self.index.to(x.device))
        return moved.div_(scale) if dual else moved.mul_(scale)

    @property
    def ones_factor(self) -> float:
        return float(self.scale[0])

    def rescaled(self, scale: Float[Tensor, " n"]) -> "Monomial":
        return Monomial(self.index, self.scale * scale)

    def signed_matrix(self) -> Tensor:
        return torch.eye(self.n, dtype=FLOAT)[self.index] * self.scale.sign()[:, None]

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        return x[..., self.index.to(x.device)] * self.scale.to(x.device)


@dataclass(frozen=True, eq=False)
class DifferentiableScales(DifferentiableElement):
    """(g x)[i] = scale[i] · x[i]."""

    scale: Float[Tensor, " n"]

    @property
    def n(self) -> int:
        return self.scale.shape[0]

    def dual(self) -> "DifferentiableScales":
        return DifferentiableScales(1 / self.scale)

    def permutation_part(self) -> "DifferentiableScales":
        return DifferentiableScales(torch.ones_like(self.scale))

    def _apply(self, x: Float[Tensor, "*rest n"]) -> Float[Tensor, "*rest n"]:
        return x * self.scale


@dataclass(frozen=True)
class MonomialGroup(Group):
    """Permutations of n coordinates, with the scales of its kind; `Permutation(5)` and the like make one.

    `blocks`: coordinates stay together with those of their block, of so many blocks of neighbours (0: any order).
    """

    n: int
    scales: Scales = "none"
    permute: bool = True
    blocks: int = 0

    def __str__(self) -> str:
        if not self.permute:
            return "1"
        if self.blocks:
            return f"S{self.n // self.blocks}≀S{self.blocks}"
        prefix = {"none": "", "global": "±", "signs": "{±1}≀", "positive": "ℝ₊≀", "nonzero": "ℝ*≀"}
        return f"{prefix[self.scales]}S{self.n}"

    @property
    def dim(self) -> int:
        return self.n if self.scales in ("positive", "nonzero") else 0

    def identity(self, *batch: int) -> Monomial:
        return Monomial(torch.arange(self.n), torch.ones(self.n, dtype=FLOAT))

    def sample(self, *batch: int, seed: int) -> Monomial:
        rng = generator(seed)
        index = self._shuffled(rng) if self.permute else torch.arange(self.n)
        scale = torch.ones(self.n, dtype=FLOAT)
        if self.scales == "global":
            scale = scale * signs(1, rng=rng)
        if self.scales in ("signs", "nonzero"):
            scale = scale * signs(self.n, rng=rng)
        if self.scales in ("positive", "nonzero"):
            scale = scale * spread(self.n, rng=rng)
        return Monomial(index, scale)

    def _shuffled(self, rng: torch.Generator) -> Tensor:
        if not self.blocks:
            return torch.randperm(self.n, generator=rng)
        inner = torch.rand(self.blocks, self.n // self.blocks, generator=rng).argsort(dim=1)
        return self._of_blocks(torch.randperm(self.blocks, generator=rng), inner)

    def _of_blocks(self, order: Int[Tensor, " blocks"], inner: Int[Tensor, "blocks size"]) -> Tensor:
        """Blocks in this order, and the coordinates of each (as it was called before) in theirs."""
        return (order[:, None] * inner.shape[1] + inner[order]).flatten()

    def contains(self, element: Element) -> bool:
        if not isinstance(element, Monomial) or element.n != self.n:
            return False
        order = torch.arange(self.n)
        if self.blocks and not self._keeps_blocks(element.index):
            return False
        if not torch.equal(torch.sort(element.index).values, order) or not bool(torch.isfinite(element.scale).all()):
            return False
        return (self.permute or torch.equal(element.index, order)) and self._allows(element.scale)

    def _keeps_blocks(self, index: Tensor) -> bool:
        """Whether every block of the result was one block before."""
        before = index.reshape(self.blocks, -1) // (self.n // self.blocks)
        return bool((before == before[:, :1]).all())

    def sorting(self, keys: Float[Tensor, " n"]) -> Monomial:
        """Blocks are ordered by the sums of their keys."""
        if not self.blocks:
            return Monomial(torch.argsort(keys, stable=True), torch.ones(self.n, dtype=FLOAT))
        table = keys.reshape(self.blocks, -1)
        order = torch.argsort(table.sum(1), stable=True)
        return Monomial(self._of_blocks(order, torch.argsort(table, dim=1)), torch.ones(self.n, dtype=FLOAT))

    def _allows(self, scale: Tensor) -> bool:
        unit = bool((scale.abs() == 1).all())
        match self.scales:
            case "none":
                return bool((scale == 1).all())
            case "global":
                return unit and bool((scale == scale[0]).all())
            case "signs":
                return unit
            case "positive":
                return bool((scale > TOLERANCE).all())
            case "nonzero":
                return bool((scale.abs() > TOLERANCE).all())

    def project(self, matrix: Float[Tensor, "n n"]) -> Monomial:
        """The permutation that keeps most of the matrix, then the nearest scales its kind allows."""
        matrix = matrix.to(FLOAT)
        if self.scales == "global":
            plain = MonomialGroup(self.n, permute=self.permute)
            both = [(s, plain.project(s * matrix)) for s in (1.0, -1.0)]
            turn, best = max(both, key=lambda pair: float((pair[0] * matrix.gather(1, pair[1].index[:, None])).sum()))
            return Monomial(best.index, turn * best.scale)
        gain = {"none": matrix, "signs": matrix.abs(), "positive": matrix.clamp(min=0) ** 2}
        index = self._assign(gain.get(self.scales, matrix**2))
        kept = matrix.gather(1, index[:, None])[:, 0]
        sign = torch.where(kept < 0, -1.0, 1.0).to(FLOAT)
        size = kept.abs().clamp(min=2 * TOLERANCE)
        scale = {"signs": sign, "positive": kept.clamp(min=2 * TOLERANCE), "nonzero": sign * size}
        return Monomial(index, scale.get(self.scales, torch.ones_like(kept)))

    def nearest(self, overlap: Overlap) -> Monomial:
        """By assignment. Units with scales are compared where the best scale is close to ±1 (balanced); each chosen
        pair then gets its exact one."""
        if not self.permute:
            return self.identity()
        match self.scales:
            case "none":
                return self._unscaled(overlap.self_dual + overlap.permuted)
            case "global":
                return self._either_sign(overlap)
            case "signs":
                index = best_permutation(overlap.permuted + overlap.self_dual.abs())
                kept = _chosen(overlap.self_dual, index)
                return Monomial(index.cpu(), torch.where(kept < 0, -1.0, 1.0).to("cpu", FLOAT))
            case "positive" | "nonzero":
                return self._scaled(overlap)

    def _unscaled(self, benefit: Tensor) -> Monomial:
        index = assign_grouped(-benefit, self.blocks).heads if self.blocks else best_permutation(benefit)
        return Monomial(index.cpu(), torch.ones(self.n, dtype=FLOAT))

    def _either_sign(self, overlap: Overlap) -> Monomial:
        """With the sign of the whole space that gains more."""
        found = []
        for sign in (1, -1):
            benefit = overlap.permuted + sign * overlap.self_dual
            g = self._unscaled(benefit)
            gain = _chosen(benefit, g.index.to(benefit.device)).sum()
            found.append((float(gain), Monomial(g.index, sign * g.scale)))
        return found[0][1] if found[0][0] >= found[1][0] else found[1][1]

    def _scaled(self, overlap: Overlap) -> Monomial:
        """The benefit of a pair at scale ±1; then the exact scale of every chosen pair."""
        signs = self.scales == "nonzero"
        benefit = overlap.self_dual.abs() if signs else overlap.self_dual.clone()
        benefit += overlap.permuted  # in place: the tables of a wide layer are what a sweep needs most memory for
        index = best_permutation(benefit)
        p, q, t = (_chosen(m, index).to(FLOAT) for m in (overlap.primal, overlap.dual, overlap.signed))
        u, d = (s[index].to(FLOAT) for s in (overlap.primal_size, overlap.dual_size))
        scale = best_scales(u, d, p, q, signs=False)
        if signs:
            minus = -best_scales(u, d, -p, -q, signs=False)
            better = scale_cost(u, d, p, q, minus) + 2 * t < scale_cost(u, d, p, q, scale) - 2 * t
            scale = torch.where(better, minus, scale)
        return Monomial(index.cpu(), scale.cpu())

    def _assign(self, gain: Tensor) -> Tensor:
        if not self.permute:
            return torch.arange(self.n)
        return assign_grouped(-gain, self.blocks).heads if self.blocks else assign(-gain)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Scales where the group has them; permutations and signs are not continuous."""
        return {"x": (self.n,)} if self.dim else {}

    def parametrised(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"index": torch.arange(self.n), "scale": parameters["x"].exp()}

    def differentiable(self, tensors: Mapping[str, Tensor]) -> Element:
        return DifferentiableScales(tensors["scale"])

    def element(self, tensors: dict[str, Tensor]) -> Monomial:
        return Monomial(tensors["index"].to(torch.int64), tensors["scale"].to(FLOAT))


def _chosen(table: Float[Tensor, "n n"], index: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The entries of the pairs that an assignment chose."""
    return table.gather(1, index[:, None])[:, 0]


def Permutation(n: int) -> MonomialGroup:
    return MonomialGroup(n)


def SignedPermutation(n: int) -> MonomialGroup:
    return MonomialGroup(n, "signs")


def Trivial(n: int) -> MonomialGroup:
    """Nothing but the identity: a space that the outputs show as it is."""
    return MonomialGroup(n, permute=False)


# -- the scale of a unit: up rows move by s, down columns by 1/s ---------------------------------------------------

_REACH = 6.0  # in log s, either way
_STEPS = 97
_POLISHING = 30


def best_scales(
    u: Float[Tensor, " n"], d: Float[Tensor, " n"], p: Float[Tensor, " n"], q: Float[Tensor, " n"], *, signs: bool
) -> Float[Tensor, " n"]:
    """The s that minimises u s² − 2 p s + d/s² − 2 q/s: u, d the squares of B's rows and columns, p, q their products
    with A's. Searched on a grid of log |s| (for both signs where `signs`), then polished by Newton's method.

    A dead unit, without rows or without columns, takes the scale that is best for what it has; an empty one keeps 1.
    """
    start = torch.log((d / u).clamp(1e-8, 1e8)) / 4  # where B is balanced
    grid = start + torch.linspace(-_REACH, _REACH, _STEPS, dtype=u.dtype, device=u.device)[:, None]
    candidates = [(sign, *_best(u, d, sign * p, sign * q, grid)) for sign in ((1.0, -1.0) if signs else (1.0,))]
    scale, least = candidates[0][1].exp(), candidates[0][2]
    for sign, t, cost in candidates[1:]:
        scale, least = torch.where(cost < least, sign * t.exp(), scale), torch.minimum(cost, least)
    return torch.where((u > 0) & (d > 0), scale, _of_dead(u, d, p, q, signs=signs))


def _of_dead(u: Tensor, d: Tensor, p: Tensor, q: Tensor, *, signs: bool) -> Tensor:
    """u s² − 2 p s alone has its minimum at p/u, d/s² − 2 q/s alone at d/q; within reach, and of a sign it may have."""
    one = torch.ones_like(u)
    by_columns, by_rows = (u == 0) & (d > 0) & (q != 0), (d == 0) & (u > 0) & (p != 0)
    found = torch.where(by_columns, d / torch.where(by_columns, q, one), one)
    found = torch.where(by_rows, p / torch.where(by_rows, u, one), found)
    size = found.abs().clamp(math.exp(-_REACH), math.exp(_REACH))
    return torch.where((found > 0) | signs, found.sign() * size, one)


def _best(u: Tensor, d: Tensor, p: Tensor, q: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    t = grid.gather(0, scale_cost(u, d, p, q, grid.exp()).argmin(0)[None])[0]
    cost = scale_cost(u, d, p, q, t.exp())
    for _ in range(_POLISHING):
        s = t.exp()
        slope = 2 * u * s**2 - 2 * p * s - 2 * d / s**2 + 2 * q / s
        bend = 4 * u * s**2 - 2 * p * s + 4 * d / s**2 - 2 * q / s
        step = (slope / bend.abs().clamp_min(1e-300)).clamp(-0.1, 0.1)
        after = scale_cost(u, d, p, q, (t - step).exp())
        better = after <= cost
        if bool((torch.where(better, t - step, t) == t).all()):  # every unit has settled
            break
        t, cost = torch.where(better, t - step, t), torch.where(better, after, cost)
    return t, cost


def scale_cost(u: Tensor, d: Tensor, p: Tensor, q: Tensor, s: Tensor) -> Tensor:
    """u s² − 2 p s + d/s² − 2 q/s: the squared distance of a unit at scale s, up to a constant."""
    return u * s**2 - 2 * p * s + d / s**2 - 2 * q / s


def balance(u: Float[Tensor, " n"], d: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The scale at which a unit's rows and columns have the same size; 1 where one of them is empty."""
    return torch.where((u > 0) & (d > 0), (d / u.clamp_min(1e-300)) ** 0.25, torch.ones_like(u))
