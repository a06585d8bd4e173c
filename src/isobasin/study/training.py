"""Training the project's own model: AdamW, warm-up and cosine, the same weights for the same seed."""

import copy
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isobasin.learning.record import Record, Unrecorded
from isobasin.learning.team import Team
from isobasin.model import Transformer

from .examples import Labelled, Stream, examples, nothing
from .fitting_steps import EagerStep, groups, packed, unpack
from .graphed import GraphedStep
from .recipe import Recipe

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""A batch of inputs, changed at random: drawn from the generator alone."""

Watch = Callable[[int, int], None]
"""Told of every step: how many are done, of how many."""

Point = tuple[float, ...]
Probe = Callable[[Transformer], Point]
"""A look at the model on the way, such as its loss and accuracy on held-out data."""

_SECTION = "training"


@dataclass(frozen=True)
class Trained:
    """A trained model, the loss of every step's batch before that step, and (step, *what a probe saw) on the way."""

    model: Transformer
    losses: tuple[float, ...]
    history: tuple[Point, ...] = ()

    def __str__(self) -> str:
        tail = self.losses[-max(1, len(self.losses) // 20) :]
        last = f", loss {self.losses[0]:.3g} → {sum(tail) / len(tail):.3g}" if tail else ""
        return f"{len(self.losses)} steps{last}"


@dataclass(frozen=True)
class Keeping:
    """Where a run is kept so that a killed one goes on, how often, and what is looked at on the way."""

    record: Record
    every_s: float = 30.0
    probe: Probe | None = None
    n_probes: int = 10


def train(
    model: Transformer,
    inputs: Tensor,
    targets: Tensor | None,
    recipe: Recipe,
    *,
    seed: int,
    only: Collection[str] | None = None,
    augment: Augment | None = None,
    pad: int | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    graphed: bool = False,
    compiled: bool = False,
    keeping: Keeping | None = None,
    team: Team | None = None,
    watch: Watch | None = None,
) -> Trained:
    """A trained copy of the model; the model itself stays as it is.

    `inputs` are images (floats, or bytes, which are scaled) or rows of token ids with a class each (or a token at each
    place, IGNORED = −100 where none is asked for) in `targets`; with `targets=None` they are one long row of token ids
    for a language model. `only` names the parameters that may move; `augment` changes each batch of inputs; `pad` is
    the token that fills short rows on the right, and is masked. The order of examples depends on `seed` alone; on one
    thread so do the weights, also if the run was killed and goes on from what `keeping` remembers. `graphed` records
    a step once and replays it (CUDA); with `compiled` its kernels are fused first.

    >>> from isobasin.model import ModelConfig
    >>> config = ModelConfig(d_model=8, n_layers=1, n_heads=2, d_ff=16, d_vocab=5, n_positions=4, causal=True)
    >>> len(train(Transformer(config), torch.arange(40) % 5, None, Recipe(steps=2), seed=0).losses)
    2
    """
    device = torch.device(device) if device is not None else next(model.parameters()).device
    data = examples(model.config, inputs.to(device), None if targets is None else targets.to(device))
    learner = copy.deepcopy(model).to(device).train()
    moving = groups(learner, recipe, only)

    def stepper(x: Tensor, y: Tensor) -> EagerStep | GraphedStep:
        if graphed and device.type == "cuda" and team is None:
            return GraphedStep(learner, moving, recipe, x, y, autocast, pad, compiled=compiled)
        return EagerStep(learner, moving, recipe, autocast=autocast, pad=pad, team=team)

    run = _Run(learner, data, recipe, stepper, augment, keeping or Keeping(Unrecorded()), seed)
    while run.step < run.n_steps:
        run.advance()
        if watch:
            watch(run.step, run.n_steps)
    return Trained(_handed_back(learner, like=model), tuple(run.read_losses()), tuple(run.history))


class _Run:
    """A training run as it stands: what a checkpoint holds, and nothing else, changes from step to step."""

    def __init__(
        self,
        learner: Transformer,
        data: Labelled | Stream,
        recipe: Recipe,
        stepper: Callable[[Tensor, Tensor], EagerStep | GraphedStep],
        augment: Augment | None,
        keeping: Keeping,
        seed: int,
    ) -> None:
        self._learner, self._data, self._recipe, self._augment = learner, data, recipe, augment
        self._make = stepper
        self._stepper: EagerStep | GraphedStep | None = None
        self._keeping, self._kept_at = keeping, time.monotonic()
        self._generator, self._waiting = torch.Generator("cpu").manual_seed(seed), nothing()
        self.step, self.n_steps = 0, recipe.n_steps(len(data))
        self.history: list[Point] = []
        self._losses: list[float] = []
        self._unread: list[Tensor] = []
        self._state = keeping.record.find(_SECTION)

    def advance(self) -> None:
        """One step; the first goes on from where a killed run was kept."""
        if self._state is not None:
            self._restore_order(self._state)
        x, y, waiting = self._data.draw(self._recipe.batch_size, self._waiting, self._generator)
        if self._augment:
            x = self._augment(x, self._generator)
        if self._stepper is None:
            self._stepper = self._make(x, y)
            self._restore_weights()
        self._unread.append(self._stepper(x, y, self._recipe.rate(self.step, self.n_steps)))
        self._waiting, self.step = waiting, self.step + 1
        self._look()
        if time.monotonic() - self._kept_at >= self._keeping.every_s and self.step < self.n_steps:
            self._keeping.record.keep(_SECTION, self._state_now())
            self._kept_at = time.monotonic()

    def read_losses(self) -> list[float]:
        """Read now and then: asking a device for a number at every step would make it wait."""
        if self._unread:
            self._losses += torch.stack(self._unread).tolist()
            self._unread = []
        return self._losses

    def _look(self) -> None:
        probe, n = self._keeping.probe, self._keeping.n_probes
        if probe is None or (self.step * n) // self.n_steps == ((self.step - 1) * n) // self.n_steps:
            return
        self._learner.eval()
        self.history.append((float(self.step), *probe(self._learner)))
        self._learner.train()

    def _state_now(self) -> dict[str, Any]:
        assert self._stepper is not None
        return {
            "step": self.step,
            "weights": {name: p.detach().cpu().clone() for name, p in self._learner.named_parameters()},
            "optimizer": packed(self._stepper.optimizer),
            "generator": self._generator.get_state(),
            "waiting": self._waiting,
            "losses": list(self.read_losses()),
            "history": [list(point) for point in self.history],
        }

    def _restore_order(self, state: dict[str, Any]) -> None:
        self.step, self._waiting = state["step"], state["waiting"]
        self._generator.set_state(state["generator"])
        self._losses, self.history = list(state["losses"]), [tuple(point) for point in state["history"]]

    @torch.no_grad()
    def _restore_weights(self) -> None:
        """After a graph was recorded: its trial steps must not count, nor its tensors move."""
        if self._state is None:
            return
        assert self._stepper is not None
        for name, parameter in self._learner.named_parameters():
            parameter.copy_(self._state["weights"][name])
        unpack(self._stepper.optimizer, self._state["optimizer"])
        self._state = None


def _handed_back(learner: Transformer, like: Transformer) -> Transformer:
    """In evaluation mode, without gradients, and open to training where `like` was; it stays on its device."""
    learner.zero_grad(set_to_none=True)
    for name, parameter in like.named_parameters():
        learner.get_parameter(name).requires_grad_(parameter.requires_grad)
    return learner.eval()
