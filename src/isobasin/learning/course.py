"""The path from A to a moved B, differentiable in the element that moves it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isobasin.action import Action
from isobasin.groups import Element
from isobasin.normalize import lightest
from isobasin.path.mixture import Mixture
from isobasin.running import logits, module_of, places
from isobasin.symmetries import Symmetry
from isobasin.tasks import IGNORED, Batch
from isobasin.weights import Weights


@dataclass(frozen=True)
class Course:
    """A and B, both in the canonical values of a scope's free coordinates, B where a first alignment put it.

    On these forms elements act linearly, and the line between them has the losses that the line from A to B has once
    B carries A's own gains: what neither function sees is the same at both ends.
    """

    like: Weights
    module: nn.Module
    places: Mapping[str, str]
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]

    @classmethod
    def between(
        cls, a: Weights, b: Weights, part: Symmetry, elements: Mapping[str, Element], device: torch.device
    ) -> "Course":
        flat = [lightest(m, part.coordinates).apply(m) for m in (a, b)]
        action = Action(b.arch, elements)
        module = module_of(flat[0], attention="sdpa").to(device).requires_grad_(False)
        held = places(flat[0], module)
        names = [name for name in held if not a.arch.tensors[name].buffer]
        start = {name: flat[0][name].to(device, torch.float32) for name in names}
        # One layout, however B came to lie where it does: sums in another order end in other bits.
        end = {
            name: action.tensor(name, flat[1][name].double()).to(device, torch.float32).contiguous() for name in names
        }
        return cls(flat[0], module, held, start, end)

    @property
    def device(self) -> torch.device:
        return next(iter(self.a.values())).device

    def rebased(self, elements: Mapping[str, Element]) -> "Course":
        """The same with B where these elements move it."""
        action = Action(self.like.arch, elements)
        return replace(self, b={name: action.tensor(name, tensor).contiguous() for name, tensor in self.b.items()})

    def moved(self, elements: Mapping[str, Element]) -> dict[str, Tensor]:
        """B's tensors after these elements."""
        action = Action(self.like.arch, elements)
        return {name: action.tensor(name, tensor) for name, tensor in self.b.items()}

    def loss(
        self, moved: Mapping[str, Tensor], lam: float | Tensor, batch: Batch, autocast: torch.dtype | None = None
    ) -> Tensor:
        """Mean loss of a batch at (1−λ)·A + λ·moved."""
        mixed = {self.places[name]: torch.lerp(start, moved[name], lam) for name, start in self.a.items()}
        with _precision(self.device, autocast):
            said = torch.func.functional_call(_Logits(self.like, self.module), _prefixed(mixed), (batch.inputs,))
        return F.cross_entropy(said.float().flatten(0, -2), batch.targets.flatten(), ignore_index=IGNORED)

    def vector(self, mixture: Mixture, tensors: Mapping[str, Tensor]) -> Tensor:
        """These tensors in the layout of a mixture, to be measured."""
        out = torch.zeros_like(mixture.buffer)
        for name, tensor in tensors.items():
            mixture.part(out, self.places[name]).copy_(tensor)
        return out


class _Logits(nn.Module):
    """The logits of a model as a module of their own, so that its parameters can be given from outside."""

    def __init__(self, like: Weights, model: nn.Module) -> None:
        super().__init__()
        self.like, self.model = like, model

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return logits(self.like, self.model, inputs)


def _prefixed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def _precision(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """Nothing is kept of casts: every tensor is new at every step, and a recorded step may not keep any."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype, cache_enabled=False)
