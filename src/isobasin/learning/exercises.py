"""What is learned from, and what decides: batches in an order that any step can ask for, and data held out."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.learning.lessons import generator
from isobasin.tasks import Batch, Task

HELD_OUT = 10  # one sample in so many
MOST = 1024  # samples held out: a check measures them at every point
Augment = Callable[[Tensor, torch.Generator], Tensor]


class Exercises:
    """The batches of a task again and again, in a new order each time; `exercises[n]` is the n-th of them all."""

    def __init__(self, task: Task, seed: int, device: torch.device, augment: Augment | None = None) -> None:
        self._held = [on(batch, device) for batch in task if len(batch)]
        self._seed, self._augment = seed, augment
        self._order: tuple[int, list[int]] = (-1, [])
        if not self._held:
            raise IsobasinError(f"{task.source}: holds nothing to learn from, expected at least one sample")

    def __getitem__(self, number: int) -> Batch:
        epoch, place = divmod(number, len(self._held))
        if self._order[0] != epoch:
            order = torch.randperm(len(self._held), generator=generator(self._seed, "order", epoch)).tolist()
            self._order = (epoch, order)
        batch = self._held[self._order[1][place]]
        pixels = batch.inputs.get("pixel_values")
        if self._augment is None or pixels is None:
            return batch
        changed = self._augment(pixels, generator(self._seed, "augment", number))
        return replace(batch, inputs=batch.inputs | {"pixel_values": changed})


def on(batch: Batch, device: torch.device) -> Batch:
    moved = {name: tensor.to(device) for name, tensor in batch.inputs.items()}
    return Batch(moved, batch.targets.to(device), batch.n_bytes)


def split(task: Task, *, most: int = MOST) -> tuple[Task, Task]:
    """A task to learn from and one to decide by: a tenth of the samples, and no sample is in both.

    Of text it is the last windows, so that no window to decide by stands between two that were learned. Labelled
    samples may be sorted by class, so there it is every tenth.
    """
    n = task.n_samples
    if n < 2:
        raise IsobasinError(
            f"{task.source}: {n} sample is too little to hold some out, expected 2 or more; give --held-out data"
        )
    count = min(max(1, n // HELD_OUT), most)
    if task.kind in ("lm", "mlm"):
        chosen = set(range(n - count, n))
    else:
        chosen = {(k + 1) * n // count - 1 for k in range(count)}
    return _part(task, chosen, keep=False), _part(task, chosen, keep=True)


def _part(task: Task, chosen: set[int], *, keep: bool) -> Task:
    def batches() -> Iterator[Batch]:
        first = 0
        for batch in task:
            rows = [k for k in range(len(batch)) if (first + k in chosen) == keep]
            first += len(batch)
            if len(rows) == len(batch):
                yield batch
            elif rows:
                yield _rows(batch, torch.tensor(rows))

    def gathered() -> Iterator[Batch]:
        size = max((len(batch) for batch in islice(task, 1)), default=1)
        return together(batches(), size)

    count = len(chosen) if keep else task.n_samples - len(chosen)
    said = f"{task.fingerprint}, {'only' if keep else 'without'} {sorted(chosen)}"
    return replace(task, n_samples=count, batches=gathered if keep else batches, fingerprint=said)


def _rows(batch: Batch, rows: Tensor) -> Batch:
    """Some samples of a batch; of its bytes nobody knows whose they are."""
    return Batch({name: tensor[rows] for name, tensor in batch.inputs.items()}, batch.targets[rows], None)


def together(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    """The same samples in batches of about `size`: a few of each batch would make a measurement wait for hundreds.

    Only samples of one shape come together.
    """
    waiting: dict[tuple[object, ...], list[Batch]] = {}
    for batch in batches:
        shape = (*((name, t.shape[1:]) for name, t in batch.inputs.items()), batch.targets.shape[1:])
        group = waiting.setdefault(shape, [])
        group.append(batch)
        if sum(map(len, group)) >= size:
            yield _one(waiting.pop(shape))
    yield from map(_one, waiting.values())


def _one(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    inputs = {name: torch.cat([batch.inputs[name] for batch in batches]) for name in batches[0].inputs}
    known = [batch.n_bytes for batch in batches if batch.n_bytes is not None]
    n_bytes = sum(known) if len(known) == len(batches) else None
    return Batch(inputs, torch.cat([batch.targets for batch in batches]), n_bytes)
