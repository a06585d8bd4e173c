"""The job `pair`: B is aligned to A by every matcher of the cell, and the straight path to each result is measured."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isobasin.alignment.problem import check_comparable
from isobasin.errors import IsobasinError
from isobasin.learn.matching import LearnedAlignment
from isobasin.model import ModelConfig
from isobasin.path.curve import Curve, grid
from isobasin.path.evaluation import FlatModel, evaluate_line
from isobasin.runtime import change, logits
from isobasin.tasks import Task
from isobasin.tasks.datasets import Dataset, eval_batch_size
from isobasin.weights import Weights, load

from .align import Aligner
from .config import MatcherConfig
from .models import open_dataset_for
from .plan import Context

OUTPUT_SAMPLES = 64  # on which the outputs of a model before and after alignment are compared


def pair(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """Curves, barriers, distances, seconds and output changes: for the naive path, and by the label of each matcher.

    λ = 0 is the first model, λ = 1 the second, aligned to it.
    """
    a, b = (load(folder / "model") for folder in needs)
    check_comparable(a, b)
    configs = _distinct([MatcherConfig.from_table(table) for table in settings["matchers"]])
    path = PathEvaluator.of(settings, a, context, n_points=settings.get("points", 25))
    aligner = Aligner(a, b, settings, dataset_of(settings, a, context), context)
    rows = {"naive": _curve_dict(path.curve(b))} | {c.label: _aligned_dict(aligner, c, path) for c in configs}
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    by_name = {name: {label: row[name] for label, row in rows.items() if name in row} for name in names}
    return {"lambdas": list(path.lambdas), "n_samples": path.task.n_samples, **by_name}


def _distinct(configs: list[MatcherConfig]) -> list[MatcherConfig]:
    labels = [config.label for config in configs]
    for label in labels:
        if labels.count(label) > 1:
            raise IsobasinError(f"matchers: {label} is asked for twice in one cell; keep one of them")
    return configs


def _curve_dict(curve: Curve) -> dict[str, Any]:
    return {"curves": {name: list(values) for name, values in curve.metrics.items()}, "barrier": barriers(curve)}


def _aligned_dict(aligner: Aligner, config: MatcherConfig, path: "PathEvaluator") -> dict[str, Any]:
    began = time.perf_counter()
    found = aligner.align(config)
    seconds = time.perf_counter() - began
    moved = found.transform.apply(aligner.b)
    result = _curve_dict(path.curve(moved)) | {
        "distance": [found.distance_before, found.distance_after],
        "seconds": round(seconds, 3),
        "output_change": path.output_change(aligner.b, moved),
        "head_permutation": [list(places) for places in found.head_permutation],
    }
    if isinstance(found, LearnedAlignment):
        history = [list(row) for row in found.held_out_history]
        result["learning"] = {"held_out": dict(found.held_out), "kept": found.kept, "history": history}
    return result


def dataset_of(settings: Mapping[str, Any], model: Weights, context: Context) -> Dataset:
    """The data set of a job, cut to the sequence length or image size of its model."""
    assert model.path is not None
    return open_dataset_for(model.path, ModelConfig.from_dict(dict(model.config)), settings["dataset"], context.data)


def evaluation_task(settings: Mapping[str, Any], model: Weights, context: Context) -> Task:
    """The test samples on which a job measures all of its models."""
    data = dataset_of(settings, model, context)
    return data.task("test", samples=settings.get("samples"), batch_size=eval_batch_size(data.kind, context.device))


@dataclass(frozen=True)
class PathEvaluator:
    """Measures straight paths from one model to others, at the same points and on the same samples."""

    mixture: FlatModel
    start: Tensor
    task: Task
    lambdas: tuple[float, ...]

    @staticmethod
    def of(settings: Mapping[str, Any], a: Weights, context: Context, *, n_points: int) -> "PathEvaluator":
        mixture = FlatModel.of(a, torch.device(context.device))
        return PathEvaluator(mixture, mixture.buffer.clone(), evaluation_task(settings, a, context), grid(n_points))

    def curve(self, b: Weights) -> Curve:
        """Every metric at every point of the path to B, in float32; on CUDA matrix products are in TF32."""
        with _tf32():
            return evaluate_line(self.mixture, self.start, self.mixture.vector(b), self.task, self.lambdas, name="")

    def output_change(self, b: Weights, moved: Weights) -> float:
        """The largest difference between the logits of two models, relative to the largest logit."""
        before, after = (self._outputs(model) for model in (b, moved))
        return change(before, after)

    @torch.inference_mode()
    def _outputs(self, model: Weights) -> Tensor:
        self.mixture.buffer.copy_(self.mixture.vector(model))
        batch = next(iter(self.task))
        some = {name: t[:OUTPUT_SAMPLES].to(self.mixture.buffer.device) for name, t in batch.inputs.items()}
        return logits(self.mixture.weights, self.mixture.module, some).float()


@contextmanager
def _tf32() -> Iterator[None]:
    """Use TF32 in matrix products on CUDA: a study measures thousands of points. For a Llama of width 256 on an H200 a
    point took 101 ms instead of 141, and at three points no loss changed by more than 3e-5."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def barriers(curve: Curve) -> dict[str, float]:
    """The barrier of every metric."""
    return {name: found.height for name, found in curve.barriers.items()}
