"""What unrelated models of this shape score: B with the stream of every part turned by itself.

Each part keeps its spectra and everything that happens inside it, but no longer fits the parts around it, and tokens,
positions and outputs are shuffled: so nothing is left that A and B could share but what any two models share.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.action import Action
from isobasin.arch import Architecture, Space
from isobasin.groups import Element, SignedPermutation
from isobasin.likeness.frame import tables
from isobasin.likeness.pairs import Parted
from isobasin.match.canonical import ENDS, STREAM
from isobasin.symmetries import group_of

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class Unrelated:
    """A model drawn from another one: the same parts, each in a frame of its own."""

    model: Parted
    seed: int

    @property
    def arch(self) -> Architecture:
        return self.model.arch

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        return self.model.parts

    @property
    def spaces(self) -> list[str]:
        return self.model.spaces

    def part(self, space: str) -> Mapping[str, Tensor]:
        """Turned by an element that depends on the seed and the part."""
        number = list(self.model.parts).index(space)
        seed = 1_000_003 * self.seed + number
        action = Action(self.arch, {STREAM: self._turn(seed)})
        tensors = {name: action.tensor(name, t) for name, t in self.model.part(space).items()}
        return self._shuffled(tensors, seed) if space == ENDS else tensors

    def _turn(self, seed: int) -> Element:
        space = self.arch.spaces[STREAM]
        assert isinstance(space, Space)
        group = SignedPermutation(space.size) if space.kind == "fixed" else group_of(space)
        return group.sample(seed=seed)

    def _shuffled(self, tensors: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
        rng = torch.Generator().manual_seed(seed)
        for name, axis, _ in tables(self.arch, self.parts[ENDS]):
            rows = tensors[name].movedim(axis, -1)
            flat = rows.reshape(-1, rows.shape[-1])
            mixed = flat[torch.randperm(len(flat), generator=rng)].reshape(rows.shape)
            tensors[name] = mixed.movedim(-1, axis)
        return tensors


@dataclass(frozen=True)
class Null:
    """Scores of unrelated models: how many were drawn, from which seed, and their quantiles."""

    draws: int
    seed: int
    scores: tuple[float, ...]

    @property
    def largest(self) -> float:
        return max(self.scores)

    @property
    def facts(self) -> dict[str, object]:
        found = torch.quantile(torch.tensor(self.scores, dtype=torch.float64), torch.tensor(QUANTILES).double())
        quantiles = {f"{q:g}": float(value) for q, value in zip(QUANTILES, found)}
        return {"draws": self.draws, "seed": self.seed, "quantiles": quantiles, "largest": self.largest}
