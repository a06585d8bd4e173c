"""A whole study: read the grid, plan its jobs, run those that are not done, show progress, and write study.json."""

import hashlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from isobasin.errors import IsobasinError, brief, printable
from isobasin.files import recover
from isobasin.model.transformer import CONFIG_NAME, WEIGHTS_NAME, read_folder
from isobasin.path.barrier import is_connected
from isobasin.path.provenance import provenance
from isobasin.study.config import DATA_KINDS, Cell, Grid, read_grid
from isobasin.study.executors import Event, OnEvent, execute, local_pool, ray_pool
from isobasin.study.plan import CellPlan, Context, Job, in_order, plan_cell
from isobasin.study.results import mean
from isobasin.study.store import STUDY, Store, read_json, write_json
from isobasin.tasks.datasets import locate
from isobasin.tasks.tokenizer import TOKENIZER_FILE as TOKENIZER
from isobasin.workers import ENGINES, Pool, available_cores

if TYPE_CHECKING:
    from rich.table import Table

LOCK = ".lock"
MAX_WORKERS = 1024
WORKERS_PER_GPU = 4  # the models are small
_MAX_CELLS = 30  # rows of the live table
_STATES: Mapping[str, str] = {"cached": "done", "started": "running", "retried": "waiting", "blocked": "failed"}
_KIND_NAMES = {"image": "pictures", "text": "labelled text", "lm": "one long text"}
_CELL_FIELDS = ("model", "positions", "layers", "heads", "width", "dataset", "scope", "frozen", "finetune_heads")
_WORST = {"accuracy": min, "loss": max, "bits_per_byte": max, "perplexity": max}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How a study is run. Nothing here changes its numbers, except for the rounding of another device."""

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
        if self.workers is not None and not 1 <= self.workers <= MAX_WORKERS:
            raise IsobasinError(f"--workers {brief(self.workers)}, expected 1 or more, up to {MAX_WORKERS}")
        if self.data is not None and not self.data.is_dir():
            raise IsobasinError(f"--data {self.data}: no such folder; expected the root of the data sets")


def run_study(grid: str | Path, out: str | Path, config: RunConfig, *, command: str) -> dict[str, Any]:
    """Run all jobs that are not done, and write `study.json`. Returns the rows and the failures.

    Results of earlier runs are found by their key and kept; a killed run is resumed.
    """
    began, found, store = time.perf_counter(), read_grid(grid), Store(Path(out).absolute())
    device = _device(config.device)
    chosen = found.only(config.only)
    for cell in chosen:
        check_dataset(cell, config.data)
    checkpoints = {cell.label: find_checkpoint(cell, Path(grid).parent) for cell in found.cells}
    settings = {label: checkpoint.settings for label, checkpoint in checkpoints.items() if checkpoint}
    plans = [plan_cell(cell, checkpoint=settings.get(cell.label)) for cell in found.cells]
    wanted = [plan for plan in plans if plan.cell in chosen]
    _check_place(store.root)
    with _locked(store.root):
        store.remove_unfinished()
        for job in (job for plan in plans for job in plan.jobs if store.is_complete(job)):
            store.remove_scratch(store.scratch / job.name)  # a worker was killed before it did
        # The run is written at the start, so that it is also there if it is killed. Its seconds are then 0.
        run = provenance(command=command, seed=0, device=device, seconds=0.0)
        earlier = read_json(store.root / STUDY).get("runs", []) if (store.root / STUDY).is_file() else []
        runs = [*earlier, run]
        write_study(found, plans, store, runs)
        for plan in wanted:
            checkpoint = checkpoints[plan.cell.label]
            if checkpoint is not None and plan.pretrained is not None:
                import_checkpoint(plan.pretrained, checkpoint, store)
        _run_jobs(wanted, store, config, device, lambda: write_study(found, plans, store, runs))
        if not config.keep_weights:
            _drop_weights(plans, store)
        run["seconds"] = round(time.perf_counter() - began, 3)
        return write_study(found, plans, store, runs)


def _run_jobs(plans: Sequence[CellPlan], store: Store, config: RunConfig, device: str, save: Callable[[], Any]) -> None:
    """Run the jobs. `save` is called whenever a cell is done or has failed, so that a kill loses no row."""
    jobs = [job for plan in plans for job in plan.jobs]
    pool = _pool(config, store, device)
    try:
        with show_progress(plans, quiet=config.quiet) as (show, progress):

            def on_event(event: Event, job: Job, reason: str) -> None:
                show(event, job, reason)
                mine = [plan for plan in plans if job in plan.jobs] if event in ("done", "failed") else []
                if any(progress.cell_state(plan) in ("done", "failed") for plan in mine):
                    save()

            execute(jobs, store, pool, on_event, retry=config.retry)
    finally:
        pool.close()
        store.remove_unfinished()


def write_study(grid: Grid, plans: Sequence[CellPlan], store: Store, runs: Sequence[Any]) -> dict[str, Any]:
    """Write study.json: the grid, a row for each cell with the names of its results, and the runs."""
    rows = [cell_row(plan, store) for plan in plans]
    failed = [{"cell": each["cell"], "why": each["why"]} for each in rows if each["status"] == "failed"]
    title = {"title": grid.title} if grid.title else {}
    found = {"name": grid.name, **title, "cells": rows, "failed": failed}
    write_json(store.root / STUDY, {"format": 1, **found, "grid": grid.text, "runs": list(runs)})
    return found


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise IsobasinError(f"--device {name!r} is unknown, expected auto, cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise IsobasinError(f"--device {name}: there is no CUDA device here; use --device cpu")
    return name


def _pool(config: RunConfig, store: Store, device: str) -> Pool:
    context = Context(data=config.data.absolute() if config.data else None, device=device, scratch=store.scratch)
    if config.engine == "ray":
        share = 1 / WORKERS_PER_GPU if device.startswith("cuda") else 0.0
        return ray_pool(store, context, size=config.workers, share=share)
    cores = available_cores()
    n_gpus = torch.cuda.device_count() if device == "cuda" else 1
    devices = [f"cuda:{i}" for i in range(n_gpus)] if device == "cuda" else [device]
    size = cores if device == "cpu" else min(cores, WORKERS_PER_GPU * n_gpus)
    return local_pool(store, context, size=config.workers or size, devices=devices)


def _drop_weights(plans: Sequence[CellPlan], store: Store) -> None:
    """Drop the weights that no open job needs; results stay."""
    jobs = {job for plan in plans for job in plan.jobs}
    needed = {need for job in jobs if not store.is_done(job) for need in job.needs}
    for job in jobs - needed:
        if store.is_done(job):
            store.drop_weights(job)


def _check_place(root: Path) -> None:
    if root.exists() and not root.is_dir():
        raise IsobasinError(f"output {root} is a file, expected a folder: choose another name")
    recover(root / STUDY)
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
def _locked(root: Path) -> Iterator[None]:
    """Allow one run at a time in a folder. The lock is released when the process ends, in whatever way."""
    try:
        import fcntl
    except ImportError:  # not a POSIX system: no lock
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


def check_dataset(cell: Cell, root: Path | None) -> None:
    """Check that the data sets of a cell exist and fit its model."""
    for name in dict.fromkeys([cell.pretrain["dataset"] or cell.dataset, cell.dataset]):
        (kind, _, _), expected = locate(name, root), DATA_KINDS[cell.model]
        if kind != expected:
            raise IsobasinError(
                f"cell {cell.label!r}: data set {name!r} is {_KIND_NAMES[kind]}, "
                f"{cell.model} reads {_KIND_NAMES[expected]}"
            )


@dataclass(frozen=True)
class PretrainedCheckpoint:
    """The folder of a model that replaces pretraining, identified by the hash of its content."""

    folder: Path
    sha256: str

    @property
    def settings(self) -> dict[str, str]:
        return {"name": self.folder.name, "sha256": self.sha256}


def find_checkpoint(cell: Cell, base: Path) -> PretrainedCheckpoint | None:
    """The checkpoint of a cell, by a path relative to the grid file; its sizes must be those of the cell."""
    if cell.pretrain["checkpoint"] is None or cell.scope == "model":
        return None
    folder = base / cell.pretrain["checkpoint"]
    config, _ = read_folder(folder)
    sizes = {"positions": cell.positions, "n_layers": cell.layers, "n_heads": cell.heads, "d_model": cell.width}
    for name, value in sizes.items():
        if getattr(config, name) != value:
            raise IsobasinError(
                f"pretrain.checkpoint {folder}: {name} is {getattr(config, name)}, but the cell says {value}; "
                "change one of them"
            )
    content = hashlib.sha256()
    for file in _checkpoint_files(folder):
        content.update(hashlib.sha256(file.read_bytes()).digest())
    return PretrainedCheckpoint(folder, content.hexdigest())


def _checkpoint_files(folder: Path) -> list[Path]:
    """The files of a model of the study; other files in its folder are ignored."""
    return [path for name in (CONFIG_NAME, WEIGHTS_NAME, TOKENIZER) if (path := folder / name).is_file()]


def import_checkpoint(job: Job, checkpoint: PretrainedCheckpoint, store: Store) -> None:
    """Store a copy of a checkpoint as the result of the job `pretrain`."""
    if store.is_complete(job):
        return
    with store.writing(job) as pending:
        (pending.folder / "model").mkdir()
        for file in _checkpoint_files(checkpoint.folder):
            shutil.copyfile(file, pending.folder / "model" / file.name)
        pending.commit({"checkpoint": checkpoint.settings}, seconds=0.0)


def cell_row(plan: CellPlan, store: Store) -> dict[str, Any]:
    """The row of a cell in study.json: the quality of its models, the barrier by matcher, and its status.

    Averages are over all pairs, and only for a cell that is done. A cell whose models miss its requirements is failed.
    """
    cell = plan.cell
    models = [store.result(job) if store.is_done(job) else None for job in plan.models]
    status, why = _status(plan, store, models)
    pairs = [store.result(job) for job in plan.pairs] if status == "done" else []
    return {
        "cell": cell.label,
        **{name: getattr(cell, name) for name in _CELL_FIELDS},
        "seeds": list(cell.seeds),
        "status": status,
        "why": why,
        **_quality([found for found in models if found is not None]),
        "baseline": _accuracy(plan.baseline, store),
        "pretrained": _accuracy(plan.pretrained, store),
        "require": {name: value for name, value in cell.require.items() if value is not None},
        "n_pairs": len(pairs),
        **_barriers(pairs),
        "jobs": plan.names,
    }


def _quality(models: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """{"accuracy": {"mean", "min"}, …}: the worst value of a loss is its maximum."""
    found: dict[str, Any] = {}
    for metric, worst in _WORST.items():
        values = [model[metric] for model in models if model.get(metric) is not None]
        found[metric] = {"mean": mean(values), worst.__name__: worst(values)} if values else None
    return found


def _status(plan: CellPlan, store: Store, models: Sequence[Mapping[str, Any] | None]) -> tuple[str, str | None]:
    """done, failed (and why) or not filled."""
    for seed, found in zip(plan.cell.seeds, models):
        missed = found and _missed_requirement(found, plan.cell.require)
        if missed:
            return "failed", f"seed {seed}: {missed}"
    waiting = [job for job in plan.jobs if not store.is_done(job)]
    for job in waiting:
        failure = store.failure(job)
        if failure is not None:
            return "failed", f"{job.kind}: {failure['error']}"
    return ("not filled", None) if waiting else ("done", None)


def _missed_requirement(model: Mapping[str, Any], require: Mapping[str, float | None]) -> str | None:
    """The first requirement that a model misses: an accuracy is a lower bound, a loss an upper bound."""
    for metric, required in require.items():
        if required is None:
            continue
        found = model.get(metric)
        good = found is not None and (found >= required if metric == "accuracy" else found <= required)
        if not good:
            sign = "≥" if metric == "accuracy" else "≤"
            shown = "none" if found is None else f"{found:.4g}"
            return f"{metric} {shown}, asked for {sign} {required:g}"
    return None


def _barriers(pairs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean loss barriers over the pairs, their share of the naive one, and whether all pairs are connected."""
    if not pairs:
        return {"naive": None, "barrier": {}, "share": {}, "connected": {}}
    each = {label: [pair["barrier"][label]["loss"] for pair in pairs] for label in pairs[0]["barrier"]}
    naive_each = each.pop("naive")
    naive, means = mean(naive_each), {label: mean(values) for label, values in each.items()}
    share = {label: value / naive if value is not None and naive else None for label, value in means.items()}
    by_pair = {label: list(map(is_connected, values, naive_each)) for label, values in each.items()}
    connected = {label: None if None in found else all(found) for label, found in by_pair.items()}
    return {"naive": naive, "barrier": means, "share": share, "connected": connected}


