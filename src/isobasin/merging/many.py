"""Several models brought together: each next to one of them, or all to their common mean.

Every model i has one transform Tᵢ into one common frame. From model i to model j leads Tⱼ⁻¹ Tᵢ and nothing else: a
way around any cycle, i → j → k → i, is the identity by construction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from isobasin.errors import IsobasinError
from isobasin.match.align import align
from isobasin.match.alignment import Alignment
from isobasin.match.comparable import check_comparable
from isobasin.match.matchers import ActivationMatching, Matcher
from isobasin.merging.gathering import at_hand, mean_of, scope_tensors, spread_of, square_between
from isobasin.symmetries import symmetry
from isobasin.transform import Transform, Value
from isobasin.views import Doubled
from isobasin.weights import Weights

FALL = 1e-6  # a round that lowers the objective by a smaller share is the last
FLOOR = 1e-12  # an objective below this share of ‖mean‖² is rounding
ROUNDS = 10

MatcherFor = Callable[[Weights, Weights], Matcher]  # (reference, moving)
Aligner = Callable[[Weights, Weights], Alignment]  # (moving, reference)
Watch = Callable[[int, int], None]


@dataclass(frozen=True)
class Distance:
    """How far a model is from what it was aligned to, as a share of that one's norm, over the scope's tensors."""

    before: float
    after: float


@dataclass(frozen=True)
class Many:
    """Models, and the transform that takes each into the common frame; the identity where one stayed.

    `history` is the objective Σᵢ ‖Tᵢθᵢ − mean‖² after each round, empty where the frame is one model's. `alignments`
    tell how each was first found, None for the model that stayed.
    """

    models: tuple[Weights, ...]
    transforms: tuple[Transform, ...]
    distances: tuple[Distance, ...]
    history: tuple[float, ...] = ()
    alignments: tuple[Alignment | None, ...] = ()
    device: torch.device | None = None

    @property
    def rounds(self) -> int:
        return max(1, len(self.history))

    @cached_property
    def moved(self) -> tuple[Weights, ...]:
        """Every model in the common frame, computed where it is read; its function is what it was."""
        return tuple(_applied(t, m, self.device) for t, m in zip(self.transforms, self.models))

    @property
    def mean(self) -> Weights:
        """The mean of the models in the common frame, computed where it is read."""
        return mean_of(self.moved)

    def between(self, i: int, j: int) -> Transform:
        """Tⱼ⁻¹ Tᵢ: takes model i next to model j, in j's own gauge (its gains, its free biases).

        >>> many.between(0, 1).apply(a)  # doctest: +SKIP
        """
        count = len(self.models)
        for k in (i, j):
            if not 0 <= k < count:
                raise IsobasinError(f"model {k}: expected a number from 0 to {count - 1}")
        if i == j:
            return _identity(self.models[i])
        return self._gauged[j].inverse().compose(self._gauged[i], self.models[0].arch)

    @cached_property
    def _gauged(self) -> tuple[Transform, ...]:
        """The same transforms, each with a value for every coordinate that one of them sets: a cycle then ends at the
        values where it began, and not at those that another transform leaves behind."""
        free = symmetry(self.models[0].arch).coordinates
        named = dict.fromkeys(name for t in self.transforms for name in t.gauge)
        usable = [n for n in named if all(free[n].usable(Doubled(m)) for m in (*self.models, *self.moved))]
        values = [{name: self._value(k, name) for name in usable} for k in range(len(self.models))]
        # A norm may show its gain alone in one model, gain and shift in another: what all of them show is set.
        rows = {name: min(_height(v[name]) for v in values) for name in usable}
        return tuple(
            Transform(t.family, t.spaces, t.elements, {name: _cut(v[name], rows[name]) for name in usable})
            for t, v in zip(self.transforms, values)
        )

    def _value(self, k: int, name: str) -> Value:
        if name in self.transforms[k].gauge:
            return self.transforms[k].gauge[name]
        coordinate = symmetry(self.models[k].arch).coordinates[name]
        before, after = (coordinate.read(Doubled(m)).cpu() for m in (self.models[k], self.moved[k]))
        return _cut(Value(before, after), min(map(_rows, (before, after))))

    def __str__(self) -> str:
        pairs = ", ".join(f"{d.before:.4g} → {d.after:.4g}" for d in self.distances)
        frame = f"their mean in {self.rounds} rounds" if self.history else "one of them"
        return f"{len(self.models)} models aligned to {frame}, distances {pairs}"


def align_many(
    models: Sequence[Weights],
    *,
    matcher: Matcher | MatcherFor | None = None,
    to: int | str = 0,
    rounds: int = ROUNDS,
    aligner: Aligner | None = None,
    device: torch.device | None = None,
    watch: Watch | None = None,
) -> Many:
    """Align every model to model `to`, or (`to="mean"`) all but the first to the mean of them all, again and again.

    A matcher that depends on the pair is given as a function of (reference, moving). An `aligner`, a function of
    (moving, reference), takes the place of matcher and `align`; it can not align to a mean. `rounds` is the most that a
    mean may take. Models and mean are read tensor by tensor; models of up to 2²⁷ numbers together (1 GB in float64) are
    held in memory while their mean is sought.

    >>> many = align_many([a, b, c], to="mean", matcher=WeightMatching(scope="model"))  # doctest: +SKIP
    >>> many.between(1, 2).apply(b)  # b next to c  # doctest: +SKIP
    """
    models = tuple(models)
    _check(models, to, rounds, (matcher is None) == (aligner is None), aligner)
    one = to if isinstance(to, int) else 0
    if aligner is not None:
        return _Steps(models, (None,) * len(models), device, watch).to_one(one, aligner)
    assert matcher is not None
    made = [
        None if i == one else matcher(models[one], m) if callable(matcher) else matcher for i, m in enumerate(models)
    ]
    steps = _Steps(models, tuple(made), device, watch)
    return steps.to_one(one) if to != "mean" else steps.to_mean(rounds)


def _check(models: tuple[Weights, ...], to: int | str, rounds: int, unclear: bool, aligner: Aligner | None) -> None:
    if len(models) < 2:
        raise IsobasinError(f"{len(models)} model to align: expected two or more")
    if not (to == "mean" or (type(to) is int and 0 <= to < len(models))):
        raise IsobasinError(f"align to {to!r}: expected mean, or the number of a model from 0 to {len(models) - 1}")
    if rounds < 1:
        raise IsobasinError(f"rounds {rounds}: expected 1 or more")
    if unclear:
        raise IsobasinError("align_many takes a matcher or an aligner, expected one of the two")
    if aligner is not None and to == "mean":
        raise IsobasinError(
            "align to the mean: what lowers losses need not come nearer, and a mean needs that; give a model's number"
        )
    for model in models[1:]:
        check_comparable(models[0], model)


@dataclass(frozen=True)
class _Steps:
    """The models, and the matcher of each that may move."""

    models: tuple[Weights, ...]
    matchers: tuple[Matcher | None, ...]
    device: torch.device | None
    watch: Watch | None

    def align(self, i: int, moving: Weights, to: Weights) -> Alignment:
        matcher = self.matchers[i]
        assert matcher is not None
        return align(moving, to=to, matcher=matcher, device=self.device, watch=self.watch)

    def to_one(self, to: int, aligner: Aligner | None = None) -> Many:
        one = self.models[to]
        found = [
            None if i == to else aligner(model, one) if aligner else self.align(i, model, one)
            for i, model in enumerate(self.models)
        ]
        moves = tuple(_identity(m) if a is None else a.transform for a, m in zip(found, self.models))
        far = tuple(Distance(0.0, 0.0) if a is None else Distance(a.distance_before, a.distance_after) for a in found)
        return Many(self.models, moves, far, (), tuple(found), self.device)

    def to_mean(self, rounds: int) -> Many:
        """Minimise J = Σᵢ ‖Tᵢθᵢ − m‖², m their mean, T₀ = 1: models to the mean, then the mean of the models …

        The first model stays where it is, so the mean keeps its gauge. Neither step raises J: a new Tᵢ is taken only
        where it is closer to m than the old one, and the mean is the point with the least sum of squares.
        """
        names = scope_tensors(self.models[0], next(m.scope for m in self.matchers if m is not None))
        before = spread_of(self.models, names)
        first = self.to_one(0)
        moves, moved = list(first.transforms), [at_hand(m, len(self.models)) for m in first.moved]
        spread = spread_of(moved, names)
        history = [spread.total]
        while len(history) < rounds and spread.total > FLOOR * spread.norm:
            mean = mean_of(tuple(moved))  # of this round: a tuple of its own
            for i in range(1, len(moved)):
                new = self._nearer(i, moves[i], moved[i], mean)
                there = at_hand(_applied(new, self.models[i], self.device), len(moved))
                if square_between(there, mean, names) < square_between(moved[i], mean, names):
                    moves[i], moved[i] = new, there
            spread = spread_of(moved, names)
            history.append(spread.total)
            if history[-2] - history[-1] <= FALL * history[-2]:
                break
        distances = tuple(Distance(*pair) for pair in zip(before.distances, spread.distances))
        return Many(self.models, tuple(moves), distances, tuple(history), first.alignments, self.device)

    def _nearer(self, i: int, old: Transform, moved: Weights, mean: Weights) -> Transform:
        """From where the model lies now; but tables of agreement speak of its coordinates as they were given."""
        matcher = self.matchers[i]
        if isinstance(matcher, ActivationMatching) and matcher.agreements:
            return self.align(i, self.models[i], mean).transform
        return self.align(i, moved, mean).transform.compose(old, mean.arch)


def _identity(model: Weights) -> Transform:
    return Transform(model.arch.family, dict(model.arch.spaces))


def _applied(transform: Transform, model: Weights, device: torch.device | None) -> Weights:
    """The moved model; one that nothing moves stays the very same."""
    return transform.apply(model, device=device) if transform.elements or transform.gauge else model


def _rows(value: torch.Tensor) -> int:
    return len(value) if value.dim() else 1


def _height(value: Value) -> int:
    return _rows(value.before)


def _cut(value: Value, rows: int) -> Value:
    return Value(*(v[:rows] if v.dim() else v for v in (value.before, value.after)))
