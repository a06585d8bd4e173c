"""The null space of a Jacobian: the directions of the weights that a function does not see."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

CLEAR_GAP = 1e4  # between the smallest singular value that counts and the largest that does not
NOISE = 1e-9


@dataclass(frozen=True)
class Measured:
    """A null space: its dimension, and how clearly it is one."""

    dim: int
    gap: float
    noise: float

    def agrees_with(self, predicted: int) -> bool:
        return self.gap > CLEAR_GAP and self.noise < NOISE and self.dim == predicted


def null_space(function: Callable[[dict[str, Tensor]], Tensor], params: dict[str, Tensor]) -> Measured:
    """dim ker(d function / d params): rows are random combinations of the outputs, a few more than parameters.

    Columns are brought to length one, so that a small gradient is not taken for none; those that are
    rounding noise (a key bias) are null as they stand.
    """
    out, pull = torch.func.vjp(function, params)
    n_params = sum(p.numel() for p in params.values())
    assert out.numel() > n_params
    rng = torch.Generator().manual_seed(0)
    mix = torch.randn(n_params + 10, *out.shape, generator=rng, dtype=torch.float64)
    rows = torch.func.vmap(lambda m: pull(m)[0], chunk_size=128)(mix)
    jacobian = torch.cat([rows[name].reshape(len(mix), -1) for name in params], dim=1)
    lengths = jacobian.norm(dim=0)
    seen = lengths > 1e-12 * lengths.max()
    values = torch.linalg.svdvals(jacobian[:, seen] / lengths[seen])
    values = torch.cat([values / values[0], torch.zeros(n_params - len(values))]).clamp(min=1e-16)
    rank = int((values[:-1] / values[1:]).argmax()) + 1
    return Measured(n_params - rank, float(values[rank - 1] / values[rank]), float(values[rank]))
