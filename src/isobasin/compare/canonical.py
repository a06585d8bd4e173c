"""One point of every orbit: all models of the same orbit have the same canonical point, up to rounding."""

import torch

from isobasin.action import Action
from isobasin.arch import HeadSpace
from isobasin.compare.frame import frame
from isobasin.compare.normal_form import Form
from isobasin.compare.places import place_heads, place_units
from isobasin.groups import Element, HeadsElement, Monomial
from isobasin.match.canonical import STREAM
from isobasin.symmetries import symmetry
from isobasin.transform import Transform
from isobasin.weights import Weights


def canonical(weights: Weights) -> Transform:
    """The transform that brings a model to the canonical point of its orbit; one part in memory at a time.

    Gains one, shifts folded, means and unseen biases zero; the stream in its canonical frame; Q and K, V and O, up
    and down balanced; heads and units in order, signs and rotations fixed. The function stays as it is.

    It can not be unique where a model has more symmetry than its architecture gives it: equal heads or units, heads of
    deficient rank, a stream that tables and layers do not span. Two units whose keys differ by less than the rounding
    of the file may change places.

    >>> point = canonical(model).apply(model)  # doctest: +SKIP
    """
    form, groups = Form(weights), symmetry(weights.arch).groups
    elements: dict[str, Element] = {STREAM: frame(form)}
    turn = Action(weights.arch, dict(elements))
    for space in form.spaces:
        if space in groups:
            elements[space] = _place(form, space, turn)
    return Transform(weights.arch.family, dict(weights.arch.spaces), elements, form.folding.gauge)


def _place(form: Form, space: str, turn: Action) -> Element:
    """The element of one space: balanced first, then put in its place."""
    balance, tensors = form.balanced(space)
    moved = {name: turn.tensor(name, t.to("cpu", torch.float64)) for name, t in tensors.items()}
    place = form.arch.spaces[space]
    if isinstance(place, HeadSpace):
        assert isinstance(balance, HeadsElement)
        return place_heads(form.arch, place, moved) @ balance
    assert isinstance(balance, Monomial)
    return balance if place.kind == "fixed" else place_units(form.arch, place, moved) @ balance
