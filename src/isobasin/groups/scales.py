"""The scale of a unit: up rows move by s, down columns by 1/s."""

import math

import torch
from torch import Tensor

from isobasin.shapes import Float

_REACH = 6.0  # in log s, either way
_STEPS = 97


def best_scales(
    u: Float[Tensor, " n"], d: Float[Tensor, " n"], p: Float[Tensor, " n"], q: Float[Tensor, " n"], *, signs: bool
) -> Float[Tensor, " n"]:
    """The s that minimises u s² − 2 p s + d/s² − 2 q/s: u, d the squares of B's rows and columns, p, q their products
    with A's. Searched on a grid of log |s| (for both signs where `signs`), then polished by Newton's method.

    A dead unit, without rows or without columns, takes the scale that is best for what it has; an empty one keeps 1.
    """
    start = torch.log((d / u).clamp(1e-8, 1e8)) / 4  # where B is balanced
    grid = start + torch.linspace(-_REACH, _REACH, _STEPS, dtype=u.dtype)[:, None]
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
    for _ in range(30):
        s = t.exp()
        slope = 2 * u * s**2 - 2 * p * s - 2 * d / s**2 + 2 * q / s
        bend = 4 * u * s**2 - 2 * p * s + 4 * d / s**2 - 2 * q / s
        step = (slope / bend.abs().clamp_min(1e-300)).clamp(-0.1, 0.1)
        better = scale_cost(u, d, p, q, (t - step).exp()) <= scale_cost(u, d, p, q, s)
        t = torch.where(better, t - step, t)
    return t, scale_cost(u, d, p, q, t.exp())


def scale_cost(u: Tensor, d: Tensor, p: Tensor, q: Tensor, s: Tensor) -> Tensor:
    """u s² − 2 p s + d/s² − 2 q/s: the squared distance of a unit at scale s, up to a constant."""
    return u * s**2 - 2 * p * s + d / s**2 - 2 * q / s


def balance(u: Float[Tensor, " n"], d: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The scale at which a unit's rows and columns have the same size; 1 where one of them is empty."""
    return torch.where((u > 0) & (d > 0), (d / u.clamp_min(1e-300)) ** 0.25, torch.ones_like(u))
