"""The same function without choices that it does not see: models can be compared coordinate by coordinate only there.

`normalize` gives every free coordinate a value that no group element moves: gains one, shifts folded, means and
unseen biases zero. `lightest` does the same for a scope, but behind a gain that stays as it is (BERT's, or that of a
norm outside the scope) it leaves each reader as small as it can be: with zero means it would be the larger for every
gain that is small, and closest would mean closest in what nobody sees.
"""

from collections.abc import Mapping

import torch

from isobasin.gauge import Coordinate, NormCoordinate
from isobasin.symmetries import symmetry
from isobasin.transform import Transform, Value
from isobasin.views import Doubled, View, chain
from isobasin.weights import Weights


def normalize(weights: Weights) -> Transform:
    """The transform that brings every free coordinate to its canonical value.

    >>> flat = normalize(model).apply(model)  # doctest: +SKIP
    """
    tensors = Doubled(weights)
    gauge = {}
    for name, coordinate in symmetry(weights.arch).coordinates.items():
        if coordinate.usable(tensors):
            before = coordinate.read(tensors)
            flat = coordinate.canonical(before) if isinstance(coordinate, NormCoordinate) else torch.zeros_like(before)
            gauge[name] = Value(before, flat)
    return Transform(weights.arch.family, dict(weights.arch.spaces), {}, gauge)


def lightest(weights: Weights, coordinates: Mapping[str, Coordinate]) -> Transform:
    """The transform that brings the coordinates of a scope to the values at which its tensors are least.

    >>> flat = lightest(model, symmetry(model).scoped("first-attention").coordinates).apply(model)  # doctest: +SKIP
    """
    tensors = Doubled(weights)
    free = [c for c in coordinates.values() if c.usable(tensors)]
    norms = {c: c.canonical(c.read(tensors)) for c in free if isinstance(c, NormCoordinate)}
    folded = View(tensors, chain(*(c.set(value) for c, value in norms.items())))
    least = {c: norms[c] if isinstance(c, NormCoordinate) else c.least(folded) for c in free}
    gauge = {c.name: Value(c.read(tensors), value) for c, value in least.items()}
    return Transform(weights.arch.family, dict(weights.arch.spaces), {}, gauge)
