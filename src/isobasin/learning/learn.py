"""Learned matching: descend the loss at random points of the path, with respect to the group element.

The ends never change their function, whatever is learned: only where B lies on its orbit does. Held-out data decide
which of the elements met on the way is kept, and when to stop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from isobasin.groups import Element
from isobasin.learning.course import Course
from isobasin.learning.exercises import Augment, Exercises
from isobasin.learning.judge import Judge
from isobasin.learning.lessons import Lessons
from isobasin.learning.motion import Motion, joined
from isobasin.learning.rearranging import Rearranging
from isobasin.learning.record import Record, State, Unrecorded, packed, unpacked
from isobasin.learning.step import step_of
from isobasin.learning.team import Alone, Team
from isobasin.path.mixture import Mixture
from isobasin.symmetries import Symmetry, symmetry
from isobasin.tasks import Task
from isobasin.weights import Weights

__all__ = ["Learned", "Lessons", "learn"]

SECTION = "learning"  # of a record
Watch = Callable[[int, int, float], None]  # (step, of, held-out barrier as last measured)


@dataclass(frozen=True)
class Learned:
    """The element kept, its held-out barrier, and what was seen on the way: (step, held-out barrier)."""

    elements: Mapping[str, Element]
    barrier: float
    history: tuple[tuple[int, float], ...]
    losses: tuple[float, ...] = field(repr=False, default=())


def learn(
    a: Weights,
    b: Weights,
    start: Mapping[str, Element],
    lessons_on: Task,
    held_out: Task,
    *,
    scope: str = "model",
    lessons: Lessons | None = None,
    seed: int = 0,
    device: torch.device | None = None,
    augment: Augment | None = None,
    watch: Watch | None = None,
    record: Record | None = None,
    team: Team | None = None,
) -> Learned:
    """Elements between the canonical forms, from `start` on, that make the path from A to B low.

    `start` has an element for every space of the scope. `watch(step, of, barrier)` is told of each step, with the
    held-out barrier as last measured; `record` remembers where a killed run was; `team` shares the batches.

    >>> found = learn(a, b, match_whole(a, b, WeightMatching("model")).elements, task, held_out)  # doctest: +SKIP
    """
    device, lessons, record = device or torch.device("cpu"), lessons or Lessons(), record or Unrecorded()
    part = symmetry(b.arch).scoped(scope)
    exercises = Exercises(lessons_on, seed, device, augment)
    pupil = Pupil(a, b, part, start, held_out, lessons, seed, device, team or Alone())
    kept = record.find(SECTION)
    if kept:
        pupil.recall(kept)
    while pupil.step < lessons.steps and pupil.barrier > 0:
        pupil.take_step(exercises)
        if lessons.is_check(pupil.step - 1):
            pupil.check()
            record.keep(SECTION, pupil.state())
        if watch:
            watch(pupil.step, lessons.steps, pupil.barrier)
    return pupil.learned()


class Pupil:
    """Where learning stands: parameters, optimizer, the base they act on, and the best element so far."""

    def __init__(
        self,
        a: Weights,
        b: Weights,
        part: Symmetry,
        start: Mapping[str, Element],
        held_out: Task,
        lessons: Lessons,
        seed: int,
        device: torch.device,
        team: Team,
    ) -> None:
        self._part, self._lessons, self._seed, self._team, self._start = part, lessons, seed, team, dict(start)
        self._course = Course.between(a, b, part, start, device)
        self._motion = Motion(part).to(device)
        mixture = Mixture.of(self._course.like, device)
        self._mixture = mixture
        self._judge = Judge(mixture, self._course.vector(mixture, self._course.a), held_out, lessons.check_points, team)
        self._last = self._judge.loss_at_end(self._course.vector(mixture, self._course.b))
        self._rearranging = Rearranging(part, team) if lessons.permutations == "free" else None
        self._down = step_of(self._course, self._motion, lessons, team, self._rearranging)
        self.step = 0
        self.barrier = self._barrier()
        self._base = self._best = self._start
        self._history = [(0, self.barrier)]
        self._losses: list[torch.Tensor] = []

    def take_step(self, exercises: Exercises) -> None:
        """One step of Adam on the mean loss of this step's batches, this process's share of them and the others'."""
        n, team = self._lessons.accumulate * self._team.size, self._team
        mine = range(team.rank, n, team.size)
        points = self._lessons.points(self.step, n, self._seed)
        batches = [exercises[self.step * n + k] for k in mine]
        total = self._down([points[k] for k in mine], batches, self._lessons.rate_at(self.step))
        self._losses.append(team.total(total) / n)
        self.step += 1

    def check(self) -> None:
        """Measure the path on held-out data; keep the element if it is the best, and lies safely in its group."""
        found = self._barrier()
        if self._rearranging:
            found = self._rearranged(found)
        self._history.append((self.step, found))
        if found < self.barrier:
            elements = joined(self._motion.elements(), self._base)
            if all(self._part.groups[name].contains(g) for name, g in elements.items()):
                self._best, self.barrier = elements, found

    def learned(self) -> Learned:
        losses = torch.stack(self._losses).tolist() if self._losses else []
        return Learned(self._best, self.barrier, tuple(self._history), tuple(losses))

    def state(self) -> State:
        """Everything a run needs to go on as if it had not stopped; what is random follows from seed and step."""
        return {
            "step": self.step,
            "motion": self._motion.state_dict(),
            "optimizer": self._down.optimizer.state_dict(),
            "start": packed(self._start),
            "base": packed(self._base),
            "best": packed(self._best),
            "barrier": self.barrier,
            "history": self._history,
            "losses": torch.stack(self._losses).cpu(),
        }

    def recall(self, state: State) -> None:
        self.step, self.barrier = state["step"], state["barrier"]
        self._motion.load_state_dict(state["motion"])
        self._down.recall(state["optimizer"])
        self._best = unpacked(state["best"], self._part)
        self._history = [(int(step), float(found)) for step, found in state["history"]]
        self._losses = list(state["losses"].to(self._course.device))
        base = unpacked(state["base"], self._part)
        moves = {name: g @ self._base[name].inverse() for name, g in base.items()}
        if self._rearranging:
            self._rebase(self._rearranging.only(moves), base)

    def _barrier(self, course: Course | None = None) -> float:
        course = course or self._course
        with torch.no_grad():
            end = course.vector(self._mixture, course.moved(self._motion.smooth()))
        return self._judge.barrier(end, self._last)

    def _rearranged(self, found: float) -> float:
        """Try other places for units, and keep those under which the held-out barrier is lowest."""
        assert self._rearranging is not None
        with torch.no_grad():
            moved = self._course.moved(self._motion.smooth())
        best = None
        for proposal in self._rearranging.proposals(self._course.a, moved):
            self._motion.permute(proposal)
            course = self._course.rebased(proposal)
            height = self._barrier(course)
            if height < found:
                found, best = height, proposal
            self._motion.permute({name: g.inverse() for name, g in proposal.items()})
        if best:
            self._motion.permute(best)
            self._rebase(best, {name: best[name] @ g if name in best else g for name, g in self._base.items()})
        self._rearranging.forget()
        return found

    def _rebase(self, moves: Mapping[str, Element], base: Mapping[str, Element]) -> None:
        self._course, self._base = self._course.rebased(moves), dict(base)
        self._down.go_on_from(self._course)
