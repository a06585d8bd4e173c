"""Training the project's own model: AdamW with warm-up and cosine decay, reproducible from the seed.

A step runs eagerly, or on CUDA as one recorded graph: a small model otherwise leaves a GPU waiting for kernel launches.
"""

import copy
import importlib.util
import math
import shutil
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.files import NullResumeStore, ResumeStore
from isobasin.learn.trainer import capture_graph, warmup_cosine
from isobasin.model import ModelConfig, Transformer
from isobasin.tasks.datasets import model_inputs, windows
from isobasin.tasks.task import IGNORED

Augment = Callable[[Tensor, torch.Generator], Tensor]
"""Changes a batch of inputs at random, with random numbers from the generator only."""

Watch = Callable[[int, int], None]
"""Called after every step with the number of steps done and the number of all steps."""

ParameterGroups = list[dict[str, Any]]

_SECTION = "training"
_MAX_COMPILED = 64  # model and batch shapes that one process may compile; torch's default is a few


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """AdamW with linear warm-up and cosine decay to zero. Give either `steps` or `epochs`.

    >>> TrainingRecipe(epochs=2, batch_size=100).n_steps(n_examples=8000)
    160
    """

    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 128
    peak_lr: float = 1e-3
    warmup: float = 0.1  # share of the steps in which the rate rises
    weight_decay: float = 0.05  # of matrices; gains and biases have none
    betas: tuple[float, float] = (0.9, 0.98)
    label_smoothing: float = 0.0
    grad_clip: float | None = 1.0  # largest norm of the whole gradient

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise IsobasinError(f"recipe: steps={self.steps} and epochs={self.epochs}, expected exactly one of them")
        length = self.steps if self.steps is not None else self.epochs
        assert length is not None
        _require(length >= 0, "steps or epochs", length, "0 or more")
        _require(self.batch_size >= 1, "batch_size", self.batch_size, "1 or more")
        _require(self.peak_lr > 0, "peak_lr", self.peak_lr, "more than 0")
        _require(0 <= self.warmup <= 1, "warmup", self.warmup, "a share from 0 to 1")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "two numbers from 0 to below 1")
        _require(0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "from 0 to below 1")
        _require(self.grad_clip is None or self.grad_clip > 0, "grad_clip", self.grad_clip, "more than 0, or None")

    def n_steps(self, n_examples: int) -> int:
        """The number of steps: as given, or enough batches for the epochs."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return math.ceil(self.epochs * n_examples / self.batch_size)

    def rate(self, step: int, of: int) -> float:
        """Learning rate of step 0 … of − 1.

        >>> recipe = TrainingRecipe(steps=10, peak_lr=1.0, warmup=0.2)
        >>> [round(recipe.rate(step, 10), 2) for step in (0, 1, 5, 9)]
        [0.5, 1.0, 0.5, 0.0]
        """
        return warmup_cosine(step, of, peak=self.peak_lr, warmup_steps=self.warmup * of)


def _require(good: bool, name: str, found: object, expected: str) -> None:
    if not good:
        raise IsobasinError(f"recipe: {name} is {found}, expected {expected}")


@dataclass(frozen=True)
class LabelledExamples:
    """Inputs with a class each (N,), or with a token at each position (N, T)."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def draw(self, batch_size: int, queue: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets, and the queue of examples that are left in this epoch.

        Every epoch is a new permutation; a batch may reach over into the next.
        """
        while len(queue) < batch_size:
            queue = torch.cat([queue, torch.randperm(len(self), generator=generator, device="cpu")])
        chosen, queue = queue[:batch_size].to(self.inputs.device), queue[batch_size:]
        return model_inputs(self.inputs[chosen]), self.targets[chosen], queue


@dataclass(frozen=True)
class TokenStream:
    """One row of token ids. An example is a window of it; its targets are the tokens one position later."""

    tokens: Tensor
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def draw(self, batch_size: int, queue: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Windows with uniformly random starts. The queue is not used."""
        starts = torch.randint(len(self.tokens) - self.length, (batch_size,), generator=generator, device="cpu")
        return *windows(self.tokens, starts.to(self.tokens.device), self.length), queue


def empty_queue() -> Tensor:
    """The queue of examples before the first batch."""
    return torch.empty(0, dtype=torch.int64, device="cpu")


