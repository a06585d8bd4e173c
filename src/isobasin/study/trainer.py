"""Training the project's own model: AdamW with warm-up and cosine decay, reproducible from the seed.

A step runs eagerly, or on CUDA as one recorded graph: a small model otherwise leaves a GPU waiting for kernel launches.
"""

import copy
import importlib.util
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
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

ParameterGroups = list[dict[str, Any]]

_SECTION = "training"
_N_EVALUATIONS = 10
_MAX_COMPILED = 64  # model and batch shapes that one process may compile; torch's default is a few


@dataclass(frozen=True, kw_only=True)
class TrainingRecipe:
    """AdamW with linear warm-up and cosine decay to zero. Give either `steps` or `epochs`."""

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
        """Learning rate of step 0 … of − 1."""
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
    n_out = config.n_classes if config.n_classes is not None else config.d_vocab
    assert n_out is not None
    scored = targets[targets != IGNORED]
    if scored.numel() and not 0 <= int(scored.min()) <= int(scored.max()) < n_out:
        raise IsobasinError(
            f"training targets go from {int(scored.min())} to {int(scored.max())}, but the model has {n_out} outputs"
        )
    return LabelledExamples(inputs, targets)


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


class AdamWStep:
    """`step(x, y, rate)` is one step of AdamW; returns the loss before it, still on the device.

    `pad` is the token that is masked; rows are padded with it on the right. With `example`, a batch on a CUDA device,
    the step is recorded as a CUDA graph and replayed: all batches must then have the shape of the example. Recording
    needs a few trial steps. They run at rate zero, and the optimizer's state is cleared after them. With `compiled` the
    model's kernels are fused before they are recorded, which takes half a minute for a new combination of model and
    batch shape.
    """

    def __init__(
        self,
        model: Transformer,
        groups: ParameterGroups,
        recipe: TrainingRecipe,
        *,
        autocast: torch.dtype | None = None,
        pad: int | None = None,
        example: tuple[Tensor, Tensor] | None = None,
        compiled: bool = False,
    ) -> None:
        self._model: Callable[[Tensor, Tensor | None], Tensor] = model
        self._recipe, self._autocast, self._pad = recipe, autocast, pad
        self._graph: torch.cuda.CUDAGraph | None = None
        if example is None:
            self.optimizer = torch.optim.AdamW(groups, lr=recipe.peak_lr, betas=recipe.betas, fused=True)
            return
        if compiled:
            self._model = compile_forward(model)
        self._x, self._y = (tensor.clone() for tensor in example)
        self._rate = torch.zeros((), device=self._x.device)
        self.optimizer = torch.optim.AdamW(groups, lr=self._rate, betas=recipe.betas, fused=True, capturable=True)
        self._graph, self._loss = capture_graph(self._recorded_step, self.optimizer)

    def __call__(self, x: Tensor, y: Tensor, rate: float) -> Tensor:
        if self._graph is None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            return self._step(*_without_padding(x, self._pad), y)
        self._x.copy_(x)
        self._y.copy_(y)
        self._rate.fill_(rate)
        self._graph.replay()
        return self._loss.clone()

    def _recorded_step(self) -> Tensor:
        return self._step(self._x, None if self._pad is None else self._x != self._pad, self._y)

    def _step(self, x: Tensor, mask: Tensor | None, y: Tensor) -> Tensor:
        """Forward, backward, clip, step."""
        self.optimizer.zero_grad(set_to_none=True)
        # Casts are not cached: a recorded graph would reuse casts of old weights.
        mixed = torch.autocast(x.device.type, self._autocast, enabled=self._autocast is not None, cache_enabled=False)
        with mixed:
            logits = self._model(x, mask)
        loss = cross_entropy(logits, y, self._recipe.label_smoothing)
        loss.backward()
        if self._recipe.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(optimized_parameters(self.optimizer), self._recipe.grad_clip)
        self.optimizer.step()
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


def can_compile() -> bool:
    """Whether torch can compile kernels here: it needs Triton and a C compiler."""
    return importlib.util.find_spec("triton") is not None and any(shutil.which(name) for name in ("cc", "gcc", "clang"))


