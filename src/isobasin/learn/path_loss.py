"""The loss on the path from A to a moved B: differentiable for training, and the held-out barrier.

Several processes can learn one element together. Every process draws the same orders and path points and holds the same
parameters; only the batches differ. Gradients are averaged.
"""

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import islice
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isobasin.errors import IsobasinError
from isobasin.groups import Element
from isobasin.learn.data import regroup
from isobasin.path.barrier import barrier, grid
from isobasin.path.evaluation import FlatModel, to_device
from isobasin.runtime import logits, module_of, separate_places
from isobasin.symmetries import Symmetry
from isobasin.symmetries.action import Action
from isobasin.symmetries.normal_form import to_normal_form
from isobasin.tasks import IGNORED, Batch, Task
from isobasin.tasks.datasets import ACCELERATOR_BATCHES
from isobasin.weights import Weights

Objective = Literal["auto", "labels", "ends"]
OBJECTIVES = ("auto", "labels", "ends")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of one run, seen from one of them; `accelerator` connects them if they are several."""

    rank: int = 0
    size: int = 1
    accelerator: Any = None

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same in each of them."""
        return tensor if self.accelerator is None else self.accelerator.reduce(tensor, reduction="sum")


SINGLE_PROCESS = ProcessGroup()


def current_group(device: torch.device) -> ProcessGroup:
    """The process group of this run, from the environment that `accelerate launch` or `torchrun` sets."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return SINGLE_PROCESS
    try:
        accelerate = import_module("accelerate")
    except ImportError as error:
        raise IsobasinError("several processes need the package accelerate: pip install 'isobasin[learn]'") from error
    found = accelerate.Accelerator(cpu=device.type == "cpu")
    return ProcessGroup(found.process_index, found.num_processes, found)


def average_gradients(group: ProcessGroup, parameters: Sequence[Tensor], n: int) -> None:
    """Replace each gradient by its sum over all processes, divided by n; one message for all parameters."""
    held = [p for p in parameters if p.grad is not None]
    if not held:
        return
    flat = group.all_reduce_sum(torch.cat([p.grad.flatten() for p in held if p.grad is not None])) / n
    for parameter, part in zip(held, flat.split([p.numel() for p in held])):
        parameter.grad = part.view_as(parameter)


@dataclass(frozen=True)
class LinearPath:
    """The line from A to B, both with canonical values of a scope's free coordinates; B after a first alignment.

    Group elements act linearly on these forms. The line between them has the same losses as the line from A to B once
    B has A's gains and free biases.
    """

    reference: Weights  # A in canonical form
    module: nn.Module
    places: Mapping[str, str]
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]

    @classmethod
    def between(
        cls, a: Weights, b: Weights, part: Symmetry, elements: Mapping[str, Element], device: torch.device
    ) -> "LinearPath":
        """The path from A to B moved by `elements`."""
        form_a, form_b = (to_normal_form(m, part.coordinates).apply(m) for m in (a, b))
        action = Action(b.arch, elements)
        module = module_of(form_a, attention="sdpa").to(device).requires_grad_(False)
        held = separate_places(form_a, module)
        names = [name for name in held if not a.arch.tensors[name].buffer]
        start = {name: form_a[name].to(device, torch.float32) for name in names}
        # Contiguous, however B was moved: another memory layout sums in another order and rounds differently.
        end = {
            name: action.tensor(name, form_b[action.source(name)].double()).to(device, torch.float32).contiguous()
            for name in names
        }
        return cls(form_a, module, held, start, end)

    @property
    def device(self) -> torch.device:
        return next(iter(self.a.values())).device

    def rebased(self, elements: Mapping[str, Element]) -> "LinearPath":
        """The path to B moved by these elements."""
        return replace(self, b={name: tensor.contiguous() for name, tensor in self.moved(elements).items()})

    def moved(self, elements: Mapping[str, Element]) -> dict[str, Tensor]:
        """B's tensors moved by these elements."""
        action = Action(self.reference.arch, elements)
        return {name: action.tensor(name, self.b[action.source(name)]) for name in self.b}

    def loss(
        self,
        moved: Mapping[str, Tensor],
        lam: float | Tensor,
        batch: Batch,
        objective: Objective = "labels",
        autocast: torch.dtype | None = None,
    ) -> Tensor:
        """Mean loss of a batch at (1−λ)·A + λ·moved: cross-entropy with its labels, or with the ends' prediction."""
        mixed = {name: torch.lerp(start, moved[name], lam) for name, start in self.a.items()}
        said = self._logits(mixed, batch, autocast).flatten(0, -2)
        labels = batch.targets.flatten()
        if objective == "labels":
            return F.cross_entropy(said, labels, ignore_index=IGNORED)
        losses = F.cross_entropy(said, self.mean_prediction(batch, autocast).flatten(0, -2), reduction="none")
        if batch.targets.ndim == 1:  # a classifier predicts something for every sample, labelled or not
            return losses.mean()
        scored = labels != IGNORED  # a sum, not a selection: a CUDA graph has fixed shapes
        return torch.where(scored, losses, 0.0).sum() / scored.sum()

    @torch.no_grad()
    def mean_prediction(self, batch: Batch, autocast: torch.dtype | None = None) -> Tensor:
        """The mean of the probabilities that A and B predict; moving B within its group does not change it."""
        ends = (torch.softmax(self._logits(tensors, batch, autocast), -1) for tensors in (self.a, self.b))
        return sum(ends, torch.zeros((), device=self.device)) / 2

    def _logits(self, tensors: Mapping[str, Tensor], batch: Batch, autocast: torch.dtype | None) -> Tensor:
        held = {f"model.{self.places[name]}": self._stored(name, tensor) for name, tensor in tensors.items()}
        # Autocast without its cache: every tensor is new at every step, and a CUDA graph must not hold cached casts.
        with torch.autocast(self.device.type, autocast, cache_enabled=False) if autocast else nullcontext():
            said: Tensor = torch.func.functional_call(_Logits(self.reference, self.module), held, (batch.inputs,))
        return said.float()

    def vector(self, mixture: FlatModel, tensors: Mapping[str, Tensor]) -> Tensor:
        """These tensors in the layout of a mixture."""
        out = torch.zeros_like(mixture.buffer)
        for name, tensor in tensors.items():
            mixture.part(out, self.places[name]).copy_(self._stored(name, tensor))
        return out

    def _stored(self, name: str, tensor: Tensor) -> Tensor:
        """As the module holds it: gains of some families are stored less 1."""
        offset = self.reference.arch.offset(name)
        return tensor - offset if offset else tensor


