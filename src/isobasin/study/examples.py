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

    def draw(self, batch_size: int, waiting: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets, and the examples that still wait for their turn in this epoch."""
        while len(waiting) < batch_size:
            waiting = torch.cat([waiting, torch.randperm(len(self), generator=generator, device="cpu")])
        chosen, waiting = waiting[:batch_size].to(self.inputs.device), waiting[batch_size:]
        return ready(self.inputs[chosen]), self.targets[chosen], waiting

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end; every epoch is a new permutation, and a batch may reach over into the next."""
        return _endless(self, batch_size, generator)


@dataclass(frozen=True)
class Stream:
    """One row of token ids; an example is a window of it, and its targets are the tokens one place further."""

    tokens: Tensor
    length: int

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def draw(self, batch_size: int, waiting: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Windows that begin anywhere, with equal chance; nothing waits."""
        starts = torch.randint(len(self.tokens) - self.length, (batch_size,), generator=generator, device="cpu")
        return *windows(self.tokens, starts.to(self.tokens.device), self.length), waiting

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end."""
        return _endless(self, batch_size, generator)


def _endless(data: Labelled | Stream, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    waiting = nothing()
    while True:
        x, y, waiting = data.draw(size, waiting, generator)
        yield x, y


def nothing() -> Tensor:
    """What waits before the first batch."""
    return torch.empty(0, dtype=torch.int64, device="cpu")


def windows(tokens: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Inputs (N, length) from each start on, and the tokens one place further, int64."""
    chosen = tokens.unfold(0, length + 1, 1)[starts].long()
    return chosen[:, :-1], chosen[:, 1:]


def ready(inputs: Tensor) -> Tensor:
    """As a model reads them: bytes of pictures from −1 to 1, (x/255 − ½)/½; ids int64; anything else as it is."""
    if inputs.dtype == torch.uint8 and inputs.ndim == 4:
        return (inputs.float() / 255 - 0.5) / 0.5
    return inputs if inputs.is_floating_point() else inputs.long()


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
