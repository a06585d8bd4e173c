"""The commands `distance`, `canonical` and `fingerprint`."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isobasin.cli.options import (
    VERIFY,
    DeviceOptions,
    Json,
    MemoryOptions,
    Model,
    PrintOptions,
    SaveOptions,
    Seed,
    Verify,
    check_choice,
    with_options,
)
from isobasin.cli.output import (
    check_outputs,
    companion_facts,
    emit,
    left_out_lines,
    measured_cost,
    not_copied_lines,
    note,
    number,
    progress,
    verified_change,
    write_model,
)
from isobasin.errors import IsobasinError

if TYPE_CHECKING:
    import torch

    from isobasin.compare.fingerprint import Fingerprint
    from isobasin.weights import Weights


@with_options
def distance_command(
    *,
    a: Annotated[str, typer.Argument(metavar="A", help="The reference.")],
    b: Annotated[str, typer.Argument(metavar="B", help="A model of the same shape, or of another depth.")],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the layer-to-layer matrix: .png, .svg, .pdf.")
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="The layer-to-layer matrix, also for models of one depth.")
    ] = False,
    null_samples: Annotated[int, typer.Option(max=10_000, metavar="N", help="Unrelated models to sample.")] = 8,
    seed: Seed = 0,
    device: DeviceOptions,
    memory: MemoryOptions,
    show: PrintOptions,
) -> None:
    """Measure the distance of two models modulo symmetry, by part, and a score: 0 unrelated, 1 the same orbit."""
    from isobasin.compare.distance import distance

    models = memory.load(a), memory.load(b)
    with measured_cost() as cost, progress(quiet=show.silent) as on_progress:
        on_progress("comparing", 0, 1 + null_samples)  # the number of blocks is known once the first are compared
        found = distance(
            *models,
            layers=layers or plot is not None,
            null_samples=null_samples,
            seed=seed,
            device=device.find(),
            watch=partial(on_progress, "comparing"),
        )
    facts: dict[str, Any] = {**found.to_dict(), "verdict_text": found.verdict_text, "note": found.explanation or None}
    facts |= {"seconds": cost["seconds"], "peak_anon_mb": cost["peak_anon_mb"]}
    if plot is not None:
        from isobasin.report.figures import plot_similarity

        plot_similarity(facts, plot, names=(Path(a).name or "A", Path(b).name or "B"))
        facts["plot"] = str(plot)
    emit(facts, distance_lines(facts), show.json)


@with_options
def canonical_command(*, model: Model, save: SaveOptions, verify: Verify = "auto", show: PrintOptions) -> None:
    """Write the canonical point of a model's orbit: the same function, the same weights for every scrambled copy."""
    from isobasin.compare.canonical import canonical_point
    from isobasin.weights import load

    check_choice("--verify", verify, VERIFY)
    weights = load(model)
    check_outputs(save, [weights.path] if weights.path else [])
    found = canonical_point(weights)
    moved = found.transform.apply(weights)
    change = verified_change(weights, moved, verify, quiet=show.silent).largest
    dtype = write_model(moved, save, quiet=show.silent)
    lines = [f"{save.output}: the canonical point of its orbit, the same function; rounded once, to {dtype}"]
    if not found.unique:
        lines.append("not unique: a copy of the model may have another canonical point")
        lines += [f"  {doubt}" for doubt in found.doubts]
    facts: dict[str, Any] = {"output": str(save.output), "dtype": dtype, "unique": found.unique}
    facts |= {"max_output_change": change, "doubts": [doubt.to_dict() for doubt in found.doubts]}
    facts |= companion_facts(weights.path, save)
    emit(facts, [*lines, *not_copied_lines(facts)], show.json)


@with_options
def fingerprint_command(
    *,
    model: Model,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="X", help="A fingerprint, a file with one, or a model. Exit 1: they differ, 3: undecided."
        ),
    ] = None,
    device: DeviceOptions,
    memory: MemoryOptions,
    json: Json = False,
) -> None:
    """Print a short string that scrambled, cast or re-saved copies of a model share. Compare it with --compare: copies
    may round an entry to a neighbouring number, so different strings alone say nothing."""
    from isobasin.compare.fingerprint import compare_fingerprints, doubts, fingerprint_with_errors, type_doubts
    from isobasin.runtime import require_runnable

    place, weights = device.find(), memory.load(model)
    other, more, compared = (None, (), None) if compare is None else _read_fingerprint(compare, place, memory)
    found, errors = fingerprint_with_errors(weights, place, like=other)
    uncertain = [*doubts(errors), *type_doubts(weights)]
    facts: dict[str, Any] = {"fingerprint": str(found), "doubts": [doubt.to_dict() for doubt in uncertain]}
    if other is not None:
        both = [max(pair) for pair in zip(errors, more, strict=True)] if more else errors
        result = compare_fingerprints(found, other, both)
        if not result.steps and compared is not None:  # a damaged config or a missing tensor is not another model
            require_runnable(weights)
            require_runnable(compared)
        facts |= {
            "other": str(other),
            "equal": result.equal,
            "same_shape": bool(result.steps),
            "largest_step": max(result.steps) if result.steps else None,
            "entries_apart": result.apart,
            "entries_uncertain": result.uncertain,
        }
    emit(facts, fingerprint_lines(facts), json)
    if compare is None and not json and sys.stdout.isatty():
        note("compare it with `isobasin fingerprint MODEL --compare`; strings of copies may differ")
    if facts.get("equal", True) is not True:
        raise typer.Exit(1 if facts["equal"] is False else 3)


