"""Workers on this machine: processes of their own, one torch thread each, that end when this one does."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from ..jobs import Context, Job
from ..store import Store
from .attempt import Attempt, attempt
from .graph import Outcome

LOG = "workers.log"  # what libraries say inside the workers
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_SPAWN = get_context("spawn")


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    job: Job | None = None


class LocalPool:
    """`size` processes at most; on several devices they take turns. One that is killed is replaced."""

    def __init__(self, store: Store, context: Context, *, size: int, devices: Sequence[str]) -> None:
        self.size = size
        self._store, self._context, self._devices = store, context, tuple(devices)
        self._workers: list[_Worker] = []
        self._n_made = 0

    def start(self, job: Job) -> None:
        idle = [worker for worker in self._workers if worker.job is None]
        worker = idle[0] if idle else self._new()
        worker.job = job
        with suppress(BrokenPipeError, ConnectionResetError):  # it died idle: `wait` finds out, and the job comes back
            worker.pipe.send(job)

    def wait(self) -> list[Outcome]:
        busy = {worker.pipe: worker for worker in self._workers if worker.job is not None}
        return [self._heard(busy[pipe]) for pipe in wait(list(busy)) if isinstance(pipe, Connection)]

    def close(self) -> None:
        """End all workers now: whatever they do is unfinished, and goes on from its scratch folder another time."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    def _heard(self, worker: _Worker) -> Outcome:
        job, worker.job = worker.job, None
        assert job is not None
        try:
            found = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            worker.pipe.close()
            self._workers.remove(worker)
            found = Attempt(f"its worker ended ({_ending(worker.process.exitcode)})", again=True)
        return Outcome(job, found)

    def _new(self) -> _Worker:
        device = self._devices[self._n_made % len(self._devices)]
        self._n_made += 1
        near, far = _SPAWN.Pipe()
        log = self._store.root / LOG
        arguments = (far, self._store, replace(self._context, device=device), os.getpid(), log)
        process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
        with _one_thread():
            process.start()
        far.close()  # or the death of the worker would not be heard
        worker = _Worker(process, near)
        self._workers.append(worker)
        return worker


def _serve(pipe: Connection, store: Store, context: Context, parent: int, log: Path) -> None:
    """The life of a worker: a job in, how it ended out, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to answer
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            pipe.send(attempt(pipe.recv(), store, context))


def _end_with(parent: int) -> None:
    """A killed parent says no farewell: look for it."""
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Libraries read these when they are loaded, before any of our code runs in the child."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        with suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
