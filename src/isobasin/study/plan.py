"""Jobs of a study, and the jobs of each cell.

A job is one piece of work: its kind, its settings, the jobs it needs, and the key under which its result is stored.
Equal jobs of several cells are one job.
"""

import hashlib
import importlib
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobasin.errors import IsobasinError
from isobasin.files import strict_json
from isobasin.study.config import Cell, MatcherConfig

if TYPE_CHECKING:
    from isobasin.study.store import Store

WORK: Mapping[str, str] = {
    "baseline": "isobasin.study.models:baseline",
    "pretrain": "isobasin.study.models:pretrain",
    "finetune": "isobasin.study.models:finetune",
    "pair": "isobasin.study.pairs:pair",
    "heads": "isobasin.study.ablations:heads",
    "layers": "isobasin.study.ablations:layers",
    "control": "isobasin.study.ablations:control",
}
"""Kind of a job -> "module:function", imported when it runs. A kind may also be such an address itself."""

VERSION: Mapping[str, int] = dict.fromkeys(WORK, 1)
"""Part of the key: increase it when a kind of work gives other numbers for the same settings."""

_KEY_DIGITS = 24  # hexadecimal: 96 bits
_LEARNED_ONLY = ("start", "steps", "rate", "augment", "objective")  # fields of MatcherConfig that only `learned` reads


@dataclass(frozen=True)
class Job:
    """A kind of work, all settings that its result depends on, and the jobs whose folders it reads.

    The key is the beginning of sha256 over canonical JSON of (kind, its version, settings, keys of needs).
    """

    kind: str
    settings: Mapping[str, Any]  # plain JSON data: no path, no device
    needs: tuple["Job", ...] = ()

    @cached_property
    def key(self) -> str:
        parts = [self.kind, VERSION.get(self.kind, 1), self.settings, [need.key for need in self.needs]]
        text = json.dumps(strict_json(parts), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_DIGITS]

    @property
    def name(self) -> str:
        """The name of its result, `pretrain-0123…`."""
        return f"{self.kind.rpartition(':')[2]}-{self.key}"

    @property
    def title(self) -> str:
        """A short description for progress messages, such as `finetune first-block seed 2`."""
        shown = ("model", "positions", "dataset", "scope")
        words = [Path(str(self.settings[key])).name for key in shown if self.settings.get(key) is not None]
        seed = [f"seed {self.settings['seed']}"] if self.settings.get("seed") else []
        pair = ["–".join(str(need.settings.get("seed")) for need in self.needs)] if len(self.needs) == 2 else []
        return " ".join([self.kind.rpartition(":")[2], *words, *seed, *pair])

    def __hash__(self) -> int:  # settings are a mapping
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Job) and self.key == other.key


@dataclass(frozen=True)
class Context:
    """What a job needs to run but its result does not depend on."""

    data: Path | None  # root of the datasets; None: only those that ship with the package
    device: str  # "cpu", "cuda", "cuda:1", …
    scratch: Path  # a folder for the work function's checkpoints; it survives a kill


Work = Callable[[Mapping[str, Any], Sequence[Path], Path, Context], dict[str, Any]]
"""work(settings, folders of the needs in order, an empty folder to write into, context) -> result, plain JSON."""


def run_job(job: Job, store: "Store", context: Context) -> dict[str, Any]:
    """Run a job whose needs are done, unless it is done itself. Returns the content of its `result.json`.

    `context.scratch` is the root of all scratch folders; the work function gets one of its own.
    """
    if store.is_complete(job):
        return store.result(job)
    work = load_work(job.kind)
    scratch = context.scratch / job.name
    scratch.mkdir(parents=True, exist_ok=True)
    folders = [store.folder(need) for need in job.needs]
    with store.writing(job) as pending:
        began = time.perf_counter()
        found = work(job.settings, folders, pending.folder, replace(context, scratch=scratch))
        result = pending.commit(found, seconds=time.perf_counter() - began)
    store.remove_scratch(scratch)
    return result


def load_work(kind: str) -> Work:
    """The work function of a kind."""
    module, _, function = WORK.get(kind, kind).partition(":")
    if not function:
        raise IsobasinError(f"kind of work {kind!r} is unknown, expected one of {', '.join(WORK)}")
    work: Work = getattr(importlib.import_module(module), function)
    return work


def in_order(jobs: Iterable[Job]) -> tuple[Job, ...]:
    """The jobs and all jobs that they need, each once, needs first."""
    found: dict[Job, None] = {}

    def visit(job: Job) -> None:
        if job not in found:
            for need in job.needs:
                visit(need)
            found[job] = None

    for job in jobs:
        visit(job)
    return tuple(found)


