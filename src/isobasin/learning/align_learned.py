"""`align` by learning: start from another matcher, learn on data, keep what held-out data say is best."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch

from isobasin.errors import IsobasinError
from isobasin.groups import Element
from isobasin.learning.exercises import Augment, split
from isobasin.learning.judge import Judge
from isobasin.learning.learn import Learned, Watch, learn
from isobasin.learning.lessons import Lessons
from isobasin.learning.record import Record, Unrecorded, packed_transform, unpacked_transform
from isobasin.learning.team import Alone, Team
from isobasin.match.align import align
from isobasin.match.align_whole import judged
from isobasin.match.alignment import Alignment
from isobasin.match.comparable import check_comparable
from isobasin.match.matchers import Matcher, WeightMatching
from isobasin.match.whole import dressed
from isobasin.path.mixture import Mixture
from isobasin.symmetries import SCOPES, Symmetry, symmetry
from isobasin.tasks import Task
from isobasin.transform import Transform
from isobasin.weights import Weights

Kept = Literal["naive", "start", "learned"]
ROUNDING = 1e-6  # of a mean loss in float32: lines that are closer than that are equally low


@dataclass(frozen=True, kw_only=True)
class LearnedMatching:
    """Learning from where another matcher ends; `start` is that matcher, the weights alone unless one is given."""

    scope: str = "model"
    start: Matcher | None = None
    lessons: Lessons = field(default_factory=Lessons)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.scope not in SCOPES:
            raise IsobasinError(f"scope {self.scope!r} is unknown, expected one of {', '.join(SCOPES)}")
        if self.start is not None and self.start.scope != self.scope:
            raise IsobasinError(
                f"learning has the scope {self.scope}, its start {self.start.scope}; expected the same for both"
            )

    @property
    def first(self) -> Matcher:
        return self.start or WeightMatching(scope=self.scope)

    def question(self) -> dict[str, Any]:
        """Every choice that the result depends on, as plain data."""
        lessons = asdict(self.lessons) | {"autocast": str(self.lessons.autocast)}
        return {"scope": self.scope, "start": repr(self.first), "lessons": lessons, "seed": self.seed}


@dataclass(frozen=True)
class LearnedAlignment(Alignment):
    """An alignment that was learned: held-out barriers of the three paths, and which of their ends was kept."""

    held_out: Mapping[Kept, float] = field(default_factory=dict)
    kept: Kept = "naive"
    learning: tuple[tuple[int, float], ...] = ()
    learned_from: str = ""
    decided_by: str = ""
    losses: tuple[float, ...] = field(default=(), repr=False)

    def __str__(self) -> str:
        barriers = ", ".join(f"{name} {height:.4g}" for name, height in self.held_out.items())
        steps = self.learning[-1][0] if self.learning else 0
        return f"held-out barrier {barriers} after {steps} steps; kept: {self.kept}; {Alignment.__str__(self)}"


def align_learned(
    b: Weights,
    *,
    to: Weights,
    matcher: LearnedMatching,
    task: Task,
    held_out: Task | None = None,
    dtype: str = "auto",
    device: torch.device | None = None,
    verify: bool = True,
    augment: Augment | None = None,
    watch: Watch | None = None,
    record: Record | None = None,
    team: Team | None = None,
) -> LearnedAlignment:
    """B, moved within its symmetries to where the path from A is low.

    `task` is learned from; `held_out` decides, and without it a part of the task that is then not learned from. The
    result is never worse on held-out data than B as it is, nor than the start. `record` lets a killed run go on.

    >>> found = align_learned(b, to=a, matcher=LearnedMatching(), task=task)  # doctest: +SKIP
    >>> moved = found.transform.apply(b)  # doctest: +SKIP
    """
    check_comparable(to, b)
    device, record, team = device or torch.device("cpu"), record or Unrecorded(), team or Alone()
    task, held_out = (task, held_out) if held_out is not None else split(task)
    part = symmetry(b.arch).scoped(matcher.scope)
    scale = _Scale(to, b, part, held_out, matcher.lessons.check_points, device, team)
    options = [scale.weigh("naive", Transform(b.arch.family, dict(b.arch.spaces)))]
    options.append(scale.weigh("start", _start(b, to, part, matcher, record, device)))
    learned = learn(
        to,
        b,
        scale.elements(_best(options).transform),
        task,
        held_out,
        scope=matcher.scope,
        lessons=matcher.lessons,
        seed=matcher.seed,
        device=device,
        augment=augment,
        watch=watch,
        record=record,
        team=team,
    )
    options.append(scale.weigh("learned", scale.dressed(learned.elements)))
    best = _best(options)
    dtypes = replace(b, exact=False).output_dtypes(dtype)
    found = judged(to, b, part, best.transform, None, dtypes, device=device, verify=verify, closer=False)
    sources = {"learned_from": task.source, "decided_by": held_out.source}
    return _told(found, {o.name: o.barrier for o in options}, best.name, learned, sources)


def _told(
    found: Alignment, barriers: Mapping[Kept, float], kept: Kept, learned: Learned, sources: Mapping[str, str]
) -> LearnedAlignment:
    facts = vars(found) | {"history": tuple(height for _, height in learned.history), **sources}
    return LearnedAlignment(**facts, held_out=barriers, kept=kept, learning=learned.history, losses=learned.losses)


def _start(
    b: Weights, a: Weights, part: Symmetry, matcher: LearnedMatching, record: Record, device: torch.device
) -> Transform:
    """Where the other matcher ends; a run that goes on knows it already."""
    kept = record.find("start")
    if kept:
        return unpacked_transform(kept, part)
    found = align(b, to=a, matcher=matcher.first, dtype="float32", device=device, verify=False).transform
    record.keep("start", packed_transform(found))
    return found


@dataclass(frozen=True)
class _Option:
    name: Kept
    transform: Transform
    barrier: float
    mean: float  # of the losses on the line


def _best(options: Sequence[_Option]) -> _Option:
    """The lowest barrier; of equal ones the lowest line; and of lines that rounding tells apart, the first."""
    lowest = min(option.barrier for option in options)
    level = [option for option in options if option.barrier == lowest]
    mean = min(option.mean for option in level)
    return next(option for option in level if option.mean <= mean + ROUNDING * mean)


class _Scale:
    """Transforms of B, weighed by the held-out barrier of the path from A to the model they make."""

    def __init__(
        self, a: Weights, b: Weights, part: Symmetry, held_out: Task, points: int, device: torch.device, team: Team
    ) -> None:
        self._a, self._b, self._part, self._device = a, b, part, device
        self._mixture = Mixture.of(a, device)
        self._judge = Judge(self._mixture, self._mixture.buffer.clone(), held_out, points, team)

    def weigh(self, name: Kept, transform: Transform) -> _Option:
        moved = transform.apply(self._b, device=self._device)
        return _Option(name, transform, *self._judge.rating(self._mixture.vector(moved)))

    def elements(self, transform: Transform) -> dict[str, Element]:
        """Its elements, and the identity where it has none."""
        return {name: transform.elements.get(name, group.identity()) for name, group in self._part.groups.items()}

    def dressed(self, elements: Mapping[str, Element]) -> Transform:
        """These very elements in A's gauge: what `dressed` would make of unit scales is nearer to A, but it is not
        what was learned."""
        return replace(dressed(self._a, self._b, self._part, elements, self._device), elements=dict(elements))
