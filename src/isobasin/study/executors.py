"""Execution of the jobs of a study: a scheduler, over workers on this machine or on a Ray cluster (`workers`).

A job starts when all jobs that it needs are done. A failure stops only the jobs that depend on it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from isobasin.study.plan import Context, Job, in_order, run_job
from isobasin.study.store import Store
from isobasin.workers import RETRIES, LocalPool, Outcome, Pool, RayPool

LOG = "workers.log"  # the output of libraries inside the workers

Event = Literal["cached", "started", "retried", "done", "failed", "blocked"]
OnEvent = Callable[[Event, Job, str], None]
"""Called at every change of a job: the event, the job, and the reason in words (or an empty string)."""


@dataclass
class _Schedule:
    """The state of every job. Waiting jobs keep their order: earlier cells are finished first."""

    store: Store
    on_event: OnEvent
    waiting: dict[Job, None] = field(default_factory=dict)
    running: dict[Job, None] = field(default_factory=dict)
    failed: dict[Job, None] = field(default_factory=dict)
    attempts: dict[Job, int] = field(default_factory=dict)

    def add(self, job: Job) -> None:
        """A job waits, unless it or a job that it needs has failed in an earlier run."""
        earlier = self.store.failure(job)
        if earlier is not None:
            self._fail(job, f"{earlier['error']} (in an earlier run; --retry tries again)")
        else:
            self.waiting[job] = None
            self._block_dependents()

    def next_ready(self) -> Job | None:
        still_open = self.waiting | self.running
        return next((job for job in self.waiting if not any(need in still_open for need in job.needs)), None)

    def start(self, job: Job) -> None:
        del self.waiting[job]
        self.running[job] = None
        self.attempts[job] = self.attempts.get(job, 0) + 1
        self.on_event("started", job, "")

    def finish(self, outcome: Outcome) -> None:
        job: Job = outcome.task
        del self.running[job]
        if outcome.error is None:
            self.on_event("done", job, "")
        elif outcome.temporary and self.attempts[job] <= RETRIES:
            self.waiting = {job: None, **self.waiting}
            self.on_event("retried", job, outcome.error)
        else:
            self.store.record_failure(job, outcome.error, self.attempts[job])
            self._fail(job, outcome.error)
            self._block_dependents()

    def _fail(self, job: Job, reason: str, event: Event = "failed") -> None:
        self.failed[job] = None
        self.on_event(event, job, reason)

    def _block_dependents(self) -> None:
        for job in list(self.waiting):  # needs come first, so one pass reaches all dependents
            if any(need in self.failed for need in job.needs):
                del self.waiting[job]
                self._fail(job, "", "blocked")


def execute(jobs: Iterable[Job], store: Store, pool: Pool, on_event: OnEvent, *, retry: bool = False) -> None:
    """Run all jobs that are not done. Jobs that failed in an earlier run are skipped, unless `retry`."""
    everything = in_order(jobs)
    schedule = _Schedule(store, on_event)
    open_jobs = unfinished(everything, store)
    for job in everything:
        if job not in open_jobs:
            on_event("cached", job, "")
    for job in open_jobs:
        if retry:
            store.remove_failure(job)
        schedule.add(job)
    while schedule.waiting or schedule.running:
        while len(schedule.running) < pool.size and (ready := schedule.next_ready()) is not None:
            schedule.start(ready)
            pool.start(ready)
        for outcome in pool.wait():
            schedule.finish(outcome)


def unfinished(jobs: Sequence[Job], store: Store) -> tuple[Job, ...]:
    """The jobs to run, needs first: those without a result, and those whose dropped weights are needed."""
    wanted: set[Job] = set()
    for job in reversed(jobs):  # dependents first
        if job in wanted or not store.is_done(job):
            wanted.add(job)
            wanted.update(need for need in job.needs if not store.is_complete(need))
    return tuple(job for job in jobs if job in wanted)


@dataclass(frozen=True)
class RunJob:
    """The work of a study: run a job, with its results in the store."""

    store: Store
    context: Context

    def __call__(self, job: Job) -> None:
        run_job(job, self.store, self.context)


def local_pool(store: Store, context: Context, *, size: int, devices: Sequence[str]) -> LocalPool:
    """Processes on this machine, spread over the devices. A later run resumes jobs that were killed with them."""
    works = (RunJob(store, replace(context, device=device)) for device in devices)
    return LocalPool(*works, size=size, log=store.root / LOG)


def ray_pool(store: Store, context: Context, *, size: int | None, share: float = 0.0) -> RayPool:
    """Tasks on a Ray cluster, which needs the folder of the study, and the data, on a shared file system."""
    return RayPool(RunJob(store, context), size=size, share=share)
