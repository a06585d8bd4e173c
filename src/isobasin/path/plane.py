"""The loss on the plane through A, B and B aligned."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.path.mixture import Mixture
from isobasin.path.survey import MEMORY, Ledger, Watch, survey
from isobasin.tasks import Task


@dataclass(frozen=True)
class Plane:
    """Losses on a grid, `loss[row of y][column of x]`, in distances from A; and where the three models lie."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    loss: tuple[tuple[float, ...], ...]
    points: Mapping[str, tuple[float, float]]


def loss_plane(
    mixture: Mixture,
    a: Tensor,
    b: Tensor,
    moved: Tensor,
    task: Task,
    *,
    name: str,
    n: int = 15,
    margin: float = 0.25,
    memory: int = MEMORY,
    ledger: Ledger | None = None,
    watch: Watch | None = None,
) -> Plane:
    """Origin at A, the first axis towards B, the second towards B aligned and perpendicular to the first.

    A model that was not moved at all spans no plane: the second axis is then left out and all rows are equal.
    """
    first, width = _unit(b - a)
    along = float(torch.dot(moved - a, first))
    second, height = _unit(moved - a - along * first)
    points = {"A": (0.0, 0.0), "B": (width, 0.0), "B aligned": (along, height)}
    x = _ticks([p[0] for p in points.values()], n, margin)
    y = _ticks([p[1] for p in points.values()], n, margin)
    stations = {
        f"{name}/{i}/{j}": _station(mixture, a, first, second, u, v) for j, v in enumerate(y) for i, u in enumerate(x)
    }
    sums = survey(mixture, stations, task, memory=memory, ledger=ledger, watch=watch)
    losses = [one.metrics(task.kind)["loss"] for one in sums.values()]
    return Plane(x, y, tuple(tuple(losses[j * n : (j + 1) * n]) for j in range(n)), points)


def _unit(vector: Tensor) -> tuple[Tensor, float]:
    length = float(torch.linalg.vector_norm(vector))
    return (vector / length, length) if length else (vector, 0.0)


def _ticks(values: list[float], n: int, margin: float) -> tuple[float, ...]:
    low, high = min(values), max(values)
    edge = margin * ((high - low) or 1.0)
    return tuple(low - edge + k * (high - low + 2 * edge) / (n - 1) for k in range(n))


def _station(mixture: Mixture, a: Tensor, first: Tensor, second: Tensor, u: float, v: float) -> Callable[[], None]:
    def go() -> None:
        torch.add(a, first, alpha=u, out=mixture.buffer).add_(second, alpha=v)

    return go
