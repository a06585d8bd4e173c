"""The command `path`."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from isobasin.cli.aligning import Choices, matcher_of
from isobasin.cli.learning import Learning, check_one_process, learned, learning_facts, learning_lines
from isobasin.cli.moving import device_named
from isobasin.cli.printing import note, progress
from isobasin.errors import IsobasinError
from isobasin.files import check_place, write_text
from isobasin.learning.align_learned import LearnedAlignment
from isobasin.match.align import align
from isobasin.match.alignment import Alignment
from isobasin.match.comparable import check_comparable
from isobasin.path.compare import Aligner, Compared, compare, result_of
from isobasin.path.fingerprint import model_facts, model_hash, provenance
from isobasin.path.ledger import FileLedger
from isobasin.path.survey import Watch
from isobasin.tasks import Task, open_task
from isobasin.weights import Weights, load


@dataclass(frozen=True)
class Measuring:
    """What to measure on, and how, as given on the command line."""

    data: Path
    task: str
    tokenizer: str | None
    points: int
    max_samples: int | None
    batch_size: int | None
    seq_len: int | None
    explain: bool
    plane: int
    device: str
    seed: int

    def check(self, aligned: bool) -> None:
        for flag, value, least in (
            ("--points", self.points, 2),
            ("--max-samples", self.max_samples, 1),
            ("--batch-size", self.batch_size, 1),
            ("--seq-len", self.seq_len, 2),
        ):
            if value is not None and value < least:
                raise IsobasinError(f"{flag} {value}: expected {least} or more")
        if self.plane and (not aligned or self.plane < 3):
            raise IsobasinError("--plane needs --align and at least 3 points a side: it goes through B and B aligned")

    def open(self, models: list[Weights], split: str = "test") -> Task:
        return open_task(
            self.data,
            models,
            kind=self.task,
            tokenizer=self.tokenizer,
            max_samples=self.max_samples,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            seed=self.seed,
            split=split,
        )


def path_facts(
    sources: list[str],
    output: Path,
    measuring: Measuring,
    choices: Choices | None,
    *,
    learning: Learning | None = None,
    force: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Evaluate every pair, write the result file, and give it back."""
    if len(sources) not in (2, 3):
        raise IsobasinError(f"{len(sources)} models given, expected two or three: isobasin path A B [C]")
    measuring.check(choices is not None)
    if choices:
        choices.check()
    if learning:
        learning.check()
        check_one_process("path")
    began = time.perf_counter()
    models = dict(zip("ABC", map(load, sources)))
    for other in list(models.values())[1:]:
        check_comparable(models["A"], other)
    check_place(output, force=force, inputs=tuple(m.path for m in models.values() if m.path))
    device = device_named(measuring.device)
    task = measuring.open(list(models.values()))
    if learning:
        _check_apart(measuring, learning, list(models.values()))
    hashes = {label: model_hash(model) for label, model in models.items()}
    question = _question(hashes, task, measuring, choices) | _lessons(learning, models, measuring.seed)
    ledger = FileLedger(output, question)
    if ledger.n_found and not quiet:
        note(f"going on from {ledger.n_found} finished points")
    # What was learned for a pair lies beside the output until that is written: the stack closes last.
    with ExitStack() as lessons:
        try:
            with _bars(quiet) as watch:
                pairs = compare(
                    models,
                    task,
                    aligner=_aligner(choices, learning, models, output, device, lessons, quiet) if choices else None,
                    n_points=measuring.points,
                    explained=measuring.explain,
                    plane=measuring.plane,
                    device=device,
                    ledger=ledger,
                    watch=watch,
                )
        except KeyboardInterrupt:
            note("isobasin: finished points are kept; the same command goes on from them")
            raise
        result = result_of(pairs, task)
        result["models"] = {label: model_facts(model, hashes[label]) for label, model in models.items()}
        if choices:
            result["alignment"] = {name: _alignment(pair, choices) for name, pair in pairs.items()}
        result["provenance"] = provenance(
            command=shlex.join(["isobasin", *sys.argv[1:]]),
            seed=measuring.seed,
            device=str(device),
            seconds=time.perf_counter() - began,
        )
        write_text(output, json.dumps(result, allow_nan=False, indent=1) + "\n")
    ledger.close()
    return result | {"output": str(output)}


