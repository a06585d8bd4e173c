"""Pairs to learn on: a model and a reparametrisation of it, with data that the model itself has labelled."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import isobasin as ib
from isobasin.alignment.experts import nearest_elements
from isobasin.alignment.matchers import WeightMatching
from isobasin.groups import Element, Monomial
from isobasin.learn.matching import LearnedMatching
from isobasin.learn.trainer import TrainConfig
from isobasin.runtime import logits, module_of
from isobasin.tasks import IGNORED, Batch, Task
from isobasin.weights import Weights

CONFIG = ib.ModelConfig.preset("llama", d_model=16, n_layers=2, n_heads=2, d_ff=24, d_vocab=11, n_positions=8)


def told(task: Task, a: Weights) -> Task:
    """The same inputs, and as targets what A finds likeliest: A and its scrambled copies are good at them."""
    module = module_of(a)

    def batches() -> Iterator[Batch]:
        for batch in task:
            with torch.no_grad():
                said = logits(a, module, batch.inputs).argmax(-1)
            yield replace(batch, targets=torch.where(batch.targets == IGNORED, IGNORED, said))

    return replace(task, batches=batches)


def rows_task(n: int, *, seed: int, batch: int = 4) -> Task:
    """Rows of random tokens, each to be followed by the one after it."""
    ids = torch.randint(CONFIG.d_vocab or 0, (n, 9), generator=torch.Generator().manual_seed(seed))
    batches = [Batch({"input_ids": r[:, :-1]}, r[:, 1:]) for r in ids.split(batch)]
    return Task("lm", "rows", "memory", n, {}, f"rows {seed} {n} {batch}", lambda: iter(batches))


def sharp(seed: int = 0) -> Weights:
    """A small Llama whose outputs are far from even."""
    model = ib.Transformer(CONFIG, seed=seed)
    rng = torch.Generator().manual_seed(seed)
    state = {n: t + 0.4 * torch.randn(t.shape, generator=rng) for n, t in model.state_dict().items()}
    return ib.load(state, CONFIG.to_dict())


def scrambled(a: Weights, scope: str = "model") -> Weights:
    """The same function elsewhere, every tensor in memory."""
    moved = ib.scramble(a, scope=scope, seed=5).apply(a)
    return ib.load(moved.state_dict("float32"), dict(a.config))


def noisy(b: Weights, share: float = 0.3) -> Weights:
    """A neighbour, whose function is another one."""
    rng = torch.Generator().manual_seed(3)
    state = {n: t + share * t.std() * torch.randn(t.shape, generator=rng) for n, t in b.state_dict().items()}
    return ib.load(state, dict(b.config))


def misplaced(a: Weights, b: Weights, *, units: int) -> dict[str, Element]:
    """The elements that weights find, with some units of the first layer in each other's places."""
    found = dict(nearest_elements(a, b, "model", WeightMatching(), torch.device("cpu")))
    index = torch.arange(CONFIG.d_ff)
    index[:units] = index[:units].roll(1)
    wrong = Monomial(index, torch.ones(CONFIG.d_ff, dtype=torch.float64))
    return found | {"ff0": wrong @ found["ff0"]}


NUMBERS: dict[str, Any] = {"steps": 30, "lr": 2e-2, "check_every": 10, "check_points": 5}


def matching(task: Task, scope: str = "model", **settings: Any) -> LearnedMatching:
    """From a start that leaves something to learn: heads are paired, their factors are not matched."""
    return LearnedMatching(task, scope=scope, init=WeightMatching(scope=scope, stage2="none"), **(NUMBERS | settings))


def config(**settings: Any) -> TrainConfig:
    return TrainConfig(**(NUMBERS | settings))


def same_bits(a: Weights, b: Weights) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)
