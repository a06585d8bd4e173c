"""The command `path`."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from isobasin.cli.aligning import Choices, check_matcher, matcher_of
from isobasin.cli.moving import device_named
from isobasin.cli.printing import note, progress
from isobasin.errors import IsobasinError
from isobasin.match.align import align
from isobasin.match.alignment import Alignment
from isobasin.match.comparable import check_comparable
from isobasin.path.compare import Aligner, Compared, compare, result_of
from isobasin.path.files import check_place, write_text
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

    def open(self, models: list[Weights]) -> Task:
        return open_task(
            self.data,
            models,
            kind=self.task,
            tokenizer=self.tokenizer,
            max_samples=self.max_samples,
            batch_size=self.batch_size,
            seq_len=self.seq_len,
            seed=self.seed,
        )


def path_facts(
    sources: list[str], output: Path, measuring: Measuring, choices: Choices | None, *, force: bool, quiet: bool
) -> dict[str, Any]:
    """Evaluate every pair, write the result file, and give it back."""
    if len(sources) not in (2, 3):
        raise IsobasinError(f"{len(sources)} models given, expected two or three: isobasin path A B [C]")
    measuring.check(choices is not None)
    if choices:
        choices.check()
        check_matcher(choices)
    began = time.perf_counter()
    models = dict(zip("ABC", map(load, sources)))
    for other in list(models.values())[1:]:
        check_comparable(models["A"], other)
    check_place(output, force=force, inputs=tuple(m.path for m in models.values() if m.path))
    device = device_named(measuring.device)
    task = measuring.open(list(models.values()))
    hashes = {label: model_hash(model) for label, model in models.items()}
    ledger = FileLedger(output, _question(hashes, task, measuring, choices))
    if ledger.n_found and not quiet:
        note(f"going on from {ledger.n_found} finished points")
    try:
        with _bars(quiet) as watch:
            pairs = compare(
                models,
                task,
                aligner=_aligner(choices, device) if choices else None,
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


def _aligner(choices: Choices, device: Any) -> Aligner:
    def aligned(b: Weights, a: Weights) -> Alignment:
        matcher = matcher_of(choices, a, b)
        return align(b, to=a, matcher=matcher, device=device, verify=choices.verify != "none", dtype="float32")

    return aligned


def _alignment(pair: Compared, choices: Choices) -> dict[str, Any]:
    assert pair.alignment is not None
    how = {"scope": choices.scope_used, "matcher": choices.matcher, "stage2": choices.stage2}
    return how | pair.alignment.facts


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
