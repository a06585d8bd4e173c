"""Whole models: sweeps over all spaces, each in turn given its best element while the others stay.

One sweep reads each model once, block by block: the units or heads of a block are matched with the stream where it
stands, and the block's overlap on the stream is added up; at the end one Procrustes (or assignment) moves the stream.
The objective, the squared distance of the canonical forms (and what activations add to it), never rises from sweep to
sweep: what would raise it is not taken.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobasin.action import Action
from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.groups import Element
from isobasin.match.activations_whole import Agreement
from isobasin.match.attention import attention_matrices
from isobasin.match.canonical import ENDS, STREAM, Canonical, blocks
from isobasin.match.heads import HeadMatch
from isobasin.match.matchers import Matcher
from isobasin.match.overlap import Overlap, empty, overlap
from isobasin.match.spaces import match_space
from isobasin.match.verification import check_element
from isobasin.views import Tensors

Elements = Mapping[str, Element]
ROUNDING = 1e-20  # a distance this much smaller than at the start is none (squared)


@dataclass(frozen=True)
class Descent:
    """Where the sweeps ended: elements between the canonical forms, and the objective sweep by sweep."""

    elements: Elements
    history: tuple[float, ...]
    converged: bool
    heads: Mapping[str, HeadMatch] = field(default_factory=dict)

    @property
    def square(self) -> float:
        return self.history[-1]


@dataclass(frozen=True)
class Board:
    """A and B in canonical form, and the spaces of B that may move."""

    a: Canonical
    b: Canonical
    matcher: Matcher
    agreement: Agreement = field(default_factory=Agreement)

    @property
    def arch(self) -> Architecture:
        return self.b.weights.arch

    @property
    def identity(self) -> dict[str, Element]:
        return {name: group.identity() for name, group in self.b.part.groups.items()}

    @property
    def turns(self) -> bool:
        """Whether the stream is among the spaces that move."""
        return STREAM in self.b.part.groups

    def from_ends(self) -> dict[str, Element]:
        """A first guess of the stream's map, from embeddings, head and the stream's biases alone."""
        here = self.identity
        return here | ({STREAM: self._turned(self._on_stream(ENDS, here))} if self.turns else {})

    def from_agreement(self) -> dict[str, Element]:
        """A first guess of the stream's map from activations alone."""
        size = self.b.part.groups[STREAM].identity().n
        return self.identity | {STREAM: self._turned(empty(size, torch.zeros((), dtype=self.b.dtype)))}

    def descend(
        self,
        start: Elements,
        *,
        most: int,
        tolerance: float = 1e-4,
        watch: Callable[[int, float], None] | None = None,
    ) -> Descent:
        """Sweep until the distance stops falling. Its value at a state is measured exactly, by the sweep that
        starts there."""
        state, best = dict(start), dict(start)
        history: list[float] = []
        heads: dict[str, HeadMatch] = {}
        found = heads
        for number in range(most):
            square, proposed, matched = self.sweep(state)
            if history and not square < history[-1]:
                return Descent(best, tuple(history), True, found)
            settled = bool(history) and (
                history[-1] - square <= tolerance * history[-1] or square <= ROUNDING * history[0]
            )
            best, found = state, heads
            history.append(square)
            if watch:
                watch(number + 1, square)
            if settled:
                return Descent(best, tuple(history), True, found)
            state, heads = proposed, matched
        return Descent(best, tuple(history), False, found)

    def sweep(self, elements: Elements) -> tuple[float, dict[str, Element], dict[str, HeadMatch]]:
        """The objective at these elements, and better ones."""
        now = dict(elements)
        matched: dict[str, HeadMatch] = {}
        square, on_stream = self._distance(ENDS, now), self._on_stream(ENDS, now) if self.turns else None
        square += self.agreement.missing(STREAM, now[STREAM]) if self.turns else 0.0
        for name in (n for n in blocks(self.arch) if n not in (ENDS, STREAM)):
            if name not in self.b.part.groups:
                if self.turns:
                    square += self._distance(name, now)
                continue
            square += self._match(name, now, matched)
            if on_stream is not None:
                on_stream = on_stream + self._on_stream(name, now)
        if on_stream is not None:
            now[STREAM] = self._turned(on_stream)
        return square, now, matched

    def _turned(self, found: Overlap) -> Element:
        space = self.arch.spaces[STREAM]
        assert isinstance(space, Space)
        return match_space(space, found.joined(self.agreement.benefit(STREAM, found.primal)))

    def _match(self, name: str, now: dict[str, Element], matched: dict[str, HeadMatch]) -> float:
        """Give this space a better element, if there is one; what the objective had here before."""
        a, b = self.a.block(name), self._moved(name, now, skip=name)
        before = self._objective(name, now[name], a, b)
        space = self.arch.spaces[name]
        proposed: Element
        if isinstance(space, HeadSpace):
            heads_a, heads_b = (attention_matrices(self.arch, space, _doubled(t)) for t in (a, b))
            matched[name] = self.matcher.match(heads_a, heads_b, space)
            check_element(self.b.weights, space, matched[name].element)
            proposed = matched[name].element
        else:
            found = overlap(self.arch, name, a, b, a, now[name])
            proposed = match_space(space, found.joined(self.agreement.benefit(name, found.primal)))
        if self._objective(name, proposed, a, b) < before:
            now[name] = proposed
        return before

    def _objective(self, name: str, element: Element, a: Tensors, b: Tensors) -> float:
        return _square(a, Action(self.arch, {name: element}), b) + self.agreement.missing(name, element)

    def _moved(self, name: str, now: Elements, skip: str = "") -> dict[str, Tensor]:
        """B's block where the elements have moved it, all but one of them."""
        action = Action(self.arch, {n: g for n, g in now.items() if n != skip})
        return {n: action.tensor(n, t) for n, t in self.b.block(name).items()}

    def _distance(self, name: str, now: Elements) -> float:
        return _square(self.a.block(name), Action(self.arch, now), self.b.block(name))

    def _on_stream(self, name: str, now: Elements) -> Overlap:
        b = self._moved(name, now, skip=STREAM)
        return overlap(self.arch, STREAM, self.a.block(name), b, b, now[STREAM])


def _square(a: Tensors, action: Action, b: Tensors) -> float:
    return float(sum((a[name] - action.tensor(name, t)).square().sum(dtype=torch.float64) for name, t in b.items()))


def _doubled(tensors: Tensors) -> dict[str, Tensor]:
    return {name: t.to(torch.float64) for name, t in tensors.items()}