def _read_fingerprint(
    text: str, device: "torch.device", memory: MemoryOptions
) -> "tuple[Fingerprint, tuple[float, ...], Weights | None]":
    """A fingerprint given as text, as a file that contains one, or as a model; of a model also the errors of its
    entries, and the model."""
    from isobasin.compare.fingerprint import VERSIONS, Fingerprint, fingerprint_with_errors
    from isobasin.weights import is_gguf

    if text.split(".")[0] in VERSIONS:
        return Fingerprint.read(text), (), None
    path = Path(text)
    try:
        is_file = path.is_file()
    except OSError:
        is_file = False
    if not is_file or is_gguf(path):
        weights = memory.load(text)
        return *fingerprint_with_errors(weights, device), weights
    try:
        words = path.read_text(encoding="utf-8-sig").split()  # some editors put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise IsobasinError(f"--compare {text}: can not be read as text; expected a file with a fingerprint") from error
    if not words:
        raise IsobasinError(f"--compare {text}: the file is empty; expected a fingerprint in it")
    found = {word for word in words[1:] if word.split(".")[0] in VERSIONS} - {words[0]}
    if found:
        raise IsobasinError(f"--compare {text}: {1 + len(found)} different fingerprints in one file; expected one")
    return Fingerprint.read(words[0]), (), None


def distance_lines(facts: dict[str, Any]) -> list[str]:
    null = facts["null"]
    spread = ", ".join(f"{q} → {value:.4f}" for q, value in null["quantiles"].items())
    lines = [
        f"score       {facts['score']:.6f}   (1 the same orbit, 0 unrelated)",
        f"verdict     {facts['verdict_text']}",
        f"unrelated   quantiles {spread}, largest {null['largest']:.4f} of {null['draws']} sampled",
        f"distance    {facts['distance']:.4g} of ‖A‖ modulo symmetry, {number(facts['naive'], '.4g')} as stored",
        *([f"            {facts['note']}"] if facts["note"] else []),
        "",
        f"{'part':<12}{'of B':<8}{'as stored':>10}{'distance':>12}{'score':>9}",
    ]
    lines += [_part_line(row) for row in facts["per_layer"]]
    lines += left_out_lines(facts)
    if "layers" in facts:
        best = ", ".join(f"{j}←{i}" for j, i in enumerate(facts["best_in_a"]))
        lines += ["", f"layers of B, and the most similar layer of A: {best}"]
    if "plot" in facts:
        lines.append(f"figure      {facts['plot']}")
    return lines


def _part_line(row: dict[str, Any]) -> str:
    mine, other = ("" if row[key] is None else str(row[key]) for key in ("layer", "other_layer"))
    name = f"{row['space']} {mine}".strip()
    return f"{name:<12}{other:<8}{number(row['naive'], '.4g'):>10}{row['distance']:>12.4g}{row['score']:>9.4f}"


def fingerprint_lines(facts: dict[str, Any]) -> list[str]:
    doubts = [f"uncertain: {d['space']}: {d['reason']}, by {d['uncertainty']:.2g}" for d in facts["doubts"]]
    if "equal" not in facts:
        return [facts["fingerprint"], *doubts]
    if facts["equal"] is None:
        uncertain = facts["entries_uncertain"]
        verdict = f"undecided: {uncertain} entries differ, by no more than the rounding of the files may change them"
    elif facts["equal"]:
        verdict = f"equal: no entry is more than one quantum away (largest step {facts['largest_step']})"
    elif not facts["same_shape"]:
        verdict = "different: the models are of different shapes or settings"
    else:
        apart, largest = facts["entries_apart"], facts["largest_step"]
        verdict = f"different: {apart} entries are more than one quantum away, by up to {largest}"
    return [facts["fingerprint"], facts["other"], verdict, *doubts]
