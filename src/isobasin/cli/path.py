"""The command `path`."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobasin.cli.align import AlignSetup, check_one_process, learning_facts, learning_lines
from isobasin.cli.options import (
    DataOptions,
    DeviceOptions,
    Force,
    LearnOptions,
    LearnSetup,
    MatchOptions,
    PrintOptions,
    Seed,
    with_options,
)
from isobasin.cli.output import emit, note, number, progress
from isobasin.errors import IsobasinError

if TYPE_CHECKING:
    import torch

    from isobasin.alignment.result import Alignment
    from isobasin.path.evaluation import Watch
    from isobasin.path.pairs import Aligner
    from isobasin.tasks import Task
    from isobasin.weights import Weights


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What is measured."""

    data: Annotated[Path, typer.Option(help="Text, token ids, labelled text or images, in a file or folder.")]
    points: Annotated[int, typer.Option(help="Points of the line, both ends included.")] = 25
    explain: Annotated[bool, typer.Option("--explain", help="Also the barrier by component.")] = False
    plane: Annotated[int, typer.Option(help="Also the loss on a plane, with this many points on a side.")] = 0


@with_options
def path_command(
    *,
    models: Annotated[list[str], typer.Argument(metavar="A B [C]", help="Two or three models of one architecture.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The result file, path.json for instance.")],
    measured: MeasureOptions,
    reading: DataOptions,
    align: Annotated[bool, typer.Option("--align", help="Also align B to A, and measure the path to it.")] = False,
    match: MatchOptions,
    align_data: Annotated[
        Path | None, typer.Option(help="Unlabelled data for --matcher activations; by default --data.")
    ] = None,
    learn_data: Annotated[
        Path | None,
        typer.Option(help="learned: data to learn from, or self; by default the train split of --data, if it has one."),
    ] = None,
    learn_samples: Annotated[int | None, typer.Option(help="learned: learn from at most this many samples.")] = None,
    learn: LearnOptions,
    seed: Seed = 0,
    device: DeviceOptions,
    force: Force = False,
    show: PrintOptions,
) -> None:
    """Measure losses along the straight line between models, naive and aligned, and the barrier."""
    learning = None
    if align and match.matcher == "learned":
        reading_to_learn = replace(reading, max_samples=learn_samples)
        learning = LearnSetup(learn, reading_to_learn, learn_data or measured.data, "--learn-data")
    unlabelled = align_data or (learning.data if learning else measured.data)
    setup = AlignSetup(match, unlabelled, seed, learning) if align else None
    result = measure(
        models, output, measured, reading, setup, seed=seed, device=device.find(), force=force, quiet=show.silent
    )
    emit(result, path_lines(result), show.json)


def _check(measured: MeasureOptions, reading: DataOptions, aligned: bool) -> None:
    for flag, value, least in (
        ("--points", measured.points, 2),
        ("--max-samples", reading.max_samples, 1),
        ("--batch-size", reading.batch_size, 1),
        ("--seq-len", reading.seq_len, 2),
    ):
        if value is not None and value < least:
            raise IsobasinError(f"{flag} {value}: expected {least} or more")
    if measured.plane and (not aligned or measured.plane < 3):
        raise IsobasinError("--plane needs --align and at least 3 points a side: it goes through B and B aligned")


def check_disjoint(
    data: Path, reading: DataOptions, learning: LearnSetup, models: "list[Weights]", *, seed: int
) -> None:
    """Refuse to measure on data that were learned from or held out: expect other data, or another split."""
    place, held_out = data.resolve(), learning.options.held_out
    if held_out and held_out.resolve() == place:
        raise IsobasinError(f"--held-out {held_out} is --data itself: what decides can not be measured on too")
    if learning.from_own_text or learning.data is None or learning.data.resolve() != place:
        return
    one = replace(reading, max_samples=1, batch_size=1)
    measured, learned = (
        next(iter(one.open(data, models, seed=seed, split=split))).inputs for split in ("test", "train")
    )
    if all(learned[name].equal(tensor) for name, tensor in measured.items()):
        raise IsobasinError(
            f"--learn-data {data}: has no train split apart from what is measured; give other data, or self"
        )


