"""Training of a group element: descend the loss at random points of the path from A to the moved B.

B's function never changes, only its position on its orbit does. Held-out data decide which of the elements seen during
training is kept, and when to stop.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.files import NullResumeStore, ResumeStore
from isobasin.groups import Element
from isobasin.learn.data import Augment, BatchSampler, seeded_generator
from isobasin.learn.optimizer import GroupOptimizer
from isobasin.learn.parameters import GroupParameters, PermutationProposals, compose
from isobasin.learn.path_loss import (
    OBJECTIVES,
    SINGLE_PROCESS,
    HeldOutEvaluator,
    LinearPath,
    Objective,
    ProcessGroup,
    average_gradients,
)
from isobasin.model import Transformer
from isobasin.path.evaluation import FlatModel
from isobasin.symmetries import Symmetry, symmetry
from isobasin.symmetries.transform import pack_elements, unpack_elements
from isobasin.tasks import Batch, Task
from isobasin.weights import Weights

Permutations = Literal["fixed", "free"]
PERMUTATIONS = ("fixed", "free")
RESUME_SECTION = "learning"  # of a resume file
GRAPH_WARMUP = 3  # eager steps before a CUDA graph is captured, as the documentation of torch asks for
MAX_GRAPHS = 4  # shapes of batches that are captured; the held-out split leaves batches of two sizes
OnProgress = Callable[[int, int, float], None]  # (step, of, last measured held-out barrier)


def warmup_cosine(step: int, steps: int, *, peak: float, warmup_steps: float) -> float:
    """The learning rate of step 0 … steps − 1: linear warm-up, then a cosine that reaches zero with the last step."""
    if step + 1 <= warmup_steps:
        return peak * (step + 1) / warmup_steps
    falling = (step + 1 - warmup_steps) / (steps - warmup_steps)
    return peak * (1 + math.cos(math.pi * falling)) / 2


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How the group element is learned: rates with warm-up and cosine decay, measured every `check_every` steps.

    A step turns a rotation by at most about `turn` radians and moves other parameters by Adam with the rate `lr`.
    With the objective `ends` the loss is the cross-entropy with the mean of the probabilities that A and B predict,
    which needs no labels; with `labels` it is that with the labels of the data. `auto` is `ends` for language models
    and for data without labels.

    A step takes `accumulate` batches, each at its own point of the path: the range `lambdas` is cut into as many parts,
    and one point is drawn from each. With `permutations="free"` checks may also permute units.
    """

    steps: int = 500
    lr: float = 0.01  # peak learning rate of scales, angles and matrices
    turn: float = 0.04  # largest angle of a rotation's step
    warmup: float = 0.05  # share of the steps
    lambdas: tuple[float, float] = (0.4, 0.6)  # the best of several ranges on text and on digits
    accumulate: int = 1
    clip: float = 1.0  # largest norm of the whole gradient
    check_every: int = 100
    check_points: int = 7
    permutations: Permutations = "fixed"
    autocast: torch.dtype | None = None
    objective: Objective = "auto"

    def __post_init__(self) -> None:
        low, high = self.lambdas
        _require(self.steps >= 0, "steps", self.steps, "0 or more")
        _require(self.lr > 0, "lr", self.lr, "more than 0")
        _require(self.turn > 0, "turn", self.turn, "more than 0")
        _require(0 <= self.warmup <= 1, "warmup", self.warmup, "a share from 0 to 1")
        _require(0 <= low <= high <= 1, "lambdas", self.lambdas, "two points of the path, 0 ≤ low ≤ high ≤ 1")
        _require(self.accumulate >= 1, "accumulate", self.accumulate, "1 or more")
        _require(self.clip > 0, "clip", self.clip, "more than 0")
        _require(self.check_every >= 1, "check_every", self.check_every, "1 or more")
        _require(self.check_points >= 3, "check_points", self.check_points, "3 or more: both ends and one between")
        _require(self.permutations in PERMUTATIONS, "permutations", self.permutations, " or ".join(PERMUTATIONS))
        _require(self.objective in OBJECTIVES, "objective", self.objective, " or ".join(OBJECTIVES))

    def rate_at(self, step: int) -> float:
        """The share of the peak rates that a step takes; the warm-up takes one step at least."""
        return warmup_cosine(step, self.steps, peak=1.0, warmup_steps=max(1.0, self.warmup * self.steps))

    def points(self, step: int, n: int, seed: int) -> list[float]:
        """n points of the path for this step, one from each n-th of `lambdas`, in random order."""
        rng = seeded_generator(seed, "points", step)
        low, high = self.lambdas
        shares = (torch.randperm(n, generator=rng) + torch.rand(n, generator=rng)) / n
        return (low + (high - low) * shares).tolist()

    def is_check(self, step: int) -> bool:
        """Whether the path is measured after this step."""
        return (step + 1) % self.check_every == 0 or step + 1 == self.steps


