"""Workers of a Ray cluster: the one at RAY_ADDRESS, or one that is started on this machine.

A cluster of several machines needs the study's folder, and the data, on a file system that all of them see.
"""

import os
import sys
from collections.abc import Sequence
from typing import Any

from isobasin.errors import IsobasinError

from ..jobs import Context, Job
from ..store import Store
from .attempt import Attempt, attempt
from .graph import Outcome

_WAIT = 1.0  # seconds after which an interrupt is looked for


class RayPool:
    """The same work as in `LocalPool`, as Ray tasks of one core each; `share` is what a task has of a GPU."""

    def __init__(self, store: Store, context: Context, *, size: int | None, share: float = 0.0) -> None:
        self._ray = _ray()
        _connect(self._ray, size)
        self.size = size or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        # Ray's own retries are off: a job is tried again by the graph, which counts.
        self._task = self._ray.remote(num_cpus=1, num_gpus=share, max_retries=0)(attempt)
        self._store, self._context = store, context
        self._running: dict[Any, Job] = {}

    def start(self, job: Job) -> None:
        self._running[self._task.remote(job, self._store, self._context)] = job

    def wait(self) -> Sequence[Outcome]:
        ended: list[Any] = []
        while not ended:
            ended, _ = self._ray.wait(list(self._running), num_returns=1, timeout=_WAIT)
        return [Outcome(self._running.pop(ref), self._heard(ref)) for ref in ended]

    def close(self) -> None:
        for ref in self._running:
            self._ray.cancel(ref, force=True)
        self._running = {}
        self._ray.shutdown()

    def _heard(self, ref: Any) -> Attempt:
        try:
            found: Attempt = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[0]
            return Attempt(f"its worker ended ({type(error).__name__}: {reason})", again=True)
        return found


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise IsobasinError(
            "--engine ray needs Ray, which is not installed: pip install 'isobasin[cluster]'"
        ) from error
    return ray


def _connect(ray: Any, size: int | None) -> None:
    """Tasks import what this process imports, also where the package is not installed."""
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}}
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "runtime_env": environment}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(address=os.environ["RAY_ADDRESS"], **options)
    else:
        ray.init(address="local", num_cpus=size, include_dashboard=False, **options)