def _accuracy(job: Job | None, store: Store) -> float | None:
    return store.result(job).get("accuracy") if job is not None and store.is_done(job) else None


@dataclass
class Progress:
    """The state of every job, from the events of the scheduler."""

    plans: Sequence[CellPlan]
    states: dict[Job, str] = field(default_factory=dict)
    began: dict[Job, float] = field(default_factory=dict)

    @cached_property
    def jobs(self) -> tuple[Job, ...]:
        return in_order(job for plan in self.plans for job in plan.jobs)

    def update(self, event: Event, job: Job) -> None:
        self.states[job] = _STATES.get(event, event)
        if event == "started":
            self.began[job] = time.monotonic()

    def count(self, state: str, jobs: Sequence[Job] | None = None) -> int:
        return sum(self.states.get(job) == state for job in (self.jobs if jobs is None else jobs))

    def cell_state(self, plan: CellPlan) -> str:
        """failed, done, running or waiting; a cell that shares a running job is running."""
        states = {self.states.get(job, "waiting") for job in plan.jobs}
        return next(state for state in ("failed", "running", "waiting", "done") if state in states)


@contextmanager
def show_progress(plans: Sequence[CellPlan], *, quiet: bool) -> Iterator[tuple[OnEvent, Progress]]:
    """The function to call at every event, and the state: a live table on a terminal with rich, otherwise lines."""
    progress = Progress(plans)
    shown = {} if quiet else {"done": "done", "retried": "tried again", "failed": "failed"}
    write: Callable[[str], object] = partial(print, file=sys.stderr, flush=True)

    def on_event(event: Event, job: Job, reason: str) -> None:
        """Write `[ 3/12] finetune digits first-attention seed 2: done, 4.1 s`."""
        progress.update(event, job)
        if event not in shown:
            return
        n_done, n_jobs = progress.count("done"), len(progress.jobs)
        seconds = f", {time.monotonic() - progress.began[job]:.1f} s" if job in progress.began else ""
        after = f": {reason}" if reason else ""
        write(printable(f"[{n_done:{len(str(n_jobs))}d}/{n_jobs}] {job.title}: {shown[event]}{seconds}{after}"))

    if quiet or not sys.stderr.isatty() or find_spec("rich") is None:
        yield on_event, progress
        return
    from rich.console import Console
    from rich.live import Live

    del shown["done"]  # the table shows it
    console = Console(stderr=True)
    with Live(console=console, refresh_per_second=2, get_renderable=lambda: _table(progress)) as live:
        write = partial(live.console.print, highlight=False, markup=False)
        yield on_event, progress