def training_examples(config: ModelConfig, inputs: Tensor, targets: Tensor | None) -> LabelledExamples | TokenStream:
    """A token stream if there are no targets, which needs a language model; otherwise labelled examples."""
    if targets is None:
        if config.n_classes is not None or inputs.ndim != 1 or len(inputs) <= config.n_positions:
            raise IsobasinError(
                f"training data of shape {tuple(inputs.shape)} without targets: expected a language model and one row "
                f"of more than n_positions={config.n_positions} token ids; a classifier needs targets"
            )
        return TokenStream(inputs, config.n_positions)
    if len(inputs) == 0 or len(inputs) != len(targets):
        raise IsobasinError(f"training data has {len(inputs)} inputs and {len(targets)} targets: expected one for each")
    _check_classes(config, targets)
    return LabelledExamples(inputs, targets)


def _check_classes(config: ModelConfig, targets: Tensor) -> None:
    n_out = config.n_classes if config.n_classes is not None else config.d_vocab
    assert n_out is not None
    scored = targets[targets != IGNORED]
    if scored.numel() and not 0 <= int(scored.min()) <= int(scored.max()) < n_out:
        raise IsobasinError(
            f"training targets go from {int(scored.min())} to {int(scored.max())}, but the model has {n_out} outputs"
        )


def parameter_groups(
    model: Transformer, recipe: TrainingRecipe, only: Collection[str] | None = None
) -> ParameterGroups:
    """Groups for the optimizer: matrices with weight decay, gains and biases without.

    With `only`, all other parameters get `requires_grad=False`.
    """
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


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Mean cross-entropy in float32 over the scored targets."""
    return F.cross_entropy(
        logits.float().flatten(0, -2), targets.flatten(), ignore_index=IGNORED, label_smoothing=smoothing
    )


def _precision(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Mixed precision in `dtype`, or none. Casts are not cached: a recorded graph would reuse casts of old weights."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False)


class EagerStep:
    """`step(x, y, rate)` is one step of AdamW; returns the loss before it, still on the device.

    `pad` is the token that is masked; rows are padded with it on the right.
    """

    def __init__(
        self,
        model: Transformer,
        groups: ParameterGroups,
        recipe: TrainingRecipe,
        *,
        autocast: torch.dtype | None = None,
        pad: int | None = None,
    ) -> None:
        self._model, self._recipe, self._autocast, self._pad = model, recipe, autocast, pad
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=recipe.betas, fused=True)

    def __call__(self, x: Tensor, y: Tensor, rate: float) -> Tensor:
        x, mask = _without_padding(x, self._pad)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return _adamw_step(self._model, self.optimizer, self._recipe, x, mask, y, self._autocast)


def _adamw_step(
    model: Callable[[Tensor, Tensor | None], Tensor],
    optimizer: torch.optim.Optimizer,
    recipe: TrainingRecipe,
    x: Tensor,
    mask: Tensor | None,
    y: Tensor,
    autocast: torch.dtype | None,
) -> Tensor:
    """Forward, backward, clip, step; the same for eager and for recorded steps."""
    optimizer.zero_grad(set_to_none=True)
    with _precision(x.device, autocast):
        logits = model(x, mask)
    loss = cross_entropy(logits, y, recipe.label_smoothing)
    loss.backward()
    if recipe.grad_clip is not None:
        torch.nn.utils.clip_grad_norm_(optimized_parameters(optimizer), recipe.grad_clip)
    optimizer.step()
    return loss.detach()


def _without_padding(x: Tensor, pad: int | None) -> tuple[Tensor, Tensor | None]:
    """Rows without the columns that are padding in all of them, and the mask: true where there is a token."""
    if pad is None:
        return x, None
    mask = x != pad
    width = int(mask.sum(1).max())
    return x[:, :width], mask[:, :width]


def optimized_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _optimizer_state(optimizer: torch.optim.Optimizer) -> list[dict[str, Tensor]]:
    """The optimizer's state for each parameter, in their order; empty before the first step."""
    return [
        {name: value.detach().cpu().clone() for name, value in optimizer.state.get(p, {}).items()}
        for p in optimized_parameters(optimizer)
    ]


def _load_optimizer_state(optimizer: torch.optim.Optimizer, saved: list[dict[str, Tensor]]) -> None:
    """The inverse. Existing state is overwritten in place: a recorded graph refers to tensors by their address."""
    for parameter, found in zip(optimized_parameters(optimizer), saved):
        state = optimizer.state[parameter]
        for name, value in found.items():
            if name in state:
                state[name].copy_(value)
            else:
                state[name] = value.clone().to(parameter.device)


