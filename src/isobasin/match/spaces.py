"""The best element of one plain space, given how two models overlap on it: Procrustes, or an assignment."""

import torch
from torch import Tensor

from isobasin.arch import Space
from isobasin.arch.architecture import ROTATED
from isobasin.errors import IsobasinError
from isobasin.groups import Element, Monomial
from isobasin.match.assignment import assign as assign_exactly
from isobasin.match.large_assignment import assign as assign_nearly
from isobasin.match.overlap import Overlap
from isobasin.match.scales import best_scales
from isobasin.symmetries import group_of

EXACT_BELOW = 1024  # bench/assignment.py: here the two solvers take the same time, and scipy less below it


def match_space(space: Space, found: Overlap) -> Element:
    """The g of this space's group that brings g·B closest to A.

    Units with scales are compared balanced (`balanced`), where the best scale is close to ±1; each chosen pair then
    gets its exact one.
    """
    if space.kind in ROTATED:
        return group_of(space).project(found.turning.cpu())
    match space.kind:
        case "fixed":
            return group_of(space).identity()
        case "permutation":
            return _monomial(found.turning + found.magnitude)
        case "permutation±":
            return _either_sign(found)
        case "signed":
            return _signed(found)
        case "positive" | "scaled":
            return _scaled(found, signs=space.kind == "scaled")
    raise IsobasinError(f"{space.name}: no way to match units of kind {space.kind!r}")


def _assigned(benefit: Tensor) -> Tensor:
    """The permutation of largest benefit; for wide layers one that is proven to be within a millionth of it."""
    if len(benefit) <= EXACT_BELOW:
        return assign_exactly(-benefit)
    return assign_nearly(benefit, tolerance=1e-6, start=torch.arange(len(benefit))).index


def _monomial(benefit: Tensor, scale: Tensor | None = None) -> Monomial:
    index = _assigned(benefit)
    return Monomial(index, torch.ones(len(index), dtype=torch.float64) if scale is None else scale)


def _either_sign(found: Overlap) -> Monomial:
    plus, minus = (_monomial(found.magnitude + sign * found.turning) for sign in (1, -1))
    rows = torch.arange(plus.n)
    gains = [
        float((found.magnitude + sign * found.turning).cpu()[rows, g.index].sum())
        for sign, g in ((1, plus), (-1, minus))
    ]
    return plus if gains[0] >= gains[1] else Monomial(minus.index, -minus.scale)


def _signed(found: Overlap) -> Monomial:
    index = _assigned(found.magnitude + found.turning.abs())
    return Monomial(index, _sign(found.turning.cpu()[torch.arange(len(index)), index]))


def _scaled(found: Overlap, *, signs: bool) -> Monomial:
    """Benefit of a pair at scale ±1; then the exact scale of every chosen pair."""
    benefit = found.turning.abs() if signs else found.turning.clone()
    benefit += found.magnitude  # in place: the tables of a wide layer are what a sweep needs most memory for
    index = _assigned(benefit)
    rows = torch.arange(len(index))
    p, q, t = (m.cpu()[rows, index].to(torch.float64) for m in (found.primal, found.dual, found.signed))
    u, d = (s.cpu()[index].to(torch.float64) for s in (found.primal_size, found.dual_size))
    plus = best_scales(u, d, p, q, signs=False)
    if not signs:
        return Monomial(index, plus)
    minus = -best_scales(u, d, -p, -q, signs=False)
    better = _cost(u, d, p, q, minus) + 2 * t < _cost(u, d, p, q, plus) - 2 * t
    return Monomial(index, torch.where(better, minus, plus))


def _cost(u: Tensor, d: Tensor, p: Tensor, q: Tensor, s: Tensor) -> Tensor:
    return u * s**2 - 2 * p * s + d / s**2 - 2 * q / s


def _sign(x: Tensor) -> Tensor:
    return torch.where(x < 0, -1.0, 1.0).to(torch.float64)
