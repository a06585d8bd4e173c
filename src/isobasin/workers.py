"""Pools of workers: processes on this machine, or tasks on a Ray cluster.

A worker does one task at a time, with one torch thread. What it does is a callable that can be pickled.
"""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.resource_tracker import ensure_running
from pathlib import Path
from typing import Any, Protocol

import torch

from isobasin.errors import IsobasinError, one_line

RETRIES = 1  # after a failure that may be temporary: a killed worker, memory that other processes used
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_RAY_WAIT_SECONDS = 1.0  # between two checks for an interrupt
_SPAWN = get_context("spawn")
ENGINES = ("local", "ray")

Work = Callable[[Any], Any]


@dataclass(frozen=True)
class Outcome:
    """A finished attempt: without an error the task is done, and `value` is what the work returned. `temporary`:
    another attempt may succeed."""

    task: Any
    error: str | None = None
    temporary: bool = False
    value: Any = None


class Pool(Protocol):
    """Workers. `start` is called while fewer than `size` tasks are running; `wait` returns at least one outcome."""

    @property
    def size(self) -> int: ...

    def start(self, task: Any) -> None: ...

    def wait(self) -> Sequence[Outcome]: ...

    def close(self) -> None: ...


def attempt(task: Any, work: Work) -> Outcome:
    """Do a task inside a worker; errors are returned, not raised.

    One torch thread is used: sums are then added in the same order, whatever the number of cores.
    """
    torch.set_num_threads(1)
    try:
        return Outcome(task, value=work(task))
    except IsobasinError as error:  # a mistake in the input: it would occur again
        return Outcome(task, one_line(str(error)))
    except Exception as error:
        traceback.print_exc()
        return Outcome(task, one_line(f"{type(error).__name__}: {error}"), temporary=True)


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    task: Any = None


class LocalPool:
    """At most `size` processes on this machine. A killed one is replaced.

    They take the works in turn, for instance one for each device. `log` receives the output of libraries inside them.
    """

    def __init__(self, *works: Work, size: int, log: Path) -> None:
        self.size = size
        self._works, self._log = works, log
        self._workers: list[_Worker] = []
        self._n_started = 0

    def start(self, task: Any) -> None:
        idle = [worker for worker in self._workers if worker.task is None]
        worker = idle[0] if idle else self._new_worker()
        worker.task = task
        with suppress(BrokenPipeError, ConnectionResetError):  # the worker died idle: `wait` returns an outcome for it
            worker.pipe.send(task)

    def wait(self) -> list[Outcome]:
        busy = {worker.pipe: worker for worker in self._workers if worker.task is not None}
        return [self._outcome(busy[pipe]) for pipe in wait(list(busy)) if isinstance(pipe, Connection)]

    def close(self) -> None:
        """Kill all workers, with what they are doing."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers = []

    def _outcome(self, worker: _Worker) -> Outcome:
        task, worker.task = worker.task, None
        try:
            found: Outcome = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join()
            worker.pipe.close()
            self._workers.remove(worker)
            return Outcome(task, f"its worker ended ({_exit_reason(worker.process.exitcode)})", temporary=True)
        return found

    def _new_worker(self) -> _Worker:
        work = self._works[self._n_started % len(self._works)]
        self._n_started += 1
        near, far = _SPAWN.Pipe()
        arguments = (far, work, os.getpid(), self._log)
        process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
        worker = _Worker(process, near)
        with _interrupts_deferred(), _one_thread(), _without_main():
            process.start()
            far.close()  # otherwise `recv` would not end when the worker dies
            self._workers.append(worker)
        return worker


def _serve(pipe: Connection, work: Work, parent: int, log: Path) -> None:
    """The loop of a worker: receive a task, send its outcome, until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles interrupts
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    with suppress(EOFError, ConnectionResetError, BrokenPipeError):
        while True:
            pipe.send(attempt(pipe.recv(), work))


