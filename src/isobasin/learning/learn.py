"""Learned matching: descend the loss at random points of the path, with respect to the group element.

The ends never change their function, whatever is learned: only where B lies on its orbit does. Held-out data decide
which of the elements met on the way is kept, and when to stop.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobasin.groups import Element
from isobasin.learning.course import Course
from isobasin.learning.motion import Motion, joined
from isobasin.path.curve import Curve, grid
from isobasin.path.evaluate import along
from isobasin.path.mixture import Mixture
from isobasin.symmetries import symmetry
from isobasin.tasks import Batch, Task
from isobasin.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """How to learn: frozen numbers."""

    steps: int = 500
    rate: float = 3e-3
    warmup: float = 0.05
    lambdas: tuple[float, float] = (0.2, 0.8)
    clip: float = 1.0
    check_every: int = 100
    check_points: int = 7
    autocast: torch.dtype | None = None


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
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    watch: Callable[[int, int, float], None] | None = None,
) -> Learned:
    """Elements between the canonical forms, from `start` on, that make the path from A to B low.

    `watch(step, of, barrier)` is told of each step, with the held-out barrier as last measured.
    """
    lessons = lessons or Lessons()
    device = device or torch.device("cpu")
    part = symmetry(b.arch).scoped(scope)
    course = Course.between(a, b, part, start, device)
    motion = Motion(part).to(device)
    judge = _Judge(course, held_out, lessons, device)
    optimizer = torch.optim.Adam(motion.parameters(), lr=lessons.rate, betas=(0.9, 0.95))
    rng = torch.Generator().manual_seed(seed)
    best, barrier = {}, judge.barrier(motion)
    history, losses = [(0, barrier)], []
    for step, batch in zip(range(lessons.steps), _endless(lessons_on, rng, device)):
        if augment and "pixel_values" in batch.inputs:
            batch = Batch({"pixel_values": augment(batch.inputs["pixel_values"], rng)}, batch.targets)
        low, high = lessons.lambdas
        lam = (low + (high - low) * torch.rand((), generator=rng)).to(device)
        loss = course.loss(course.moved(motion.smooth()), lam, batch, lessons.autocast)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(motion.parameters(), lessons.clip)
        for group in optimizer.param_groups:
            group["lr"] = lessons.rate * _share(step, lessons)
        optimizer.step()
        losses.append(loss.detach())
        if (step + 1) % lessons.check_every == 0 or step + 1 == lessons.steps:
            found = judge.barrier(motion)
            history.append((step + 1, found))
            if found < barrier:
                best, barrier = motion.elements(), found
            if barrier <= 0:
                break
        if watch:
            watch(step + 1, lessons.steps, barrier)
    return Learned(joined(best, start), barrier, tuple(history), tuple(torch.stack(losses).tolist()) if losses else ())


class _Judge:
    """Measures the path on held-out data, in float32."""

    def __init__(self, course: Course, held_out: Task, lessons: Lessons, device: torch.device) -> None:
        self._course, self._task, self._n = course, held_out, lessons.check_points
        self._mixture = Mixture.of(course.like, device)
        self._start = course.vector(self._mixture, course.a)

    def curve(self, motion: Motion) -> Curve:
        with torch.no_grad():
            end = self._course.vector(self._mixture, self._course.moved(motion.smooth()))
        return along(self._mixture, self._start, end, self._task, grid(self._n), name="held out")

    def barrier(self, motion: Motion) -> float:
        found = self.curve(motion).barrier.height
        return math.inf if math.isnan(found) else found


def _share(step: int, lessons: Lessons) -> float:
    """Warm-up, then a cosine to zero."""
    rising = max(1.0, lessons.warmup * lessons.steps)
    if step + 1 <= rising:
        return (step + 1) / rising
    return (1 + math.cos(math.pi * (step + 1 - rising) / max(1.0, lessons.steps - rising))) / 2


def _endless(task: Task, rng: torch.Generator, device: torch.device) -> Iterator[Batch]:
    """The batches again and again, in a new order each time."""
    held: Sequence[Batch] = [
        Batch({k: t.to(device) for k, t in batch.inputs.items()}, batch.targets.to(device), batch.n_bytes)
        for batch in task
    ]
    while held:
        for k in torch.randperm(len(held), generator=rng).tolist():
            yield held[k]
