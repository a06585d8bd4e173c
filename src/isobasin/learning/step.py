"""One step of learning. On CUDA it is recorded once and replayed: small models leave a large device waiting for
launches otherwise."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobasin.learning.course import Course
from isobasin.learning.lessons import Lessons
from isobasin.learning.motion import Motion
from isobasin.learning.rearranging import Rearranging
from isobasin.learning.team import Team, average
from isobasin.model import Transformer
from isobasin.tasks import Batch

WARM = 3  # trial steps before a recording, as torch asks for
SHAPES = 4  # of batches that are recorded; holding samples out leaves batches of two sizes


class Step:
    """`step(points, batches, rate)` moves the parameters by one step of Adam, and gives back the sum of the losses.

    The path is run on copies of what was moved, and what they gather goes through the group once, however many batches
    there are.
    """

    def __init__(
        self, course: Course, motion: Motion, lessons: Lessons, team: Team, rearranging: Rearranging | None
    ) -> None:
        self.course, self._motion, self._lessons, self._team = course, motion, lessons, team
        self._rearranging = rearranging
        self._parameters = list(motion.parameters())
        on_cuda = course.device.type == "cuda"
        self._rate = torch.zeros((), device=course.device) if on_cuda else 0.0
        self.optimizer = torch.optim.Adam(self._parameters, lr=self._rate, betas=(0.9, 0.95), capturable=on_cuda)

    def __call__(self, points: Sequence[float], batches: Sequence[Batch], rate: float) -> Tensor:
        self._set_rate(rate)
        return self._down(points, batches)

    def go_on_from(self, course: Course) -> None:
        """The same parameters on another base."""
        self.course = course

    def recall(self, optimizer: dict[str, Any]) -> None:
        """The optimizer as it was, wherever that was. The rate stays this step's own: one that came from a file lies on
        the CPU, and a recording would hold the value it had meanwhile, zero."""
        self.optimizer.load_state_dict(optimizer)
        for group in self.optimizer.param_groups:
            group["lr"], group["capturable"] = self._rate, isinstance(self._rate, Tensor)

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _down(self, points: Sequence[float] | Tensor, batches: Sequence[Batch]) -> Tensor:
        moved = self.course.moved(self._motion.smooth())
        leaves = {name: t.detach().requires_grad_(t.requires_grad) for name, t in moved.items()}
        total = torch.zeros((), device=self.course.device)
        for point, batch in zip(points, batches):
            loss = self.course.loss(leaves, point, batch, self._lessons.autocast)
            loss.backward()
            total += loss.detach()
        self.optimizer.zero_grad(set_to_none=True)
        felt = [name for name, leaf in leaves.items() if leaf.grad is not None]
        torch.autograd.backward([moved[name] for name in felt], [leaves[name].grad for name in felt])
        if self._rearranging:
            self._rearranging.hear(leaves)
        average(self._team, self._parameters, self._lessons.accumulate * self._team.size)
        torch.nn.utils.clip_grad_norm_(self._parameters, self._lessons.clip)
        for parameter in self._parameters:
            if parameter.grad is not None:  # a point of the path without a finite loss teaches nothing
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.optimizer.step()
        return total


@dataclass(frozen=True)
class Recording:
    """A step for batches of one shape: fill `points` and `batches`, replay, read `total`."""

    points: Tensor
    batches: list[Batch]
    graph: torch.cuda.CUDAGraph
    total: Tensor


class RecordedStep(Step):
    """The same as a CUDA graph for each shape of batches, the first SHAPES of them: others run as before.

    Where units change places there is one: a recording begins with trial steps, after which nothing was heard.
    """

    def __init__(
        self, course: Course, motion: Motion, lessons: Lessons, team: Team, rearranging: Rearranging | None
    ) -> None:
        super().__init__(course, motion, lessons, team, rearranging)
        self._most = 1 if rearranging else SHAPES
        self._recordings: dict[Hashable, Recording] = {}

    def __call__(self, points: Sequence[float], batches: Sequence[Batch], rate: float) -> Tensor:
        shape = _shape(batches)
        if shape not in self._recordings and len(self._recordings) < self._most:
            self._recordings[shape] = self._record(points, batches)
        found = self._recordings.get(shape)
        if found is None:
            return super().__call__(points, batches, rate)
        self._set_rate(rate)
        found.points.copy_(torch.tensor(points))
        for here, given in zip(found.batches, batches):
            _copy(here, given)
        found.graph.replay()
        return found.total.clone()

    def go_on_from(self, course: Course) -> None:
        self.course, self._recordings = course, {}

    def _record(self, points: Sequence[float], batches: Sequence[Batch]) -> Recording:
        """A few trial steps at rate zero, which the optimizer forgets, then the recording."""
        here = torch.tensor(points, device=self.course.device)
        held = [Batch({k: t.clone() for k, t in b.inputs.items()}, b.targets.clone()) for b in batches]
        self._set_rate(0.0)
        kept = {p: {k: t.clone() for k, t in state.items()} for p, state in self.optimizer.state.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self._down(here, held)
        torch.cuda.current_stream().wait_stream(side)
        for parameter, state in self.optimizer.state.items():
            for key, tensor in state.items():
                tensor.copy_(kept[parameter][key]) if parameter in kept else tensor.zero_()
        if self._rearranging:
            self._rearranging.forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total = self._down(here, held)
        return Recording(here, held, graph, total)


def step_of(course: Course, motion: Motion, lessons: Lessons, team: Team, rearranging: Rearranging | None) -> Step:
    """Recorded where that is known to work: the project's own model on CUDA, in one process."""
    own = isinstance(course.module, Transformer)
    recorded = own and course.device.type == "cuda" and team.size == 1
    return (RecordedStep if recorded else Step)(course, motion, lessons, team, rearranging)


def _copy(here: Batch, given: Batch) -> None:
    here.targets.copy_(given.targets)
    for name, tensor in given.inputs.items():
        here.inputs[name].copy_(tensor)


def _shape(batches: Sequence[Batch]) -> Hashable:
    return tuple((*((k, t.shape) for k, t in b.inputs.items()), b.targets.shape) for b in batches)
