"""Several processes that learn one element together: each takes its share of the batches, gradients are averaged.

Every process draws the same orders and path points and holds the same parameters; only the batches differ.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from isobasin.errors import IsobasinError


class ProcessGroup(Protocol):
    """The processes of one run, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, the same in each of them."""


@dataclass(frozen=True)
class SingleProcess:
    """A run in one process."""

    rank: int = 0
    size: int = 1

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        return tensor


@dataclass(frozen=True)
class AccelerateGroup:
    """The processes that `accelerate launch` or `torchrun` started."""

    accelerator: Any

    @property
    def rank(self) -> int:
        return int(self.accelerator.process_index)

    @property
    def size(self) -> int:
        return int(self.accelerator.num_processes)

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        found: Tensor = self.accelerator.reduce(tensor, reduction="sum")
        return found


def current_group(device: torch.device) -> ProcessGroup:
    """The process group of this run, from the environment that `accelerate launch` or `torchrun` sets."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return SingleProcess()
    try:
        accelerate = import_module("accelerate")
    except ImportError as error:
        raise IsobasinError("several processes need the package accelerate: pip install accelerate") from error
    return AccelerateGroup(accelerate.Accelerator(cpu=device.type == "cpu"))


def average_gradients(group: ProcessGroup, parameters: Sequence[Tensor], n: int) -> None:
    """Replace each gradient by its sum over all processes, divided by n; one message for all parameters."""
    held = [p for p in parameters if p.grad is not None]
    if not held:
        return
    flat = group.all_reduce_sum(torch.cat([p.grad.flatten() for p in held if p.grad is not None])) / n
    for parameter, part in zip(held, flat.split([p.numel() for p in held])):
        parameter.grad = part.view_as(parameter)
