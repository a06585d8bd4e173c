"""Joint alignment of several models: all to one of them, or all to their mean.

Every model i has one transform Tᵢ into a common frame. The transform from model i to model j is Tⱼ⁻¹ Tᵢ, so the
composition around any cycle, i → j → k → i, is the identity by construction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from isobasin.alignment.align import Matcher, align
from isobasin.alignment.comparable import check_comparable
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.result import Alignment
from isobasin.alignment.trunk import trunk_pair
from isobasin.arguments import checks_arguments
from isobasin.display import Shown, Summary
from isobasin.errors import IsobasinError
from isobasin.merging.recipe import MAX_ROUNDS, check_reference
from isobasin.symmetries import symmetry
from isobasin.symmetries.transform import Transform, Value
from isobasin.views import AsFloat64, Change, View
from isobasin.weights import ModelSource, Weights, load

MIN_DECREASE = 1e-6  # the rounds end with one that lowers the objective by a smaller share
ROUNDING = 1e-12  # an objective below this share of ‖mean‖² is rounding error
MAX_HELD = 2**27  # numbers of all models together, up to which moved models are held in memory (in float64)

Aligner = Callable[[Weights, Weights], Alignment]  # (moving, reference)


@dataclass(frozen=True)
class Distance:
    """The distance of a model from its reference, relative to the norm of that, over the tensors of the scope."""

    before: float
    after: float


@dataclass(frozen=True, repr=False)
class JointAlignment(Shown):
    """Models, and the transform of each into the common frame; the identity for a model that stays.

    `history` is the objective Σᵢ ‖Tᵢθᵢ − mean‖² after each round, empty if the frame is that of one model.
    `alignments` are the first alignments found, None for a model that stays.
    """

    models: tuple[Weights, ...]
    transforms: tuple[Transform, ...]
    distances: tuple[Distance, ...]
    history: tuple[float, ...] = ()
    alignments: tuple[Alignment | None, ...] = ()
    device: torch.device | None = None
    scope: str | None = None

    def summary(self) -> Summary:
        """The distance of every model from the common frame."""
        rows = [(i, f"{d.before:.4g}", f"{d.after:.4g}") for i, d in enumerate(self.distances)]
        return Summary(str(self), {"scope": self.scope or "given"}, ("model", "before", "after"), rows)

    @property
    def rounds(self) -> int:
        return max(1, len(self.history))

    @cached_property
    def transported(self) -> tuple[Weights, ...]:
        """Every model in the common frame, computed when a tensor is read; the functions are unchanged."""
        return tuple(_applied(t, m, self.device) for t, m in zip(self.transforms, self.models))

    @property
    def mean(self) -> Weights:
        """The mean of the models in the common frame, computed when a tensor is read."""
        return mean_of(self.transported)

    @checks_arguments
    def between(self, i: int, j: int) -> Transform:
        """Tⱼ⁻¹ Tᵢ: takes model i to model j, in the gauge of j (its gains and free biases)."""
        count = len(self.models)
        for k in (i, j):
            if not 0 <= k < count:
                raise IsobasinError(f"model {k}: expected a number from 0 to {count - 1}")
        if i == j:
            return _identity(self.models[i])
        return self._with_all_values[j].inverse().compose(self._with_all_values[i], self.models[0].arch)

    @cached_property
    def _with_all_values(self) -> tuple[Transform, ...]:
        """The transforms, each with a value for every coordinate that any of them sets.

        A cycle then returns to the values of its first model, and not to values that another transform left behind.
        """
        free = symmetry(self.models[0].arch).coordinates
        named = dict.fromkeys(name for t in self.transforms for name in t.gauge)
        usable = [n for n in named if all(free[n].usable(AsFloat64(m)) for m in (*self.models, *self.transported))]
        values = [{name: self._value(k, name) for name in usable} for k in range(len(self.models))]
        # A norm may have only a gain in one model, and gain and shift in another: only what all have is set.
        rows = {name: min(_rows(v[name].before) for v in values) for name in usable}
        return tuple(
            Transform(t.family, t.spaces, t.elements, {name: _cut(v[name], rows[name]) for name in usable})
            for t, v in zip(self.transforms, values)
        )

    def _value(self, k: int, name: str) -> Value:
        if name in self.transforms[k].gauge:
            return self.transforms[k].gauge[name]
        coordinate = symmetry(self.models[k].arch).coordinates[name]
        before, after = (coordinate.read(AsFloat64(m)).cpu() for m in (self.models[k], self.transported[k]))
        return _cut(Value(before, after), min(_rows(before), _rows(after)))

    def __str__(self) -> str:
        pairs = ", ".join(f"{d.before:.4g} → {d.after:.4g}" for d in self.distances)
        frame = f"their mean in {self.rounds} rounds" if self.history else "one of them"
        return f"{len(self.models)} models aligned to {frame}, distances {pairs}"


def _rows(value: Tensor) -> int:
    return len(value) if value.dim() else 1


def _cut(value: Value, rows: int) -> Value:
    return Value(*(v[:rows] if v.dim() else v for v in (value.before, value.after)))


def align_many(
    models: Sequence[ModelSource],
    *,
    matcher: Matcher | None = None,
    to: int | str = 0,
    rounds: int = MAX_ROUNDS,
    aligner: Aligner | None = None,
    device: torch.device | str | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> JointAlignment:
    """Align every model to model `to`, or (`to="mean"`) all but the first to the mean of all, at most `rounds` times.

    The matcher is `WeightMatching()` unless given. An `aligner`, a function of (moving, reference), replaces matcher
    and `align`; it can not align to a mean. Models and mean are read tensor by tensor; models of up to 2²⁷ numbers
    together (1 GB in float64) are held in memory during the alignment to a mean.
    """
    given, place = tuple(map(load, models)), None if device is None else torch.device(device)
    if len(given) < 2:
        raise IsobasinError(f"{len(given)} model to align: expected two or more")
    check_reference(to, len(given))
    if rounds < 1:
        raise IsobasinError(f"rounds {rounds}: expected 1 or more")
    if matcher is not None and aligner is not None:
        raise IsobasinError("align_many: a matcher and an aligner are given, expected at most one of the two")
    if aligner is not None and to == "mean":
        raise IsobasinError(
            "align to the mean: what lowers losses need not come nearer, and a mean needs that; give a model's number"
        )
    for model in given[1:]:
        if to == "mean" or trunk_pair(given[0], model) is None:  # a mean needs all tensors of all models
            check_comparable(given[0], model)
    reference = to if isinstance(to, int) else 0
    chosen = matcher or (WeightMatching() if aligner is None else None)
    matchers = [
        None if i == reference or chosen is None else chosen.prepared(given[reference], m) for i, m in enumerate(given)
    ]

    def align_one(i: int, moving: Weights, target: Weights) -> Alignment:
        prepared = matchers[i]
        if prepared is None:
            assert aligner is not None
            return aligner(moving, target)
        return align(moving, to=target, matcher=prepared, device=place, watch=watch)

    found = [None if i == reference else align_one(i, m, given[reference]) for i, m in enumerate(given)]
    aligned = JointAlignment(
        given,
        tuple(_identity(m) if a is None else a.transform for a, m in zip(found, given)),
        tuple(Distance(0.0, 0.0) if a is None else Distance(a.distance_before, a.distance_after) for a in found),
        alignments=tuple(found),
        device=place,
        scope=next((m.scope for m in matchers if m is not None), None),
    )
    return _to_mean(aligned, matchers, align_one, rounds) if to == "mean" else aligned


def _to_mean(
    first: JointAlignment,
    matchers: Sequence[Matcher | None],
    align_one: Callable[[int, Weights, Weights], Alignment],
    rounds: int,
) -> JointAlignment:
    """Minimise J = Σᵢ ‖Tᵢθᵢ − m‖², m the mean of all Tᵢθᵢ and T₀ = 1, over the transforms and the mean in turn.

    The first model stays, so the mean keeps its gauge. Neither step raises J: a new Tᵢ is taken only if it is closer to
    m than the old one, and the mean is the point with the least sum of squares.
    """
    assert first.scope is not None
    models, names = first.models, sorted(symmetry(first.models[0].arch).scoped(first.scope).tensors)

    def held(model: Weights) -> Weights:
        return model.held(model) if len(models) * model.n_params <= MAX_HELD else model

    transforms, moved = list(first.transforms), [held(m) for m in first.transported]
    squares, norm = _squares_from_mean(moved, names)
    history = [sum(squares)]
    while len(history) < rounds and history[-1] > ROUNDING * norm:
        mean = mean_of(moved)
        for i in range(1, len(models)):
            matcher = matchers[i]
            if matcher is not None and matcher.fixed_basis:
                new = align_one(i, models[i], mean).transform
            else:
                new = align_one(i, moved[i], mean).transform.compose(transforms[i], mean.arch)
            there = held(_applied(new, models[i], first.device))
            if _squared_distance(there, mean, names) < _squared_distance(moved[i], mean, names):
                transforms[i], moved[i] = new, there
        squares, norm = _squares_from_mean(moved, names)
        history.append(sum(squares))
        if history[-2] - history[-1] <= MIN_DECREASE * history[-2]:
            break
    before, after = (
        [(square / max(size, 1e-300)) ** 0.5 for square in each]
        for each, size in (_squares_from_mean(models, names), (squares, norm))
    )
    distances = tuple(map(Distance, before, after))
    return replace(first, transforms=tuple(transforms), distances=distances, history=tuple(history))


def mean_of(models: Sequence[Weights]) -> Weights:
    """The mean model in float64, computed when a tensor is read; buffers are those of the first model."""
    first, models = models[0], tuple(models)

    def mean(name: str) -> Change:
        return lambda _: _mean([_float64(model, name) for model in models])

    changes = {name: mean(name) for name in first if not first.arch.tensors[name].buffer}
    return replace(first, tensors=View(first, changes), checkpoint=None, changed=frozenset(changes), exact=False)


def _float64(model: Weights, name: str) -> Tensor:
    return AsFloat64(model)[name].cpu()


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0]) / len(tensors)


def _squares_from_mean(models: Sequence[Weights], names: Sequence[str]) -> tuple[list[float], float]:
    """The squared distance of each model from their mean, and the squared norm of the mean, over these tensors."""
    squares, norm = [0.0] * len(models), 0.0
    for name in names:
        tensors = [_float64(model, name) for model in models]
        mean = _mean(tensors)
        squares = [s + float((t - mean).square().sum()) for s, t in zip(squares, tensors)]
        norm += float(mean.square().sum())
    return squares, norm


def _squared_distance(a: Weights, b: Weights, names: Sequence[str]) -> float:
    return sum(float((_float64(a, name) - _float64(b, name)).square().sum()) for name in names)


def _identity(model: Weights) -> Transform:
    return Transform(model.arch.family, dict(model.arch.spaces))


def _applied(transform: Transform, model: Weights, device: torch.device | None) -> Weights:
    """The moved model; the same object if the transform is the identity."""
    return transform.apply(model, device=device) if transform.elements or transform.gauge else model