def _check_apart(measuring: Measuring, learning: Learning, models: list[Weights]) -> None:
    """What is measured must not have been learned from, nor have decided: another place, or another split of it."""
    place = measuring.data.resolve()
    if learning.held_out and learning.held_out.resolve() == place:
        raise IsobasinError(f"--held-out {learning.held_out} is --data itself: what decides can not be measured on too")
    if learning.alone or learning.data is None or learning.data.resolve() != place:
        return
    first = replace(measuring, max_samples=1, batch_size=1)
    measured, learned_from = (next(iter(first.open(models, split))).inputs for split in ("test", "train"))
    if all(learned_from[name].equal(tensor) for name, tensor in measured.items()):
        raise IsobasinError(
            f"--learn-data {measuring.data}: has no train split apart from what is measured; give other data, or self"
        )


def _lessons(learning: Learning | None, models: dict[str, Weights], seed: int) -> dict[str, Any]:
    """What learned numbers depend on beside models and flags; own text follows from these."""
    if learning is None:
        return {}
    data = [] if learning.alone else [t.fingerprint for t in learning.tasks(list(models.values()), seed)]
    return {"learning": asdict(learning) | {"data": data, "held_out": str(learning.held_out)}}


def _question(hashes: dict[str, str], task: Task, measuring: Measuring, choices: Choices | None) -> dict[str, Any]:
    """All that the numbers depend on."""
    flags = asdict(measuring) | {"data": None, "points": None, "plane": None, "explain": None}
    matching = asdict(choices) | {"verify": None, "workers": None} if choices else None
    return {
        "version": version("isobasin"),
        "models": hashes,
        "task": task.fingerprint,
        "flags": flags,
        "matching": matching,
    }


def _aligner(
    choices: Choices,
    learning: Learning | None,
    models: dict[str, Weights],
    output: Path,
    device: Any,
    lessons: ExitStack,
    quiet: bool,
) -> Aligner:
    common: dict[str, Any] = {"device": device, "verify": choices.verify != "none", "dtype": "float32"}

    def aligned(b: Weights, a: Weights) -> Alignment:
        if learning is None:
            return align(b, to=a, matcher=matcher_of(choices, a, b), **common)
        pair = "-".join(label for m in (a, b) for label, model in models.items() if model is m)
        start = matcher_of(replace(choices, matcher=learning.start), a, b)
        beside = output.with_name(f"{output.name}.{pair}")
        context = learned(b, a, learning, start, beside, seed=choices.seed, quiet=quiet, **common)
        return lessons.enter_context(context).alignment

    return aligned


def _alignment(pair: Compared, choices: Choices) -> dict[str, Any]:
    assert pair.alignment is not None
    how = {"scope": choices.scope_used, "matcher": choices.matcher, "stage2": choices.stage2}
    lesson = learning_facts(pair.alignment) if isinstance(pair.alignment, LearnedAlignment) else {}
    return how | pair.alignment.facts | lesson


@contextmanager
def _bars(quiet: bool) -> Iterator[Callable[[str], Watch]]:
    """One bar after the other, each made when its title is first heard."""
    with ExitStack() as stack:

        def watch(title: str) -> Watch:
            opened: list[Any] = []

            def told(done: int, of: int) -> None:
                if not opened:
                    stack.close()
                    opened.append(stack.enter_context(progress(title, of, quiet=quiet)))
                opened[0](done)
                if done == of:
                    stack.close()  # before another bar, of learning for instance, begins
                    opened.clear()

            return told

        yield watch


def path_lines(facts: dict[str, Any]) -> list[str]:
    lines = [f"{facts['task']['name']}: {facts['task']['n_samples']} samples, {len(facts['lambdas'])} points"]
    for pair, curves in facts["curves"].items():
        for path, metrics in curves.items():
            for metric, values in metrics.items():
                height = facts["barrier"][pair][path][metric]
                lam = facts["barrier_lambda"][pair][path][metric]
                told = f"not finite from λ = {lam:.3g} on" if height is None else f"{height:.4g} at λ = {lam:.3g}"
                middle = values[len(values) // 2]
                lines.append(
                    f"{pair}  {path:8s} {metric:14s} {_short(values[0])} … {_short(middle)} … {_short(values[-1])}"
                    f"   barrier {told}"
                )
    for pair, found in facts.get("alignment", {}).items():
        lines += [f"{pair}  {line}" for line in learning_lines(found)] if "held_out_barrier" in found else []
    for pair, paths in facts.get("explain", {}).items():
        for path, found in paths.items():
            lines.append(f"{pair}  {path}: barrier {_short(found['barrier'])} with outputs mixed instead of weights in")
            lines += [
                f"    {part['name']:28s} {_short(part['barrier'])}  share {_percent(part['share'])}"
                for part in found["components"]
            ]
    return [*lines, f"{facts['output']}: written"]


def _short(value: float | None) -> str:
    return "     nan" if value is None else f"{value:8.4f}"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{100 * value:.0f} %"