def _exit_with_parent(parent: int) -> None:
    """Workers exit when the parent process dies."""
    while os.getppid() == parent:
        time.sleep(0.3)
    os._exit(1)


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Signals that stop this process take effect after the block, in which a worker is started.

    Interrupted in between, this process would leave a worker that nobody ends, and that fails on truncated input. The
    worker inherits that SIGINT is blocked, so a Ctrl-C in the terminal does not reach it while it imports libraries.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    ensure_running()  # a helper of multiprocessing; starting it unblocks SIGINT
    received: list[int] = []
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: handler for number in names if callable(handler := signal.getsignal(number))}
    for number in handlers:  # other threads do not block SIGINT, so blocking alone would not do
        signal.signal(number, lambda number, _: received.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for deferred in received:
        signal.raise_signal(deferred)


@contextmanager
def _without_main() -> Iterator[None]:
    """Workers do not import the script that starts them: without a main guard it would run again."""
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

    `share` is the share of a GPU for each task. A cluster of several machines needs all files that tasks read and write
    on a shared file system.
    """

    def __init__(self, work: Work, *, size: int | None, share: float = 0.0) -> None:
        self._ray = _connected_ray(size)
        self.size = size or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        # Ray's own retries are off: whoever starts the tasks retries and counts.
        self._task = self._ray.remote(num_cpus=1, num_gpus=share, max_retries=0)(attempt)
        self._work = work
        self._running: dict[Any, Any] = {}

    def start(self, task: Any) -> None:
        self._running[self._task.remote(task, self._work)] = task

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

    def _outcome(self, ref: Any, task: Any) -> Outcome:
        try:
            found: Outcome = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            return Outcome(task, f"its worker ended ({type(error).__name__}: {reason})", temporary=True)
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


# -- a list of tasks -----------------------------------------------------------------------------------------------

Watch = Callable[[], None]


@dataclass(frozen=True)
class _Numbered:
    """The same work for a task that has a number in front, by which its outcome is told from others."""

    work: Work

    def __call__(self, numbered: tuple[int, Any]) -> Any:
        return self.work(numbered[1])


@contextmanager
def open_workers(
    work: Work, *, engine: str = "local", size: int | None = None, log: Path
) -> Iterator[Callable[..., list[Any]]]:
    """A function that does a list of tasks and returns what the work returned for each: `local` processes, or `ray`.

    By default one process for each core; a single local one is this process. `watch` is called after each task.
    """
    if engine not in ENGINES:
        raise IsobasinError(f"--engine {engine!r} is not available, expected one of {', '.join(ENGINES)}")
    if engine == "local" and (size or available_cores()) == 1:
        yield lambda tasks, watch=None: [_watched(work(task), watch) for task in tasks]
        return
    pool: Pool = (
        RayPool(_Numbered(work), size=size)
        if engine == "ray"
        else LocalPool(_Numbered(work), size=size or available_cores(), log=log)
    )
    try:
        yield lambda tasks, watch=None: _do_all(pool, list(tasks), watch)
    finally:
        pool.close()


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _watched(value: Any, watch: Watch | None) -> Any:
    if watch:
        watch()
    return value


def _do_all(pool: Pool, tasks: list[Any], watch: Watch | None) -> list[Any]:
    """A failure that may be temporary is tried again once; any other ends all."""
    found: dict[int, Any] = {}
    waiting, attempts, n_running = list(range(len(tasks))), dict[int, int](), 0
    while waiting or n_running:
        while waiting and n_running < pool.size:
            number = waiting.pop(0)
            attempts[number] = attempts.get(number, 0) + 1
            pool.start((number, tasks[number]))
            n_running += 1
        for outcome in pool.wait():
            number, n_running = outcome.task[0], n_running - 1
            if outcome.error is None:
                found[number] = _watched(outcome.value, watch)
            elif outcome.temporary and attempts[number] <= RETRIES:
                waiting.insert(0, number)
            else:
                raise IsobasinError(outcome.error)
    return [found[number] for number in range(len(tasks))]
