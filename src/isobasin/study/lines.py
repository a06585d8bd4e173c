"""Straight lines from one model of a study, measured on the same samples at the same points."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobasin.model import ModelConfig
from isobasin.path.curve import Curve, grid
from isobasin.path.evaluate import along
from isobasin.path.mixture import Mixture
from isobasin.running import change, logits
from isobasin.tasks import Task
from isobasin.weights import Weights

from .datasets import Dataset, at_once
from .fitting_models import open_for
from .jobs import Context

CHECKED = 64  # samples on which a model and itself moved are compared


def data_of(settings: Mapping[str, Any], model: Weights, context: Context) -> Dataset:
    """The data that a job names, cut to what its model reads."""
    assert model.path is not None
    return open_for(model.path, ModelConfig.from_dict(dict(model.config)), settings["dataset"], context.data)


def measured_on(settings: Mapping[str, Any], model: Weights, context: Context) -> Task:
    """The test samples that all lines of a job are measured on."""
    data = data_of(settings, model, context)
    return data.task("test", samples=settings.get("samples"), batch_size=at_once(data.kind, context.device))


@dataclass(frozen=True)
class Line:
    """Straight lines from one model, measured on the same samples at the same points."""

    mixture: Mixture
    start: Tensor
    task: Task
    lambdas: tuple[float, ...]

    @staticmethod
    def of(a: Weights, task: Task, n_points: int, device: torch.device) -> "Line":
        mixture = Mixture.of(a, device)
        return Line(mixture, mixture.buffer.clone(), task, grid(n_points))

    def to(self, b: Weights) -> Curve:
        """Every metric at every point of the line to this model, in float32; on CUDA products are in TF32."""
        with _tf32():
            return along(self.mixture, self.start, self.mixture.vector(b), self.task, self.lambdas, name="")

    def change(self, b: Weights, moved: Weights) -> float:
        """How far the logits of a model and of itself moved are apart, relative to the largest."""
        before, after = (self._said(model) for model in (b, moved))
        return change(before, after)

    @torch.inference_mode()
    def _said(self, model: Weights) -> Tensor:
        self.mixture.buffer.copy_(self.mixture.vector(model))
        batch = next(iter(self.task))
        some = {name: t[:CHECKED].to(self.mixture.buffer.device) for name, t in batch.inputs.items()}
        return logits(self.mixture.like, self.mixture.module, some).float()


@contextmanager
def _tf32() -> Iterator[None]:
    """On CUDA products take their factors in TF32: a study measures thousands of points. For a Llama of width 256 on an
    H200 a point took 101 ms instead of 141, and of three points no loss moved by more than 3e-5."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def heights(curve: Curve) -> dict[str, float]:
    """The barrier of every metric."""
    return {name: found.height for name, found in curve.barriers.items()}


def middle(curve: Curve) -> float:
    """The loss half-way, or at the point just before it."""
    losses = curve.metrics["loss"]
    return losses[(len(losses) - 1) // 2]
