"""Permutations that change while learning: units take other places where gradient and likeness both ask for it.

For the permutation matrix P of a space, ∂L/∂P[i, j] = ⟨∂L/∂row i of the moved tensor, its row j⟩, summed over all the
tensors that P touches: a straight-through gradient, accumulated between two checks. A proposal is the assignment of
largest likeness − η · gradient. Held-out data decide whether it is kept.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from isobasin.arch import Space
from isobasin.groups import Element, Monomial
from isobasin.learning.team import Team
from isobasin.match.assignment import assign as assign_exactly
from isobasin.match.large_assignment import assign as assign_nearly
from isobasin.match.overlap import Overlap, overlap
from isobasin.match.spaces import EXACT_BELOW
from isobasin.symmetries import Symmetry

KINDS = ("permutation", "signed", "positive", "scaled")
SIGNED = ("signed", "scaled")
BOLDNESS = (0.3, 1.0, 3.0)  # η, in units of the ratio of the two sizes


class Rearranging:
    """The spaces whose units may change places, and the gradient heard since the last check."""

    def __init__(self, part: Symmetry, team: Team) -> None:
        self._part, self._team = part, team
        self._spaces = {
            name: space
            for name in part.groups
            if isinstance(space := part.arch.spaces[name], Space) and space.kind in KINDS
        }
        self._names = {name: _touching(part, name) for name in self._spaces}
        self._heard: dict[str, Tensor] = {}

    def only(self, elements: Mapping[str, Element]) -> dict[str, Element]:
        return {name: g for name, g in elements.items() if name in self._spaces}

    def hear(self, leaves: Mapping[str, Tensor]) -> None:
        """Add up the gradients of tensors that these spaces touch."""
        for name in {n for names in self._names.values() for n in names}:
            gradient = leaves[name].grad
            if gradient is not None:
                # In place: a recorded step adds to the same memory at every replay.
                self._heard.setdefault(name, torch.zeros_like(gradient)).add_(gradient)

    def forget(self) -> None:
        for heard in self._heard.values():
            heard.zero_()

    def proposals(self, a: Mapping[str, Tensor], moved: Mapping[str, Tensor]) -> Iterator[dict[str, Element]]:
        """Permutations (with signs) of all these spaces together, from the shyest to the boldest."""
        # Every process must make the same proposals: what it heard is what all of them heard.
        heard = {name: self._team.total(self._heard[name]) for name in sorted(self._heard)}
        for boldness in BOLDNESS:
            found = {}
            for name in self._spaces:
                element = self._proposed(name, a, moved, heard, boldness)
                if element is not None and not element.is_identity:
                    found[name] = element
            if found:
                yield found

    def _proposed(
        self,
        name: str,
        a: Mapping[str, Tensor],
        moved: Mapping[str, Tensor],
        heard: Mapping[str, Tensor],
        boldness: float,
    ) -> Element | None:
        names = [n for n in self._names[name] if n in heard]
        if not names:
            return None
        here, arch = self._part.groups[name].identity(), self._part.arch
        like = overlap(arch, name, a, moved, names, here)
        gradient = overlap(arch, name, heard, moved, names, here)
        size = boldness * _size(like) / max(_size(gradient), 1e-30)
        benefit = {
            sign: like.magnitude + sign * like.turning - size * (gradient.magnitude + sign * gradient.turning)
            for sign in ((1.0, -1.0) if self._spaces[name].kind in SIGNED else (1.0,))
        }
        best = torch.stack(list(benefit.values())).amax(0)
        index = _assigned(best).cpu()
        rows = torch.arange(len(index))
        plain = benefit[1.0].cpu()[rows, index] >= best.cpu()[rows, index]
        return Monomial(index, torch.where(plain, 1.0, -1.0).to(torch.float64))


def _touching(part: Symmetry, space: str) -> tuple[str, ...]:
    arch = part.arch
    return tuple(
        name
        for name, pattern in arch.tensors.items()
        if not pattern.buffer
        and space in {arch.space_of(term).name for axis in pattern.roles[0].axes for term in axis.terms}
    )


def _size(found: Overlap) -> float:
    return float((found.turning + found.magnitude).norm())


def _assigned(benefit: Tensor) -> Tensor:
    if len(benefit) <= EXACT_BELOW:
        return assign_exactly(-benefit)
    return assign_nearly(benefit, tolerance=1e-6, start=torch.arange(len(benefit))).index
