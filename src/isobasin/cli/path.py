"""The commands `path` and `report`: measure paths between models, and write a page about what was measured."""

import json
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobasin import __version__
from isobasin.cli.align import AlignSetup, learning_facts, learning_lines
from isobasin.cli.options import (
    MAX_SAMPLES,
    DataOptions,
    DeviceOptions,
    Force,
    Json,
    LearnOptions,
    LearnSetup,
    MatchOptions,
    PrintOptions,
    Seed,
    with_options,
)
from isobasin.cli.output import emit, existing, note, number, progress, reserve_outputs
from isobasin.errors import IsobasinError

if TYPE_CHECKING:
    from isobasin.weights import Weights


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """What is measured."""

    data: Annotated[Path, typer.Option(metavar="PATH", help="Text, tokens, tables, images; or digits.")]
    points: Annotated[int, typer.Option(max=10_001, metavar="N", help="Points of the line, both ends included.")] = 25
    explain: Annotated[bool, typer.Option("--explain", help="Also the barrier by component.")] = False
    plane: Annotated[int, typer.Option(max=501, metavar="N", help="Also the loss on a plane of N × N points.")] = 0


@with_options
def path_command(
    *,
    models: Annotated[list[str], typer.Argument(metavar="A B [C]", help="Two or three models of one architecture.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The result, path.json for instance.")],
    measured: MeasureOptions,
    reading: DataOptions,
    align: Annotated[bool, typer.Option("--align", help="Also measure the path to B aligned to A.")] = False,
    match: MatchOptions,
    align_data: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="For --matcher activations; else --data.", rich_help_panel="Alignment"),
    ] = None,
    learn_data: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Data to learn from, or self; else --data.", rich_help_panel=LearnOptions.panel
        ),
    ] = None,
    learn_samples: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_SAMPLES, metavar="N", help="Learn from at most so many.", rich_help_panel=LearnOptions.panel
        ),
    ] = None,
    learn: LearnOptions,
    seed: Seed = 0,
    device: DeviceOptions,
    force: Force = False,
    show: PrintOptions,
) -> None:
    """Measure losses along the straight line between models, naive and aligned, and the barrier."""
    import shlex

    from isobasin.alignment.comparable import check_comparable
    from isobasin.files import ResumeFile, atomic_write, check_output_file
    from isobasin.path.pairs import evaluate_pairs, path_document
    from isobasin.path.provenance import model_provenance
    from isobasin.weights import load

    began, place = time.perf_counter(), device.find()
    _check(models, measured, reading, align)
    setup = None
    if align:
        learned = match.matcher == "learned"
        source, to_learn = learn_data or measured.data, replace(reading, max_samples=learn_samples)
        learning = LearnSetup(learn, to_learn, source, "--learn-data") if learned else None
        setup = AlignSetup(match, align_data or (source if learned else measured.data), seed, learning)
        setup.check("path")
    loaded = dict(zip("ABC", map(load, models)))
    for other in list(loaded.values())[1:]:
        check_comparable(loaded["A"], other)  # before anything is read
    read = existing(measured.data, align_data, learn_data)
    reserve_outputs(output)
    check_output_file(
        output, force=force, kind="path result", inputs=[*(m.path for m in loaded.values() if m.path), *read]
    )
    task = reading.open(measured.data, list(loaded.values()), seed=seed, split="test")
    learned_from: list[str] = []
    if setup and setup.learning:
        check_disjoint(measured.data, reading, setup.learning, list(loaded.values()), seed=seed)
        if not setup.learning.from_own_text:  # generated text follows from models, options and seed
            learned_from = [t.fingerprint for t in setup.learning.tasks(list(loaded.values()), seed) if t]
    described = {label: model_provenance(model) for label, model in loaded.items()}
    key = {  # everything that the measured numbers depend on
        "version": __version__,
        "models": {label: one["sha256"] for label, one in described.items()},
        "task": task.fingerprint,
        "reading": asdict(reading),
        "seed": seed,
        "device": str(place),
        "alignment": asdict(setup) if setup else None,
        "learned_from": learned_from,
    }
    cache = ResumeFile(output, "partial", key)
    if cache.n_found and not show.silent:
        note(f"going on from {cache.n_found} finished points")
    with ExitStack() as until_written:
        try:
            with progress(quiet=show.silent) as on_progress:
                aligner = None
                if setup:
                    running: dict[str, Any] = {"dtype": "float32", "device": place, "quiet": show.silent}
                    aligner = setup.aligner(loaded, output, until_written, on_progress, **running)
                pairs = evaluate_pairs(
                    loaded,
                    task,
                    aligner=aligner,
                    n_points=measured.points,
                    explained=measured.explain,
                    plane=measured.plane,
                    device=place,
                    cache=cache,
                    watch=lambda title: partial(on_progress, title),
                )
        except KeyboardInterrupt:
            note("isobasin: finished points are kept; the same command goes on from them")
            raise
        result = path_document(
            pairs,
            task,
            models=described,
            settings=setup.settings if setup else {},
            command=shlex.join(["isobasin", *sys.argv[1:]]),
            seed=seed,
            device=str(place),
            seconds=time.perf_counter() - began,
        )
        for pair, found in result.get("alignment", {}).items():
            found |= learning_facts(pairs[pair].alignment)
        atomic_write(output, json.dumps(result, allow_nan=False, indent=1) + "\n")
    cache.close()
    facts = result | {"output": str(output)}
    emit(facts, path_lines(facts), show.json)


def _check(models: list[str], measured: MeasureOptions, reading: DataOptions, aligned: bool) -> None:
    if len(models) not in (2, 3):
        raise IsobasinError(f"{len(models)} models given, expected two or three: isobasin path A B [C]")
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


def path_lines(facts: dict[str, Any]) -> list[str]:
    from isobasin.path.barrier import midpoint

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


def report_command(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH.json…", help="Results of `isobasin path`.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The page, report.html for instance.")],
    force: Force = False,
    json: Json = False,
) -> None:
    """Write one self-contained page: verdict, table, curves, the barrier by component, provenance."""
    from isobasin.files import check_output_file
    from isobasin.report import read_result, verdict, write_report

    results = [read_result(path) for path in paths]
    reserve_outputs(output)
    check_output_file(output, force=force, kind="page", inputs=paths)
    written = write_report(results, output, force=force)
    pairs = [
        {"file": str(path), "pair": pair.key, "verdict": found.state, "sentence": found.sentence}
        for path, result in zip(paths, results)
        for pair in result.pairs
        for found in [verdict(pair)]
    ]
    lines = [*(str(pair["sentence"]) for pair in pairs), f"{written}: open it in any browser"]
    emit({"output": str(written), "pairs": pairs}, lines, json)
