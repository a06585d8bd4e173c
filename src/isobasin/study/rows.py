"""The table of a study: one row for each cell, from the results that are there."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from .jobs import Job
from .plan import CellPlan
from .store import Store

CONNECTED_SHARE = 0.05  # of the naive barrier
CONNECTED_NATS = 0.02
_SHOWN = ("model", "positions", "layers", "heads", "width", "dataset", "scope", "frozen", "finetune_heads")
_WORST = {"accuracy": min, "loss": max, "bits_per_byte": max, "perplexity": max}


def row(plan: CellPlan, store: Store) -> dict[str, Any]:
    """What a cell says: how good its models are, the barrier between them by matcher, and whether all is there.

    Averages are over all pairs, and only of a cell that is done: one with models that miss what it asks for is failed.
    """
    cell = plan.cell
    models = [store.result(job) if store.is_done(job) else None for job in plan.models]
    quality = _quality([found for found in models if found is not None])
    status, why = _status(plan, store, models)
    pairs = [store.result(job) for job in plan.pairs] if status == "done" else []
    about = {"cell": cell.label, **{name: getattr(cell, name) for name in _SHOWN}, "seeds": list(cell.seeds)}
    return {
        **about,
        "status": status,
        "why": why,
        **quality,
        "baseline": _optional(plan.baseline, store, "accuracy"),
        "pretrained": _optional(plan.pretrained, store, "accuracy"),
        "require": {name: value for name, value in cell.require.items() if value is not None},
        "n_pairs": len(pairs),
        **_barriers(pairs),
        "jobs": plan.names,
    }


def _quality(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{"accuracy": {"mean", "min"}, …}: the worst of a loss is its max."""
    found: dict[str, Any] = {}
    for metric, worst in _WORST.items():
        values = [model[metric] for model in models if model.get(metric) is not None]
        mean = {"mean": fmean(values), worst.__name__: worst(values)} if values else None
        found[metric] = mean
    return found


def _status(plan: CellPlan, store: Store, models: Sequence[Mapping[str, Any] | None]) -> tuple[str, str | None]:
    """done, failed (and why) or not filled."""
    for seed, found in zip(plan.cell.seeds, models):
        missed = found and _missed(found, plan.cell.require)
        if missed:
            return "failed", f"seed {seed}: {missed}"
    waiting = [job for job in plan.jobs if not store.is_done(job)]
    for job in waiting:
        failure = store.failure(job)
        if failure is not None:
            return "failed", f"{job.kind}: {failure['error']}"
    return ("not filled", None) if waiting else ("done", None)


def _missed(model: Mapping[str, Any], require: Mapping[str, float | None]) -> str | None:
    """What a model owes to its cell: an accuracy of at least, any loss of at most what is asked for."""
    for metric, asked in require.items():
        if asked is None:
            continue
        found = model.get(metric)
        good = found is not None and (found >= asked if metric == "accuracy" else found <= asked)
        if not good:
            sign = "≥" if metric == "accuracy" else "≤"
            shown = "none" if found is None else f"{found:.4g}"
            return f"{metric} {shown}, asked for {sign} {asked:g}"
    return None


def _barriers(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean loss barriers over the pairs: naive, and by matcher also as a share; connected where every pair is."""
    if not pairs:
        return {"naive": None, "barrier": {}, "share": {}, "connected": {}}
    labels = list(pairs[0]["barrier"])
    mean = {label: _mean([pair["barrier"][label]["loss"] for pair in pairs]) for label in labels}
    naive = mean.pop("naive")
    share = {label: value / naive if value is not None and naive else None for label, value in mean.items()}
    connected = {label: _all_connected(pairs, label) for label in mean}
    return {"naive": naive, "barrier": mean, "share": share, "connected": connected}


def _all_connected(pairs: Sequence[Mapping[str, Any]], label: str) -> bool | None:
    said = [is_connected(pair["barrier"][label]["loss"], pair["barrier"]["naive"]["loss"]) for pair in pairs]
    return None if None in said else all(said)


def is_connected(barrier: float | None, naive: float | None) -> bool | None:
    """The rule of the study: at most 5 % of the naive barrier, or at most 0.02 nats.

    >>> is_connected(0.04, 1.0), is_connected(0.019, 0.02), is_connected(0.1, 1.0), is_connected(None, 1.0)
    (True, True, False, None)
    """
    if barrier is None:
        return None
    return barrier <= CONNECTED_NATS or (naive is not None and barrier <= CONNECTED_SHARE * naive)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None  # a path that is not finite has no mean


def _optional(job: Job | None, store: Store, metric: str) -> float | None:
    return store.result(job).get(metric) if job is not None and store.is_done(job) else None
