"""The graph of a study, worked through: a job starts when what it needs is done, and a failure stops only its heirs."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ..jobs import Job, in_order
from ..store import Store
from .attempt import Attempt

RETRIES = 1  # after a failure that may pass: a killed worker, memory that others took

Event = Literal["found", "started", "again", "done", "failed", "blocked"]
Told = Callable[[Event, Job, str], None]
"""Told of every change: what happened, to which job, and in words why (empty if there is nothing to say)."""


@dataclass(frozen=True)
class Outcome:
    """A try that has ended."""

    job: Job
    attempt: Attempt


class Pool(Protocol):
    """Workers. `start` is called while fewer than `size` jobs are under way; `wait` gives at least one that ended."""

    @property
    def size(self) -> int: ...

    def start(self, job: Job) -> None: ...

    def wait(self) -> Sequence[Outcome]: ...

    def close(self) -> None: ...


@dataclass
class _Board:
    """Where every job stands. Waiting jobs keep their order: earlier cells are finished first."""

    waiting: dict[Job, None] = field(default_factory=dict)
    running: dict[Job, None] = field(default_factory=dict)
    failed: dict[Job, None] = field(default_factory=dict)
    tries: dict[Job, int] = field(default_factory=dict)

    def next_ready(self) -> Job | None:
        return next((job for job in self.waiting if not any(self._is_open(need) for need in job.needs)), None)

    def _is_open(self, job: Job) -> bool:
        return job in self.waiting or job in self.running


def work_through(jobs: Iterable[Job], store: Store, pool: Pool, told: Told, *, retry: bool = False) -> None:
    """Do all jobs that are not done. Those that failed in an earlier run are left alone, unless `retry`."""
    everything = in_order(jobs)
    board = _Board()
    wanted = unfinished(everything, store)
    for job in everything:
        if job not in wanted:
            told("found", job, "")
    for job in wanted:
        if retry:
            store.forget_failure(job)
        _place(job, board, store, told)
    while board.waiting or board.running:
        while len(board.running) < pool.size and (ready := board.next_ready()) is not None:
            del board.waiting[ready]
            board.running[ready] = None
            board.tries[ready] = board.tries.get(ready, 0) + 1
            told("started", ready, "")
            pool.start(ready)
        for outcome in pool.wait():
            _settle(outcome, board, store, told)


def unfinished(jobs: Sequence[Job], store: Store) -> tuple[Job, ...]:
    """What has to be done, needs first: jobs without a result, and those whose weights are gone but needed."""
    wanted: set[Job] = set()
    for job in reversed(jobs):  # heirs first
        if job in wanted or not store.is_done(job):
            wanted.add(job)
            wanted.update(need for need in job.needs if not store.is_whole(need))
    return tuple(job for job in jobs if job in wanted)


def _place(job: Job, board: _Board, store: Store, told: Told) -> None:
    """A job waits, unless it or one that it needs has failed."""
    earlier = store.failure(job)
    if earlier is not None:
        board.failed[job] = None
        told("failed", job, f"{earlier['error']} (in an earlier run; --retry tries again)")
    elif any(need in board.failed for need in job.needs):
        board.failed[job] = None
        told("blocked", job, "")
    else:
        board.waiting[job] = None


def _settle(outcome: Outcome, board: _Board, store: Store, told: Told) -> None:
    job, found = outcome.job, outcome.attempt
    del board.running[job]
    if found.error is None:
        told("done", job, "")
    elif found.again and board.tries[job] <= RETRIES:
        board.waiting = {job: None, **board.waiting}
        told("again", job, found.error)
    else:
        store.record_failure(job, found.error, board.tries[job])
        board.failed[job] = None
        told("failed", job, found.error)
        _block_heirs(board, told)


def _block_heirs(board: _Board, told: Told) -> None:
    for job in list(board.waiting):  # needs come first, so one pass reaches all heirs
        if any(need in board.failed for need in job.needs):
            del board.waiting[job]
            board.failed[job] = None
            told("blocked", job, "")
