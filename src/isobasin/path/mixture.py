"""One module whose parameters are views into one flat buffer: a mixture of models is then one sum of vectors."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from isobasin.running import logits, module_of, places
from isobasin.tasks import Batch, Sums
from isobasin.weights import Weights

_ALIGNED = 64  # floats: every parameter starts where vector instructions and matrix kernels like it


@dataclass(frozen=True)
class Mixture:
    """A module that runs wherever `buffer` says; filling the buffer is all it takes to move it.

    Everything is float32, whatever the checkpoints store.
    """

    like: Weights
    module: nn.Module
    offsets: dict[str, int]
    buffer: Tensor

    @classmethod
    def of(cls, weights: Weights, device: torch.device | None = None) -> "Mixture":
        """The module of this model, ready to be moved."""
        module = module_of(weights, attention="sdpa").to(device or torch.device("cpu")).requires_grad_(False)
        offsets, size = _layout(module)
        buffer = torch.zeros(size, device=device)
        mixture = cls(weights, module, offsets, buffer)
        for name, parameter in module.named_parameters():  # each once, however many places it is tied to
            view = mixture.part(buffer, name)
            view.copy_(parameter)
            parameter.data = view
        return mixture

    def vector(self, weights: Weights) -> Tensor:
        """Another model as a vector in the same layout."""
        module = module_of(weights, attention="sdpa")
        out = torch.zeros_like(self.buffer)
        for name, parameter in module.named_parameters():
            self.part(out, name).copy_(parameter.detach())
        return out

    def part(self, vector: Tensor, name: str) -> Tensor:
        """One parameter's place in a vector."""
        shape = self._shapes[name]
        return vector[self.offsets[name] : self.offsets[name] + shape.numel()].view(shape)

    @cached_property
    def _shapes(self) -> dict[str, torch.Size]:
        return {name: parameter.shape for name, parameter in self.module.named_parameters()}

    @cached_property
    def places(self) -> dict[str, str]:
        """The parameter that holds each tensor of the architecture."""
        return places(self.like, self.module)

    @torch.inference_mode()
    def score(self, batches: Iterable[Batch]) -> Sums | None:
        """All of these batches, where the buffer stands now; None if there are none."""
        total: Sums | None = None
        for batch in batches:
            one = Sums.of(logits(self.like, self.module, batch.inputs), batch)
            total = one if total is None else total + one
        return total


def _layout(module: nn.Module) -> tuple[dict[str, int], int]:
    offsets, size = {}, 0
    for name, parameter in module.named_parameters():
        offsets[name] = size
        size += -(-parameter.numel() // _ALIGNED) * _ALIGNED
    return offsets, size
