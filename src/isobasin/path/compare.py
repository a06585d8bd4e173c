"""Two or three models compared: every pair, naive beside aligned, as one result that a file can hold."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from isobasin.match.alignment import Alignment
from isobasin.match.comparable import check_comparable
from isobasin.path.curve import Curve, grid
from isobasin.path.evaluate import along
from isobasin.path.explain import Explanation, explain
from isobasin.path.mixture import Mixture
from isobasin.path.plane import Plane, loss_plane
from isobasin.path.survey import MEMORY, Ledger, Watch
from isobasin.tasks import Task
from isobasin.weights import Weights

Aligner = Callable[[Weights, Weights], Alignment]  # (moving, reference)


@dataclass(frozen=True)
class Compared:
    """One pair: its curves by path (`naive`, `aligned`), and what else was asked."""

    curves: Mapping[str, Curve]
    alignment: Alignment | None = None
    explained: Mapping[str, Explanation] = field(default_factory=dict)
    plane: Plane | None = None


def compare(
    models: Mapping[str, Weights],
    task: Task,
    *,
    aligner: Aligner | None = None,
    n_points: int = 25,
    explained: bool = False,
    plane: int = 0,
    device: torch.device | None = None,
    memory: int = MEMORY,
    ledger: Ledger | None = None,
    watch: Callable[[str], Watch] | None = None,
) -> dict[str, Compared]:
    """Every pair of the models (in order: the later one moves), by the name `A-B`.

    `plane` is the number of grid points along each side of the loss plane, 0 for none; `watch(title)` gives a
    function that is told of each finished step.
    """
    labels = list(models)
    for other in labels[1:]:
        check_comparable(models[labels[0]], models[other])
    mixture = Mixture.of(models[labels[0]], device)
    found = {}
    for first, second in combinations(labels, 2):
        name = f"{first}-{second}"
        told = _prefixed(watch, name)
        start, end = mixture.vector(models[first]), mixture.vector(models[second])
        common: dict[str, Any] = {"memory": memory, "ledger": ledger}
        curves = {}
        explanations = {}
        alignment = aligner(models[second], models[first]) if aligner else None
        ends: dict[str, Tensor] = {"naive": end}
        if alignment:
            ends["aligned"] = mixture.vector(alignment.transform.apply(models[second]))
        for path, stop in ends.items():
            key = f"{name}/{path}"
            curves[path] = along(
                mixture, start, stop, task, grid(n_points), name=key, watch=told(f"{path} path"), **common
            )
            if explained:
                explanations[path] = explain(
                    mixture, start, stop, task, curves[path], name=key, watch=told(f"{path}, explained"), **common
                )
        surface = None
        if plane and alignment:
            surface = loss_plane(
                mixture, start, end, ends["aligned"], task, name=f"{name}/plane", n=plane, watch=told("plane"), **common
            )
        found[name] = Compared(curves, alignment, explanations, surface)
    return found


def _prefixed(watch: Callable[[str], Watch] | None, name: str) -> Callable[[str], Watch | None]:
    return lambda title: watch(f"{name} {title}") if watch else None


def result_of(pairs: Mapping[str, Compared], task: Task) -> dict[str, Any]:
    """The numbers as `path.json` holds them; one that is not finite is None, and named."""
    first = next(iter(pairs.values())).curves["naive"]
    result: dict[str, Any] = {
        "kind": "isobasin.path",
        "schema": 1,
        "lambdas": list(first.lambdas),
        "task": {
            "kind": task.kind,
            "name": task.name,
            "n_samples": task.n_samples,
            "fingerprint": task.fingerprint,
            "settings": dict(task.settings),
        },
        "curves": _each(pairs, lambda c: {name: [_number(x) for x in v] for name, v in c.metrics.items()}),
        "barrier": _each(pairs, lambda c: {name: _number(b.height) for name, b in c.barriers.items()}),
        "barrier_lambda": _each(pairs, lambda c: {name: b.lam for name, b in c.barriers.items()}),
        "not_finite": [
            {"pair": pair, "path": path, "metric": metric, "lambda": lam}
            for pair, compared in pairs.items()
            for path, curve in compared.curves.items()
            for metric, lam in curve.not_finite
        ],
    }
    if any(c.explained for c in pairs.values()):
        result["explain"] = {
            pair: {path: _explained(e) for path, e in c.explained.items()} for pair, c in pairs.items()
        }
    planes = {pair: c.plane for pair, c in pairs.items() if c.plane}
    if planes:
        result["plane"] = {
            pair: asdict(p) | {"loss": [[_number(x) for x in row] for row in p.loss]} for pair, p in planes.items()
        }
    return result


def _each(pairs: Mapping[str, Compared], of: Callable[[Curve], Any]) -> dict[str, dict[str, Any]]:
    return {pair: {path: of(curve) for path, curve in c.curves.items()} for pair, c in pairs.items()}


def _explained(found: Explanation) -> dict[str, Any]:
    return {
        "barrier": _number(found.barrier),
        "lambdas": list(found.lambdas),
        "components": [
            {"name": part, "barrier": _number(height), "share": _number(found.share(part))}
            for part, height in found.parts.items()
        ],
    }


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
