"""Pairs of models to align: an original, and the same function elsewhere on its orbit, with or without noise."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import oracle
import tiny
from isobasin.groups import Element, HeadsElement
from isobasin.model import ModelConfig, Transformer
from isobasin.symmetries import symmetry
from isobasin.symmetries.action import Action
from isobasin.symmetries.transform import Transform, scramble
from isobasin.views import AsFloat64
from isobasin.weights import Weights, load

# What attention consists of, from the files' names alone.
ATTENTION = re.compile(r".*\.(attn|attention|self_attn)\.(?!.*LayerNorm).*")
# A parallel NeoX without attention biases has one output bias for attention and feed-forward.
SHARED = re.compile(r"gpt_neox\.layers\.\d+\.mlp\.dense_4h_to_h\.bias")


@dataclass(frozen=True)
class Pair:
    """A, and B that a transform made of it; B as a float32 file would hold it."""

    a: Weights
    b: Weights
    planted: Transform


def held(weights: Weights, changes: Mapping[str, Tensor] | None = None) -> Weights:
    """The same model with its tensors in memory, some of them replaced."""
    return replace(weights, tensors={name: weights[name] for name in weights} | dict(changes or {}))


def rounded(weights: Weights) -> Weights:
    """As a float32 file would hold it."""
    return held(weights, {name: weights[name].to(torch.float32) for name in weights})


@cache
def model(name: str, seed: int = 0) -> Weights:
    """A tiny transformers model, through a folder that transformers wrote, all tensors in memory."""
    with TemporaryDirectory() as folder:
        tiny.save(tiny.case(name), Path(folder), seed=seed)
        return load(*tiny.read(Path(folder)))


def own_model(config: ModelConfig, seed: int = 0) -> Weights:
    """Our own model with every parameter drawn at random, in float32."""
    drawn = tiny.randomize(Transformer(config), seed)
    return load(drawn.state_dict(), config.to_dict())


def scrambled(a: Weights, scope: str, seed: int = 1) -> Pair:
    planted = scramble(a, scope=scope, seed=seed)
    return Pair(a, rounded(planted.apply(a)), planted)


def scope_tensors(a: Weights, scope: str = "all-attention") -> list[str]:
    """The tensors of a scope, by name."""
    mine = [name for name in a if ATTENTION.fullmatch(name)]
    if a.arch.family == "gpt_neox" and not any(name.endswith("attention.dense.bias") for name in a):
        mine += [name for name in a if SHARED.fullmatch(name)]
    return [name for name in mine if scope == "all-attention" or re.search(r"\.0\.", name)]


def with_noise(pair: Pair, share: float = 0.1, seed: int = 5) -> Pair:
    """Gaussian noise on B's attention, a share of each tensor's root mean square."""
    rng = torch.Generator().manual_seed(seed)
    noisy = {}
    for name in scope_tensors(pair.a):
        t = pair.b[name].to(torch.float64)
        noise = torch.randn(t.shape, generator=rng, dtype=torch.float64)
        noisy[name] = (t + share * t.square().mean().sqrt() * noise).to(torch.float32)
    return replace(pair, b=held(pair.b, noisy))


def acted(a: Weights, elements: Mapping[str, Element]) -> Weights:
    """The elements straight on the tensors, whether or not they lie in the group, in float64."""
    changes = Action(a.arch, elements).changes()
    return held(a, {name: change(AsFloat64(a)) for name, change in changes.items()})


def squared_distance(found: Weights, a: Weights) -> float:
    """Over the tensors of all attention layers."""
    return float(sum((found[n].double() - a[n].double()).square().sum() for n in scope_tensors(a)))


def worst_tensor(found: Weights, a: Weights) -> float:
    """The largest relative distance of any tensor of the model."""
    return max(
        float((found[n].double() - a[n].double()).norm() / a[n].double().norm().clamp(min=1e-30))
        for n in a
        if a[n].is_floating_point()
    )


def head_order_back(planted: Transform) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """The order of B's query heads and of its kv heads, per layer, that undoes the planted element."""
    elements = [g for g in planted.elements.values() if isinstance(g, HeadsElement)]
    queries = tuple(tuple(torch.argsort(g.head_permutation).tolist()) for g in elements)
    return queries, tuple(tuple(torch.argsort(g.kv).tolist()) for g in elements)


def identity(a: Weights) -> dict[str, HeadsElement]:
    """The neutral element of every attention layer."""
    whole = symmetry(a.arch).groups
    found = {h.name: whole[h.name].identity() for h in a.arch.heads()}
    return {name: g for name, g in found.items() if isinstance(g, HeadsElement)}


def said(weights: Weights, inputs: Mapping[str, Tensor]) -> Tensor:
    """What a model says, in float64: the oracle's formulas, or our own module."""
    if weights.arch.family == "isobasin":
        module = Transformer(ModelConfig.from_dict(dict(weights.config))).double()
        module.load_state_dict({name: weights[name].double() for name in weights})
        with torch.no_grad():
            answer: Tensor = module(*inputs.values())
        return answer
    found = {disk: weights[name] for name, disk in weights.names.on_disk.items()}
    found |= {copy: found[weights.names.on_disk[target]] for copy, target in weights.names.copies.items()}
    return oracle.forward(found, weights.config, inputs)


def moved_outputs(after: Weights, before: Weights, inputs: Mapping[str, Tensor]) -> float:
    """The largest change of outputs, relative to the largest output."""
    expected = said(before, inputs)
    return float((said(after, inputs) - expected).abs().max() / expected.abs().max())


def own_inputs(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    if config.image_size is not None:
        shape: tuple[Any, ...] = (3, config.n_channels, config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=rng, dtype=torch.float64)}
    return {"input_ids": torch.randint(config.d_vocab or 2, (3, config.n_positions), generator=rng)}
