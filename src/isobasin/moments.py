"""Second moments of what each attention layer reads, in one pass over unlabeled inputs."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.running import Inputs, record_reads
from isobasin.shapes import Float
from isobasin.tasks import unlabeled
from isobasin.weights import Weights


def reading_roots(a: Weights, b: Weights, data: Path, *, seed: int = 0) -> dict[str, Tensor]:
    """Σ^½ per attention layer, Σ the mean of both models' second moments of (what it reads, 1)."""
    sums = [second_moments(model, unlabeled(data, model, seed=seed)) for model in (a, b)]
    return {name: _root((sums[0][name] + sums[1][name]) / 2) for name in sums[0]}


def second_moments(weights: Weights, inputs: Iterable[Inputs]) -> dict[str, Float[Tensor, "rows rows"]]:
    """E[(y, 1)(y, 1)ᵀ] over all tokens, y what the layer's projections read; accumulated in float64."""
    totals: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def add(name: str, reads: Tensor) -> None:
        y = reads.flatten(0, -2).to(torch.float64)
        y = torch.cat([y, torch.ones_like(y[:, :1])], -1)
        totals[name] = totals.get(name, 0) + y.mT @ y
        counts[name] = counts.get(name, 0) + len(y)

    wanted = {_key_weight(weights, heads.name): heads.name for heads in weights.arch.heads()}
    record_reads(weights, inputs, wanted, add)
    if not totals:
        raise IsobasinError("--data holds no inputs: expected at least one text, image or row of token ids")
    return {name: total / counts[name] for name, total in totals.items()}


def _key_weight(weights: Weights, heads: str) -> str:
    face = f"qk{heads.removeprefix('heads')}"
    return next(
        name
        for name, _, _, term in weights.arch.carriers(face)
        if not term.dual and len(weights.arch.tensors[name].roles[0].axes) > 1
    )


def _root(moment: Tensor) -> Tensor:
    values, basis = torch.linalg.eigh(moment)
    return (basis * values.clamp_min(0).sqrt()) @ basis.mT