class _Logits(nn.Module):
    """The logits of a model as a module, so that `functional_call` can replace its parameters."""

    def __init__(self, like: Weights, model: nn.Module) -> None:
        super().__init__()
        self.like, self.model = like, model

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return logits(self.like, self.model, inputs)


class HeldOutEvaluator:
    """Measures the barrier of lines from one model, in float32, on the same held-out data each time.

    Where no sample has a label, the divergence (Kullback–Leibler) from the mean prediction of `start` and `end` takes
    the place of the loss, and that of the ends counts as zero: the mean prediction is better than either of them, so
    that a line soon has no barrier in the usual sense. `end` is B anywhere on its orbit.
    """

    def __init__(
        self,
        mixture: FlatModel,
        start: Tensor,
        end: Tensor,
        task: Task,
        n_points: int,
        processes: ProcessGroup = SINGLE_PROCESS,
    ) -> None:
        self._mixture, self._start, self._lambdas, self._processes = mixture, start, grid(n_points), processes
        batches = [to_device(batch, start.device) for batch in islice(task, processes.rank, None, processes.size)]
        if batches and start.device.type != "cpu":
            batches = list(regroup(batches, ACCELERATOR_BATCHES * len(batches[0])))
        if not any(batch.labelled or batch.targets.ndim > 1 for batch in batches):
            batches = [replace(batch, targets=self._mean_prediction(batch, end)) for batch in batches]
        soft = [batch.targets for batch in batches if batch.targets.is_floating_point()]
        self._entropy = float(torch.special.entr(torch.cat(soft).double()).sum(-1).mean()) if soft else None
        self._batches = batches
        self._start_loss = self.loss(start)
        if math.isnan(self._start_loss):
            raise IsobasinError(f"{task.source}: A has no finite loss there; expected data that A can be measured on")

    def barrier_and_mean(self, end: Tensor, end_loss: float | None = None) -> tuple[float, float]:
        """The barrier of the line to `end`, and the mean loss over it, which ranks lines without a barrier; both are
        infinite if a point has no finite loss.

        Give `end_loss` where it is known: moving B within its symmetries does not change it.
        """
        if self._entropy is not None:
            inner = [self.loss(end, lam) - self._entropy for lam in self._lambdas[1:-1]]
            bad = any(math.isnan(found) for found in inner)
            return (math.inf, math.inf) if bad else (max(0.0, *inner), sum(inner) / len(inner))
        last = self.loss(end) if end_loss is None else end_loss
        losses = [self._start_loss, *(self.loss(end, lam) for lam in self._lambdas[1:-1]), last]
        found = barrier(self._lambdas, losses).height
        return (math.inf, math.inf) if math.isnan(found) else (found, sum(losses) / len(losses))

    @torch.no_grad()
    def _mean_prediction(self, batch: Batch, end: Tensor) -> Tensor:
        found = []
        for point in (self._start, end):
            self._mixture.buffer.copy_(point)
            found.append(torch.softmax(logits(self._mixture.weights, self._mixture.module, batch.inputs).float(), -1))
        return (found[0] + found[1]) / 2

    @torch.no_grad()
    def loss(self, end: Tensor, lam: float = 1.0) -> float:
        """The mean loss at one point of the line to `end`."""
        torch.lerp(self._start, end, lam, out=self._mixture.buffer)
        sums = self._mixture.metric_sums(self._batches)
        mine = torch.tensor([sums.loss, sums.count] if sums else [0.0, 0.0], dtype=torch.float64)
        loss, count = self._processes.all_reduce_sum(mine.to(self._start.device)).tolist()
        if not count:
            raise IsobasinError("held-out data hold nothing that is scored: expected at least one token or sample")
        return float(loss / count)