class GraphedStep:
    """`step(x, y, rate)` is one step of AdamW, replayed from a CUDA graph; all batches must have one shape.

    Recording needs a few trial steps. They run at rate zero, and the optimizer's state is cleared after them. `pad` is
    the token that is masked. With `compiled` the model's kernels are fused before they are recorded, which takes half a
    minute for a new combination of model and batch shape.
    """

    def __init__(
        self,
        model: Transformer,
        groups: ParameterGroups,
        recipe: TrainingRecipe,
        x: Tensor,
        y: Tensor,
        autocast: torch.dtype | None,
        pad: int | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self._model = compile_forward(model) if compiled else model
        self._recipe, self._autocast, self._pad = recipe, autocast, pad
        self._x, self._y = x.clone(), y.clone()
        self._rate = torch.zeros((), device=x.device)
        self.optimizer = torch.optim.AdamW(groups, lr=self._rate, betas=recipe.betas, fused=True, capturable=True)
        self._graph, self._loss = capture_graph(self._step, self.optimizer)

    def __call__(self, x: Tensor, y: Tensor, rate: float) -> Tensor:
        self._x.copy_(x)
        self._y.copy_(y)
        self._rate.fill_(rate)
        self._graph.replay()
        return self._loss.clone()

    def _step(self) -> Tensor:
        mask = None if self._pad is None else self._x != self._pad
        return _adamw_step(self._model, self.optimizer, self._recipe, self._x, mask, self._y, self._autocast)


def can_compile() -> bool:
    """Whether torch can compile kernels here: it needs Triton and a C compiler."""
    return importlib.util.find_spec("triton") is not None and any(shutil.which(name) for name in ("cc", "gcc", "clang"))


def compile_forward(model: Transformer) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The model's forward pass (and its backward pass) with fused kernels.

    If compilation fails, torch logs a warning with the reason, and the model runs uncompiled.
    """
    compiled = torch.compile(model, dynamic=False)
    settings = torch._dynamo.config.patch(recompile_limit=_MAX_COMPILED, suppress_errors=True)

    def forward(x: Tensor, mask: Tensor | None) -> Tensor:
        with settings:
            found: Tensor = compiled(x, mask)
        return found

    return forward


@dataclass(frozen=True)
class TrainResult:
    """A trained model, the loss of every step's batch before that step, and (step, *evaluation) during training."""

    model: Transformer
    losses: tuple[float, ...]
    history: tuple[tuple[float, ...], ...] = ()

    def __str__(self) -> str:
        tail = self.losses[-max(1, len(self.losses) // 20) :]
        last = f", loss {self.losses[0]:.3g} → {sum(tail) / len(tail):.3g}" if tail else ""
        return f"{len(self.losses)} steps{last}"


@dataclass(frozen=True)
class CheckpointConfig:
    """Where and how often the state of a run is saved, so that it can be resumed, and what is evaluated meanwhile."""

    record: ResumeStore
    every_s: float = 30.0
    evaluate: Callable[[Transformer], tuple[float, ...]] | None = None  # such as loss and accuracy on held-out data
    n_evaluations: int = 10


def train(
    model: Transformer,
    inputs: Tensor,
    targets: Tensor | None,
    recipe: TrainingRecipe,
    *,
    seed: int,
    only: Collection[str] | None = None,
    augment: Augment | None = None,
    pad: int | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    graphed: bool = False,
    compiled: bool = False,
    checkpoints: CheckpointConfig | None = None,
    watch: Watch | None = None,
) -> TrainResult:
    """Train a copy of the model; the model itself is not changed.

    `inputs` are images (floats, or bytes, which are scaled) or rows of token ids with a class each (or a token at each
    position, IGNORED = −100 where none is scored) in `targets`. With `targets=None` they are one long row of token ids
    for a language model. `only` names the parameters that are trained; `augment` changes each batch of inputs; `pad` is
    the token that pads short rows on the right, and is masked. The order of examples depends on `seed` alone; on one
    thread so do the weights, also if the run was killed and resumed from `checkpoints`. `graphed` records a step once
    and replays it (CUDA); with `compiled` its kernels are fused first.

    >>> config = ModelConfig(d_model=8, n_layers=1, n_heads=2, d_ff=16, d_vocab=5, n_positions=4, causal=True)
    >>> len(train(Transformer(config), torch.arange(40) % 5, None, TrainingRecipe(steps=2), seed=0).losses)
    2
    """
    device = torch.device(device) if device is not None else next(model.parameters()).device
    data = training_examples(model.config, inputs.to(device), None if targets is None else targets.to(device))
    learner = copy.deepcopy(model).to(device).train()
    groups = parameter_groups(learner, recipe, only)

    def make_step(x: Tensor, y: Tensor) -> EagerStep | GraphedStep:
        if graphed and device.type == "cuda":
            return GraphedStep(learner, groups, recipe, x, y, autocast, pad, compiled=compiled)
        return EagerStep(learner, groups, recipe, autocast=autocast, pad=pad)

    run = _Run(learner, data, recipe, make_step, augment, checkpoints or CheckpointConfig(NullResumeStore()), seed)
    while run.step < run.n_steps:
        run.advance()
        if watch:
            watch(run.step, run.n_steps)
    return TrainResult(_finished(learner, like=model), tuple(run.read_losses()), tuple(run.history))


class _Run:
    """The state of a training run: everything that changes from step to step is in its checkpoint."""

    def __init__(
        self,
        learner: Transformer,
        data: LabelledExamples | TokenStream,
        recipe: TrainingRecipe,
        make_step: Callable[[Tensor, Tensor], EagerStep | GraphedStep],
        augment: Augment | None,
        checkpoints: CheckpointConfig,
        seed: int,
    ) -> None:
        self._learner, self._data, self._recipe, self._augment = learner, data, recipe, augment
        self._make_step = make_step
        self._stepper: EagerStep | GraphedStep | None = None
        self._checkpoints, self._saved_at = checkpoints, time.monotonic()
        self._generator, self._queue = torch.Generator("cpu").manual_seed(seed), empty_queue()
        self.step, self.n_steps = 0, recipe.n_steps(len(data))
        self.history: list[tuple[float, ...]] = []
        self._losses: list[float] = []
        self._unread: list[Tensor] = []
        self._saved = checkpoints.record.find(_SECTION)

    def advance(self) -> None:
        """One step. The first one resumes from a saved state, if there is one."""
        if self._saved is not None:
            self._restore_order(self._saved)
        x, y, queue = self._data.draw(self._recipe.batch_size, self._queue, self._generator)
        if self._augment:
            x = self._augment(x, self._generator)
        if self._stepper is None:
            self._stepper = self._make_step(x, y)
            self._restore_weights()
        self._unread.append(self._stepper(x, y, self._recipe.rate(self.step, self.n_steps)))
        self._queue, self.step = queue, self.step + 1
        self._evaluate()
        if time.monotonic() - self._saved_at >= self._checkpoints.every_s and self.step < self.n_steps:
            self._checkpoints.record.keep(_SECTION, self._state())
            self._saved_at = time.monotonic()

    def read_losses(self) -> list[float]:
        """All losses so far. They are copied in batches: one copy per step would make the device wait."""
        if self._unread:
            self._losses += torch.stack(self._unread).tolist()
            self._unread = []
        return self._losses

    def _evaluate(self) -> None:
        evaluate, n = self._checkpoints.evaluate, self._checkpoints.n_evaluations
        if evaluate is None or (self.step * n) // self.n_steps == ((self.step - 1) * n) // self.n_steps:
            return
        self._learner.eval()
        self.history.append((float(self.step), *evaluate(self._learner)))
        self._learner.train()

    def _state(self) -> dict[str, Any]:
        assert self._stepper is not None
        return {
            "step": self.step,
            "weights": {name: p.detach().cpu().clone() for name, p in self._learner.named_parameters()},
            "optimizer": _optimizer_state(self._stepper.optimizer),
            "generator": self._generator.get_state(),
            "waiting": self._queue,
            "losses": list(self.read_losses()),
            "history": [list(point) for point in self.history],
        }

    def _restore_order(self, state: dict[str, Any]) -> None:
        self.step, self._queue = state["step"], state["waiting"]
        self._generator.set_state(state["generator"])
        self._losses, self.history = list(state["losses"]), [tuple(point) for point in state["history"]]

    @torch.no_grad()
    def _restore_weights(self) -> None:
        """After a graph was captured: its trial steps must not count, and its tensors must stay in place."""
        if self._saved is None:
            return
        assert self._stepper is not None
        for name, parameter in self._learner.named_parameters():
            parameter.copy_(self._saved["weights"][name])
        _load_optimizer_state(self._stepper.optimizer, self._saved["optimizer"])
        self._saved = None


def _finished(learner: Transformer, like: Transformer) -> Transformer:
    """In evaluation mode, without gradients, and with the `requires_grad` of `like`; it stays on its device."""
    learner.zero_grad(set_to_none=True)
    for name, parameter in like.named_parameters():
        learner.get_parameter(name).requires_grad_(parameter.requires_grad)
    return learner.eval()
