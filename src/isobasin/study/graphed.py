"""Training steps as one CUDA graph: a small model leaves a large accelerator waiting for launches otherwise."""

import importlib.util
import shutil
from collections.abc import Callable

import torch
from torch import Tensor

from isobasin.model import Transformer

from .fitting_steps import Groups, loss_of, parameters, precision
from .recipe import Recipe

_WARM = 3
_SHAPES = 64  # kinds of models that one process may train compiled; torch would give up after a few


class GraphedStep:
    """`step(x, y, rate)` is one step of AdamW, replayed from a recording; batches must keep their shape.

    Recording needs a few trial steps. They run at rate zero, and the optimizer forgets them. `pad` is the token that
    is masked. With `compiled` the model's kernels are fused before they are recorded: half a minute for a kind of model
    and a shape of batches that this machine has not seen.
    """

    def __init__(
        self,
        model: Transformer,
        moving: Groups,
        recipe: Recipe,
        x: Tensor,
        y: Tensor,
        autocast: torch.dtype | None,
        pad: int | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self._model = fused(model) if compiled else model
        self._recipe, self._autocast, self._pad = recipe, autocast, pad
        self._x, self._y = x.clone(), y.clone()
        self._rate = torch.zeros((), device=x.device)
        self.optimizer = torch.optim.AdamW(moving, lr=self._rate, betas=recipe.betas, fused=True, capturable=True)
        self._graph, self._loss = recorded(self._once, self.optimizer)

    def __call__(self, x: Tensor, y: Tensor, rate: float) -> Tensor:
        self._x.copy_(x)
        self._y.copy_(y)
        self._rate.fill_(rate)
        self._graph.replay()
        return self._loss.clone()

    def _once(self) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        mask = None if self._pad is None else self._x != self._pad
        with precision(self._x.device, self._autocast):
            logits = self._model(self._x, mask)
        loss = loss_of(logits, self._y, self._recipe.label_smoothing)
        loss.backward()
        if self._recipe.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters(self.optimizer), self._recipe.grad_clip)
        self.optimizer.step()
        return loss.detach()


def can_compile() -> bool:
    """Whether torch finds what it needs to write kernels of its own."""
    return importlib.util.find_spec("triton") is not None and any(shutil.which(name) for name in ("cc", "gcc", "clang"))


def fused(model: Transformer) -> Callable[[Tensor, Tensor | None], Tensor]:
    """The model's forward pass, and with it the backward one, with neighbouring kernels made one.

    Where torch can not do that after all it says why, as a warning of its own, and runs the model as it is.
    """
    compiled = torch.compile(model, dynamic=False)
    settings = torch._dynamo.config.patch(recompile_limit=_SHAPES, suppress_errors=True)

    def forward(x: Tensor, mask: Tensor | None) -> Tensor:
        with settings:
            found: Tensor = compiled(x, mask)
        return found

    return forward


def recorded(once: Callable[[], Tensor], optimizer: torch.optim.Optimizer) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A step as a graph, and the tensor that holds its loss after each replay; the rate must be zero meanwhile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM):
            once()
    torch.cuda.current_stream().wait_stream(side)
    for state in optimizer.state.values():
        for value in state.values():
            value.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = once()
    return graph, loss
