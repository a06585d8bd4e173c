"""Where a barrier sits: how far it falls when a component's outputs are mixed instead of its weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.path.components import Component, Where, components, mixed_outputs
from isobasin.path.curve import Curve
from isobasin.path.evaluate import curve_of
from isobasin.path.mixture import Mixture
from isobasin.path.survey import MEMORY, Ledger, Watch, survey
from isobasin.tasks import Task


@dataclass(frozen=True)
class Explanation:
    """The barrier of the plain path on these points, and what it becomes with each part's outputs mixed."""

    lambdas: tuple[float, ...]
    barrier: float
    parts: Mapping[str, float]

    def share(self, part: str) -> float:
        """The part of the barrier that goes away."""
        return (self.barrier - self.parts[part]) / self.barrier if self.barrier > 0 else 0.0


def parts_of(mixture: Mixture) -> dict[str, list[Component]]:
    """What is asked about: all attention, all feed-forward, both, and each layer."""
    every = components(mixture.like.arch)
    found = {kind: [c for c in every if c.kind == kind] for kind in ("attention", "feed-forward")}
    found["attention and feed-forward"] = list(every)
    return found | {f"layer {i}": [c for c in every if c.layer == i] for i in range(mixture.like.arch.sizes.n_layers)}


def chosen_points(curve: Curve, most: int = 9) -> tuple[float, ...]:
    """The ends, the highest point, and others evenly between: mixing outputs costs two passes a point."""
    step = max(1, -(-(len(curve.lambdas) - 1) // (most - 1)))
    return tuple(sorted({*curve.lambdas[::step], curve.lambdas[-1], curve.barrier.lam}))


def explain(
    mixture: Mixture,
    start: Tensor,
    end: Tensor,
    task: Task,
    curve: Curve,
    *,
    name: str,
    memory: int = MEMORY,
    ledger: Ledger | None = None,
    watch: Watch | None = None,
) -> Explanation:
    """Measure the path again for every part of the model, with that part's outputs mixed."""
    lambdas = chosen_points(curve)
    parts = parts_of(mixture)
    found: dict[str, float] = {}
    for number, (part, chosen) in enumerate(parts.items()):
        where = Where()
        stations = {f"{name}/{part}/{lam!r}": _station(mixture, start, end, lam, where) for lam in lambdas}
        with mixed_outputs(mixture, chosen, start, end, where):
            sums = survey(mixture, stations, task, memory=memory, ledger=ledger)
        found[part] = curve_of(lambdas, list(sums.values()), task).barrier.height
        if watch:
            watch(number + 1, len(parts))
    return Explanation(lambdas, _on(curve, lambdas).barrier.height, found)


def _station(mixture: Mixture, start: Tensor, end: Tensor, lam: float, where: Where) -> Callable[[], None]:
    def go() -> None:
        where.lam = lam
        torch.lerp(start, end, lam, out=mixture.buffer)

    return go


def _on(curve: Curve, lambdas: Sequence[float]) -> Curve:
    kept = [curve.lambdas.index(lam) for lam in lambdas]
    return Curve(tuple(lambdas), {name: tuple(values[k] for k in kept) for name, values in curve.metrics.items()})
