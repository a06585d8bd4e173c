"""Change any word of any family, and a check goes red; what survives is listed here with its reason.

A mutant is dead when, for some model of its family, loading refuses it, the symmetry has another dimension (the
right one is measured in test_whole_dimension), a scrambled model says something else, or a step outside a
group that it declares is not seen (the group is then too small).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pytest
import torch
from mutants import PARTS, Mutant, bent, described, mutants
from outside import act, step_outside
from subjects import moved, on_disk, said, subject
from torch import Tensor

import tiny
from isobasin.arch import HeadSpace, Space
from isobasin.errors import IsobasinError
from isobasin.groups import Element, HeadsElement
from isobasin.model import ModelConfig, Transformer
from isobasin.normalize import normalize
from isobasin.symmetries import group_of, symmetry
from isobasin.transform import scramble
from isobasin.weights import Weights, load

pytestmark = pytest.mark.hf

UNSEEN, SEEN = 1e-6, 1e-3


@dataclass(frozen=True)
class Trial:
    """A model that judges mutants of its family: its file, and what it says."""

    weights: Weights
    tensors: Mapping[str, Tensor]
    say: Callable[[Weights], Tensor]

    @cached_property
    def output(self) -> Tensor:
        return self.say(self.weights)

    @cached_property
    def dim(self) -> int:
        return symmetry(self.weights.arch).dim

    @property
    def family(self) -> str:
        return self.weights.arch.family

    def error(self, weights: Weights) -> float:
        return float((self.say(weights) - self.output).abs().max() / self.output.abs().max())

    def verdict(self, mutant: Mutant, check: "Check") -> str | None:
        """Why the mutant is dead, or None."""
        try:
            with bent(self.family, mutant):
                weights = load(self.tensors, self.weights.config)
            if weights.arch == self.weights.arch:  # the change is in nothing that this file has
                return None
            return check(self, weights)
        except (IsobasinError, LookupError, RuntimeError, AssertionError, ValueError) as error:
            return f"{type(error).__name__}: {error}"


Check = Callable[[Trial, Weights], str | None]


def dimension(trial: Trial, weights: Weights) -> str | None:
    found = symmetry(weights.arch).dim
    return None if found == trial.dim else f"dimension {found} for {trial.dim}"


def function(*seeds: int) -> Check:
    def check(trial: Trial, weights: Weights) -> str | None:
        for seed in seeds:
            error = trial.error(moved(scramble(weights, seed=seed), weights))
            if not error <= UNSEEN:
                return f"the output moves by {error}"
        return None

    return check


def maximal(trial: Trial, weights: Weights) -> str | None:
    """Every group is as large as it may be: one step outside it is seen."""
    flat = moved(normalize(weights), weights)
    for name in symmetry(weights.arch).groups:
        outside = _outside(weights.arch.spaces[name])
        if outside is not None and not trial.error(act(flat, {name: outside})) > SEEN:
            return f"a step outside the group of {name} is not seen"
    return None


def _outside(space: Space | HeadSpace) -> Element | None:
    if isinstance(space, Space):
        return step_outside(space.kind, space.size)
    still = group_of(space).identity()
    assert isinstance(still, HeadsElement)
    return replace(still, kv=still.kv.roll(1)) if not space.permutable and space.n_kv_heads > 1 else None


# Cheap ones first; a global sign is drawn by each seed with even odds. Only a space can declare too small a group.
CHECKS: tuple[tuple[Check, tuple[str, ...]], ...] = (
    (dimension, PARTS),
    (function(0), PARTS),
    (function(1, 2), PARTS),
    (maximal, ("spaces", "heads")),
)


def survivors(trials: list[Trial]) -> tuple[set[str], int]:
    """The mutants that no check of any trial kills, by name, and how many there were."""
    every = [(t, m) for t in trials for m in mutants(described(t.family, t.weights.config))]
    alive = {mutant.name for _, mutant in every}
    for check, parts in CHECKS:
        for trial, mutant in every:
            if mutant.name in alive and mutant.part in parts and trial.verdict(mutant, check) is not None:
                alive.remove(mutant.name)
    return alive, len({mutant.name for _, mutant in every})


def from_transformers(name: str, **config: Any) -> Trial:
    """A tiny case, with other settings that leave its tensors as they are; buffers and copies of old files added."""
    s = subject(name)
    settings = {**s.weights.config, **config}
    parts = described(s.weights.arch.family, settings)
    tensors, disk = on_disk(s.weights), s.weights.names.on_disk
    buffers = [key.replace("{i}", "0") for key, text in parts["tensors"].items() if text == "-"]
    tensors |= {key: torch.zeros(1) for key in buffers if key not in disk}
    tensors |= {copy: tensors[disk[target]] for copy, target in parts.get("aliases", {}).items()}
    return Trial(load(tensors, settings), tensors, lambda weights: said(weights, s.inputs))


_OWN = {"d_model": 12, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "d_head": 4, "d_ff": 10, "norm_eps": 1e-3}
_TOKENS = _OWN | {"d_vocab": 15, "n_positions": 6}
_PATCHES = _OWN | {"image_size": 4, "patch_size": 2, "n_channels": 2, "n_classes": 5}


def own(**settings: Any) -> Trial:
    config = ModelConfig(**settings)
    model = tiny.randomize(Transformer(config).double(), seed=1).requires_grad_(False)
    rng = torch.Generator().manual_seed(2)
    if config.d_vocab:
        inputs = torch.randint(config.d_vocab, (4, config.n_positions), generator=rng)
    else:
        inputs = torch.randn(4, 2, 4, 4, generator=rng, dtype=torch.float64)

    def say(weights: Weights) -> Tensor:
        return torch.func.functional_call(model, dict(on_disk(weights)), (inputs,))

    return Trial(load(model.state_dict(), config.to_dict()), model.state_dict(), say)


# The strictest judge of a family first. ReLU units have scales, which tell a space from its dual.
TRIALS: Mapping[str, Callable[[], list[Trial]]] = {
    "gpt2": lambda: [
        from_transformers("gpt2-lm-untied", activation_function="relu"),
        from_transformers("gpt2-lm-tied"),
        from_transformers("gpt2-classifier"),
        from_transformers("gpt2-bare"),
    ],
    "bert": lambda: [
        from_transformers("bert-relu"),
        from_transformers("bert-masked-lm-untied", hidden_act="relu"),
        from_transformers("bert-masked-lm-tied"),
        from_transformers("bert-pretraining"),
        from_transformers("bert-bare"),
    ],
    "vit": lambda: [
        from_transformers("vit-classifier", hidden_act="relu"),
        from_transformers("vit-no-qkv-bias"),
        from_transformers("vit-masked-image"),
        from_transformers("vit-bare"),
    ],
    "llama": lambda: [
        from_transformers("llama-biases"),
        from_transformers("llama-gqa"),
        from_transformers("llama-tied"),
        from_transformers("llama-classifier"),
        from_transformers("llama-bare"),
    ],
    "mistral": lambda: [from_transformers("mistral-gqa")],
    "gpt_neox": lambda: [
        from_transformers("gpt_neox-sequential", hidden_act="relu"),
        from_transformers("gpt_neox-quarter-rotary"),
        from_transformers("gpt_neox-no-attention-bias"),
        from_transformers("gpt_neox-tied"),
        from_transformers("gpt_neox-classifier"),
        from_transformers("gpt_neox-bare"),
    ],
    "isobasin": lambda: [
        own(**_TOKENS, positions="rope", feed_forward="swiglu", rotary_dims=2, causal=True),
        own(**_TOKENS, positions="rope", feed_forward="swiglu", norm="rms", rotary_layout="interleaved"),
        own(**_TOKENS, positions="learned", post_norm=True, feed_forward="swiglu"),
        own(**_TOKENS, positions="sinusoidal", tied=True, bias=False),
        own(**_TOKENS, positions="none", norm="rms", tied=True, n_classes=None),
        own(**_TOKENS, positions="alibi", norm="rms", post_norm=True, n_classes=5),
        own(**_PATCHES, positions="learned", norm="layer"),
    ],
}
