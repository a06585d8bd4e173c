"""Metrics of interpolated models: one module, moved through weight space, and the data that it is evaluated on.

The parameters of the module are views into one flat buffer, so moving the module to another point is one operation on
vectors. Every batch is read once and used for all points. Data that fit into `memory` bytes are held, and the points
are then evaluated one after the other; larger data are read in parts, and each part is used for all points.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isobasin.alignment.comparable import check_comparable
from isobasin.display import notebook_progress
from isobasin.errors import IsobasinError
from isobasin.files import NullResumeStore, ResumeStore
from isobasin.path.barrier import Curve, grid
from isobasin.runtime import logits, module_of, separate_places
from isobasin.tasks import Batch, Task, open_task
from isobasin.tasks.task import MetricSums
from isobasin.weights import ModelSource, Weights, load

Watch = Callable[[int, int], None]  # (number done, number in total)
# A loss of one's own: a module at its present weights → the loss, or several metrics with `loss` among them.
Loss = Callable[[nn.Module], "float | Tensor | Mapping[str, float | Tensor]"]
MEMORY = 2**31  # bytes
_ALIGNMENT = 64  # floats: vector instructions and matrix kernels are fastest on parameters that start at multiples


@dataclass(frozen=True)
class FlatModel:
    """A module whose parameters are views into one vector, `buffer`: writing to the buffer moves the module.

    Everything is float32, whatever the checkpoints store.
    """

    weights: Weights
    module: nn.Module
    offsets: dict[str, int]
    buffer: Tensor

    @classmethod
    def of(cls, weights: Weights, device: torch.device | None = None) -> "FlatModel":
        """The module of these weights, with the buffer at these weights."""
        module = module_of(weights, attention="sdpa").to(device or torch.device("cpu")).requires_grad_(False)
        offsets, size = {}, 0
        for name, parameter in module.named_parameters():  # a tied parameter occurs once
            offsets[name] = size
            size += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        model = cls(weights, module, offsets, torch.zeros(size, device=device))
        for name, parameter in module.named_parameters():
            view = model.part(model.buffer, name)
            view.copy_(parameter)
            parameter.data = view
        return model

    def vector(self, weights: Weights) -> Tensor:
        """Another model of the same architecture as a vector in the same layout."""
        out = torch.zeros_like(self.buffer)
        for name, parameter in module_of(weights, attention="sdpa").named_parameters():
            self.part(out, name).copy_(parameter.detach())
        return out

    def part(self, vector: Tensor, name: str) -> Tensor:
        """The part of a vector that holds one parameter, as a view in the shape of the parameter."""
        shape = self.module.get_parameter(name).shape
        return vector[self.offsets[name] : self.offsets[name] + shape.numel()].view(shape)

    @cached_property
    def places(self) -> dict[str, str]:
        """The name of the parameter that holds each tensor of the architecture."""
        return separate_places(self.weights, self.module)

    @torch.inference_mode()
    def metric_sums(self, batches: Iterable[Batch]) -> MetricSums | None:
        """The metric sums over these batches at the present weights; None if there are no batches."""
        total: MetricSums | None = None
        for batch in batches:
            one = MetricSums.of(logits(self.weights, self.module, batch.inputs), batch)
            total = one if total is None else total + one
        return total


def evaluate_points(
    model: FlatModel,
    points: Mapping[str, Callable[[], object]],
    task: Iterable[Batch],
    *,
    memory: int = MEMORY,
    cache: ResumeStore | None = None,
    watch: Watch | None = None,
) -> dict[str, MetricSums]:
    """The metric sums over all the data at every point; a point is given by a function that moves the model there."""
    cache = NullResumeStore() if cache is None else cache
    totals: dict[str, MetricSums] = {}
    for number, part in enumerate(_parts(task, memory)):
        held = [to_device(batch, model.buffer.device) for batch in part]
        for done, (name, move) in enumerate(points.items(), 1):
            key = f"{name}/{number}"
            row = cache.find(key)
            sums = MetricSums(**row) if row else None
            if sums is None:
                move()
                sums = model.metric_sums(held)
                assert sums is not None
                cache.keep(key, asdict(sums))
            totals[name] = totals[name] + sums if name in totals else sums
            if watch:
                watch(done, len(points))
    if not totals:
        raise IsobasinError("--data holds nothing to measure: expected at least one sample")
    return totals


def _parts(task: Iterable[Batch], memory: int) -> Iterator[Sequence[Batch]]:
    part: list[Batch] = []
    size = 0
    for batch in task:
        part.append(batch)
        size += sum(t.nbytes for t in (*batch.inputs.values(), batch.targets))
        if size >= memory:
            yield part
            part, size = [], 0
    if part:
        yield part


def to_device(batch: Batch, device: torch.device) -> Batch:
    inputs = {name: tensor.to(device) for name, tensor in batch.inputs.items()}
    return Batch(inputs, batch.targets.to(device), batch.n_bytes)


def evaluate_line(
    model: FlatModel,
    start: Tensor,
    end: Tensor,
    task: Task,
    lambdas: Sequence[float],
    *,
    name: str,
    memory: int = MEMORY,
    cache: ResumeStore | None = None,
    watch: Watch | None = None,
) -> Curve:
    """Every metric of the task on the line between two vectors; `name` identifies the line in the cache."""
    # torch.lerp gives exactly the end vectors at 0 and at 1.
    points = {f"{name}/{lam!r}": partial(torch.lerp, start, end, lam, out=model.buffer) for lam in lambdas}
    sums = evaluate_points(model, points, task, memory=memory, cache=cache, watch=watch)
    return curve_of(lambdas, sums.values(), task)


def curve_of(lambdas: Sequence[float], sums: Iterable[MetricSums], task: Task) -> Curve:
    """The curve that the sums at these points make."""
    rows: list[Mapping[str, float]] = [one.metrics(task.kind) for one in sums]
    return Curve(tuple(lambdas), {name: tuple(row[name] for row in rows) for name in rows[0]})


def evaluate_models(
    models: Sequence[Weights], task: Task, *, device: torch.device | None = None, watch: Watch | None = None
) -> list[dict[str, float]]:
    """Every metric of the task for several models of one architecture, one after the other in the same module."""
    model = FlatModel.of(models[0], device)

    def move_to(weights: Weights) -> None:
        model.buffer.copy_(model.vector(weights))

    points = {str(i): partial(move_to, weights) for i, weights in enumerate(models)}
    return [sums.metrics(task.kind) for sums in evaluate_points(model, points, task, watch=watch).values()]


def evaluate_path(
    a: ModelSource,
    b: ModelSource,
    task: Task | Loss | Path | str | None = None,
    *,
    loss: Loss | None = None,
    n_points: int = 25,
    device: torch.device | str | None = None,
    memory: int = MEMORY,
    cache: ResumeStore | None = None,
    watch: Watch | None = None,
) -> Curve:
    """Every metric of the task at (1−λ)·a + λ·b, interpolated in float32; the ends are exactly the two models.

    >>> evaluate_path(a, b, "test.txt").barrier  # doctest: +SKIP
    >>> evaluate_path(a, b, loss=lambda model: model(input_ids=ids, labels=ids).loss)  # doctest: +SKIP

    `task` is a `Task`, or a file or folder of data as for `open_task`. Instead of it, `loss` is a function of the torch
    module at a point (a model of transformers, or our own `Transformer`): it returns the loss, or a mapping of metrics
    with `loss` among them. Any two models of one architecture that can be built have a path, with or without a head.

    `memory` is the number of bytes of data that may be held in memory. `cache` keeps the sums of evaluated points.
    `watch(done, total)` is called after each point.
    """
    first, second, place = load(a), load(b), None if device is None else torch.device(device)
    check_comparable(first, second)
    if (task is None) == (loss is None):
        raise IsobasinError("evaluate_path: expected one of a task (or data) and a loss, a function of the module")
    measured = loss if task is None else open_task(task, [first, second]) if isinstance(task, str | Path) else task
    model = FlatModel.of(first, place)
    start, end, lambdas = model.buffer.clone(), model.vector(second), grid(n_points)
    with notebook_progress("measuring the path", watch) as shown:
        if isinstance(measured, Task):
            line = model, start, end, measured, lambdas
            return evaluate_line(*line, name="", memory=memory, cache=cache, watch=shown)
        assert measured is not None
        return _line_of_loss(model, start, end, measured, lambdas, shown)


def _line_of_loss(
    model: FlatModel, start: Tensor, end: Tensor, loss: Loss, lambdas: Sequence[float], watch: Watch | None
) -> Curve:
    """The metrics that a function returns for the module at each point."""
    rows: list[dict[str, float]] = []
    with torch.no_grad():
        for done, lam in enumerate(lambdas, 1):
            torch.lerp(start, end, lam, out=model.buffer)
            rows.append(_metrics(loss(model.module)))
            if rows[-1].keys() != rows[0].keys():
                raise IsobasinError(
                    f"loss: metrics {', '.join(rows[-1])} at λ = {lam:.3g}, and {', '.join(rows[0])} at 0; expected "
                    "the same at every point"
                )
            if watch:
                watch(done, len(lambdas))
    return Curve(tuple(lambdas), {name: tuple(row[name] for row in rows) for name in rows[0]})


def _metrics(returned: object) -> dict[str, float]:
    """What a loss function returned, as plain numbers."""
    values: Mapping[Any, Any] = returned if isinstance(returned, Mapping) else {"loss": returned}
    try:
        found = {str(name): float(value) for name, value in values.items()}
    except (TypeError, ValueError, RuntimeError) as error:  # no number; a tensor of several numbers
        raise IsobasinError(
            f"loss: returned {type(returned).__name__} ({error!s:.100}), expected a number or numbers by name"
        ) from error
    if "loss" not in found:
        raise IsobasinError(f"loss: returned {', '.join(found) or 'nothing'}, expected `loss` among the metrics")
    return found
