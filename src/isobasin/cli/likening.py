"""Commands that compare models modulo symmetry: distance, canonical, fingerprint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobasin.checkpoint import dtype_name
from isobasin.cli.measuring import Cost
from isobasin.cli.moving import Saving, device_named
from isobasin.cli.printing import progress
from isobasin.errors import IsobasinError
from isobasin.likeness.canonical import canonical
from isobasin.likeness.distance import distance
from isobasin.likeness.fingerprint import VERSION, Fingerprint, fingerprint
from isobasin.likeness.parts import Form
from isobasin.weights import load


@dataclass(frozen=True)
class Comparing:
    """How two models are compared, and where a figure goes."""

    plot: Path | None
    layers: bool
    draws: int
    seed: int
    device: str
    quiet: bool


def distance_facts(a: str, b: str, comparing: Comparing) -> dict[str, Any]:
    one, two = load(a), load(b)
    n_parts = 1 + min(len(Form(model).spaces) for model in (one, two))
    with Cost() as cost, progress("comparing", (comparing.draws + 1) * n_parts, quiet=comparing.quiet) as step:
        found = distance(
            one,
            two,
            layers=comparing.layers or comparing.plot is not None,
            draws=comparing.draws,
            seed=comparing.seed,
            device=device_named(comparing.device),
            watch=lambda done, _: step(done),
        )
    facts: dict[str, Any] = {**found.facts, "seconds": round(cost.seconds, 3), "peak_anon_mb": cost.peak_anon_mb}
    if comparing.plot is not None:
        from isobasin.plots.likeness import plot_likeness

        facts["plot"] = str(plot_likeness(facts, comparing.plot, names=(Path(a).name or "A", Path(b).name or "B")))
    return facts


def distance_lines(facts: dict[str, Any]) -> list[str]:
    null = facts["null"]
    spread = ", ".join(f"{q} → {value:.4f}" for q, value in null["quantiles"].items())
    lines = [
        f"score       {facts['score']:.6f}   (1 the same orbit, 0 unrelated)",
        f"unrelated   quantiles {spread}, largest {null['largest']:.4f} of {null['draws']} drawn",
        f"distance    {facts['distance']:.4g} of ‖A‖ modulo symmetry, {_number(facts['naive'])} as stored",
        "",
        f"{'part':<12}{'of B':<8}{'as stored':>10}{'distance':>12}{'score':>9}",
    ]
    lines += [_part_line(row) for row in facts["per_layer"]]
    if "layers" in facts:
        best = ", ".join(f"{j}←{i}" for j, i in enumerate(facts["best_in_a"]))
        lines += ["", f"layers of B and the layer of A each is most like: {best}"]
    if "plot" in facts:
        lines.append(f"figure      {facts['plot']}")
    return lines


def _part_line(row: dict[str, Any]) -> str:
    mine, other = ("" if row[key] is None else str(row[key]) for key in ("layer", "other_layer"))
    name = f"{row['space']} {mine}".strip()
    return f"{name:<12}{other:<8}{_number(row['naive']):>10}{row['distance']:>12.4g}{row['score']:>9.4f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def canonical_model(model: str, saving: Saving) -> dict[str, Any]:
    weights = load(model)
    moved = canonical(weights).apply(weights)
    written = 0
    with progress("writing", len(moved), quiet=saving.quiet) as step:

        def watch(_: str, __: object) -> None:
            nonlocal written
            written += 1
            step(written)

        dtypes = moved.save(
            saving.output, dtype=saving.dtype, force=saving.force, max_shard_size=saving.max_shard_size, watch=watch
        )
    types = sorted({dtype_name(d) for d in dtypes.values() if d.is_floating_point})
    return {"output": str(saving.output), "dtype": "+".join(types)}


def canonical_lines(facts: dict[str, Any]) -> list[str]:
    return [
        f"{facts['output']}: the canonical point of its orbit, the same function; rounded once, to {facts['dtype']}"
    ]


def fingerprint_facts(model: str, other: str | None) -> dict[str, Any]:
    mine = fingerprint(load(model))
    facts: dict[str, Any] = {"fingerprint": str(mine)}
    if other is None:
        return facts
    theirs = _other(other)
    steps = mine.steps(theirs)
    return facts | {
        "other": str(theirs),
        "equal": mine.matches(theirs),
        "same_shape": bool(steps),
        "largest_step": max(steps) if steps else None,
        "entries_apart": sum(step > 1 for step in steps),
    }


def _other(text: str) -> Fingerprint:
    """A fingerprint as it is written, a file that holds one, or a model."""
    if text.startswith(f"{VERSION}."):
        return Fingerprint.read(text)
    path = Path(text)
    try:
        is_file = path.is_file()
    except OSError:
        is_file = False
    if not is_file:
        return fingerprint(load(text))
    try:
        words = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise IsobasinError(f"--compare {text}: can not be read as text; expected a file with a fingerprint") from error
    if not words:
        raise IsobasinError(f"--compare {text}: the file is empty; expected a fingerprint in it")
    return Fingerprint.read(words[0])


def fingerprint_lines(facts: dict[str, Any]) -> list[str]:
    if "equal" not in facts:
        return [facts["fingerprint"]]
    if facts["equal"]:
        verdict = f"equal: no entry is more than one quantum away (largest step {facts['largest_step']})"
    elif not facts["same_shape"]:
        verdict = "different: the models are of different shapes or settings"
    else:
        apart, largest = facts["entries_apart"], facts["largest_step"]
        verdict = f"different: {apart} entries are more than one quantum away, by up to {largest}"
    return [facts["fingerprint"], facts["other"], verdict]
