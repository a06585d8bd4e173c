"""Measuring many mixtures on the same data: every batch is read once and used for all of them.

Data that fit into `memory` bytes are held, and every mixture is then measured whole, one after the other. Larger data
go by in parts, and each part is used for all mixtures before the next is read.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from isobasin.errors import IsobasinError
from isobasin.path.mixture import Mixture
from isobasin.tasks import Batch, Sums

Station = Callable[[], object]  # puts the mixture in its place
Watch = Callable[[int, int], None]  # (done, of)
MEMORY = 2**31


class Ledger(Protocol):
    """Remembers finished measurements, so that an interrupted survey goes on where it stopped."""

    def find(self, key: str) -> Sums | None: ...

    def keep(self, key: str, sums: Sums) -> None: ...


class Forgetful:
    """A ledger for whoever will not come back."""

    def find(self, key: str) -> Sums | None:
        return None

    def keep(self, key: str, sums: Sums) -> None:
        pass


def survey(
    mixture: Mixture,
    stations: Mapping[str, Station],
    task: Iterable[Batch],
    *,
    memory: int = MEMORY,
    ledger: Ledger | None = None,
    watch: Watch | None = None,
) -> dict[str, Sums]:
    """The sums of every station over all the data."""
    ledger = ledger or Forgetful()
    totals: dict[str, Sums] = {}
    for number, part in enumerate(_parts(task, memory)):
        held = [_moved(batch, mixture.buffer.device) for batch in part]
        for done, (name, go) in enumerate(stations.items(), 1):
            key = f"{name}/{number}"
            sums = ledger.find(key)
            if sums is None:
                go()
                sums = mixture.score(held)
                assert sums is not None
                ledger.keep(key, sums)
            totals[name] = totals[name] + sums if name in totals else sums
            if watch:
                watch(done, len(stations))
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


def _moved(batch: Batch, device: torch.device) -> Batch:
    return Batch(
        {name: tensor.to(device) for name, tensor in batch.inputs.items()}, batch.targets.to(device), batch.n_bytes
    )
