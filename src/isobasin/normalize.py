"""The same function in canonical form: gains one, shifts folded, means removed, unseen biases zero.

Two models can be compared coordinate by coordinate only where neither carries choices its function does not see.
"""

from collections.abc import Iterable

import torch

from isobasin.gauge import NormCoordinate
from isobasin.symmetries import symmetry
from isobasin.transform import Transform, Value
from isobasin.views import Doubled
from isobasin.weights import Weights


def normalize(weights: Weights, only: Iterable[str] | None = None) -> Transform:
    """The transform that brings every free coordinate (or those named) to its canonical value.

    >>> flat = normalize(model).apply(model)  # doctest: +SKIP
    """
    tensors = Doubled(weights)
    chosen = None if only is None else set(only)
    gauge = {}
    for name, coordinate in symmetry(weights.arch).coordinates.items():
        if (chosen is None or name in chosen) and coordinate.usable(tensors):
            before = coordinate.read(tensors)
            flat = coordinate.canonical(before) if isinstance(coordinate, NormCoordinate) else torch.zeros_like(before)
            gauge[name] = Value(before, flat)
    return Transform(weights.arch.family, dict(weights.arch.spaces), {}, gauge)
