"""From cells to jobs: what is trained, which pairs are measured, what is ablated; equal jobs are one job."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from .aligning import Choice
from .grid import Cell
from .jobs import Job, in_order

_LEARNING = ("start", "steps", "rate", "augment")  # of a choice: for `learned` alone


@dataclass(frozen=True)
class CellPlan:
    """The jobs of one cell. `models` are in the order of its seeds, `pairs` in that of its pairs."""

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
        """Where each result lies, as study.json says it."""
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


def plan_cell(cell: Cell, *, checkpoint: Mapping[str, str] | None = None, baseline: bool = False) -> CellPlan:
    """The jobs of a cell; `checkpoint` replaces pretraining, `baseline` asks for the simple one beside the models."""
    pretrained = None if cell.scope == "model" else _pretrain(cell, checkpoint)
    models = tuple(
        _pretrain_whole(cell, seed) if pretrained is None else _finetune(cell, seed, pretrained) for seed in cell.seeds
    )
    pairs = tuple(Job("pair", _pair_settings(cell), (models[i], models[j])) for i, j in cell.pairs)
    ablations = _ablations(cell, pretrained or models[0], models)
    simple = Job("baseline", {"dataset": cell.dataset, "limits": {}}) if baseline else None
    return CellPlan(cell, simple, pretrained, models, pairs, MappingProxyType(ablations))


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


def _pretrain(cell: Cell, checkpoint: Mapping[str, str] | None) -> Job:
    seed, dataset = cell.pretrain["seed"] or 0, cell.pretrain["dataset"] or cell.dataset
    if checkpoint is not None:
        return Job("pretrain", _shape(cell) | {"dataset": cell.dataset, "checkpoint": dict(checkpoint)})
    return Job("pretrain", _shape(cell) | {"dataset": dataset, "train": _train(cell.pretrain), "seed": seed})


def _pretrain_whole(cell: Cell, seed: int) -> Job:
    return Job("pretrain", _shape(cell) | {"dataset": cell.dataset, "train": _train(cell.whole), "seed": seed})


def _finetune(cell: Cell, seed: int, pretrained: Job) -> Job:
    settings = {
        "scope": cell.scope,
        "seed": seed,
        "heads": cell.finetune_heads,
        "frozen": cell.frozen,
        "dataset": cell.dataset,
        "train": _train(cell.finetune),
    }
    return Job("finetune", settings, (pretrained,))


def _measuring(cell: Cell) -> dict[str, Any]:
    return {"dataset": cell.dataset, "samples": cell.samples}


def _pair_settings(cell: Cell) -> dict[str, Any]:
    matchers = [_matcher_settings(choice) for choice in cell.matchers]
    return _measuring(cell) | {"matchers": matchers, "scope": cell.scope, "points": cell.points}


def _matcher_settings(choice: Choice) -> dict[str, Any]:
    drop = () if choice.matcher == "learned" else _LEARNING
    return {key: value for key, value in asdict(choice).items() if key not in drop}


def _ablations(cell: Cell, trained: Job, models: tuple[Job, ...]) -> dict[str, tuple[Job, ...]]:
    """`heads` for every pair, `layers` of the pretrained model, `control` of the first model."""
    measuring, found = _measuring(cell), {}
    if "heads" in cell.ablations:
        settings = measuring | {"scope": cell.scope, "stage2": "full", "seed": 0}
        found["heads"] = tuple(Job("heads", settings, (models[i], models[j])) for i, j in cell.pairs)
    if "layers" in cell.ablations:
        found["layers"] = (Job("layers", measuring | {"seeds": list(cell.seeds)}, (trained,)),)
    if "control" in cell.ablations:
        settings = measuring | {"scope": "all-attention", "seed": 0}
        found["control"] = (Job("control", settings, (models[0],)),)
    return found


def job_title(job: Job) -> str:
    """A few words for a person: what is being done.

    >>> job_title(Job("finetune", {"scope": "first-block", "seed": 2}, (Job("pretrain", {"model": "vit"}),)))
    'finetune first-block seed 2'
    """
    kept = ("model", "positions", "dataset", "scope")
    words = [Path(str(job.settings[key])).name for key in kept if job.settings.get(key) is not None]
    seed = [f"seed {job.settings['seed']}"] if job.settings.get("seed") else []
    pair = ["–".join(str(need.settings.get("seed")) for need in job.needs)] if len(job.needs) == 2 else []
    return " ".join([job.kind.rpartition(":")[2], *words, *seed, *pair])
