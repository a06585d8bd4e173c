"""A change of weights that keeps the function: group elements, and values for the free coordinates.

It acts in three steps: gains and shifts are folded away, the elements act, and the free coordinates receive their
target values. Without a gauge part it is a plain linear action.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Norm, Space, identity_fields
from isobasin.arguments import checks_arguments
from isobasin.display import Shown, Summary
from isobasin.errors import TransformError, with_article
from isobasin.groups import Element
from isobasin.symmetries.action import Action, composed_elements, inverse_elements
from isobasin.symmetries.coordinate import Coordinate, Stage
from isobasin.symmetries.symmetry import Symmetry, group_of, symmetry
from isobasin.views import AsFloat64, Change, ReadOnce, Tensors, View, chain
from isobasin.weights import ModelSource, Weights, load

LARGEST_FACTOR = 5.0  # of a random value relative to the present one, where it is limited


@dataclass(frozen=True)
class Value:
    """A free coordinate before and after, in the frames of source and target."""

    before: Tensor
    after: Tensor


@dataclass(frozen=True, repr=False)
class Transform(Shown):
    """Elements by space and values by coordinate. Immutable; `b @ a` is first a, then b.

    Coordinates hold values, not differences, so a transform applies to any model of its architecture.
    """

    family: str
    spaces: Mapping[str, Space | HeadSpace]
    elements: Mapping[str, Element] = field(default_factory=dict)
    gauge: Mapping[str, Value] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        """For other processes: without what was computed of it, functions among them."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    @property
    def exact(self) -> bool:
        """True if it rounds nothing in any type: permutations and signs, and no free coordinate."""
        return not self.gauge and all(element.exact for element in self.elements.values())

    def summary(self) -> Summary:
        """What it is for, and how much of the symmetry it uses."""
        labels = Counter(self.spaces[name].label if name in self.spaces else name for name in self.elements)
        kinds = Counter(name.partition(":")[0] for name in self.gauge)
        facts = {
            "for": _words(self.spaces),
            "elements": _counts(labels),
            "free values": _counts(kinds),
            "exact": "yes: it rounds nothing in any type" if self.exact else "no: weights are rounded when stored",
        }
        return Summary(f"transform of {self.family} models", facts)

    @checks_arguments
    def apply(
        self,
        weights: ModelSource,
        *,
        device: torch.device | str | None = None,
        kept: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> Weights:
        """The moved model; lazily, tensor by tensor. The function is the same, the given model untouched. `kept`: what
        was computed once stays in memory, with the tensors that it depends on. `dtype`: float32 where the rounding of
        that type does not count; elements of streams and units act in it, all else is computed in float64."""
        weights = load(weights)
        device = None if device is None else torch.device(device)
        self.check(symmetry(weights.arch), weights)
        stages = self._stages(weights.arch, dtype)
        tensors: Tensors = AsFloat64(weights, device)
        for stage in stages:
            tensors = View(ReadOnce(tensors) if kept else tensors, stage)
        changed = frozenset(name for stage in stages for name in stage)
        return replace(
            weights,
            tensors=_Changed(weights, tensors, changed),
            changed=weights.changed | changed,
            exact=weights.exact and (self.exact or not changed),
        )

    def _stages(self, arch: Architecture, dtype: torch.dtype = torch.float64) -> list[dict[str, Change]]:
        """Fold, act, set: each a set of changes over what the one before made; empty ones left out."""
        for known, known_type, stages in self._known_stages:
            if known is arch and known_type == dtype:
                return stages
        self._known_stages[:] = [(arch, dtype, self._made_stages(arch, dtype))]
        return self._known_stages[0][2]

    @cached_property
    def _known_stages(self) -> list[tuple[Architecture, torch.dtype, list[dict[str, Change]]]]:
        return []

    def _made_stages(self, arch: Architecture, dtype: torch.dtype) -> list[dict[str, Change]]:
        chosen = [symmetry(arch).coordinates[name] for name in self.gauge]
        fold = chain(*(c.set(c.canonical(self.gauge[c.name].after)) for c in chosen if c.folds))
        targets = [chain(*(c.set(self.gauge[c.name].after) for c in chosen if c.stage == stage)) for stage in Stage]
        act = Action(arch, self.elements, in_type=dtype != torch.float64).changes()
        moved: dict[str, Change] = {name: partial(_computed_in, dtype, change) for name, change in act.items()}
        stages = [fold, moved, *targets]
        return [stage for stage in stages if stage]

    def check(self, whole: Symmetry, weights: Weights) -> None:
        """Refuse a model of another architecture, elements outside their group, a rotation behind a gain."""
        if self.family != weights.arch.family or not _covers(weights.arch.spaces, self.spaces):
            raise TransformError(
                f"the transform is for {with_article(self.family)} model with {_words(self.spaces)}, the model is "
                f"{weights.arch.family} with {_words(weights.arch.spaces)}; use a transform made for this architecture"
            )
        for name in self.gauge:
            if name not in whole.coordinates:
                raise TransformError(
                    f"coordinate {name}: not free in this model (a bias or norm of the transform's model is missing)"
                )
        for name, value in self.gauge.items():
            shapes = whole.coordinates[name].shapes
            if not (value.before.shape == value.after.shape and tuple(value.after.shape) in shapes):
                raise TransformError(
                    f"coordinate {name}: the transform holds shape {tuple(value.after.shape)}, expected "
                    f"{' or '.join(map(str, shapes))} in this model; make the transform again"
                )
        self.check_elements()
        action = Action(weights.arch, self.elements)
        for norm in weights.arch.norms.values():
            if action.rotates(norm.space) and f"norm:{norm.name}" not in self.gauge:
                _check_constant(norm, weights)
        for scale in weights.arch.scales:
            if f"scale:{scale}" not in self.gauge and scale in weights.arch.tensors:
                _check_scale(scale, weights, action)

    def check_elements(self) -> None:
        """Every element lies in the group of its space, and every number is finite."""
        assert self._elements_checked

    @cached_property
    def _elements_checked(self) -> bool:
        """Looked at once: a transform does not change, and applies to a model many times, one tensor after another."""
        for name, element in self.elements.items():
            if name not in self.spaces:
                raise TransformError(f"element {name}: no such space in family {self.family}")
            group = group_of(self.spaces[name])
            if not group.contains(element):
                raise TransformError(
                    f"element {name}: not in {group} (wrong size, not finite, or too badly conditioned); "
                    "make the transform again"
                )
        for name, value in self.gauge.items():
            if not (torch.isfinite(value.before).all() and torch.isfinite(value.after).all()):
                raise TransformError(f"coordinate {name}: not finite; make the transform again")
        return True

    def inverse(self) -> "Transform":
        """Back again: inverse elements, and each coordinate to the value it came from."""
        return replace(
            self,
            elements=inverse_elements(self.elements, self.spaces),
            gauge={name: Value(v.after, v.before) for name, v in self.gauge.items()},
        )

    @checks_arguments
    def compose(self, first: "Transform", arch: Architecture) -> "Transform":
        """`first`, then this one: elements multiply, the last target wins; what only one of them sets is carried
        through the other's elements.

        The function is always that of the two in turn. The weights are too, unless this one sets a coordinate that
        moves a later one which only `first` sets: that one then keeps the value `first` gave it.
        """
        spaces = {**first.spaces, **self.spaces}
        if self.family != first.family or not all(_covers(spaces, each.spaces) for each in (self, first)):
            raise TransformError("transforms of two different architectures do not compose")
        elements = composed_elements(self.elements, first.elements, spaces)
        free = symmetry(arch).coordinates
        back = Action(arch, inverse_elements(first.elements, spaces))
        onward = Action(arch, self.elements)
        gauge: dict[str, Value] = {}
        for name in [*first.gauge, *(n for n in self.gauge if n not in first.gauge)]:
            before = (
                first.gauge[name].before
                if name in first.gauge
                else free[name].transported(self.gauge[name].before, back)
            )
            after = (
                self.gauge[name].after
                if name in self.gauge
                else free[name].transported(first.gauge[name].after, onward)
            )
            gauge[name] = Value(before, after)
        return replace(self, spaces=spaces, elements=elements, gauge=gauge)

    def header(self) -> dict[str, Any]:
        """The architecture this is for, as plain data."""
        return {"family": self.family, "spaces": {name: identity_fields(space) for name, space in self.spaces.items()}}


def pack_elements(elements: Mapping[str, Element]) -> dict[str, Any]:
    """Elements as plain tensors, for a resume file."""
    return {name: dict(g.tensors()) for name, g in elements.items()}


def unpack_elements(state: Mapping[str, Any], part: Symmetry) -> dict[str, Element]:
    return {name: part.groups[name].element(tensors) for name, tensors in state.items()}


def pack_transform(transform: Transform) -> dict[str, Any]:
    """A transform as plain tensors, for a resume file."""
    gauge = {name: {"before": v.before, "after": v.after} for name, v in transform.gauge.items()}
    return {"elements": pack_elements(transform.elements), "gauge": gauge}


def unpack_transform(state: dict[str, Any], part: Symmetry) -> Transform:
    gauge = {name: Value(**v) for name, v in state["gauge"].items()}
    return Transform(part.arch.family, dict(part.arch.spaces), unpack_elements(state["elements"], part), gauge)


def _computed_in(dtype: torch.dtype, change: Change, tensors: Tensors) -> Tensor:
    """A change in this type, given back in float64."""
    return change(AsFloat64(tensors, dtype=dtype)).to(torch.float64)


class _Changed(Mapping[str, Tensor]):
    """Changed tensors from the views, the others bitwise from the source."""

    def __init__(self, source: Tensors, moved: Tensors, changed: frozenset[str]) -> None:
        self._source, self._moved, self._changed = source, moved, changed

    def __getitem__(self, name: str) -> Tensor:
        return self._moved[name] if name in self._changed else self._source[name]

    def __iter__(self) -> Any:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)


