"""Models that are compared: the tiny transformers models and small ones of our own, in memory."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

import oracle
import tiny
from isobasin.model import ModelConfig, Transformer
from isobasin.transform import Transform, scramble
from isobasin.weights import Weights, load

FULL = os.environ.get("ISOBASIN_SLOW", "0") == "1"

# At least one of every family and of every kind of stream, of units and of positions.
SOME = (
    "gpt2-lm-tied",
    "gpt2-lm-untied",
    "bert-masked-lm-tied",
    "bert-relu",
    "vit-no-qkv-bias",
    "llama-gqa",
    "llama-tied",
    "mistral-head-dim",
    "gpt_neox-sequential",
)
CASES = tuple(case.name for case in tiny.CASES) if FULL else SOME


@cache
def subject(name: str, seed: int = 0) -> Weights:
    """The tiny model of that name, every parameter drawn at random."""
    with TemporaryDirectory() as folder:
        tiny.save(tiny.case(name), Path(folder), seed=seed)
        return load(*tiny.read(Path(folder)))


def own(config: ModelConfig, seed: int) -> Weights:
    """A model of our own, every parameter drawn at random, in float64."""
    model = tiny.randomize(Transformer(config).double(), seed)
    with TemporaryDirectory() as folder:
        model.save(folder)
        return held(load(Path(folder)))


def held(weights: Weights, changes: Mapping[str, Tensor] | None = None) -> Weights:
    """The same model with its tensors in memory, some of them replaced."""
    return replace(weights, tensors={name: weights[name] for name in weights} | dict(changes or {}))


def moved(transform: Transform, weights: Weights) -> Weights:
    return held(transform.apply(weights))


def scrambled(weights: Weights, seed: int = 5) -> Weights:
    return moved(scramble(weights, seed=seed), weights)


def cast(weights: Weights, dtype: torch.dtype) -> Weights:
    """Rounded to a type, and held in float32."""
    floating = (name for name in weights if weights[name].is_floating_point())
    return held(weights, {name: weights[name].to(dtype).float() for name in floating})


def noisy(weights: Weights, size: float, seed: int = 0) -> Weights:
    """Every number changed by about this share of itself."""
    rng = torch.Generator().manual_seed(seed)
    floating = [name for name in weights if weights[name].is_floating_point()]
    noise = {name: torch.randn(weights[name].shape, generator=rng, dtype=torch.float64) for name in floating}
    return held(weights, {name: weights[name].double() * (1 + size * noise[name]) for name in floating})


def difference(found: Weights, expected: Weights) -> float:
    """The largest ‖found − expected‖ / ‖expected‖ over the tensors that are not all zero."""
    pairs = [(found[name].double(), expected[name].double()) for name in expected if expected[name].numel()]
    return max(float((x - y).norm() / y.norm()) for x, y in pairs if float(y.norm()) > 1e-9)


def output_change(name: str, found: Weights, expected: Weights) -> float:
    """How far the float64 outputs of two forms of a tiny model are apart, relative to the largest."""
    outputs = []
    for weights in (found, expected):
        tensors = {disk: weights[own_name] for own_name, disk in weights.names.on_disk.items()}
        tensors |= {copy: tensors[weights.names.on_disk[target]] for copy, target in weights.names.copies.items()}
        outputs.append(oracle.forward(tensors, weights.config, tiny.case(name).inputs(0)))
    return float((outputs[0] - outputs[1]).abs().max() / outputs[1].abs().max())
