"""All pairs of two or three models: curves without and with alignment, explanations, loss planes; as in `path.json`."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from isobasin.alignment.comparable import check_comparable
from isobasin.alignment.result import Alignment
from isobasin.files import ResumeStore
from isobasin.path.barrier import Curve, finite_or_none, grid
from isobasin.path.evaluation import FlatModel, Watch, evaluate_line, evaluate_points
from isobasin.path.explanation import Explanation, explain
from isobasin.path.provenance import provenance
from isobasin.tasks import Task
from isobasin.weights import Weights

MARGIN = 0.25  # of a loss plane around the models, in widths of what they span
Aligner = Callable[[Weights, Weights], Alignment]  # (moving, reference)


@dataclass(frozen=True)
class LossPlane:
    """Losses on a grid, `loss[row of y][column of x]`, in distances from A; `points` holds the models' positions."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    loss: tuple[tuple[float, ...], ...]
    points: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class PairResult:
    """The results of one pair; curves and explanations by path (`naive`, `aligned`)."""

    curves: Mapping[str, Curve]
    alignment: Alignment | None = None
    explanations: Mapping[str, Explanation] = field(default_factory=dict)
    plane: LossPlane | None = None


def evaluate_pairs(
    models: Mapping[str, Weights],
    task: Task,
    *,
    aligner: Aligner | None = None,
    n_points: int = 25,
    explained: bool = False,
    plane: int = 0,
    device: torch.device | None = None,
    cache: ResumeStore | None = None,
    watch: Callable[[str], Watch] | None = None,
) -> dict[str, PairResult]:
    """Evaluate every pair of the models, by the name `A-B`; the second model of a pair is aligned to the first.

    `plane` is the number of grid points along each side of the loss plane, 0 for no plane. `watch(title)` gives a
    function that is called after each step.
    """
    labels = list(models)
    for other in labels[1:]:
        check_comparable(models[labels[0]], models[other])
    model = FlatModel.of(models[labels[0]], device)
    found = {}
    for first, second in combinations(labels, 2):
        name = f"{first}-{second}"

        def titled(title: str, name: str = name) -> Watch | None:
            return watch(f"{name} {title}") if watch else None

        start, end = model.vector(models[first]), model.vector(models[second])
        alignment = aligner(models[second], models[first]) if aligner else None
        ends: dict[str, Tensor] = {"naive": end}
        if alignment:
            ends["aligned"] = model.vector(alignment.transform.apply(models[second]))
        curves, explanations, surface = {}, {}, None
        for path, stop in ends.items():
            line = model, start, stop, task
            options: dict[str, Any] = {"name": f"{name}/{path}", "cache": cache}
            curves[path] = evaluate_line(*line, grid(n_points), watch=titled(f"{path} path"), **options)
            if explained:
                explanations[path] = explain(*line, curves[path], watch=titled(f"{path}, explained"), **options)
        if plane and alignment:
            options = {"name": f"{name}/plane", "cache": cache, "watch": titled("plane")}
            surface = evaluate_plane(model, start, end, ends["aligned"], task, n=plane, **options)
        found[name] = PairResult(curves, alignment, explanations, surface)
    return found


def evaluate_plane(
    model: FlatModel,
    a: Tensor,
    b: Tensor,
    aligned: Tensor,
    task: Task,
    *,
    name: str,
    n: int,
    cache: ResumeStore | None = None,
    watch: Watch | None = None,
) -> LossPlane:
    """The loss on the plane through A, B and B aligned.

    The origin is A. The first axis points to B; the second is perpendicular to it and points to B aligned. If the
    alignment moved nothing, the second axis is zero and all rows are equal.
    """
    first, width = _unit(b - a)
    along = float(torch.dot(aligned - a, first))
    second, height = _unit(aligned - a - along * first)
    models = {"A": (0.0, 0.0), "B": (width, 0.0), "B aligned": (along, height)}
    x, y = (_ticks([position[axis] for position in models.values()], n) for axis in (0, 1))

    def move_to(u: float, v: float) -> None:
        torch.add(a, first, alpha=u, out=model.buffer).add_(second, alpha=v)

    points = {f"{name}/{i}/{j}": partial(move_to, u, v) for j, v in enumerate(y) for i, u in enumerate(x)}
    sums = evaluate_points(model, points, task, cache=cache, watch=watch)
    losses = [one.metrics(task.kind)["loss"] for one in sums.values()]
    return LossPlane(x, y, tuple(tuple(losses[j * n : (j + 1) * n]) for j in range(n)), models)


def _unit(vector: Tensor) -> tuple[Tensor, float]:
    length = float(torch.linalg.vector_norm(vector))
    return (vector / length, length) if length else (vector, 0.0)


def _ticks(values: list[float], n: int) -> tuple[float, ...]:
    low, high = min(values), max(values)
    edge = MARGIN * ((high - low) or 1.0)
    return tuple(low - edge + k * (high - low + 2 * edge) / (n - 1) for k in range(n))


def path_document(
    pairs: Mapping[str, PairResult],
    task: Task,
    *,
    models: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    command: str,
    seed: int,
    device: str,
    seconds: float,
) -> dict[str, Any]:
    """The content of `path.json`; a number that is not finite is None and listed in `not_finite`.

    `models` holds the `model_provenance` of each; `settings` say how they were aligned; the rest is for `provenance`.
    """
    result: dict[str, Any] = {
        "kind": "isobasin.path",
        "schema": 1,
        "lambdas": list(next(iter(pairs.values())).curves["naive"].lambdas),
        "task": {
            "kind": task.kind,
            "name": task.name,
            "n_samples": task.n_samples,
            "fingerprint": task.fingerprint,
            "settings": dict(task.settings),
        },
        "curves": _by_path(pairs, Curve.numbers),
        "barrier": _by_path(pairs, lambda c: {name: finite_or_none(b.height) for name, b in c.barriers.items()}),
        "barrier_lambda": _by_path(pairs, lambda c: {name: b.lam for name, b in c.barriers.items()}),
        "not_finite": [
            {"pair": pair, "path": path, "metric": metric, "lambda": lam}
            for pair, found in pairs.items()
            for path, curve in found.curves.items()
            for metric, lam in curve.not_finite
        ],
    }
    if any(found.explanations for found in pairs.values()):
        result["explain"] = {
            pair: {path: e.to_dict() for path, e in found.explanations.items()} for pair, found in pairs.items()
        }
    planes = {pair: found.plane for pair, found in pairs.items() if found.plane}
    if planes:
        result["plane"] = {
            pair: asdict(p) | {"loss": [[finite_or_none(x) for x in row] for row in p.loss]}
            for pair, p in planes.items()
        }
    result["models"] = dict(models)
    alignments = {pair: found.alignment for pair, found in pairs.items() if found.alignment}
    if alignments:
        result["alignment"] = {pair: {**settings, **found.to_dict()} for pair, found in alignments.items()}
    result["provenance"] = provenance(command=command, seed=seed, device=device, seconds=seconds)
    return result


def _by_path(pairs: Mapping[str, PairResult], of: Callable[[Curve], Any]) -> dict[str, dict[str, Any]]:
    return {pair: {path: of(curve) for path, curve in found.curves.items()} for pair, found in pairs.items()}
