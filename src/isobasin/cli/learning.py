"""The matcher `learned` of the commands `align`, `path` and `merge`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from isobasin.cli.printing import note
from isobasin.errors import IsobasinError
from isobasin.learning.align_learned import LearnedAlignment, LearnedMatching, align_learned
from isobasin.learning.exercises import split
from isobasin.learning.learn import SECTION, Watch
from isobasin.learning.lessons import PERMUTATIONS, Lessons
from isobasin.learning.own_text import SOURCE, WINDOWS, OwnText
from isobasin.learning.record import FileRecord
from isobasin.learning.team import Team, team_of
from isobasin.match.matchers import Matcher
from isobasin.path.fingerprint import model_hash
from isobasin.tasks import Task, open_task
from isobasin.weights import Weights

STARTS = ("weights", "activations")
SELF = Path("self")  # in place of data: text that the two models write


@dataclass(frozen=True)
class Learning:
    """What to learn from and how, as given on the command line."""

    data: Path | None
    held_out: Path | None = None
    start: str = "weights"
    steps: int = 500
    rate: float = 3e-3
    accumulate: int = 1
    check_every: int = 50
    permutations: str = "fixed"
    bfloat16: bool = False
    task: str = "auto"
    tokenizer: str | None = None
    max_samples: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    flag: str = "--data"  # what the command calls `data`

    @property
    def alone(self) -> bool:
        """Whether the models learn from their own text."""
        return self.data == SELF

    def check(self) -> None:
        if self.data is None:
            raise IsobasinError(
                f"--matcher learned needs {self.flag}: text, a table of labelled text, images, or self for language "
                "models to learn from their own text"
            )
        if self.alone and self.start != "weights":
            raise IsobasinError(f"--start {self.start} needs data, and {self.flag} is self: use --start weights")
        for flag, value, allowed in (
            ("--start", self.start, STARTS),
            ("--permutations", self.permutations, PERMUTATIONS),
        ):
            if value not in allowed:
                raise IsobasinError(f"{flag} {value!r} is not available, expected one of {', '.join(allowed)}")
        if self.held_out is not None and self.held_out.resolve() == self.data.resolve():
            raise IsobasinError(
                f"--held-out {self.held_out} is {self.flag} itself: what is learned from can not decide; leave it out "
                "and a tenth of the data is kept for that"
            )

    def lessons(self) -> Lessons:
        return Lessons(
            steps=self.steps,
            rate=self.rate,
            accumulate=self.accumulate,
            check_every=self.check_every,
            permutations="free" if self.permutations == "free" else "fixed",
            autocast=torch.bfloat16 if self.bfloat16 else None,
        )

    def tasks(self, models: list[Weights], seed: int, device: torch.device | None = None) -> tuple[Task, Task]:
        """What is learned from, and what decides."""
        assert self.data is not None
        task, decides = self._own_text(seed).tasks(models[0], models[1], device) if self.alone else (None, None)
        task = task or self.open(self.data, models, seed, "train")
        if self.held_out is not None:
            decides = self.open(self.held_out, models, seed, "test")
        return split(task) if decides is None else (task, decides)

    def _own_text(self, seed: int) -> OwnText:
        windows = WINDOWS if self.max_samples is None else self.max_samples
        return OwnText(
            windows=windows,
            length=self.seq_len,
            batch_size=self.batch_size or 8,
            seed=seed,
            tokenizer=self.tokenizer,
        )

    def open(self, data: Path, models: list[Weights], seed: int, part: str) -> Task:
        return open_task(
            data,
            models,
            kind=self.task,
            tokenizer=self.tokenizer,
            max_samples=self.max_samples,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            seed=seed,
            split=part,
        )


@dataclass(frozen=True)
class Lesson:
    """What was learned, and whether this process is the one of its team that writes it."""

    alignment: LearnedAlignment
    writes: bool


@contextmanager
def learned(
    b: Weights,
    a: Weights,
    learning: Learning,
    start: Matcher,
    output: Path,
    *,
    dtype: str,
    device: torch.device,
    verify: bool,
    seed: int,
    quiet: bool,
) -> Iterator[Lesson]:
    """Learn; inside, the result is there to be written. Progress lies beside the output until that has been done, and
    the same command goes on from it."""
    learning.check()
    if learning.alone and not quiet:
        note("no data: learning from text that the two models write themselves")
    matcher = LearnedMatching(scope=start.scope, start=start, lessons=learning.lessons(), seed=seed)
    task, held_out = learning.tasks([a, b], seed, device)
    team = team_of(device)
    record = FileRecord(output, _question(a, b, matcher, learning, task, held_out, team), writes=team.rank == 0)
    kept = record.find(SECTION)
    if kept and not quiet:
        note(f"going on from step {kept['step']}")
    with learning_bar(matcher.lessons.steps, quiet=quiet or team.rank > 0) as watch:
        found = align_learned(
            b,
            to=a,
            matcher=matcher,
            task=task,
            held_out=held_out,
            dtype=dtype,
            device=device,
            verify=verify,
            watch=watch,
            record=record,
            team=team,
        )
    yield Lesson(found, team.rank == 0)
    record.close()


def _question(
    a: Weights, b: Weights, matcher: LearnedMatching, learning: Learning, task: Task, held_out: Task, team: Team
) -> dict[str, Any]:
    """All that the result depends on."""
    flags = asdict(learning) | {"data": None, "held_out": None, "flag": None}
    return {
        "version": version("isobasin"),
        "models": [model_hash(a), model_hash(b)],
        "data": [task.fingerprint, held_out.fingerprint],
        "matcher": matcher.question(),
        "flags": flags,
        "processes": team.size,
    }


def learning_facts(found: LearnedAlignment) -> dict[str, Any]:
    """What `--json` says beside the facts of every alignment."""
    return {
        "held_out_barrier": dict(found.held_out),
        "kept": found.kept,
        "steps": found.learning[-1][0] if found.learning else 0,
        "held_out_history": [list(row) for row in found.learning],
        "learned_from": found.learned_from,
        "decided_by": found.decided_by,
    }


def learning_lines(facts: dict[str, Any]) -> list[str]:
    barriers = ", ".join(f"{name} {height:.4g}" for name, height in facts["held_out_barrier"].items())
    sources = facts["learned_from"], facts["decided_by"]
    no_data = "; no data were used" if sources == (SOURCE, SOURCE) else ""
    return [
        f"learned from  {sources[0]}{no_data}" + ("" if sources[0] == sources[1] else f", decided by {sources[1]}"),
        f"held-out barrier  {barriers}",
        f"kept  {facts['kept']}, after {facts['steps']} steps",
    ]


def check_one_process(command: str) -> None:
    """Several processes learn together; what comes after learning is for one."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise IsobasinError(
            f"--matcher learned: `isobasin {command}` runs in one process; learn in several by `isobasin align`, then "
            "go on with what it wrote"
        )


@contextmanager
def learning_bar(steps: int, *, quiet: bool) -> Iterator[Watch]:
    """A bar on standard error with the held-out barrier as last measured; silent if asked, or if nobody watches."""
    if quiet or not sys.stderr.isatty():
        yield lambda step, of, barrier: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("learning", total=steps)
        yield lambda step, of, barrier: bar.update(
            task, completed=step, description=f"learning, held-out barrier {barrier:.4g}"
        )