def _table(progress: Progress) -> "Table":
    """One row for each cell. If there are too many, running and failed cells come first."""
    from rich.markup import escape
    from rich.table import Table

    n_done, n_jobs, n_failed = progress.count("done"), len(progress.jobs), progress.count("failed")
    title = f"{n_done} of {n_jobs} jobs done" + (f", {n_failed} failed" if n_failed else "")
    table = Table(title=title, title_justify="left")
    for name in ("cell", "jobs", "state", "now"):
        table.add_column(name, justify="right" if name == "jobs" else "left")
    states = [(plan, progress.cell_state(plan)) for plan in progress.plans]
    if len(states) > _MAX_CELLS:
        order = ("running", "failed", "waiting", "done")
        states = sorted(states, key=lambda row: order.index(row[1]))[:_MAX_CELLS]
    for plan, state in states:
        now = [
            f"{job.title} {time.monotonic() - progress.began[job]:.0f} s"
            for job in plan.jobs
            if progress.states.get(job) == "running"
        ]
        colour = {"done": "green", "failed": "red", "running": "cyan", "waiting": "dim"}[state]
        done = f"{progress.count('done', plan.jobs)}/{len(plan.jobs)}"
        table.add_row(escape(plan.cell.label), done, f"[{colour}]{state}[/]", escape("; ".join(now[:2])))
    return table
