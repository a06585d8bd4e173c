"""Losses along the straight line between two models."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from isobasin.match.comparable import check_comparable
from isobasin.path.curve import Curve, grid
from isobasin.path.mixture import Mixture
from isobasin.path.survey import MEMORY, Ledger, Watch, survey
from isobasin.tasks import Sums, Task
from isobasin.weights import Weights


def evaluate_path(
    a: Weights,
    b: Weights,
    task: Task,
    *,
    n_points: int = 25,
    device: torch.device | None = None,
    memory: int = MEMORY,
    ledger: Ledger | None = None,
    watch: Watch | None = None,
) -> Curve:
    """Every metric of the task at (1−λ)·a + λ·b, mixed in float32, in place; both ends are exactly the end models.

    `memory` is how many bytes of data may be held; `ledger` remembers finished points; `watch(done, of)` is told of
    each point.

    >>> evaluate_path(a, b, open_task("test.txt", [a, b])).barrier  # doctest: +SKIP
    Barrier(height=0.715, lam=0.5)
    """
    check_comparable(a, b)
    mixture = Mixture.of(a, device)
    start = mixture.buffer.clone()
    lambdas = grid(n_points)
    return along(mixture, start, mixture.vector(b), task, lambdas, name="", memory=memory, ledger=ledger, watch=watch)


def along(
    mixture: Mixture,
    start: Tensor,
    end: Tensor,
    task: Task,
    lambdas: Sequence[float],
    *,
    name: str,
    memory: int = MEMORY,
    ledger: Ledger | None = None,
    watch: Watch | None = None,
) -> Curve:
    """The same between two vectors; `name` tells this line from others in the ledger."""
    # torch's lerp gives exactly the ends at 0 and at 1.
    stations = {f"{name}/{lam!r}": partial(torch.lerp, start, end, lam, out=mixture.buffer) for lam in lambdas}
    found = survey(mixture, stations, task, memory=memory, ledger=ledger, watch=watch)
    return curve_of(lambdas, list(found.values()), task)


def curve_of(lambdas: Sequence[float], sums: Sequence[Sums], task: Task) -> Curve:
    rows: list[Mapping[str, float]] = [one.metrics(task.kind) for one in sums]
    return Curve(tuple(lambdas), {name: tuple(row[name] for row in rows) for name in rows[0]})
