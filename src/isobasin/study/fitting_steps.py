"""One step down: the loss of a batch, its gradient, AdamW. Eager here, as one CUDA graph in `graphed`."""

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.learning.team import Alone, Team, average
from isobasin.model import Transformer

from .examples import IGNORED
from .recipe import Recipe

Groups = list[dict[str, Any]]


def groups(model: Transformer, recipe: Recipe, only: Collection[str] | None = None) -> Groups:
    """What the optimizer moves: matrices with decay, gains and biases without. The others are closed to gradients."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if only is not None:
        if unknown := sorted(set(only) - named.keys()):
            raise IsobasinError(f"only: {', '.join(unknown)}: no such trainable parameter; see named_parameters()")
        for name, parameter in named.items():
            parameter.requires_grad_(name in only)
        named = {name: p for name, p in named.items() if name in only}
    return [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]


def loss_of(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Mean cross-entropy in float32 over what is scored."""
    return F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing
    )


def precision(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Mixed precision in `dtype`, or none. Casts are not kept: a graph could not know that weights have changed."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False)


class EagerStep:
    """`step(x, y, rate)` is one step of AdamW; gives back the loss before it, still on the device.

    `pad` is the token that is masked; rows are filled with it on the right. In a team each process takes its share of
    the batch, and the gradients are averaged.
    """

    def __init__(
        self,
        model: Transformer,
        moving: Groups,
        recipe: Recipe,
        *,
        autocast: torch.dtype | None = None,
        pad: int | None = None,
        team: Team | None = None,
    ) -> None:
        self._model, self._recipe, self._autocast, self._pad = model, recipe, autocast, pad
        self._team = team or Alone()
        self.optimizer = torch.optim.AdamW(moving, lr=recipe.peak_lr, betas=recipe.betas, fused=True)

    def __call__(self, x: Tensor, y: Tensor, rate: float) -> Tensor:
        share = slice(self._team.rank, None, self._team.size)
        (x, mask), y = trimmed(x[share], self._pad), y[share]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with precision(x.device, self._autocast):
            logits = self._model(x, mask)
        loss = loss_of(logits, y, self._recipe.label_smoothing)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        moving = parameters(self.optimizer)
        if self._team.size > 1:
            average(self._team, moving, self._team.size)
        if self._recipe.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(moving, self._recipe.grad_clip)
        self.optimizer.step()
        return loss.detach()


def trimmed(x: Tensor, pad: int | None) -> tuple[Tensor, Tensor | None]:
    """Rows without the columns that are padding in all of them, and the mask: true where there is a token."""
    if pad is None:
        return x, None
    mask = x != pad
    width = int(mask.sum(1).max())
    return x[:, :width], mask[:, :width]


def parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def packed(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """What the optimizer remembers of each parameter, in their order; empty before the first step."""
    return [
        {name: value.detach().cpu().clone() for name, value in optimizer.state.get(p, {}).items()}
        for p in parameters(optimizer)
    ]


def unpack(optimizer: torch.optim.Optimizer, kept: list[dict[str, Tensor]]) -> None:
    """The reverse, in place where a state is there already: a recorded graph knows tensors by their address."""
    for parameter, found in zip(parameters(optimizer), kept):
        state = optimizer.state[parameter]
        for name, value in found.items():
            if name in state:
                state[name].copy_(value)
            else:
                state[name] = value.clone().to(parameter.device)
