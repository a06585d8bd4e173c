"""A whole study: read the grid, plan its jobs, carry out what is not done, write the table and the page."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from isobasin.errors import IsobasinError
from isobasin.path.fingerprint import provenance

from .engine import Event, Pool, work_through
from .engine.cluster import RayPool
from .engine.local import LocalPool
from .engine.watching import watching
from .grid import Cell, Grid, read_grid
from .jobs import Context, Job
from .plan import CellPlan, plan_cell
from .rows import row
from .sources import Checkpoint, check_cell, find_checkpoint, plant
from .store import Store, read_json, write_json

STUDY = "study.json"
LOCK = ".lock"
ENGINES = ("local", "ray")
PER_GPU = 4  # small models that share one


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a study is carried out: nothing here changes its numbers, but for the rounding of another device."""

    data: Path | None = None
    engine: str = "local"
    workers: int | None = None
    device: str = "auto"
    only: str | None = None
    retry: bool = False
    keep_weights: bool = True
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise IsobasinError(f"--engine {self.engine!r} is unknown, expected one of {', '.join(ENGINES)}")
        if self.workers is not None and self.workers < 1:
            raise IsobasinError(f"--workers {self.workers}, expected 1 or more")
        if self.data is not None and not self.data.is_dir():
            raise IsobasinError(f"--data {self.data}: no such folder; expected the root of the data sets")


def run_study(grid: str | Path, out: str | Path, setting: Setting, *, command: str) -> dict[str, Any]:
    """Carry out what is not done yet, and write `study.json`. Gives back the rows and what failed.

    What was done before is found by its key and kept; a run that was killed goes on where it was.
    """
    began, found, store = perf_counter(), read_grid(grid), Store(Path(out).absolute())
    device = _device(setting.device)
    chosen = found.only(setting.only)
    for cell in chosen:
        check_cell(cell, setting.data)
    checkpoints = {cell.label: find_checkpoint(cell, Path(grid).parent) for cell in found.cells}
    plans = [_planned(cell, checkpoints[cell.label]) for cell in found.cells]
    wanted = [plan for plan in plans if plan.cell in chosen]
    _check_place(store.root)
    with _alone(store.root):
        store.tidy()
        # Named from the start: a run that is killed has filled rows too. Its seconds stay 0.
        run = provenance(command=command, seed=0, device=device, seconds=0.0)
        runs = [*_earlier_runs(store.root), run]
        write_study(found, plans, store, runs)
        for plan in wanted:
            _plant(plan, checkpoints[plan.cell.label], store)
        _work(wanted, store, setting, device, lambda: write_study(found, plans, store, runs))
        if not setting.keep_weights:
            _drop_weights(plans, store)
        run["seconds"] = round(perf_counter() - began, 3)
        return write_study(found, plans, store, runs)


def _work(plans: Sequence[CellPlan], store: Store, setting: Setting, device: str, save: Callable[[], Any]) -> None:
    """Carry out the jobs; `save` is called whenever a cell has come to its end, so that a kill loses no row."""
    jobs = [job for plan in plans for job in plan.jobs]
    pool = _pool(setting, store, device)
    try:
        with watching(plans, quiet=setting.quiet) as (told, standing):

            def heard(event: Event, job: Job, why: str) -> None:
                told(event, job, why)
                mine = [plan for plan in plans if job in plan.jobs] if event in ("done", "failed") else []
                if any(standing.cell_state(plan) in ("done", "failed") for plan in mine):
                    save()

            work_through(jobs, store, pool, heard, retry=setting.retry)
    finally:
        pool.close()
        store.tidy()


def _planned(cell: Cell, checkpoint: Checkpoint | None) -> CellPlan:
    # Only labelled text has a simple baseline beside it.
    return plan_cell(cell, checkpoint=checkpoint.settings if checkpoint else None, baseline=cell.model == "bert")


def _plant(plan: CellPlan, checkpoint: Checkpoint | None, store: Store) -> None:
    if checkpoint is not None and plan.pretrained is not None:
        plant(plan.pretrained, checkpoint, store)


def write_study(grid: Grid, plans: Sequence[CellPlan], store: Store, runs: Sequence[Any]) -> dict[str, Any]:
    """study.json: the grid, a row for each cell with the names of its results, and the runs that filled it."""
    rows = [row(plan, store) for plan in plans]
    failed = [{"cell": each["cell"], "why": each["why"]} for each in rows if each["status"] == "failed"]
    facts = {"name": grid.name, "cells": rows, "failed": failed}
    write_json(store.root / STUDY, {"format": 1, **facts, "grid": grid.text, "runs": list(runs)})
    return facts


def _earlier_runs(root: Path) -> list[Any]:
    path = root / STUDY
    return list(read_json(path).get("runs", [])) if path.is_file() else []


def _device(asked: str) -> str:
    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(asked)
    except RuntimeError as error:
        raise IsobasinError(f"--device {asked!r} is unknown, expected auto, cpu, cuda or cuda:1") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise IsobasinError(f"--device {asked}: there is no CUDA device here; use --device cpu")
    return asked


def _pool(setting: Setting, store: Store, device: str) -> Pool:
    context = Context(data=setting.data.absolute() if setting.data else None, device=device, scratch=store.scratch)
    if setting.engine == "ray":
        share = 1 / PER_GPU if device.startswith("cuda") else 0.0
        return RayPool(store, context, size=setting.workers, share=share)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    n_gpus = torch.cuda.device_count() if device == "cuda" else 1
    devices = [f"cuda:{i}" for i in range(n_gpus)] if device == "cuda" else [device]
    size = cores if device == "cpu" else min(cores, PER_GPU * n_gpus)
    return LocalPool(store, context, size=setting.workers or size, devices=devices)


def _drop_weights(plans: Sequence[CellPlan], store: Store) -> None:
    """Weights that no job still waits for; results stay."""
    jobs = {job for plan in plans for job in plan.jobs}
    waited_for = {need for job in jobs if not store.is_done(job) for need in job.needs}
    for job in jobs - waited_for:
        if store.is_done(job):
            store.drop_weights(job)


def _check_place(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise IsobasinError(f"output {root} is a file, expected a folder: choose another name")
    filled = root.is_dir() and any(path.name != LOCK for path in root.iterdir())
    if filled and not (root / STUDY).is_file():
        raise IsobasinError(
            f"output {root} is not empty and holds no {STUDY}, so it is no study: choose another folder"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IsobasinError(f"output {root} can not be made ({error.strerror}): choose another folder") from error


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """One run at a time in a folder; the lock goes with the process that holds it, however that ends."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: nobody is kept out
        yield
        return
    with (root / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise IsobasinError(
                f"output {root}: another run is at work there; wait for it, or choose another"
            ) from error
        yield
