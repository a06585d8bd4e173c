"""The seeds of a cell trained together: one stack of weights, one pass for all of them.

Each seed sees its own batches in its own order, exactly as `train` would show them. It is here to be measured beside
what the study does: on an H200 one seed after the other, each step as one CUDA graph, is faster (results/seeds.json).
Stacks run in float32: under autocast the gradient of a stacked softmax is refused.
"""

import copy
import warnings
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from isobasin.errors import IsobasinError
from isobasin.model import Transformer
from isobasin.study.trainer import (
    Augment,
    TrainingRecipe,
    TrainResult,
    capture_graph,
    cross_entropy,
    empty_queue,
    optimized_parameters,
    training_examples,
)


def train_together(
    models: Sequence[Transformer],
    inputs: Tensor,
    targets: Tensor | None,
    recipe: TrainingRecipe,
    *,
    seeds: Sequence[int],
    augment: Augment | None = None,
    pad: int | None = None,
    device: torch.device | str | None = None,
    graphed: bool = False,
) -> tuple[TrainResult, ...]:
    """What `train` gives for each model with its seed, in one run; all models have one configuration."""
    if not models or len(models) != len(seeds) or any(m.config != models[0].config for m in models):
        raise IsobasinError(f"{len(models)} models with {len(seeds)} seeds: expected equal numbers, one configuration")
    where = torch.device(device) if device is not None else next(models[0].parameters()).device
    data = training_examples(models[0].config, inputs.to(where), None if targets is None else targets.to(where))
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    waiting = [empty_queue() for _ in seeds]
    n_steps, step, losses = recipe.n_steps(len(data)), None, []
    for k in range(n_steps):
        drawn = [data.draw(recipe.batch_size, w, g) for w, g in zip(waiting, generators)]
        waiting = [rest for _, _, rest in drawn]
        changed = [augment(x, g) if augment else x for (x, _, _), g in zip(drawn, generators)]
        x, y = torch.stack(changed), torch.stack([y for _, y, _ in drawn])
        if step is None:
            step = StackedStep(models, recipe, x, y, where, pad=pad, graphed=graphed)
        losses.append(step(x, y, recipe.rate(k, n_steps)))
    said = torch.stack(losses).T.tolist() if losses else [[] for _ in models]
    ends = step.models() if step else list(models)
    return tuple(TrainResult(model, tuple(one)) for model, one in zip(ends, said))


class StackedStep:
    """One step of AdamW for every seed: `step(x, y, rate)` takes and gives a first axis of seeds."""

    def __init__(
        self,
        models: Sequence[Transformer],
        recipe: TrainingRecipe,
        x: Tensor,
        y: Tensor,
        device: torch.device,
        *,
        pad: int | None,
        graphed: bool,
    ) -> None:
        self._recipe, self._pad, self._device = recipe, pad, device
        self._given = models
        stacked, _ = stack_module_state([copy.deepcopy(model).to(device) for model in models])
        open_to = {name for name, p in models[0].named_parameters() if p.requires_grad}
        self._weights = {name: t.detach().requires_grad_(name in open_to) for name, t in stacked.items()}
        self._shape = Transformer(models[0].config).to("meta")  # the formula; weights come from the stack
        moving = [t for t in self._weights.values() if t.requires_grad]
        groups = [
            {"params": [t for t in moving if t.ndim > 2], "weight_decay": recipe.weight_decay},
            {"params": [t for t in moving if t.ndim <= 2], "weight_decay": 0.0},
        ]
        self._rate = torch.zeros((), device=device)
        self._x, self._y = x.clone(), y.clone()
        cuda = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(groups, lr=self._rate, betas=recipe.betas, fused=True, capturable=cuda)
        self._graph = capture_graph(self._once, self.optimizer) if graphed and cuda else None

    def __call__(self, x: Tensor, y: Tensor, rate: float) -> Tensor:
        self._rate.fill_(rate)
        self._x.copy_(x)
        self._y.copy_(y)
        if self._graph is None:
            return self._once()
        self._graph[0].replay()
        return self._graph[1].clone()

    def _once(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        losses = self._losses()
        losses.sum().backward()  # the seeds do not touch: each loss has its own gradient
        if self._recipe.grad_clip is not None:
            self._clip(self._recipe.grad_clip)
        self.optimizer.step()
        return losses.detach()

    def _losses(self) -> Tensor:
        smoothing = self._recipe.label_smoothing

        def one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            mask = None if self._pad is None else x != self._pad
            return cross_entropy(functional_call(self._shape, weights, (x, mask)), y, smoothing)

        # The fused kernels of CUDA refuse the gradient of a stack; the plain formula takes it.
        plain = sdpa_kernel(SDPBackend.MATH) if self._device.type == "cuda" else nullcontext()
        with plain, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="There is a performance drop")  # CPU attention goes seed by seed
            return vmap(one)(self._weights, self._x, self._y)

    def _clip(self, largest: float) -> None:
        """Each seed's whole gradient by itself, as `clip_grad_norm_` does it."""
        held = [t.grad for t in optimized_parameters(self.optimizer) if t.grad is not None]
        norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in held]).norm(dim=0)  # (seeds,)
        shrink = (largest / (norms + 1e-6)).clamp(max=1.0)
        for grad in held:
            grad.mul_(shrink.view(-1, *[1] * (grad.ndim - 1)))

    @torch.no_grad()
    def models(self) -> list[Transformer]:
        """The stack taken apart."""
        made = []
        for i, given in enumerate(self._given):
            model = Transformer(given.config).to(self._device)
            model.load_state_dict({name: stack[i] for name, stack in self._weights.items()})
            made.append(model.eval())
        return made