@dataclass(frozen=True)
class CellPlan:
    """The jobs of one cell. `models` are in the order of its seeds, `pairs` in the order of its pairs."""

    cell: Cell
    baseline: Job | None
    pretrained: Job | None  # None: independent training
    models: tuple[Job, ...]
    pairs: tuple[Job, ...]
    ablations: Mapping[str, tuple[Job, ...]]

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All of them with their needs, needs first."""
        ends = [*self.models, *self.pairs, *(job for jobs in self.ablations.values() for job in jobs)]
        return in_order([*([self.baseline] if self.baseline else []), *ends])

    @property
    def names(self) -> dict[str, Any]:
        """The name of each result, as in study.json."""
        seeds = self.cell.seeds
        return {
            "baseline": self.baseline.name if self.baseline else None,
            "pretrain": self.pretrained.name if self.pretrained else None,
            "models": [{"seed": seed, "job": job.name} for seed, job in zip(seeds, self.models)],
            "pairs": [
                {"seeds": [seeds[i], seeds[j]], "job": job.name} for (i, j), job in zip(self.cell.pairs, self.pairs)
            ],
            **{name: [job.name for job in jobs] for name, jobs in self.ablations.items()},
        }


def plan_cell(cell: Cell, *, checkpoint: Mapping[str, str] | None = None) -> CellPlan:
    """The jobs of a cell. `checkpoint` replaces pretraining. Only labelled text has a baseline."""
    pretrained = None
    if cell.scope == "model":
        models = tuple(_pretrain(cell, cell.dataset, cell.whole, seed) for seed in cell.seeds)
    else:
        dataset, first = cell.dataset, cell.pretrain
        if checkpoint is not None:
            pretrained = Job("pretrain", _shape(cell) | {"dataset": dataset, "checkpoint": dict(checkpoint)})
        else:
            pretrained = _pretrain(cell, first["dataset"] or dataset, first, first["seed"] or 0)
        train = _train(cell.finetune)
        tuned = {"heads": cell.finetune_heads, "frozen": cell.frozen, "dataset": dataset, "train": train}
        starts = [{"scope": cell.scope, "seed": seed} for seed in cell.seeds]
        models = tuple(Job("finetune", start | tuned, (pretrained,)) for start in starts)
    measured = {"dataset": cell.dataset, "samples": cell.samples}
    matchers = [_matcher_settings(config) for config in cell.matchers]
    settings = measured | {"matchers": matchers, "scope": cell.scope, "points": cell.points}
    pairs = tuple(Job("pair", settings, (models[i], models[j])) for i, j in cell.pairs)
    ablations = _ablations(cell, measured, pretrained or models[0], models)
    baseline = Job("baseline", {"dataset": cell.dataset, "limits": {}}) if cell.model == "bert" else None
    return CellPlan(cell, baseline, pretrained, models, pairs, ablations)


def _shape(cell: Cell) -> dict[str, Any]:
    found = {name: getattr(cell, name) for name in ("model", "positions", "layers", "heads", "width", "sequence")}
    return found | ({"patch": cell.patch} if cell.patch else {})


def _train(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe as settings: of epochs and steps, the one that is given."""
    return {
        key: value
        for key, value in recipe.items()
        if key not in ("dataset", "checkpoint", "seed") and not (key in ("epochs", "steps") and value is None)
    }


def _pretrain(cell: Cell, dataset: str, recipe: Mapping[str, Any], seed: int) -> Job:
    return Job("pretrain", _shape(cell) | {"dataset": dataset, "train": _train(recipe), "seed": seed})


def _matcher_settings(config: MatcherConfig) -> dict[str, Any]:
    """Its settings; an objective of labels is left out, as in the keys of jobs before there was another one."""
    labels = ("objective",) if config.objective == "labels" else ()
    drop = labels if config.matcher == "learned" else _LEARNED_ONLY
    return {key: value for key, value in asdict(config).items() if key not in drop}


def _ablations(
    cell: Cell, measured: Mapping[str, Any], trained: Job, models: tuple[Job, ...]
) -> dict[str, tuple[Job, ...]]:
    """`heads` for every pair, `layers` for the pretrained model, `control` for the first model."""
    found = {}
    if "heads" in cell.ablations:
        settings = {**measured, "scope": cell.scope, "stage2": "full", "seed": 0}
        found["heads"] = tuple(Job("heads", settings, (models[i], models[j])) for i, j in cell.pairs)
    if "layers" in cell.ablations:
        found["layers"] = (Job("layers", {**measured, "seeds": list(cell.seeds)}, (trained,)),)
    if "control" in cell.ablations:
        settings = {**measured, "scope": "all-attention", "seed": 0}
        found["control"] = (Job("control", settings, (models[0],)),)
    return found
