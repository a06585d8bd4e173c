"""The job `pair`: B is aligned to A by every matcher of the cell, and the straight path to each result is measured.

In attention scopes what a matcher finds is applied even if it is no closer to A. Matching runs on the CPU in float64,
learning on the device of the context, in bfloat16 on CUDA.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from isobasin.alignment.align import Matcher, align
from isobasin.alignment.comparable import check_comparable
from isobasin.alignment.matchers import ActivationMatching, WeightMatching
from isobasin.alignment.reference import ReferenceMatching
from isobasin.alignment.result import Alignment
from isobasin.errors import IsobasinError
from isobasin.files import ResumeFile
from isobasin.learn.matching import LearnedAlignment, LearnedMatching
from isobasin.learn.path_loss import Objective
from isobasin.model import ModelConfig
from isobasin.path.barrier import Curve, grid
from isobasin.path.evaluation import FlatModel, evaluate_line
from isobasin.runtime import Inputs, logits, output_difference
from isobasin.study.config import MatcherConfig
from isobasin.study.models import open_dataset_for
from isobasin.study.plan import Context
from isobasin.symmetries import ATTENTION_SCOPES
from isobasin.symmetries.transform import pack_transform
from isobasin.tasks import Batch, Task
from isobasin.tasks.datasets import Dataset, augmentation, eval_batch_size
from isobasin.tasks.loader import MAX_IMAGES, MAX_TOKENS
from isobasin.weights import Weights, load

ACTIVATION_SAMPLES = 2048  # training samples for activations, at most
LEARNING_SAMPLES = 20_000  # training samples for learning, at most; a tenth of them is held out
OUTPUT_SAMPLES = 64  # on which the outputs of a model before and after alignment are compared


def pair(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """Curves, barriers, distances, seconds and output changes: for the naive path, and by the label of each matcher.

    λ = 0 is the first model, λ = 1 the second, aligned to it.
    """
    a, b = (load(folder / "model") for folder in needs)
    check_comparable(a, b)
    configs = [MatcherConfig.from_table(table) for table in settings["matchers"]]
    labels = [config.label for config in configs]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise IsobasinError(f"matchers: {twice[0]} is asked for twice in one cell; keep one of them")
    path = PathEvaluator.of(settings, a, context, n_points=settings.get("points", 25))
    aligner = Aligner(a, b, settings, dataset_of(settings, a, context), context)
    rows = {"naive": _curve_dict(path.curve(b))} | {c.label: _aligned_dict(aligner, c, path) for c in configs}
    names = list(dict.fromkeys(name for row in rows.values() for name in row))
    by_name = {name: {label: row[name] for label, row in rows.items() if name in row} for name in names}
    return {"lambdas": list(path.lambdas), "n_samples": path.task.n_samples, **by_name}


def _curve_dict(curve: Curve) -> dict[str, Any]:
    return {"curves": {name: list(values) for name, values in curve.metrics.items()}, "barrier": barriers(curve)}


def _aligned_dict(aligner: "Aligner", config: MatcherConfig, path: "PathEvaluator") -> dict[str, Any]:
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


@dataclass(frozen=True)
class Aligner:
    """Aligns B to A by any `MatcherConfig`; each result is computed once."""

    a: Weights
    b: Weights
    settings: Mapping[str, Any]  # of the job; `scope` is one of them
    data: Dataset
    context: Context
    _cache: dict[MatcherConfig, Alignment] = field(default_factory=dict, repr=False)

    @property
    def scope(self) -> str:
        return str(self.settings["scope"])

    def align(self, config: MatcherConfig) -> Alignment:
        """In attention scopes the matcher's result is applied even if it is no closer. Otherwise an ablation would not
        show what its variant does."""
        if config not in self._cache and config.matcher == "learned":
            self._cache[config] = self._learn(config)
        elif config not in self._cache:
            closer = self.scope not in ATTENTION_SCOPES
            self._cache[config] = align(self.b, to=self.a, matcher=self._matcher(config), only_if_closer=closer)
        return self._cache[config]

    def _matcher(self, config: MatcherConfig) -> Matcher:
        common: dict[str, Any] = {"scope": self.scope, "stage2": config.stage2}
        if config.head_distance:
            common["head_distance"] = config.head_distance
        if config.matcher == "reference":
            return ReferenceMatching(**common)
        if config.matcher == "activations":
            inputs = list(unlabeled_inputs(self.data.task("train", samples=ACTIVATION_SAMPLES)))
            return ActivationMatching(inputs, **common)
        return WeightMatching(**common)

    def _learn(self, config: MatcherConfig) -> LearnedAlignment:
        """Held-out data are a part of the training data. A killed run is resumed from its scratch folder."""
        device = torch.device(self.context.device)
        start = MatcherConfig(matcher=config.start, stage2=config.stage2, head_distance=config.head_distance)
        scratch = self.context.scratch / config.label.replace("/", "-")
        resume = ResumeFile(scratch, "learning", {"job": dict(self.settings)}, tensors=True)
        if resume.find("start") is None:  # matching was done already, and need not be repeated
            resume.keep("start", pack_transform(self.align(start).transform))
        matcher = LearnedMatching(
            self.data.task("train", samples=LEARNING_SAMPLES),
            scope=self.scope,
            init=self._matcher(start),
            steps=config.steps,
            lr=config.rate,
            check_every=max(1, config.steps // 10),
            objective=cast(Objective, config.objective),
            autocast=torch.bfloat16 if device.type == "cuda" else None,
            augment=augmentation(config.augment),
            resume=resume,
        )
        found = align(self.b, to=self.a, matcher=matcher, device=device)
        resume.close()
        assert isinstance(found, LearnedAlignment)
        return found


def unlabeled_inputs(task: Task) -> Iterator[Inputs]:
    """The inputs of a task up to MAX_IMAGES images or MAX_TOKENS tokens. A padded text is given alone, without its
    padding, which would otherwise be part of the statistics."""
    images, tokens = 0, 0
    for batch in task:
        for one in _unpadded(batch):
            if images >= MAX_IMAGES or tokens >= MAX_TOKENS:
                return
            yield one
            images += len(one["pixel_values"]) if "pixel_values" in one else 0
            tokens += one["input_ids"].numel() if "input_ids" in one else 0


def _unpadded(batch: Batch) -> Iterator[Inputs]:
    mask = batch.inputs.get("attention_mask")
    if mask is None:
        yield dict(batch.inputs)
        return
    for row, real in zip(batch.inputs["input_ids"], mask.bool()):
        yield {"input_ids": row[real][None]}


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
        return output_difference(self._outputs(b), self._outputs(moved))

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