def compile_forward(model: Transformer) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The model's forward pass (and its backward pass) with fused kernels.

    If compilation fails, torch logs a warning with the reason, and the model runs uncompiled.
    """
    compiled = torch.compile(model, dynamic=False)
    limit = "recompile_limit" if hasattr(torch._dynamo.config, "recompile_limit") else "cache_size_limit"  # torch 2.6
    settings = torch._dynamo.config.patch({limit: _MAX_COMPILED, "suppress_errors": True})

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


def train(
    model: Transformer,
    inputs: Tensor,
    targets: Tensor | None,
    recipe: TrainingRecipe,
    *,
    seed: int,
    only: Collection[str] | None = None,
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None,
    pad: int | None = None,
    device: torch.device | str | None = None,
    autocast: torch.dtype | None = None,
    graphed: bool = False,
    compiled: bool = False,
    checkpoints: CheckpointConfig | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> TrainResult:
    """Train a copy of the model; the model itself is not changed. The copy is returned in evaluation mode.

    `inputs` are images (floats, or bytes, which are scaled) or rows of token ids with a class each (or a token at each
    position, IGNORED = −100 where none is scored) in `targets`. With `targets=None` they are one long row of token ids
    for a language model. `only` names the parameters that are trained; `augment` changes each batch of inputs, with
    random numbers from its generator only; `pad` is the token that pads short rows on the right, and is masked. The
    order of examples depends on `seed` alone; on one thread so do the weights, also if the run was killed and resumed
    from `checkpoints`. `graphed` records a step once and replays it (CUDA); with `compiled` its kernels are fused
    first. `watch` is called after every step with the number of steps done and of all steps.
    """
    device = torch.device(device) if device is not None else next(model.parameters()).device
    data = training_examples(model.config, inputs.to(device), None if targets is None else targets.to(device))
    learner = copy.deepcopy(model).to(device).train()
    groups = parameter_groups(learner, recipe, only)

    keep = checkpoints or CheckpointConfig(NullResumeStore())
    n_steps, stepper, saved_at = recipe.n_steps(len(data)), None, time.monotonic()
    state = _State(torch.Generator("cpu").manual_seed(seed))
    saved = keep.record.find(_SECTION)
    if saved is not None:
        state.restore(saved)
    while state.step < n_steps:
        x, y, state.queue = data.draw(recipe.batch_size, state.queue, state.generator)
        if augment:
            x = augment(x, state.generator)
        if stepper is None:
            example = (x, y) if graphed and device.type == "cuda" else None
            stepper = AdamWStep(learner, groups, recipe, autocast=autocast, pad=pad, example=example, compiled=compiled)
            if saved is not None:
                _restore_weights(learner, stepper.optimizer, saved)
        state.unread.append(stepper(x, y, recipe.rate(state.step, n_steps)))
        state.step += 1
        part = state.step * _N_EVALUATIONS // n_steps
        if keep.evaluate and part > (state.step - 1) * _N_EVALUATIONS // n_steps:
            state.history.append((float(state.step), *keep.evaluate(learner.eval())))
            learner.train()
        if time.monotonic() - saved_at >= keep.every_s and state.step < n_steps:
            keep.record.keep(_SECTION, state.to_dict() | _saved_weights(learner, stepper.optimizer))
            saved_at = time.monotonic()
        if watch:
            watch(state.step, n_steps)
    learner.zero_grad(set_to_none=True)
    for name, parameter in model.named_parameters():
        learner.get_parameter(name).requires_grad_(parameter.requires_grad)
    return TrainResult(learner.eval(), tuple(state.read_losses()), tuple(state.history))


@dataclass
class _State:
    """What changes from step to step, beside the weights and the optimizer."""

    generator: torch.Generator
    queue: Tensor = field(default_factory=empty_queue)
    step: int = 0
    losses: list[float] = field(default_factory=list)
    history: list[tuple[float, ...]] = field(default_factory=list)
    unread: list[Tensor] = field(default_factory=list)

    def read_losses(self) -> list[float]:
        """All losses so far. They are copied in batches: one copy per step would make the device wait."""
        if self.unread:
            self.losses += torch.stack(self.unread).tolist()
            self.unread = []
        return self.losses

    def to_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "generator": self.generator.get_state(),
            "waiting": self.queue,
            "losses": list(self.read_losses()),
            "history": [list(point) for point in self.history],
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.step, self.queue = saved["step"], saved["waiting"]
        self.generator.set_state(saved["generator"])
        self.losses, self.history = list(saved["losses"]), [tuple(point) for point in saved["history"]]


def _saved_weights(learner: Transformer, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The weights, and the optimizer's state for each parameter in their order."""
    weights = {name: p.detach().cpu().clone() for name, p in learner.named_parameters()}
    states = [
        {name: value.detach().cpu().clone() for name, value in optimizer.state.get(p, {}).items()}
        for p in optimized_parameters(optimizer)
    ]
    return {"weights": weights, "optimizer": states}


@torch.no_grad()
def _restore_weights(learner: Transformer, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """The inverse, after a graph was captured: its trial steps must not count. Existing tensors are overwritten in
    place: a recorded graph refers to them by their address."""
    for name, parameter in learner.named_parameters():
        parameter.copy_(saved["weights"][name])
    for optimized, found in zip(optimized_parameters(optimizer), saved["optimizer"]):
        state = optimizer.state[optimized]
        for name, value in found.items():
            if name in state:
                state[name].copy_(value)
            else:
                state[name] = value.clone().to(optimized.device)
