"""One piece of work of a study: what it is, what it needs, and the key that its result is found by. No torch here."""

import hashlib
import importlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from isobasin.errors import IsobasinError

if TYPE_CHECKING:
    from .store import Store

WORK: Mapping[str, str] = MappingProxyType(
    {
        "baseline": "isobasin.study.fitting:baseline",
        "pretrain": "isobasin.study.fitting:pretrain",
        "finetune": "isobasin.study.fitting:finetune",
        "pair": "isobasin.study.pairs:pair",
        "heads": "isobasin.study.ablations:heads",
        "layers": "isobasin.study.ablations:layers",
        "control": "isobasin.study.ablations:control",
    }
)
"""Kind of a job -> "module:function", imported when it runs. A kind may also be such an address itself."""

VERSION: Mapping[str, int] = MappingProxyType(dict.fromkeys(WORK, 1))
"""Part of the key: raise it when a kind of work begins to give other numbers for the same settings."""

_KEY = 24  # hex digits: 96 bits


@dataclass(frozen=True)
class Job:
    """A kind of work, all that its result depends on, and the jobs whose folders it reads.

    The key is the beginning of sha256 over canonical JSON of (kind, its version, settings, keys of needs).

    >>> a = Job("pretrain", {"model": "vit", "seed": 1})
    >>> a.key == Job("pretrain", {"seed": 1, "model": "vit"}).key, a.key == Job("pretrain", {"model": "vit"}).key
    (True, False)
    >>> len(Job("finetune", {"scope": "model"}, (a,)).key)
    24
    """

    kind: str
    settings: Mapping[str, Any]  # plain JSON data: no path, no device
    needs: tuple["Job", ...] = ()

    @cached_property
    def key(self) -> str:
        parts = [self.kind, VERSION.get(self.kind, 1), self.settings, [need.key for need in self.needs]]
        return hashlib.sha256(_canonical(parts).encode()).hexdigest()[:_KEY]

    @property
    def name(self) -> str:
        """The folder of its result, `pretrain-0123…`."""
        return f"{self.kind.rpartition(':')[2]}-{self.key}"

    def __hash__(self) -> int:  # settings are a mapping
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.key == other.key


@dataclass(frozen=True)
class Context:
    """What a run has but a result does not depend on."""

    data: Path | None  # root of the datasets; None: only what ships with the package
    device: str  # "cpu", "cuda", "cuda:1", …
    scratch: Path  # a work function's own folder, which survives a kill: checkpoints to resume from


Work = Callable[[Mapping[str, Any], Sequence[Path], Path, Context], dict[str, Any]]
"""work(settings, folders of the needs in order, an empty folder to write into, context) -> result, plain JSON."""


def run_job(job: Job, store: "Store", context: Context) -> dict[str, Any]:
    """Do the work, unless it is done; its needs must be. Gives back what `result.json` holds.

    `context.scratch` is the root of all scratch folders here; the work function is handed one of its own.
    """
    if store.is_whole(job):
        return store.result(job)
    work = load_work(job.kind)
    scratch = context.scratch / job.name
    scratch.mkdir(parents=True, exist_ok=True)
    folders = [store.folder(need) for need in job.needs]
    with store.writing(job) as place:
        began = time.perf_counter()
        found = work(job.settings, folders, place.folder, replace(context, scratch=scratch))
        result = place.commit(found, seconds=time.perf_counter() - began)
    store.forget_scratch(scratch)
    return result


def load_work(kind: str) -> Work:
    """The work function of a kind."""
    module, _, function = WORK.get(kind, kind).partition(":")
    if not function:
        raise IsobasinError(f"kind of work {kind!r} is unknown, expected one of {', '.join(WORK)}")
    work: Work = getattr(importlib.import_module(module), function)
    return work


def in_order(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """The jobs and all that they need, each once, needs first."""
    found: dict[Job, None] = {}

    def visit(job: Job) -> None:
        if job not in found:
            for need in job.needs:
                visit(need)
            found[job] = None

    for job in jobs:
        visit(job)
    return tuple(found)


def strict(value: Any) -> Any:
    """Plain JSON data: tuples become lists, and NaN and infinities, which JSON has not, null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    return value


def _canonical(value: Any) -> str:
    return json.dumps(strict(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