def _require(good: bool, name: str, found: object, expected: str) -> None:
    if not good:
        raise IsobasinError(f"learning: {name} is {found}, expected {expected}")


@dataclass(frozen=True)
class LearnResult:
    """The elements kept, their held-out barrier, (step, held-out barrier) of every check, and the training losses."""

    elements: Mapping[str, Element]
    barrier: float
    history: tuple[tuple[int, float], ...]
    losses: tuple[float, ...] = field(repr=False, default=())
    objective: Objective = "labels"


def learn(
    a: Weights,
    b: Weights,
    start: Mapping[str, Element],
    task: Task,
    held_out: Task,
    *,
    scope: str = "model",
    config: TrainConfig | None = None,
    seed: int = 0,
    device: torch.device | None = None,
    augment: Augment | None = None,
    on_progress: OnProgress | None = None,
    resume: ResumeStore | None = None,
    processes: ProcessGroup = SINGLE_PROCESS,
) -> LearnResult:
    """Elements between the canonical forms of A and B that make the path from A to B low, trained from `start` on.

    `start` has an element for every space of the scope. `on_progress(step, of, barrier)` is called after each step with
    the held-out barrier as last measured; `resume` stores the state at every check; `processes` share the batches.
    """
    device, config = device or torch.device("cpu"), config or TrainConfig()
    resume = NullResumeStore() if resume is None else resume
    part = symmetry(b.arch).scoped(scope)
    sampler = BatchSampler(task, seed, device, augment)
    if config.objective == "auto":
        config = replace(config, objective="ends" if task.kind == "lm" or not sampler.labelled else "labels")
    if config.objective == "labels" and not sampler.labelled:
        raise IsobasinError(f"{task.source}: no sample has a label; expected labelled data, or objective ends")
    trainer = Trainer(a, b, part, start, held_out, config, seed, device, processes)
    state = resume.find(RESUME_SECTION)
    if state:
        trainer.load_state(state)
    while trainer.step < config.steps and trainer.barrier > 0:
        trainer.train_step(sampler)
        if config.is_check(trainer.step - 1):
            trainer.check()
            resume.keep(RESUME_SECTION, trainer.state())
        if on_progress:
            on_progress(trainer.step, config.steps, trainer.barrier)
    return trainer.result()


