"""Inputs on which two models are compared: random ones, and ones with a structure that random ones never have."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.running import Inputs, random_inputs
from isobasin.weights import Weights

USUAL, LONGEST = 16, 256  # tokens
WORK = 2.0e11  # multiplications one long input may cost
_POSITIONS = ("n_positions", "max_position_embeddings")


@dataclass(frozen=True)
class Probe:
    """One input and what is special about it."""

    label: str
    inputs: Inputs


def probes(a: Weights, b: Weights, *, seed: int, brief: bool = False) -> list[Probe]:
    """What both models are run on; `brief` leaves out all lengths but the usual one."""
    shorter = min(a, b, key=longest)
    if "pixel_values" in random_inputs(shorter, n=1, seed=seed)[0]:
        return _pictures(shorter, seed)
    return _texts(shorter, seed, brief)


def of_words(a: Weights, b: Weights, words: Sequence[int], *, seed: int) -> Probe:
    """These words over and over, as those whose rows differ most between two models."""
    shorter = min(a, b, key=longest)
    usual = min(USUAL, longest(shorter))
    ids = torch.tensor(list(words)).repeat(usual)[:usual] % _vocabulary(shorter)
    return Probe("tokens whose rows differ most", _text(shorter, ids, seed))


def longest(weights: Weights) -> int:
    """How many tokens the model may read, as far as its config says."""
    found = [int(weights.config[k]) for k in _POSITIONS if weights.config.get(k)]
    return min([LONGEST, *found])


def mutated(probe: Probe, weights: Weights, rng: torch.Generator) -> Probe:
    """The same input with a few words exchanged, or with other contrast and noise."""
    inputs = dict(probe.inputs)
    if "pixel_values" in inputs:
        x = inputs["pixel_values"]
        scale = float(torch.exp2(2 * torch.rand((), generator=rng) - 1))
        inputs["pixel_values"] = scale * x + 0.3 * torch.randn(x.shape, generator=rng)
    else:
        ids = inputs["input_ids"].clone()
        places = torch.randint(ids.shape[1], (max(1, ids.shape[1] // 4),), generator=rng)
        ids[0, places] = torch.randint(_vocabulary(weights), places.shape, generator=rng)
        inputs["input_ids"] = ids
    return Probe(f"{probe.label.removesuffix(', varied')}, varied", inputs)


def _vocabulary(weights: Weights) -> int:
    config = weights.config
    return int(config.get("vocab_size") or config.get("d_vocab") or 2)


def _texts(weights: Weights, seed: int, brief: bool) -> list[Probe]:
    most = max(USUAL, int(WORK / max(1, weights.n_params) / 2))
    usual, long = min(USUAL, longest(weights)), min(longest(weights), most)
    n = _vocabulary(weights)
    rng = torch.Generator().manual_seed(seed)
    word, other = torch.randint(n, (2,), generator=rng).tolist()
    made = {
        "one token repeated": torch.full((usual,), word),
        "two tokens by turns": torch.tensor([word, other]).repeat(usual)[:usual],
        "ascending ids": torch.arange(usual) % n,
        "first and last of the vocabulary": torch.tensor([0, n - 1]).repeat(usual)[:usual],
    }
    if not brief:
        made |= {
            "a single token": torch.tensor([word]),
            "three tokens": torch.randint(n, (min(3, usual),), generator=rng),
            "every position": torch.randint(n, (long,), generator=rng),
        }
    drawn = random_inputs(weights, n=3, length=usual, seed=seed)
    return [Probe("random", one) for one in drawn] + [
        Probe(label, _text(weights, ids, seed)) for label, ids in made.items()
    ]


def _text(weights: Weights, ids: Tensor, seed: int) -> Inputs:
    """These words, with token types drawn where the model has them."""
    drawn = random_inputs(weights, n=1, length=len(ids), seed=seed)[0]
    return drawn | {"input_ids": ids[None]}


def _pictures(weights: Weights, seed: int) -> list[Probe]:
    drawn = random_inputs(weights, n=3, seed=seed)
    x = drawn[0]["pixel_values"]
    rows, columns = torch.meshgrid(torch.arange(x.shape[-2]), torch.arange(x.shape[-1]), indexing="ij")
    spot = torch.zeros_like(x)
    spot[..., x.shape[-2] // 2, x.shape[-1] // 2] = 5.0
    made = {
        "black": torch.zeros_like(x),
        "white": torch.ones_like(x),
        "extreme pixels": 8.0 * x.sign(),
        "checkerboard": ((rows + columns) % 2 * 2.0 - 1.0).expand_as(x).clone(),
        "one bright pixel": spot,
        "ramp": (columns / columns.max().clamp(min=1) * 2 - 1).expand_as(x).clone(),
    }
    return [Probe("random", one) for one in drawn] + [
        Probe(label, drawn[0] | {"pixel_values": pixels}) for label, pixels in made.items()
    ]
