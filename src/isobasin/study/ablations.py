"""The works beside `pair`: all head permutations, each layer's attention drawn anew, and the causal control."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from isobasin.match.align import align
from isobasin.match.matchers import WeightMatching
from isobasin.model import ModelConfig, Transformer
from isobasin.path.mixture import Mixture
from isobasin.path.survey import survey
from isobasin.symmetries import symmetry
from isobasin.weights import Weights, load

from .arrangements import Arranger, arrangements
from .disguises import Side, disguised
from .jobs import Context
from .lines import Line, heights, measured_on, middle

POINTS = 9  # of each line: there are two dozen of them
DRAWS = 3


def heads(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """Every permutation of the heads (or 23 random ones and the chosen), Stage 2 applied to each: where is Stage 1's?

    L is the loss half-way; `normalised` is 100 (L_chosen − L_best) / (L_naive − L_best). For scopes with several layers
    an arrangement permutes the heads of all of them; stream and units stay where matching puts them.
    """
    a, b = (load(folder / "model") for folder in needs)
    task = measured_on(settings, a, context)
    line = Line.of(a, task, settings.get("points", POINTS), torch.device(context.device))
    arranger = Arranger(a, b, settings.get("scope", "first-attention"), settings.get("stage2", "full"))
    tried = arrangements(arranger.layers, arranger.chosen, seed=settings.get("seed", 0))
    curves = [line.to(arranger.transform(places).apply(b)) for places in tried]
    naive = line.to(b)
    half = [middle(curve) for curve in curves]
    chosen = next(i for i, places in enumerate(tried) if dict(places) == dict(arranger.chosen))
    return {
        "permutations": [[list(places) for places in each.values()] for each in tried],
        "lambdas": list(line.lambdas),
        "curves": [list(curve.metrics["loss"]) for curve in curves],
        "loss": half,
        "barrier": [heights(curve)["loss"] for curve in curves],
        "naive": middle(naive),
        "naive_curve": list(naive.metrics["loss"]),
        "naive_barrier": heights(naive)["loss"],
        "chosen": chosen,
        "rank": 1 + sum(loss < half[chosen] for loss in half),
        "normalised": normalised(half[chosen], min(half), middle(naive)),
        "n_samples": task.n_samples,
    }


def normalised(method: float, best: float, naive: float) -> float | None:
    """L̂ = 100 (L_method − L_best) / (L_naive − L_best); None where naive is as good as the best.

    >>> normalised(1.1, 1.0, 2.0)
    10.0
    """
    return round(100 * (method - best) / (naive - best), 10) if naive > best else None


def layers(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """The loss after the attention of one layer alone is drawn anew: the mean over `seeds`, layer by layer."""
    model = load(needs[0] / "model")
    mixture = Mixture.of(model, torch.device(context.device))
    trained = mixture.buffer.clone()
    seeds = list(settings.get("seeds", range(DRAWS)))
    fresh = {seed: mixture.vector(_drawn(model, seed)) for seed in seeds}

    def place(layer: int | None, seed: int) -> None:
        mixture.buffer.copy_(trained)
        for name in mixture.offsets:
            if layer is not None and name.startswith(f"blocks.{layer}.attn."):
                mixture.part(mixture.buffer, name).copy_(mixture.part(fresh[seed], name))

    everywhere = range(model.arch.sizes.n_layers)
    stations = {f"{i}/{seed}": (lambda i=i, seed=seed: place(i, seed)) for i in everywhere for seed in seeds}
    task = measured_on(settings, model, context)
    sums = survey(mixture, {"before": lambda: place(None, 0), **stations}, task)
    found = {name: each.metrics(task.kind) for name, each in sums.items()}
    each = {metric: [[found[f"{i}/{s}"][metric] for s in seeds] for i in everywhere] for metric in found["before"]}
    return {
        "loss": [fmean(draws) for draws in each["loss"]],
        "accuracy": [fmean(draws) for draws in each["accuracy"]],
        "draws": each["loss"],
        "before": found["before"]["loss"],
        "accuracy_before": found["before"]["accuracy"],
        "n_samples": task.n_samples,
    }


def _drawn(model: Weights, seed: int) -> Weights:
    config = ModelConfig.from_dict(dict(model.config))
    return load(Transformer(config, seed=seed).state_dict(), config.to_dict())


def control(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """A model against itself with Q–K disguised: by its own symmetry, and by matrices outside it. Then aligned.

    Only what lies inside the group leaves the outputs alone, and only that is removed again by alignment.
    """
    model = load(needs[0] / "model")
    task = measured_on(settings, model, context)
    line = Line.of(model, task, settings.get("points", POINTS), torch.device(context.device))
    scope, seed = settings.get("scope", "all-attention"), settings.get("seed", 0)
    sides: tuple[Side, Side] = ("inside", "outside")
    return {
        "positions": model.config.get("positions"),
        "group": str(symmetry(model.arch).scoped(scope)),
        "lambdas": list(line.lambdas),
        "n_samples": task.n_samples,
        **{side: _disguised_and_aligned(model, line, side, scope, seed) for side in sides},
    }


def _disguised_and_aligned(model: Weights, line: Line, side: Side, scope: str, seed: int) -> dict[str, Any]:
    """Several draws, each measured before and after alignment."""
    layers = [int(h.name.removeprefix("heads")) for h in model.arch.heads()]
    layers = layers[:1] if scope == "first-attention" else layers
    rows: dict[str, list[Any]] = {}
    for draw in range(DRAWS):
        other, element = disguised(model, layers, side, seed=seed + 1000 * draw)
        found = align(other, to=model, matcher=WeightMatching(scope=scope))
        moved = found.transform.apply(other)
        naive, aligned = line.to(other), line.to(moved)
        row = {
            "element": element,
            "function_change": line.change(model, other),
            "end_loss": naive.metrics["loss"][-1],
            "barrier": [heights(naive)["loss"], heights(aligned)["loss"]],
            "excess": [excess(curve.metrics["loss"]) for curve in (naive, aligned)],
            "distance": [found.distance_before, found.distance_after],
            "output_change": line.change(other, moved),
            "curves": {"naive": list(naive.metrics["loss"]), "aligned": list(aligned.metrics["loss"])},
        }
        for name, value in row.items():
            rows.setdefault(name, []).append(value)
    return rows


def excess(losses: Sequence[float]) -> float:
    """How far the line rises over its first end: unlike the barrier it sees that the other end is bad.

    >>> excess([1.0, 3.0, 2.0])
    2.0
    """
    return max(losses) - losses[0]