class Trainer:
    """The state of training: parameters, optimizer, the path they act on, and the best element so far."""

    def __init__(
        self,
        a: Weights,
        b: Weights,
        part: Symmetry,
        start: Mapping[str, Element],
        held_out: Task,
        config: TrainConfig,
        seed: int,
        device: torch.device,
        processes: ProcessGroup,
    ) -> None:
        self._part, self._config, self._seed, self._processes = part, config, seed, processes
        self._path = LinearPath.between(a, b, part, start, device)
        self._parameters = GroupParameters(part, device)
        self._mixture = mixture = FlatModel.of(self._path.reference, device)
        first, last = (self._path.vector(mixture, end) for end in (self._path.a, self._path.b))
        self._evaluator = HeldOutEvaluator(mixture, first, last, held_out, config.check_points, processes)
        self._end_loss = self._evaluator.loss(last)
        self._proposals = PermutationProposals(part, processes) if config.permutations == "free" else None
        self._optimize = Step(self._path, self._parameters, config, processes, self._proposals)
        self.step = 0
        self.barrier = self._measure(self._path)
        self._start = self._base = self._best = dict(start)
        self._history = [(0, self.barrier)]
        self._losses: list[Tensor] = []

    def train_step(self, sampler: BatchSampler) -> None:
        """One step on the mean loss of this step's batches; this process computes its share of them."""
        n, processes = self._config.accumulate * self._processes.size, self._processes
        mine = range(processes.rank, n, processes.size)
        points = self._config.points(self.step, n, self._seed)
        batches = [sampler[self.step * n + k] for k in mine]
        total = self._optimize([points[k] for k in mine], batches, self._config.rate_at(self.step))
        self._losses.append(processes.all_reduce_sum(total) / n)
        self.step += 1

    def check(self) -> None:
        """Measure the path on held-out data; keep the elements if they are the best and safely inside their groups."""
        found = self._measure(self._path)
        if self._proposals:
            found = self._permute_units(self._proposals, found)
        self._history.append((self.step, found))
        if found < self.barrier:
            elements = compose(self._parameters.elements(), self._base)
            if all(self._part.groups[name].contains(g) for name, g in elements.items()):
                self._best, self.barrier = elements, found

    def result(self) -> LearnResult:
        losses = torch.stack(self._losses).tolist() if self._losses else []
        return LearnResult(self._best, self.barrier, tuple(self._history), tuple(losses), self._config.objective)

    def state(self) -> dict[str, Any]:
        """Everything that a run needs to continue; what is random follows from the seed and the step."""
        return {
            "step": self.step,
            "motion": self._parameters.state(),
            "optimizer": self._optimize.optimizer.state_dict(),
            "start": pack_elements(self._start),
            "base": pack_elements(self._base),
            "best": pack_elements(self._best),
            "barrier": self.barrier,
            "history": self._history,
            "losses": torch.stack(self._losses).cpu(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.step, self.barrier = state["step"], state["barrier"]
        self._parameters.load_state(state["motion"])
        self._optimize.load_optimizer(state["optimizer"])
        self._best = unpack_elements(state["best"], self._part)
        self._history = [(int(step), float(found)) for step, found in state["history"]]
        self._losses = list(state["losses"].to(self._path.device))
        if self._proposals:
            base = unpack_elements(state["base"], self._part)
            self._rebase({name: base[name] @ self._base[name].inverse() for name in self._proposals.spaces}, base)

    def _measure(self, path: LinearPath) -> float:
        """The held-out barrier of a path with B moved by the parameters as they are."""
        with torch.no_grad():
            end = path.vector(self._mixture, path.moved(self._parameters.differentiable()))
        return self._evaluator.barrier_and_mean(end, self._end_loss)[0]

    def _permute_units(self, proposals: PermutationProposals, found: float) -> float:
        """Apply the proposed permutation with the lowest held-out barrier, if it is below `found`."""
        with torch.no_grad():
            moved = self._path.moved(self._parameters.differentiable())
        best = None
        for proposal in proposals.proposals(self._path.a, moved):
            self._parameters.permute(proposal)
            height = self._measure(self._path.rebased(proposal))
            if height < found:
                found, best = height, proposal
            self._parameters.permute({name: g.inverse() for name, g in proposal.items()})
        if best:
            self._parameters.permute(best)
            self._rebase(best, compose(best, self._base))
        proposals.reset()
        return found

    def _rebase(self, moves: Mapping[str, Element], base: Mapping[str, Element]) -> None:
        self._path, self._base = self._path.rebased(moves), dict(base)
        self._optimize.set_path(self._path)


@dataclass(frozen=True)
class CapturedStep:
    """A CUDA graph of a step for batches of one shape: fill `points` and `batches`, replay, read `total`."""

    points: Tensor
    batches: list[Batch]
    graph: torch.cuda.CUDAGraph
    total: Tensor


class Step:
    """`step(points, batches, rate)` updates the parameters by one step and returns the sum of the losses.

    The gradients of all batches are accumulated on the moved tensors and then go through the group once. `graphed`
    captures the step as a CUDA graph for each shape of batches, up to MAX_GRAPHS shapes, and replays it: small models
    leave a large device waiting for kernel launches otherwise. By default that is done for the project's own model on
    CUDA in one process.
    """

    def __init__(
        self,
        path: LinearPath,
        parameters: GroupParameters,
        config: TrainConfig,
        processes: ProcessGroup,
        proposals: PermutationProposals | None = None,
        *,
        graphed: bool | None = None,
    ) -> None:
        self.path, self._parameters, self._config, self._processes = path, parameters, config, processes
        self._proposals = proposals
        on_cuda = path.device.type == "cuda"
        default = on_cuda and isinstance(path.module, Transformer) and processes.size == 1
        # A capture begins with warm-up steps and resets the gradients for proposals: with these there is one graph.
        self._max_graphs = 0 if not (default if graphed is None else graphed) else 1 if proposals else MAX_GRAPHS
        self._captured: dict[Hashable, CapturedStep] = {}
        self._rate = torch.zeros((), device=path.device) if on_cuda else 0.0
        self.optimizer = GroupOptimizer(parameters, lr=config.lr, turn=config.turn, rate=self._rate)

    def __call__(self, points: Sequence[float], batches: Sequence[Batch], rate: float) -> Tensor:
        shape = tuple((*((k, t.shape) for k, t in b.inputs.items()), b.targets.shape) for b in batches)
        if shape not in self._captured and len(self._captured) < self._max_graphs:
            self._captured[shape] = self._capture(points, batches)
        self._set_rate(rate)
        found = self._captured.get(shape)
        if found is None:
            return self._update(points, batches)
        found.points.copy_(torch.tensor(points))
        for here, given in zip(found.batches, batches):
            here.targets.copy_(given.targets)
            for name, tensor in given.inputs.items():
                here.inputs[name].copy_(tensor)
        found.graph.replay()
        return found.total.clone()

    def set_path(self, path: LinearPath) -> None:
        """Continue with the same parameters on another path."""
        self.path, self._captured = path, {}

    def load_optimizer(self, state: dict[str, Any]) -> None:
        """Restore the optimizer from any device. The learning rate stays this step's own tensor: the one from a file
        lies on the CPU, and a CUDA graph would keep its value at capture, zero."""
        self.optimizer.load_state_dict(state)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate

    def _set_rate(self, rate: float) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def _update(self, points: Sequence[float] | Tensor, batches: Sequence[Batch]) -> Tensor:
        moved = self.path.moved(self._parameters.differentiable())
        leaves = {name: t.detach().requires_grad_(t.requires_grad) for name, t in moved.items()}
        total = torch.zeros((), device=self.path.device)
        for point, batch in zip(points, batches):
            loss = self.path.loss(leaves, point, batch, self._config.objective, self._config.autocast)
            loss.backward()
            total += loss.detach()
        self.optimizer.zero_grad(set_to_none=True)
        grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
        torch.autograd.backward([moved[name] for name in grads], list(grads.values()))
        if self._proposals:
            self._proposals.accumulate(grads)
        parameters = self._parameters.tensors()
        average_gradients(self._processes, parameters, self._config.accumulate * self._processes.size)
        torch.nn.utils.clip_grad_norm_(parameters, self._config.clip)
        for parameter in parameters:
            if parameter.grad is not None:  # a path point without a finite loss gives no gradient
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        self.optimizer.step()
        self._parameters.recentre()
        return total

    def _capture(self, points: Sequence[float], batches: Sequence[Batch]) -> CapturedStep:
        here = torch.tensor(points, device=self.path.device)
        held = [Batch({k: t.clone() for k, t in b.inputs.items()}, b.targets.clone()) for b in batches]
        self._set_rate(0.0)
        graph, total = capture_graph(lambda: self._update(here, held), self.optimizer)
        if self._proposals:
            self._proposals.reset()
        return CapturedStep(here, held, graph, total)


def capture_graph(step: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A step as a CUDA graph, and the tensor that holds its loss after each replay.

    The learning rate must be zero meanwhile: warm-up steps run first, and then the state of the optimizer is restored.
    """
    before = {p: {k: t.clone() for k, t in state.items()} for p, state in optimizer.state.items()}
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(GRAPH_WARMUP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    for parameter, state in optimizer.state.items():
        for key, tensor in state.items():
            tensor.copy_(before[parameter][key]) if parameter in before else tensor.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph, loss
