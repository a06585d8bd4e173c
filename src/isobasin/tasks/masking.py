"""Which tokens a masked language model has to guess, and what it sees in their place."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.shapes import Int
from isobasin.tasks.task import IGNORED

Hide = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Masking:
    """A share of the ordinary tokens is scored: 80 % of them masked, 10 % replaced by any token, 10 % left.

    Drawn window after window from one seed, so that the batch size has no say.
    """

    mask_id: int
    n_ordinary: int  # ids a replacement is drawn from
    special: tuple[int, ...]
    seed: int
    share: float = 0.15

    def start(self) -> Hide:
        """A function from a window to what the model sees and what it should say; call it window after window."""
        rng = torch.Generator().manual_seed(self.seed)
        return lambda ids: self._hide(ids, rng)

    def _hide(self, ids: Int[Tensor, " time"], rng: torch.Generator) -> tuple[Tensor, Tensor]:
        ordinary = (~torch.isin(ids, ids.new_tensor(self.special))).nonzero().flatten()
        n = min(len(ordinary), max(1, round(self.share * len(ordinary))))
        picked = ordinary[torch.randperm(len(ordinary), generator=rng)[:n]]
        fate = torch.rand(n, generator=rng)
        strangers = torch.randint(self.n_ordinary, (n,), generator=rng)
        seen, targets = ids.clone(), torch.full_like(ids, IGNORED)
        targets[picked] = ids[picked]
        seen[picked] = torch.where(fate < 0.8, self.mask_id, torch.where(fate < 0.9, strangers, ids[picked]))
        return seen, targets
