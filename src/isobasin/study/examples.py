"""What a model is trained on, as batches: labelled examples by shuffled epochs, or windows of one long text."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.model import ModelConfig

IGNORED = -100  # a target that is not scored, as in torch's cross-entropy


@dataclass(frozen=True)
class Labelled:
    """Inputs with a class each (N,), or with a token at each place (N, T)."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end; every epoch is a new permutation, and a batch may reach over into the next."""
        waiting = torch.empty(0, dtype=torch.int64, device="cpu")
        while True:
            while len(waiting) < batch_size:
                waiting = torch.cat([waiting, torch.randperm(len(self), generator=generator, device="cpu")])
            chosen, waiting = waiting[:batch_size].to(self.inputs.device), waiting[batch_size:]
            yield self.inputs[chosen], self.targets[chosen]


@dataclass(frozen=True)
class Stream:
    """One row of token ids; an example is a window of it, and its targets are the tokens one place further."""

    tokens: Tensor
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end; windows begin anywhere, with equal chance."""
        windows = self.tokens.unfold(0, self.length + 1, 1)  # (starts, length + 1), a view
        while True:
            starts = torch.randint(len(windows), (batch_size,), generator=generator, device="cpu")
            chosen = windows[starts.to(self.tokens.device)]
            yield chosen[:, :-1], chosen[:, 1:]


def examples(config: ModelConfig, inputs: Tensor, targets: Tensor | None) -> Labelled | Stream:
    """A stream where there are no targets, which asks for a language model; otherwise labelled examples."""
    if targets is None:
        if config.n_classes is not None or inputs.ndim != 1 or len(inputs) <= config.n_positions:
            raise IsobasinError(
                f"training data of shape {tuple(inputs.shape)} without targets: expected a language model and one row "
                f"of more than n_positions={config.n_positions} token ids; a classifier needs targets"
            )
        return Stream(inputs, config.n_positions)
    if len(inputs) == 0 or len(inputs) != len(targets):
        raise IsobasinError(f"training data has {len(inputs)} inputs and {len(targets)} targets: expected one for each")
    _check_classes(config, targets)
    return Labelled(inputs, targets)


def _check_classes(config: ModelConfig, targets: Tensor) -> None:
    n_out = config.n_classes if config.n_classes is not None else config.d_vocab
    assert n_out is not None
    scored = targets[targets != IGNORED]
    if scored.numel() and not 0 <= int(scored.min()) <= int(scored.max()) < n_out:
        raise IsobasinError(
            f"training targets go from {int(scored.min())} to {int(scored.max())}, but the model has {n_out} outputs"
        )
