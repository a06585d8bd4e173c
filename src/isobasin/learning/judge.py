"""The held-out barrier: what decides which element is kept, and when to stop."""

import math
from itertools import islice

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.learning.exercises import on, together
from isobasin.learning.team import Alone, Team
from isobasin.path.curve import barrier, grid
from isobasin.path.mixture import Mixture
from isobasin.tasks import Task

WIDER = 4  # batches that an accelerator measures as one: it would wait for launches otherwise


class Judge:
    """Measures lines that begin at one model, in float32, on the same data each time."""

    def __init__(self, mixture: Mixture, start: Tensor, task: Task, n_points: int, team: Team | None = None) -> None:
        self._mixture, self._start, self._lambdas = mixture, start, grid(n_points)
        self._team = team or Alone()
        shares = islice(task, self._team.rank, None, self._team.size)
        held = [on(batch, start.device) for batch in shares]
        if held and start.device.type != "cpu":
            held = list(together(held, WIDER * len(held[0])))
        self._batches = held
        self._first = self._loss(start)
        if math.isnan(self._first):
            raise IsobasinError(f"{task.source}: A has no finite loss there; expected data that A can be measured on")

    def loss_at_end(self, end: Tensor) -> float:
        return self._loss(end)

    def barrier(self, end: Tensor, last: float | None = None) -> float:
        """Of the line to this end; infinite if a point has no finite loss. `last` is the end's loss where known:
        whatever moves B within its symmetries leaves it as it is."""
        return self.rating(end, last)[0]

    def rating(self, end: Tensor, last: float | None = None) -> tuple[float, float]:
        """The barrier, and the mean loss of the line: of two lines without a barrier one may still be the lower."""
        last = self._loss(end) if last is None else last
        losses = [self._first, *(self._loss(end, lam) for lam in self._lambdas[1:-1]), last]
        found = barrier(self._lambdas, losses).height
        return (math.inf, math.inf) if math.isnan(found) else (found, sum(losses) / len(losses))

    @torch.no_grad()
    def _loss(self, end: Tensor, lam: float = 1.0) -> float:
        torch.lerp(self._start, end, lam, out=self._mixture.buffer)
        sums = self._mixture.score(self._batches)
        mine = torch.tensor([sums.loss, sums.count] if sums else [0.0, 0.0], dtype=torch.float64)
        loss, count = self._team.total(mine.to(self._start.device)).tolist()
        if not count:
            raise IsobasinError("held-out data hold nothing that is scored: expected at least one token or sample")
        return float(loss / count)
