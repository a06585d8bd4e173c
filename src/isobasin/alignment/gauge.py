"""B's elements with the free coordinates of A: gains, shifts and unseen biases take the values nearest to A's."""

from collections.abc import Mapping

import torch
from torch import Tensor

from isobasin.groups import Element
from isobasin.groups.monomial import best_scales
from isobasin.symmetries.action import Action
from isobasin.symmetries.coordinate import Coordinate, Stage, has_sum, negligible
from isobasin.symmetries.hidden_coordinates import HiddenColumns
from isobasin.symmetries.norm_coordinates import NormCoordinate
from isobasin.symmetries.normal_form import unheld_norms, unit_rows, unit_shift
from isobasin.symmetries.symmetry import Symmetry
from isobasin.symmetries.transform import Transform, Value
from isobasin.views import AsFloat64, Tensors, View, chain
from isobasin.weights import Weights

SMALLEST_SHARE = 1e-3  # of a shift behind gains of zero that may hold a constant: columns there grow by its inverse


def with_reference_gauge(
    a: Weights,
    b: Weights,
    part: Symmetry,
    elements: Mapping[str, Element],
    device: torch.device,
    *,
    fold_norms: bool = False,
    own_values: bool = False,
) -> Transform:
    """The elements, with every free coordinate at the value nearest to A's, and units scaled to A's own.

    Where `fold_norms`, gains and shifts stay folded instead of taking A's values. Where `own_values`, the other
    coordinates keep B's: those of A may be so large that B's weights are lost beside them.
    """
    reference, moving = AsFloat64(a, device), AsFloat64(b, device)
    uneven = unit_shift({name: c for name, c in unheld_norms(a, b).items() if name in part.coordinates})
    folded = [View(tensors, uneven) for tensors in (reference, moving)]
    coordinates = [c for c in part.coordinates.values() if _is_used(c, *folded)]
    view, gauge = _set_coordinates(b, elements, coordinates, reference, moving, fold_norms, own_values)
    scaled = [name for name in elements if b.arch.spaces[name].scales]
    if scaled:
        elements = {**elements, **{name: _rescaled(name, elements[name], view, reference, b) for name in scaled}}
        view, gauge = _set_coordinates(b, elements, coordinates, reference, moving, fold_norms, own_values)
    return Transform(b.arch.family, dict(b.arch.spaces), elements, gauge)


def _set_coordinates(
    b: Weights,
    elements: Mapping[str, Element],
    coordinates: list[Coordinate],
    reference: Tensors,
    moving: Tensors,
    fold_norms: bool,
    own_values: bool,
) -> tuple[Tensors, dict[str, Value]]:
    """B after the elements have acted on its folded form, with the coordinates set one stage after the other."""
    norms = {c: _factor(c, moving, reference) for c in coordinates if c.folds}
    if fold_norms:
        norms = {c: c.canonical(value) for c, value in norms.items()}
    flat = View(moving, chain(*(c.set(c.canonical(value)) for c, value in norms.items())))
    view: Tensors = View(flat, Action(b.arch, elements).changes())
    gauge: dict[str, Value] = {}
    for stage in Stage:
        chosen = [c for c in coordinates if c.stage == stage]
        # A reader's mean is set before its norm, but what is nearest shows only behind A's own gain and shift.
        seen = View(view, chain(*(c.set(value) for c, value in norms.items()))) if stage < Stage.NORM else view
        after = {c: norms[c] if c.folds else c.read(seen) if own_values else c.nearest(seen, reference) for c in chosen}
        for c, value in after.items():
            before = c.rows(moving) if isinstance(c, NormCoordinate) else c.read(moving)
            gauge[c.name] = Value((before[: len(value)] if before.dim() else before).cpu(), value.cpu())
        view = View(view, chain(*(c.set(value) for c, value in after.items()))) if chosen else view
    return view, gauge


def _is_used(c: Coordinate, reference: Tensors, moving: Tensors) -> bool:
    """Free in both models; columns behind a zero gain of one of them take A's values, or come back in the inverse."""
    if isinstance(c, HiddenColumns):
        return c.usable(reference) or c.usable(moving)
    return c.usable(reference) and c.usable(moving)


def _factor(c: Coordinate, moving: Tensors, reference: Tensors) -> Tensor:
    return _gain_and_shift(c, moving, reference) if isinstance(c, NormCoordinate) else c.read(reference)


def _gain_and_shift(c: NormCoordinate, moving: Tensors, reference: Tensors) -> Tensor:
    """A's gain, and its shift unless A's readers can not take it up, or those of neither model hold a constant.

    B's shift behind a gain of zero can not move with the gain alone: where A's readers can not take it up, it stays
    folded.
    """
    mine, other = c.read(moving), c.read(reference)
    if len(mine) != len(other) and c.is_level(moving) and c.is_level(reference):
        gain, shift = c.rows(reference)
        return torch.stack([gain, shift] if has_sum(gain, shift) else [gain])
    if c.lacks_bias and _hidden_share(c, reference) < SMALLEST_SHARE:
        other = other[:1]
    if len(other) < len(mine) and bool(negligible(moving[c.norm.gain]).any()):
        return c.canonical(mine)
    return other[: len(mine)]


def _hidden_share(c: NormCoordinate, tensors: Tensors) -> float:
    """The share of the shift that lies behind gains of zero; one where there are none."""
    hidden, shift = negligible(tensors[c.norm.gain]), tensors[c.norm.shift]
    return float((shift * hidden).norm() / shift.norm().clamp_min(1e-300)) if bool(hidden.any()) else 1.0


def _rescaled(name: str, g: Element, view: Tensors, reference: Tensors, b: Weights) -> Element:
    """The unit scales that are best beside A as it is, gains and all; folded forms weigh inputs differently."""
    arch, sums = b.arch, {key: torch.zeros(g.n, dtype=torch.float64) for key in ("u", "d", "p", "q")}
    blocks = [{tensor: t[tensor] for tensor in arch.blocks[name]} for t in (view, reference)]
    rows = [{(n, move): x for n, x, move in unit_rows(arch, name, block)} for block in blocks]
    for (tensor, move), mine in rows[0].items():
        size, product = {"primal": ("u", "p"), "dual": ("d", "q"), "permuted": (None, None)}[move]
        if size is not None and product is not None:
            sums[size] += mine.square().sum(1).cpu()
            sums[product] += (mine * rows[1][tensor, move]).sum(1).cpu()
    return g.rescaled(best_scales(**sums, signs=arch.spaces[name].signs))
