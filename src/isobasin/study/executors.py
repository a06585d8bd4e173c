"""Execution of the jobs of a study: a scheduler, and pools of workers on this machine or on a Ray cluster.

A job starts when all jobs that it needs are done. A failure stops only the jobs that depend on it.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from isobasin.errors import IsobasinError, one_line
from isobasin.study.plan import Context, Job, in_order, run_job
from isobasin.study.store import Store

RETRIES = 1  # after a failure that may be temporary: a killed worker, memory that other processes used
LOG = "workers.log"  # the output of libraries inside the workers
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_RAY_WAIT_SECONDS = 1.0  # between two checks for an interrupt
_SPAWN = get_context("spawn")

Event = Literal["cached", "started", "retried", "done", "failed", "blocked"]
OnEvent = Callable[[Event, Job, str], None]
"""Called at every change of a job: the event, the job, and the reason in words (or an empty string)."""


@dataclass(frozen=True)
class Outcome:
    """A finished attempt: without an error the job is done. `temporary`: another attempt may succeed."""

    job: Job
    error: str | None = None
    temporary: bool = False


class Pool(Protocol):
    """Workers. `start` is called while fewer than `size` jobs are running; `wait` returns at least one outcome."""

    @property
    def size(self) -> int: ...

    def start(self, job: Job) -> None: ...

    def wait(self) -> Sequence[Outcome]: ...

    def close(self) -> None: ...


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
        job = outcome.job
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


def attempt(job: Job, store: Store, context: Context) -> Outcome:
    """Run a job inside a worker; errors are returned, not raised.

    One torch thread is used: sums are then added in the same order, whatever the number of cores.
    """
    torch.set_num_threads(1)
    try:
        run_job(job, store, context)
    except IsobasinError as error:  # a mistake in the input: it would occur again
        return Outcome(job, one_line(str(error)))
    except Exception as error:
        traceback.print_exc()
        return Outcome(job, one_line(f"{type(error).__name__}: {error}"), temporary=True)
    return Outcome(job)


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    job: Job | None = None


class LocalPool:
    """At most `size` processes on this machine, spread over the devices. A killed one is replaced."""

    def __init__(self, store: Store, context: Context, *, size: int, devices: Sequence[str]) -> None:
        self.size = size
        self._store, self._context, self._devices = store, context, tuple(devices)
        self._workers: list[_Worker] = []
        self._n_started = 0

    def start(self, job: Job) -> None:
        idle = [worker for worker in self._workers if worker.job is None]
        worker = idle[0] if idle else self._new_worker()
        worker.job = job
        with suppress(BrokenPipeError, ConnectionResetError):  # the worker died idle: `wait` returns an outcome for it
            worker.pipe.send(job)

    def wait(self) -> list[Outcome]:
        busy = {worker.pipe: worker for worker in self._workers if worker.job is not None}
        return [self._outcome(busy[pipe]) for pipe in wait(list(busy)) if isinstance(pipe, Connection)]

    def close(self) -> None:
        """Kill all workers. A later run resumes their jobs from the scratch folders."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    def _outcome(self, worker: _Worker) -> Outcome:
        job, worker.job = worker.job, None
        assert job is not None
        try:
            found: Outcome = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            worker.pipe.close()
            self._workers.remove(worker)
            return Outcome(job, f"its worker ended ({_exit_reason(worker.process.exitcode)})", temporary=True)
        return found

    def _new_worker(self) -> _Worker:
        device = self._devices[self._n_started % len(self._devices)]
        self._n_started += 1
        near, far = _SPAWN.Pipe()
        log = self._store.root / LOG
        arguments = (far, self._store, replace(self._context, device=device), os.getpid(), log)
        process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
        with _one_thread(), _without_main():
            process.start()
        far.close()  # otherwise `recv` would not end when the worker dies
        worker = _Worker(process, near)
        self._workers.append(worker)
        return worker


def _serve(pipe: Connection, store: Store, context: Context, parent: int, log: Path) -> None:
    """The loop of a worker: receive a job, send its outcome, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            pipe.send(attempt(pipe.recv(), store, context))


def _exit_with_parent(parent: int) -> None:
    """Workers exit when the parent process dies."""
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


@contextmanager
def _without_main() -> Iterator[None]:
    """Workers do not import the script that runs the study: without a main guard it would run the study again."""
    main = sys.modules["__main__"]
    before: dict[str, Any] = {n: vars(main).pop(n) for n in ("__file__", "__spec__") if n in vars(main)}
    main.__spec__ = None  # multiprocessing reads both names and imports what they say
    try:
        yield
    finally:
        vars(main).update(before)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Set the thread variables for a child: libraries read them when they are loaded, before our code runs."""
    before = {name: os.environ.get(name) for name in _THREAD_VARIABLES}
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"


class RayPool:
    """Ray tasks of one core each, on the cluster at RAY_ADDRESS or on one that is started on this machine.

    `share` is the share of a GPU for each task. A cluster of several machines needs the folder of the study, and the
    data, on a shared file system.
    """

    def __init__(self, store: Store, context: Context, *, size: int | None, share: float = 0.0) -> None:
        self._ray = _connected_ray(size)
        self.size = size or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        # Ray's own retries are off: the scheduler retries and counts.
        self._task = self._ray.remote(num_cpus=1, num_gpus=share, max_retries=0)(attempt)
        self._store, self._context = store, context
        self._running: dict[Any, Job] = {}

    def start(self, job: Job) -> None:
        self._running[self._task.remote(job, self._store, self._context)] = job

    def wait(self) -> Sequence[Outcome]:
        ended: list[Any] = []
        while not ended:
            ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_RAY_WAIT_SECONDS)
        return [self._outcome(ref, self._running.pop(ref)) for ref in ended]

    def close(self) -> None:
        for ref in self._running:
            self._ray.cancel(ref, force=True)
        self._running = {}
        self._ray.shutdown()

    def _outcome(self, ref: Any, job: Job) -> Outcome:
        try:
            found: Outcome = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            return Outcome(job, f"its worker ended ({type(error).__name__}: {reason})", temporary=True)
        return found


def _connected_ray(size: int | None) -> Any:
    """The module, connected. Tasks get the import path of this process, also where the package is not installed."""
    try:
        import ray
    except ImportError as error:
        raise IsobasinError(
            "--engine ray needs Ray, which is not installed: pip install 'isobasin[cluster]'"
        ) from error
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": environment}
    on_termination = signal.getsignal(signal.SIGTERM)
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address=os.environ["RAY_ADDRESS"], **options)
    else:
        ray.init(address="local", num_cpus=size, include_dashboard=False, **options)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_termination)  # Ray's own handler would set another exit code
    return ray
