"""The work `pair`: B aligned to A every way that is asked for, and the line to each of them measured."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isobasin.errors import IsobasinError
from isobasin.learning.align_learned import LearnedAlignment
from isobasin.match.comparable import check_comparable
from isobasin.path.curve import Curve
from isobasin.weights import Weights, load

from .aligning import Aligner, Choice
from .jobs import Context
from .lines import Line, heights, measured_on


def pair(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """Curves, barriers, distances, seconds and how far outputs moved: naive, and by the label of each matcher.

    λ = 0 is the first model, λ = 1 the second, aligned to it.
    """
    a, b = (load(folder / "model") for folder in needs)
    check_comparable(a, b)
    choices = _distinct([Choice.of(table) for table in settings["matchers"]])
    line = Line.of(a, measured_on(settings, a, context), settings.get("points", 25), torch.device(context.device))
    aligner = Aligner(a, b, settings, context)
    rows = {"naive": _curve_facts(line.to(b))} | {c.label: _aligned_facts(aligner, c, line, b) for c in choices}
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    by_name = {name: {label: row[name] for label, row in rows.items() if name in row} for name in names}
    return {"lambdas": list(line.lambdas), "n_samples": line.task.n_samples, **by_name}


def _distinct(choices: list[Choice]) -> list[Choice]:
    labels = [choice.label for choice in choices]
    for label in labels:
        if labels.count(label) > 1:
            raise IsobasinError(f"matchers: {label} is asked for twice in one cell; keep one of them")
    return choices


def _curve_facts(curve: Curve) -> dict[str, Any]:
    return {"curves": {name: list(values) for name, values in curve.metrics.items()}, "barrier": heights(curve)}


def _aligned_facts(aligner: Aligner, choice: Choice, line: Line, b: Weights) -> dict[str, Any]:
    began = time.perf_counter()
    found = aligner.align(choice)
    seconds = time.perf_counter() - began
    moved = found.transform.apply(b)
    facts = _curve_facts(line.to(moved)) | {
        "distance": [found.distance_before, found.distance_after],
        "seconds": round(seconds, 3),
        "output_change": line.change(b, moved),
        "head_permutation": [list(places) for places in found.head_permutation],
    }
    if isinstance(found, LearnedAlignment):
        history = [list(row) for row in found.learning]
        facts["learning"] = {"held_out": dict(found.held_out), "kept": found.kept, "history": history}
    return facts
