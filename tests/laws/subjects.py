"""Models the laws are tried on: the tiny transformers models, in memory, with what they say in float64."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import oracle
import tiny
from isobasin.symmetries.transform import Transform
from isobasin.weights import Weights, load


@dataclass(frozen=True)
class Subject:
    """A tiny model: its weights, an input, and its own float64 output there."""

    case: tiny.Case
    weights: Weights
    inputs: Mapping[str, Tensor]
    output: Tensor

    def error(self, weights: Weights) -> float:
        """How far another model's output is from this one's: max |difference| / max |output|."""
        return distance(said(weights, self.inputs), self.output)


@cache
def subject(name: str, seed: int = 0) -> Subject:
    """The case of that name, through a folder that transformers wrote, all tensors in memory."""
    case = tiny.case(name)
    with TemporaryDirectory() as folder:
        tiny.save(case, Path(folder), seed=seed)
        weights = load(*tiny.read(Path(folder)))
    return Subject(case, weights, case.inputs(seed), said(weights, case.inputs(seed)))


def on_disk(weights: Weights) -> dict[str, Tensor]:
    """The tensors under their names on disk, in the type in which they are held, ties included."""
    found = {disk: weights.assembled(disk, weights.stored) for disk in weights.names.by_disk}
    return found | {copy: found[weights.names.on_disk[target]] for copy, target in weights.names.copies.items()}


def said(weights: Weights, inputs: Mapping[str, Tensor]) -> Tensor:
    """What the model says, by the float64 oracle."""
    return oracle.forward(on_disk(weights), weights.config, inputs)


def distance(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def moved(transform: Transform, weights: Weights) -> Weights:
    """The moved model with every tensor computed once and kept, in float64 where it moved."""
    return held(transform.apply(weights))


def held(weights: Weights, changes: Mapping[str, Tensor] | None = None) -> Weights:
    """The same model with its tensors in memory, some of them replaced."""
    return replace(weights, tensors={name: weights[name] for name in weights} | dict(changes or {}))


def change(found: Weights, expected: Weights) -> dict[str, float]:
    """Per tensor, ‖found − expected‖ / ‖expected‖."""
    return {
        name: float(torch.linalg.vector_norm(found[name].double() - expected[name].double()))
        / max(float(torch.linalg.vector_norm(expected[name].double())), 1e-30)
        for name in expected
    }