def scramble(model: ModelSource, *, scope: str = "model", seed: int = 0) -> Transform:
    """A random element of the whole symmetry of a scope: every free coordinate gets another value too.

    >>> copy = scramble(model).apply(model)  # the same function, other weights  # doctest: +SKIP
    """
    weights = load(model)
    part = symmetry(weights.arch).scoped(scope)
    tensors = AsFloat64(weights)
    rng = torch.Generator().manual_seed(seed)
    elements = {
        name: group.sample(seed=int(torch.randint(2**62, (), generator=rng))) for name, group in part.groups.items()
    }
    gauge = {name: _drawn(c, tensors, rng) for name, c in part.coordinates.items() if c.usable(tensors)}
    return Transform(weights.arch.family, dict(weights.arch.spaces), elements, gauge)


def _drawn(coordinate: Coordinate, tensors: Tensors, rng: torch.Generator) -> Value:
    before, still = coordinate.read(tensors).cpu(), coordinate.still(tensors)
    drawn, limit = coordinate.sample(before, rng), coordinate.limit(tensors)
    if limit is not None:
        largest = torch.maximum(limit.cpu(), LARGEST_FACTOR * before.abs())  # what is there may be far larger already
        drawn = torch.minimum(torch.maximum(drawn, -largest), largest)
    return Value(before, drawn if still is None else torch.where(still.cpu(), before, drawn))


