"""B's elements with the free coordinates of A: gains, shifts and unseen biases take the values nearest to A's."""

from collections.abc import Mapping

import torch
from torch import Tensor

from isobasin.groups import Element
from isobasin.groups.monomial import best_scales
from isobasin.symmetries.action import Action
from isobasin.symmetries.coordinate import Coordinate, Stage
from isobasin.symmetries.norm_coordinates import NormCoordinate
from isobasin.symmetries.normal_form import unit_rows
from isobasin.symmetries.symmetry import Symmetry
from isobasin.symmetries.transform import Transform, Value
from isobasin.views import AsFloat64, Tensors, View, chain
from isobasin.weights import Weights


def with_reference_gauge(
    a: Weights,
    b: Weights,
    part: Symmetry,
    elements: Mapping[str, Element],
    device: torch.device,
    *,
    fold_norms: bool = False,
) -> Transform:
    """The elements, with every free coordinate at the value nearest to A's, and units scaled to A's own.

    Where `fold_norms`, gains and shifts stay folded instead of taking A's values.
    """
    reference, moving = AsFloat64(a, device), AsFloat64(b, device)
    coordinates = [c for c in part.coordinates.values() if c.usable(reference) and c.usable(moving)]
    view, gauge = _set_coordinates(b, elements, coordinates, reference, moving, fold_norms)
    scaled = [name for name in elements if b.arch.spaces[name].scales]
    if scaled:
        elements = {**elements, **{name: _rescaled(name, elements[name], view, reference, b) for name in scaled}}
        view, gauge = _set_coordinates(b, elements, coordinates, reference, moving, fold_norms)
    return Transform(b.arch.family, dict(b.arch.spaces), elements, gauge)


def _set_coordinates(
    b: Weights,
    elements: Mapping[str, Element],
    coordinates: list[Coordinate],
    reference: Tensors,
    moving: Tensors,
    fold_norms: bool,
) -> tuple[Tensors, dict[str, Value]]:
    """B after the elements have acted on its folded form, with the coordinates set one stage after the other."""
    norms = {c: _gain_and_shift(c, moving, reference) for c in coordinates if isinstance(c, NormCoordinate)}
    if fold_norms:
        norms = {c: c.canonical(value) for c, value in norms.items()}
    flat = View(moving, chain(*(c.set(c.canonical(value)) for c, value in norms.items())))
    view: Tensors = View(flat, Action(b.arch, elements).changes())
    gauge: dict[str, Value] = {}
    for stage in Stage:
        chosen = [c for c in coordinates if c.stage == stage]
        # A reader's mean is set before its norm, but what is nearest shows only behind A's own gain and shift.
        seen = View(view, chain(*(c.set(value) for c, value in norms.items()))) if stage < Stage.NORM else view
        after = {c: norms[c] if isinstance(c, NormCoordinate) else c.nearest(seen, reference) for c in chosen}
        for c, value in after.items():
            before = c.read(moving)
            gauge[c.name] = Value((before[: len(value)] if before.dim() else before).cpu(), value.cpu())
        view = View(view, chain(*(c.set(value) for c, value in after.items()))) if chosen else view
    return view, gauge


def _gain_and_shift(c: NormCoordinate, moving: Tensors, reference: Tensors) -> Tensor:
    """A's gain, and its shift unless one of the two models has one that its readers can not take up."""
    return c.read(reference)[: len(c.read(moving))]


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
