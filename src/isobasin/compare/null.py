"""What unrelated models of this shape score: B with the stream of every part turned by itself.

Each part keeps its spectra and everything that happens inside it, but no longer fits the parts around it, and tokens,
positions and outputs are shuffled: so nothing is left that A and B could share but what any two models share.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from isobasin.action import Action
from isobasin.arch import Architecture
from isobasin.arch.architecture import ROTATED
from isobasin.compare.frame import tables
from isobasin.compare.similarity import Parted
from isobasin.groups import Element, Group, Permutation, SignedPermutation
from isobasin.match.canonical import ENDS, STREAM, stream_of
from isobasin.symmetries import group_of

QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class _Moved:
    """What is made of another model, part by part."""

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


@dataclass(frozen=True)
class Turned(_Moved):
    """A model in another frame of its stream, where no coordinate means anything: what is drawn starts from it.

    A random rotation costs much, so there is one for all draws and parts. The ends stay: a map of the stream would take
    it away again. Where the stream can not be rotated nothing is done. The part that was read last is held.
    """

    _last: dict[str, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)

    def part(self, space: str) -> Mapping[str, Tensor]:
        if space == ENDS or self._turn is None:
            return self.model.part(space)
        if space not in self._last:
            self._last.clear()
            action = Action(self.arch, {STREAM: self._turn})
            self._last[space] = {name: action.tensor(name, t) for name, t in self.model.part(space).items()}
        return self._last[space]

    @cached_property
    def _turn(self) -> Element | None:
        stream = stream_of(self.arch)
        return group_of(stream).sample(seed=self.seed) if stream.kind in ROTATED else None


@dataclass(frozen=True)
class Unrelated(_Moved):
    """A model drawn from one in a random frame: the same parts, the stream of each shuffled by itself.

    There a signed permutation is as good as another rotation: what rows of A and of B have in common is again a sum of
    many small numbers with random signs.
    """

    def part(self, space: str) -> Mapping[str, Tensor]:
        """Shuffled by an element that depends on the seed and the part."""
        number = list(self.model.parts).index(space)
        seed = 1_000_003 * self.seed + number
        action = Action(self.arch, {STREAM: self._shuffles.sample(seed=seed)})
        tensors = {name: action.tensor(name, t) for name, t in self.model.part(space).items()}
        return self._shuffled(tensors, seed) if space == ENDS else tensors

    @property
    def _shuffles(self) -> Group:
        stream = stream_of(self.arch)
        match stream.kind:
            case "orthogonal" | "fixed":
                return SignedPermutation(stream.size)
            case "orthogonal1":
                return Permutation(stream.size)
            case _:
                return group_of(stream)

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
