"""`align`: one entry for every scope and every matcher."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch

from isobasin.alignment.candidates import AlignOptions
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.result import Alignment
from isobasin.alignment.trunk import trunk_pair
from isobasin.display import notebook_progress
from isobasin.weights import ModelSource, Weights, load


@runtime_checkable
class Matcher(Protocol):
    """A way to find the element: a frozen choice whose constructor only stores."""

    @property
    def scope(self) -> str: ...

    @property
    def fixed_basis(self) -> bool:
        """Whether it holds for B in the basis that it was prepared in, and not for B moved already."""

    def prepared(self, a: Weights, b: Weights) -> "Matcher":
        """The same with all that it needs to know of the two models, for several alignments of them."""

    def align(self, b: Weights, a: Weights, options: AlignOptions) -> Alignment: ...


def align(
    b: ModelSource,
    *,
    to: ModelSource,
    matcher: Matcher | None = None,
    dtype: str = "auto",
    device: torch.device | str | None = None,
    workers: int = 1,
    verify: bool = True,
    only_if_closer: bool = True,
    watch: Callable[[int, int], None] | None = None,
) -> Alignment:
    """Find the element of B's symmetry group that brings B closest to A (`to`). Both models are only read.

    >>> found = align(b, to=a)  # doctest: +SKIP
    >>> moved = found.transform.apply(b)  # doctest: +SKIP

    The result is B in A's own gauge: with A's gains, shifts and free biases where that is closer. `matcher` is
    `WeightMatching()` unless given: the whole model, from the weights alone; see `AlignOptions` for the rest.
    Models that differ only in their heads, or in rows of the vocabulary, are matched on what they share; the transform
    is one of B with its own head, and `left_out` names what took no part.
    """
    place = torch.device(device or "cpu")
    first, second = load(to), load(b)
    if workers == 1:  # others read for themselves
        first, second = first.resident(place), second.resident(place)
    pair = trunk_pair(first, second)
    chosen = matcher or WeightMatching()
    with notebook_progress("aligning", watch) as shown:
        options = AlignOptions(dtype, place, workers, verify, only_if_closer, shown)
        if pair is None:
            return chosen.align(second, first, options)
        found = chosen.align(pair.b, pair.a, options)
    return replace(found, transform=pair.of_whole(found.transform, second), left_out=pair.left_out)
