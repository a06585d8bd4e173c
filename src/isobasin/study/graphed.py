"""Training steps as one CUDA graph: a small model leaves a large accelerator waiting for launches otherwise."""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.model import Transformer

from .examples import IGNORED
from .recipe import Recipe

_WARM = 3


class GraphedStep:
    """`step(x, y, rate)` is one step of AdamW, replayed from a recording; batches must keep their shape.

    Recording needs a few trial steps. They run at rate zero, and the optimizer forgets them.
    """

    def __init__(
        self,
        model: Transformer,
        groups: list[dict[str, object]],
        recipe: Recipe,
        x: Tensor,
        y: Tensor,
        autocast: object,
    ) -> None:
        self._model, self._recipe, self._autocast = model, recipe, autocast
        self._x, self._y = x.clone(), y.clone()
        self._rate = torch.zeros((), device=x.device)
        self._optimizer = torch.optim.AdamW(groups, lr=self._rate, betas=recipe.betas, fused=True, capturable=True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM):
                self._once()
        torch.cuda.current_stream().wait_stream(side)
        for state in self._optimizer.state.values():
            for value in state.values():
                value.zero_()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = self._once()

    def __call__(self, x: Tensor, y: Tensor, rate: float) -> Tensor:
        self._x.copy_(x)
        self._y.copy_(y)
        self._rate.fill_(rate)
        self._graph.replay()
        return self._loss.clone()

    def _once(self) -> Tensor:
        precision = nullcontext()
        if isinstance(self._autocast, torch.dtype):
            precision = torch.autocast("cuda", self._autocast, cache_enabled=False)  # type: ignore[assignment]
        self._optimizer.zero_grad(set_to_none=True)
        with precision:
            logits = self._model(self._x)
        loss = F.cross_entropy(
            logits.float().flatten(0, -2),
            self._y.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self._recipe.label_smoothing,
        )
        loss.backward()
        if self._recipe.grad_clip is not None:
            moving = [p for group in self._optimizer.param_groups for p in group["params"]]
            torch.nn.utils.clip_grad_norm_(moving, self._recipe.grad_clip)
        self._optimizer.step()
        return loss.detach()
