"""Models for the comparison tests: tiny transformers models and small ones of our own, and changed copies of them."""

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
from isobasin.symmetries.transform import Transform, scramble
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
def tiny_model(name: str, seed: int = 0) -> Weights:
    """The tiny model of that name from a folder that transformers wrote; every parameter is random."""
    with TemporaryDirectory() as folder:
        tiny.save(tiny.case(name), Path(folder), seed=seed)
        return load(*tiny.read(Path(folder)))


def own_model(config: ModelConfig, seed: int = 0, dtype: torch.dtype = torch.float32) -> Weights:
    """Our own model with every parameter random."""
    return load(tiny.randomize(Transformer(config).to(dtype), seed).state_dict(), config.to_dict())


def small_model(**settings: object) -> Weights:
    """A small model of our own: one layer, two heads, unless the settings say otherwise."""
    usual = {"d_model": 12, "n_layers": 1, "n_heads": 2, "d_head": 4, "d_ff": 10, "d_vocab": 17, "n_positions": 9}
    return own_model(ModelConfig(**(usual | settings)))  # type: ignore[arg-type]


def held(weights: Weights, changes: Mapping[str, Tensor] | None = None) -> Weights:
    """The same model with its tensors in memory in the types they have, some of them replaced."""
    return replace(weights, tensors={name: weights[name] for name in weights} | dict(changes or {}))


def stored(weights: Weights, dtype: torch.dtype) -> Weights:
    """As a file of this type would hold it, read again."""
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in ((n, weights[n]) for n in weights)}
    dtypes = {name: t.dtype for name, t in tensors.items()}
    return replace(weights, tensors=tensors, dtypes=dtypes, changed=frozenset(), exact=True)


def with_tensors(weights: Weights, changes: Mapping[str, Tensor]) -> Weights:
    """The same model with some tensors replaced, as a float32 file would hold it."""
    return stored(held(weights, changes), torch.float32)


def cast(weights: Weights, dtype: torch.dtype) -> Weights:
    """Rounded to a type, and held in float32."""
    floating = (name for name in weights if weights[name].is_floating_point())
    return held(weights, {name: weights[name].to(dtype).float() for name in floating})


def moved(transform: Transform, weights: Weights) -> Weights:
    return held(transform.apply(weights))


def scrambled(weights: Weights, seed: int = 5) -> Weights:
    """A random reparametrisation, without rounding."""
    return moved(scramble(weights, seed=seed), weights)


def scrambled_file(weights: Weights, dtype: torch.dtype = torch.float32, seed: int = 1) -> Weights:
    """A random reparametrisation as a file of this type would hold it."""
    return stored(scramble(weights, scope="model", seed=seed).apply(weights), dtype)


def noisy(weights: Weights, size: float, seed: int = 0) -> Weights:
    """Every number changed by about this share of itself."""
    rng = torch.Generator().manual_seed(seed)
    floating = [name for name in weights if weights[name].is_floating_point()]
    noise = {name: torch.randn(weights[name].shape, generator=rng, dtype=torch.float64) for name in floating}
    return held(weights, {name: weights[name].double() * (1 + size * noise[name]) for name in floating})


def perturbed(weights: Weights, name: str, share: float = 1e-3, seed: int = 7) -> Weights:
    """One tensor changed by this share of its norm, in a random direction."""
    t = weights[name].double()
    noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return with_tensors(weights, {name: t + share * t.norm() / noise.norm() * noise})


def matrices(weights: Weights) -> list[str]:
    return [n for n, p in weights.arch.tensors.items() if not p.buffer and len(weights.arch.shapes[n]) > 1]


def weight_difference(found: Weights, expected: Weights) -> float:
    """The largest ‖found − expected‖ / ‖expected‖ over the tensors that are not all zero."""
    pairs = [(found[name].double(), expected[name].double()) for name in expected if expected[name].numel()]
    return max(float((x - y).norm() / y.norm()) for x, y in pairs if float(y.norm()) > 1e-9)


def outputs(weights: Weights, inputs: Mapping[str, Tensor]) -> Tensor:
    """The outputs of a model in float64: by the oracle's formulas, or by our own module."""
    if weights.arch.family == "isobasin":
        module = Transformer(ModelConfig.from_dict(dict(weights.config))).double()
        module.load_state_dict({name: weights[name].double() for name in weights})
        with torch.no_grad():
            first = next(iter(inputs.values()))
            found: Tensor = module(first.double() if first.is_floating_point() else first)
        return found
    tensors = {disk: weights[name] for name, disk in weights.names.on_disk.items()}
    tensors |= {copy: tensors[weights.names.on_disk[target]] for copy, target in weights.names.copies.items()}
    return oracle.forward(tensors, weights.config, inputs)


def output_difference(a: Weights, b: Weights, inputs: Mapping[str, Tensor]) -> float:
    """The largest difference of outputs in float64, relative to the largest output of A."""
    x, y = outputs(a, inputs), outputs(b, inputs)
    return float((x - y).abs().max() / x.abs().max())
