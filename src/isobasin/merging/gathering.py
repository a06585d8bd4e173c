"""Bringing several models together before they are mixed: each next to one of them, or all to their common mean."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.match.align import align
from isobasin.match.alignment import Alignment
from isobasin.match.matchers import Matcher
from isobasin.symmetries import symmetry
from isobasin.views import Doubled
from isobasin.weights import Weights

FALL = 1e-6  # a round that lowers the objective by a smaller share is the last
FLOOR = 1e-12  # an objective below this share of ‖mean‖² is rounding

MatcherFor = Callable[[Weights, Weights], Matcher]  # (reference, moving)


@dataclass(frozen=True)
class Distance:
    """How far a model is from what it was aligned to, as a share of that one's norm, over the scope's tensors."""

    before: float
    after: float


@dataclass(frozen=True)
class Gathered:
    """The models, moved; what moved them (None: it stayed); and the objective after each round for a common mean."""

    models: tuple[Weights, ...]
    alignments: tuple[Alignment | None, ...]
    distances: tuple[Distance, ...]
    rounds: int
    objective: tuple[float, ...] = ()


def gather(
    models: Sequence[Weights],
    matchers: MatcherFor,
    *,
    to: int | str,
    rounds: int,
    device: torch.device | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Gathered:
    """Align every model to model `to`, or (`to="mean"`) all but the first to the mean of them all, again and again."""
    one = to if isinstance(to, int) else 0
    chosen = [None if i == one else matchers(models[one], model) for i, model in enumerate(models)]
    steps = _Steps(tuple(models), tuple(chosen), device, watch)
    return steps.to_one(one) if to != "mean" else steps.to_mean(rounds)


@dataclass(frozen=True)
class _Steps:
    """The models, and the matcher of each that may move."""

    models: tuple[Weights, ...]
    matchers: tuple[Matcher | None, ...]
    device: torch.device | None
    watch: Callable[[int, int], None] | None

    def align(self, i: int, to: Weights) -> Alignment | None:
        matcher = self.matchers[i]
        if matcher is None:
            return None
        return align(self.models[i], to=to, matcher=matcher, device=self.device, watch=self.watch)

    def moved(self, i: int, found: Alignment | None) -> Weights:
        return self.models[i] if found is None else found.transform.apply(self.models[i], device=self.device)

    def to_one(self, to: int) -> Gathered:
        found = [self.align(i, self.models[to]) for i in range(len(self.models))]
        moved = tuple(self.moved(i, a) for i, a in enumerate(found))
        far = tuple(Distance(0.0, 0.0) if a is None else Distance(a.distance_before, a.distance_after) for a in found)
        return Gathered(moved, tuple(found), far, 1)

    def to_mean(self, rounds: int) -> Gathered:
        """Minimise J = Σᵢ ‖gᵢθᵢ − m‖², m their mean, g₀ = 1: models to the mean, then the mean of the models …

        The first model stays where it is, so the mean keeps its gauge. Neither step raises J: a new gᵢ is taken only
        where it is closer to m than the old one, and the mean is the point with the least sum of squares.
        """
        names = scope_tensors(self.models[0], next(m.scope for m in self.matchers if m is not None))
        before = _spread(self.models, names)
        first = self.to_one(0)
        found, moved = list(first.alignments), list(first.models)
        spread = _spread(moved, names)
        objective = [spread.total]
        while len(objective) < rounds and spread.total > FLOOR * spread.norm:
            mean = replace(self.models[0], tensors=Mean(tuple(moved)))  # of this round: a tuple of its own
            for i in range(1, len(moved)):
                new = self.align(i, mean)
                there = self.moved(i, new)
                if _square(there, mean, names) < _square(moved[i], mean, names):
                    found[i], moved[i] = new, there
            spread = _spread(moved, names)
            objective.append(spread.total)
            if objective[-2] - objective[-1] <= FALL * objective[-2]:
                break
        distances = tuple(Distance(*pair) for pair in zip(before.distances, spread.distances))
        return Gathered(tuple(moved), tuple(found), distances, len(objective), tuple(objective))


class Mean(Mapping[str, Tensor]):
    """The mean of several models, tensor by tensor, in float64; buffers are the first model's."""

    def __init__(self, models: tuple[Weights, ...]) -> None:
        self._models = models

    def __getitem__(self, name: str) -> Tensor:
        first = self._models[0]
        if first.arch.tensors[name].buffer:
            return first[name]
        return sum((Doubled(m)[name].cpu() for m in self._models[1:]), Doubled(first)[name].cpu()) / len(self._models)

    def __iter__(self) -> Iterator[str]:
        return iter(self._models[0])

    def __len__(self) -> int:
        return len(self._models[0])


@dataclass(frozen=True)
class _Spread:
    """Squared distances of models from their mean, and the square of its norm."""

    squares: tuple[float, ...]
    norm: float

    @property
    def total(self) -> float:
        return sum(self.squares)

    @property
    def distances(self) -> list[float]:
        return [(square / max(self.norm, 1e-300)) ** 0.5 for square in self.squares]


def _spread(models: Sequence[Weights], names: Sequence[str]) -> _Spread:
    squares, norm = [0.0] * len(models), 0.0
    for name in names:
        tensors = [Doubled(model)[name].cpu() for model in models]
        mean = sum(tensors[1:], tensors[0]) / len(tensors)
        squares = [s + float((t - mean).square().sum()) for s, t in zip(squares, tensors)]
        norm += float(mean.square().sum())
    return _Spread(tuple(squares), norm)


def _square(model: Weights, mean: Weights, names: Sequence[str]) -> float:
    return sum(float((Doubled(model)[name].cpu() - mean[name]).square().sum()) for name in names)


def scope_tensors(model: Weights, scope: str) -> tuple[str, ...]:
    """The weights that a scope's symmetry may change."""
    part, arch = symmetry(model.arch).scoped(scope), model.arch
    free = {name for coordinate in part.coordinates.values() for name in coordinate.touches}
    return tuple(
        name
        for name, pattern in arch.tensors.items()
        if not pattern.buffer
        and (
            name in free
            or any(
                arch.space_of(term).name in part.groups
                for role in pattern.roles
                for axis in role.axes
                for term in axis.terms
            )
        )
    )
