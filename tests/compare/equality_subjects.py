"""Models to judge: every parameter random, disguised, cast or changed; and what they say in float64."""

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
from isobasin.transform import scramble
from isobasin.weights import Weights, load


@cache
def model(name: str, seed: int = 0) -> Weights:
    """A tiny transformers model, through a folder that transformers wrote, all tensors in memory."""
    with TemporaryDirectory() as folder:
        tiny.save(tiny.case(name), Path(folder), seed=seed)
        return load(*tiny.read(Path(folder)))


def own(config: ModelConfig, seed: int = 0) -> Weights:
    """Our own model with every parameter drawn at random."""
    drawn = tiny.randomize(Transformer(config), seed)
    return load(drawn.state_dict(), config.to_dict())


def small(**settings: object) -> Weights:
    """A small model of our own: one layer, two heads, unless said otherwise."""
    usual = {"d_model": 12, "n_layers": 1, "n_heads": 2, "d_head": 4, "d_ff": 10, "d_vocab": 17, "n_positions": 9}
    return own(ModelConfig(**(usual | settings)))  # type: ignore[arg-type]


def with_tensors(weights: Weights, changes: Mapping[str, Tensor]) -> Weights:
    """The same model in memory with some tensors replaced, as a float32 file would hold them."""
    tensors = {name: changes.get(name, weights[name]) for name in weights}
    return stored(replace(weights, tensors=tensors), torch.float32)


def stored(weights: Weights, dtype: torch.dtype) -> Weights:
    """As a file of this type would hold it, read again."""
    tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in ((n, weights[n]) for n in weights)}
    dtypes = {name: t.dtype for name, t in tensors.items()}
    return replace(weights, tensors=tensors, dtypes=dtypes, changed=frozenset(), exact=True)


def scrambled(weights: Weights, dtype: torch.dtype = torch.float32, seed: int = 1) -> Weights:
    return stored(scramble(weights, scope="model", seed=seed).apply(weights), dtype)


def matrices(weights: Weights) -> list[str]:
    return [n for n, p in weights.arch.tensors.items() if not p.buffer and len(weights.arch.shapes[n]) > 1]


def perturbed(weights: Weights, name: str, share: float = 1e-3, seed: int = 7) -> Weights:
    """One tensor changed by this share of its norm, in a random direction."""
    t = weights[name].double()
    noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return with_tensors(weights, {name: t + share * t.norm() / noise.norm() * noise})


def said(weights: Weights, inputs: Mapping[str, Tensor]) -> Tensor:
    """What a model says, in float64: the oracle's formulas, or our own module."""
    if weights.arch.family == "isobasin":
        module = Transformer(ModelConfig.from_dict(dict(weights.config))).double()
        module.load_state_dict({name: weights[name].double() for name in weights})
        with torch.no_grad():
            first = next(iter(inputs.values()))
            answer: Tensor = module(first.double() if first.is_floating_point() else first)
        return answer
    found = {disk: weights[name] for name, disk in weights.names.on_disk.items()}
    found |= {copy: found[weights.names.on_disk[target]] for copy, target in weights.names.copies.items()}
    return oracle.forward(found, weights.config, inputs)


def apart(a: Weights, b: Weights, inputs: Mapping[str, Tensor]) -> float:
    """The largest difference of outputs in float64, relative to the largest output."""
    x, y = said(a, inputs), said(b, inputs)
    return float((x - y).abs().max() / x.abs().max())