def _check_constant(norm: Norm, weights: Weights) -> None:
    gain = weights[norm.gain]
    shift = weights[norm.shift] if norm.shift in weights.arch.tensors else torch.zeros(1)
    if not (bool((gain == gain[0]).all()) and bool((shift == shift[0]).all())):
        raise TransformError(
            f"{norm.gain}: the transform rotates {norm.space}, but this gain or its shift is not folded; "
            f"add the coordinate norm:{norm.name} or normalise the model first"
        )


def _check_scale(scale: str, weights: Weights, action: Action) -> None:
    (stream,) = weights.arch.spaces_of(scale)
    if action.rotates(stream) and not bool((weights[scale] == weights[scale][0]).all()):
        raise TransformError(
            f"{scale}: the transform rotates {stream}, but this scale is not folded; add the coordinate scale:{scale}"
        )


def _counts(counted: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {name}" for name, n in counted.items()) or "none"


def _covers(spaces: Mapping[str, Space | HeadSpace], part: Mapping[str, Space | HeadSpace]) -> bool:
    """Whether these spaces are those of `part`, and at most spaces of experts beside them: transforms that were made
    before experts could be permuted have none."""
    extra = [space for name, space in spaces.items() if name not in part]
    same = all(spaces.get(name) == space for name, space in part.items())
    return same and all(space.role == "experts" for space in extra)


def _words(spaces: Mapping[str, Space | HeadSpace]) -> str:
    attention = [space for space in spaces.values() if isinstance(space, HeadSpace)]
    streams = [space for space in spaces.values() if isinstance(space, Space) and space.stream]
    heads = attention[0] if attention else None
    count = f"{heads.n_heads}/{heads.n_kv_heads} heads of {heads.d_head}" if heads else "no heads"
    groups = [str(group_of(space)) for space in (*streams, heads) if space is not None]
    width = " and ".join(str(stream.size) for stream in streams) or "?"
    return f"{len(attention)} layers, width {width}, {count}, groups {' and '.join(groups)}"