def measure(
    sources: list[str],
    output: Path,
    measured: MeasureOptions,
    reading: DataOptions,
    setup: AlignSetup | None,
    *,
    seed: int,
    device: "torch.device",
    force: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Evaluate every pair, write the result file, and return its content."""
    import json
    import shlex

    from isobasin.alignment.problem import check_comparable
    from isobasin.files import ResumeFile, atomic_write, check_output_file
    from isobasin.path.pairs import evaluate_pairs, path_document
    from isobasin.path.provenance import model_hash, model_provenance, provenance
    from isobasin.weights import load

    began = time.perf_counter()
    if len(sources) not in (2, 3):
        raise IsobasinError(f"{len(sources)} models given, expected two or three: isobasin path A B [C]")
    _check(measured, reading, aligned=setup is not None)
    if setup:
        setup.check()
    if setup and setup.learning:
        check_one_process("path")
    models = dict(zip("ABC", map(load, sources)))
    for other in list(models.values())[1:]:
        check_comparable(models["A"], other)
    check_output_file(output, force=force, inputs=tuple(m.path for m in models.values() if m.path))
    task = reading.open(measured.data, list(models.values()), seed=seed, split="test")
    if setup and setup.learning:
        check_disjoint(measured.data, reading, setup.learning, list(models.values()), seed=seed)
    hashes = {label: model_hash(model) for label, model in models.items()}
    cache = ResumeFile(output, "partial", _cache_key(hashes, task, reading, setup, models, seed, device))
    if cache.n_found and not quiet:
        note(f"going on from {cache.n_found} finished points")
    with ExitStack() as until_written:
        try:
            with _progress(quiet) as watch:
                pairs = evaluate_pairs(
                    models,
                    task,
                    aligner=_aligner(setup, models, output, device, until_written, quiet) if setup else None,
                    n_points=measured.points,
                    explained=measured.explain,
                    plane=measured.plane,
                    device=device,
                    cache=cache,
                    watch=watch,
                )
        except KeyboardInterrupt:
            note("isobasin: finished points are kept; the same command goes on from them")
            raise
        result = path_document(pairs, task)
        result["models"] = {label: model_provenance(model, hashes[label]) for label, model in models.items()}
        if setup:
            result["alignment"] = {name: _alignment(pair.alignment, setup) for name, pair in pairs.items()}
        result["provenance"] = provenance(
            command=shlex.join(["isobasin", *sys.argv[1:]]),
            seed=seed,
            device=str(device),
            seconds=time.perf_counter() - began,
        )
        atomic_write(output, json.dumps(result, allow_nan=False, indent=1) + "\n")
    cache.close()
    return result | {"output": str(output)}


def _cache_key(
    hashes: dict[str, str],
    task: "Task",
    reading: DataOptions,
    setup: AlignSetup | None,
    models: "dict[str, Weights]",
    seed: int,
    device: "torch.device",
) -> dict[str, Any]:
    """Everything the measured numbers depend on. Generated text follows from models, options and seed."""
    from importlib.metadata import version

    learning = setup.learning if setup else None
    learned_from = []
    if learning and not learning.from_own_text:
        learned_from = [t.fingerprint for t in learning.tasks(list(models.values()), seed)]
    return {
        "version": version("isobasin"),
        "models": hashes,
        "task": task.fingerprint,
        "reading": asdict(reading),
        "seed": seed,
        "device": str(device),
        "alignment": asdict(setup) if setup else None,
        "learned_from": learned_from,
    }


def _aligner(
    setup: AlignSetup,
    models: "dict[str, Weights]",
    output: Path,
    device: "torch.device",
    until_written: ExitStack,
    quiet: bool,
) -> "Aligner":
    def aligned(b: "Weights", a: "Weights") -> "Alignment":
        pair = "-".join(label for m in (a, b) for label, model in models.items() if model is m)
        beside = output.with_name(f"{output.name}.{pair}")
        return setup.align(b, a, beside, until_written, dtype="float32", device=device, verify=True, quiet=quiet)

    return aligned


def _alignment(found: "Alignment | None", setup: AlignSetup) -> dict[str, Any]:
    assert found is not None
    how = {"scope": setup.scope, "matcher": setup.match.matcher, "stage2": setup.match.stage2}
    return how | found.to_dict() | (learning_facts(found) if setup.learning else {})


@contextmanager
def _progress(quiet: bool) -> "Iterator[Callable[[str], Watch]]":
    """One bar after the other: each opens at its first step and closes at its last, before another one opens."""
    with ExitStack() as stack:

        def watch(title: str) -> "Watch":
            bars: list[Any] = []

            def on_progress(done: int, of: int) -> None:
                if not bars:
                    stack.close()
                    bars.append(stack.enter_context(progress(title, of, quiet=quiet)))
                bars[0](done)
                if done == of:
                    stack.close()
                    bars.clear()

            return on_progress

        yield watch


def path_lines(facts: dict[str, Any]) -> list[str]:
    from isobasin.path.curve import midpoint

    lines = [f"{facts['task']['name']}: {facts['task']['n_samples']} samples, {len(facts['lambdas'])} points"]
    for pair, curves in facts["curves"].items():
        for path, metrics in curves.items():
            for metric, values in metrics.items():
                height = facts["barrier"][pair][path][metric]
                lam = facts["barrier_lambda"][pair][path][metric]
                barrier = f"not finite from λ = {lam:.3g} on" if height is None else f"{height:.4g} at λ = {lam:.3g}"
                middle = values[midpoint(facts["lambdas"])]
                lines.append(
                    f"{pair}  {path:8s} {metric:14s} {_number(values[0])} … {_number(middle)} … {_number(values[-1])}"
                    f"   barrier {barrier}"
                )
    for pair, found in facts.get("alignment", {}).items():
        lines += [f"{pair}  {line}" for line in learning_lines(found)]
    for pair, paths in facts.get("explain", {}).items():
        for path, found in paths.items():
            lines.append(
                f"{pair}  {path}: barrier {_number(found['barrier'])} with outputs mixed instead of weights in"
            )
            for part in found["components"]:
                share = number(part["share"], ".0%", "?").replace("%", " %")
                lines.append(f"    {part['name']:28s} {_number(part['barrier'])}  share {share}")
    return [*lines, f"{facts['output']}: written"]


def _number(value: float | None) -> str:
    return number(value, "8.4f", "     nan")
