"""What a person sees of a study under way: a live table of cells on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from ..jobs import Job, in_order
from ..plan import CellPlan, job_title
from .graph import Event, Told

_MAX_CELLS = 30  # rows of the live table: what is under way comes first
_STANDING: Mapping[Event, str] = {
    "found": "done", "started": "running", "again": "waiting", "done": "done", "failed": "failed", "blocked": "failed",
}  # fmt: skip


@dataclass
class Standing:
    """Where every job stands, gathered from what is told."""

    plans: Sequence[CellPlan]
    jobs: tuple[Job, ...] = ()
    states: dict[Job, str] = field(default_factory=dict)
    began: dict[Job, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.jobs = in_order(job for plan in self.plans for job in plan.jobs)

    def tell(self, event: Event, job: Job, why: str) -> None:
        self.states[job] = _STANDING[event]
        if event == "started":
            self.began[job] = time.monotonic()

    def count(self, state: str, jobs: Sequence[Job] | None = None) -> int:
        return sum(self.states.get(job) == state for job in (self.jobs if jobs is None else jobs))

    def cell_state(self, plan: CellPlan) -> str:
        """failed, done, running or waiting; a cell that shares a running job runs."""
        states = {self.states.get(job, "waiting") for job in plan.jobs}
        if states == {"done"}:
            return "done"
        return next(state for state in ("failed", "running", "waiting", "done") if state in states)


@contextmanager
def watching(plans: Sequence[CellPlan], *, quiet: bool) -> Iterator[tuple[Told, Standing]]:
    """The function to tell, and what it gathers; on a terminal with rich, a table that follows."""
    standing = Standing(plans)
    rich = None if quiet or not sys.stderr.isatty() else _rich()
    if rich is None:
        yield _plain(standing, quiet), standing
        return
    console = rich["console"].Console(stderr=True)
    with rich["live"].Live(
        console=console, refresh_per_second=2, get_renderable=lambda: _table(standing, rich)
    ) as live:

        def told(event: Event, job: Job, why: str) -> None:
            standing.tell(event, job, why)
            if event in ("again", "failed"):
                live.console.print(_line(event, job, why, standing), highlight=False, markup=False)

        yield told, standing


def _rich() -> dict[str, ModuleType] | None:
    try:
        import rich.console
        import rich.live
        import rich.table
    except ImportError:
        return None
    return {"console": rich.console, "live": rich.live, "table": rich.table}


def _plain(standing: Standing, quiet: bool) -> Callable[[Event, Job, str], None]:
    def told(event: Event, job: Job, why: str) -> None:
        standing.tell(event, job, why)
        if not quiet and event in ("again", "done", "failed"):
            print(_line(event, job, why, standing), file=sys.stderr, flush=True)

    return told


def _line(event: Event, job: Job, why: str, standing: Standing) -> str:
    """`[ 3/12] finetune digits first-attention seed 2: done, 4.1 s`."""
    n_done, n_jobs = standing.count("done"), len(standing.jobs)
    seconds = f", {time.monotonic() - standing.began[job]:.1f} s" if job in standing.began else ""
    words = {"done": "done", "again": "tried again", "failed": "failed"}[event]
    reason = f": {why}" if why else ""
    return f"[{n_done:{len(str(n_jobs))}d}/{n_jobs}] {job_title(job)}: {words}{seconds}{reason}"


def _table(standing: Standing, rich: Mapping[str, ModuleType]) -> Any:
    """One row for each cell; if there are too many, those that wait or are done give way."""
    n_done, n_jobs, n_failed = standing.count("done"), len(standing.jobs), standing.count("failed")
    title = f"{n_done} of {n_jobs} jobs done" + (f", {n_failed} failed" if n_failed else "")
    table = rich["table"].Table(title=title, title_justify="left")
    for name in ("cell", "jobs", "state", "now"):
        table.add_column(name, justify="right" if name == "jobs" else "left")
    for plan, state in _shown(standing):
        jobs = plan.jobs
        now = [
            f"{job_title(job)} {time.monotonic() - standing.began[job]:.0f} s"
            for job in jobs
            if standing.states.get(job) == "running"
        ]
        colour = {"done": "green", "failed": "red", "running": "cyan", "waiting": "dim"}[state]
        done = f"{standing.count('done', jobs)}/{len(jobs)}"
        table.add_row(plan.cell.label, done, f"[{colour}]{state}[/]", "; ".join(now[:2]))
    return table


def _shown(standing: Standing) -> list[tuple[CellPlan, str]]:
    states = [(plan, standing.cell_state(plan)) for plan in standing.plans]
    if len(states) <= _MAX_CELLS:
        return states
    order = ("running", "failed", "waiting", "done")
    return sorted(states, key=lambda pair: order.index(pair[1]))[:_MAX_CELLS]
