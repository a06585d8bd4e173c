"""Two parts beside each other: the best element between them, and how far they stay apart."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isobasin.action import Action
from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.groups import Element
from isobasin.match.attention import attention_matrices
from isobasin.match.canonical import STREAM
from isobasin.match.heads import match_heads
from isobasin.match.overlap import Overlap, overlap
from isobasin.match.spaces import match_space
from isobasin.symmetries import symmetry


class Parted(Protocol):
    """A model in balanced form, or an unrelated one that was drawn from it."""

    @property
    def arch(self) -> Architecture: ...

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]: ...

    @property
    def spaces(self) -> list[str]: ...

    def part(self, space: str) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class Pair:
    """A part of A and a part of B after the best element: ‖A − gB‖², ‖A‖², ‖B‖²."""

    square: float
    size_a: float
    size_b: float

    @property
    def similarity(self) -> float:
        """1 − ‖A − gB‖² / (‖A‖² + ‖B‖²): one for the same part, about zero for parts with nothing in common."""
        return 1 - self.square / max(self.size_a + self.size_b, 1e-300)

    @property
    def distance(self) -> float:
        """‖A − gB‖ / ‖A‖."""
        return (self.square / max(self.size_a, 1e-300)) ** 0.5


@dataclass(frozen=True)
class Meeting:
    """One part of each model under A's names, B's with its stream moved to A's."""

    arch: Architecture
    space: str
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]

    @staticmethod
    def of(a: Parted, b: Parted, space_a: str, space_b: str, stream: Element) -> "Meeting":
        """Names of a layer go together in their order, so that layer 3 can meet layer 6."""
        theirs, mine = b.part(space_b), a.part(space_a)
        action = Action(a.arch, {STREAM: stream})
        names = dict(zip(a.parts[space_a], b.parts[space_b], strict=True))
        moved = {name: action.tensor(name, theirs[other]) for name, other in names.items()}
        folded = {name for norm in a.arch.norms.values() for name in (norm.gain, norm.shift)}
        told = [name for name in names if name not in folded or not _constant(mine[name], moved[name])]
        return Meeting(a.arch, space_a, {n: mine[n] for n in told}, {n: moved[n] for n in told})

    def element(self) -> Element | None:
        """The element of this space that brings B's part closest to A's; None where the space has no group."""
        group = symmetry(self.arch).groups.get(self.space)
        if group is None:
            return None
        place = self.arch.spaces[self.space]
        found: Element
        if isinstance(place, HeadSpace):
            a, b = (
                attention_matrices(self.arch, place, {n: t.to(torch.float64) for n, t in x.items()})
                for x in (self.a, self.b)
            )
            found = match_heads(a, b, place, stage2="orthogonal").element
        else:
            assert isinstance(place, Space)
            here = overlap(self.arch, self.space, self.a, self.b, self.a, group.identity())
            found = match_space(place, here)
        return min((group.identity(), found), key=self.square)

    def square(self, element: Element | None) -> float:
        moved = self.moved(element)
        return float(sum((t - moved[name]).square().sum(dtype=torch.float64) for name, t in self.a.items()))

    def moved(self, element: Element | None) -> Mapping[str, Tensor]:
        """B's part with its own space moved as well."""
        if element is None:
            return self.b
        action = Action(self.arch, {self.space: element})
        return {name: action.tensor(name, t) for name, t in self.b.items()}

    def pair(self) -> Pair:
        sizes = [float(sum(t.square().sum(dtype=torch.float64) for t in x.values())) for x in (self.a, self.b)]
        return Pair(self.square(self.element()), *sizes)

    def on_stream(self, stream: Element) -> Overlap:
        """How the two overlap on the stream, B's own space moved as is best; `stream` has acted on b already."""
        back = Action(self.arch, {STREAM: stream.inverse()})
        b = {name: back.tensor(name, t) for name, t in self.moved(self.element()).items()}
        return overlap(self.arch, STREAM, self.a, b, b, stream, double=True)


def _constant(*vectors: Tensor) -> bool:
    """What folding has made the same everywhere tells nothing: gains of ones would make any two models alike."""
    return all(bool((v == v[0]).all()) for v in vectors)
