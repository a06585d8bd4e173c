"""Training the project's own model: AdamW, warm-up and cosine, the same weights for the same seed."""

import copy
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.model import Transformer

from .examples import IGNORED, examples
from .recipe import Recipe

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""A batch of inputs, changed at random: drawn from the generator alone."""

Watch = Callable[[int, int], None]
"""Told of every step: how many are done, of how many."""


@dataclass(frozen=True)
class Trained:
    """A trained model, and the loss of every step's batch before that step."""

    model: Transformer
    losses: tuple[float, ...]

    def __str__(self) -> str:
        tail = self.losses[-max(1, len(self.losses) // 20) :]
        last = f", loss {self.losses[0]:.3g} → {sum(tail) / len(tail):.3g}" if tail else ""
        return f"{len(self.losses)} steps{last}"


def train(
    model: Transformer,
    inputs: Tensor,
    targets: Tensor | None,
    recipe: Recipe,
    *,
    seed: int,
    only: Collection[str] | None = None,
    augment: Augment | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    watch: Watch | None = None,
) -> Trained:
    """A trained copy of the model; the model itself stays as it is.

    `inputs` are images or rows of token ids with a class each (or a token at each place, IGNORED = −100 where
    none is asked for) in `targets`; with `targets=None` they are one long row of token ids for a language model.
    `only` names the parameters that may move; `augment` changes each batch of inputs. The order of examples depends
    on `seed` alone; on one thread so do the weights.

    >>> from isobasin.model import ModelConfig
    >>> config = ModelConfig(d_model=8, n_layers=1, n_heads=2, d_ff=16, d_vocab=5, n_positions=4, causal=True)
    >>> print(train(Transformer(config), torch.arange(40) % 5, None, Recipe(steps=2), seed=0))
    True
    """
    device = torch.device(device) if device is not None else next(model.parameters()).device
    data = examples(model.config, inputs.to(device), None if targets is None else targets.to(device))
    n_steps = recipe.n_steps(len(data))
    learner = copy.deepcopy(model).to(device).train()
    optimizer = _optimizer(learner, recipe, only)
    generator = torch.Generator("cpu").manual_seed(seed)
    losses = []
    for step, (x, y) in enumerate(islice(data.batches(recipe.batch_size, generator), n_steps)):
        x = augment(x, generator) if augment else x
        losses.append(_step(learner, x, y, optimizer, recipe, rate=recipe.rate(step, n_steps), autocast=autocast))
        if watch:
            watch(step + 1, n_steps)
    # Read at the end: asking a device for a number at every step would make it wait.
    history = tuple(torch.stack(losses).tolist()) if losses else ()
    return Trained(_handed_back(learner, like=model), history)


def _optimizer(model: Transformer, recipe: Recipe, only: Collection[str] | None) -> torch.optim.AdamW:
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if only is not None:
        if unknown := sorted(set(only) - named.keys()):
            raise IsobasinError(f"only: {', '.join(unknown)}: no such trainable parameter; see named_parameters()")
        for name, parameter in named.items():
            parameter.requires_grad_(name in only)
        named = {name: p for name, p in named.items() if name in only}
    matrices = [p for p in named.values() if p.ndim >= 2]
    vectors = [p for p in named.values() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=recipe.betas, fused=True)


def _step(
    model: Transformer,
    x: Tensor,
    y: Tensor,
    optimizer: torch.optim.AdamW,
    recipe: Recipe,
    *,
    rate: float,
    autocast: torch.dtype | None,
) -> Tensor:
    """One step down; gives back the loss before it, still on the device."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    with _precision(x.device, autocast):
        logits = model(x)
    loss = F.cross_entropy(
        logits.float().flatten(0, -2), y.flatten(), ignore_index=IGNORED, label_smoothing=recipe.label_smoothing
    )
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    if recipe.grad_clip is not None:
        moving = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(moving, recipe.grad_clip)
    optimizer.step()
    return loss.detach()


def _precision(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def _handed_back(learner: Transformer, like: Transformer) -> Transformer:
    """In evaluation mode, without gradients, and open to training where `like` was; it stays on its device."""
    learner.zero_grad(set_to_none=True)
    for name, parameter in like.named_parameters():
        learner.get_parameter(name).requires_grad_(parameter.requires_grad)
    return learner.eval()
