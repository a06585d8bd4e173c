"""Whole models: sweeps over all spaces, each in turn given its best element while the others stay.

One sweep reads each model once, block by block: the units or heads of a block are matched with the stream where it
stands, and the block's overlap on the stream is added up; at the end one Procrustes (or assignment) moves the stream.
The objective, the squared distance of the canonical forms (and what activations add to it), never rises from sweep to
sweep: what would raise it is not taken.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace
from isobasin.groups import Element
from isobasin.match.acting import Acting
from isobasin.match.activations_whole import Agreement
from isobasin.match.attention import attention_matrices
from isobasin.match.canonical import ENDS, STREAM, Canonical, blocks, stream_of
from isobasin.match.heads import HeadMatch
from isobasin.match.matchers import Matcher
from isobasin.match.memory import give_back
from isobasin.match.overlap import Overlap, empty, overlap
from isobasin.match.spaces import match_space
from isobasin.match.verification import check_element
from isobasin.views import Tensors

Elements = Mapping[str, Element]
# A distance this much smaller than at the start is none (squared).
ROUNDING = {torch.float64: 1e-20, torch.float32: 1e-11}


@dataclass(frozen=True)
class Descent:
    """Where the sweeps ended: elements between the canonical forms, and the objective sweep by sweep.

    `ahead` is what the last sweep proposed, if nobody has measured it yet: where to go on from.
    """

    elements: Elements
    history: tuple[float, ...]
    converged: bool
    heads: Mapping[str, HeadMatch] = field(default_factory=dict)
    ahead: tuple[Elements, Mapping[str, HeadMatch]] | None = None

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
        if not self.turns:
            return here
        found = self._nothing()
        for a, b in self._pieces(ENDS):
            found = found + self._on_stream(a, b, here)
        return here | {STREAM: self._turned(found)}

    def ends_left(self) -> float:
        """What that guess leaves of the squared distance of their tables, as a share of ‖A‖² + ‖B‖²."""
        here, left, size = Acting(self.arch, self.from_ends()), 0.0, 0.0
        for pieces in self._pieces(ENDS):
            a, b = ({name: t for name, t in piece.items() if t.ndim > 1} for piece in pieces)  # gains are folded: all 1
            left += _square(a, here, b)
            size += sum(float(t.square().sum(dtype=torch.float64)) for t in (*a.values(), *b.values()))
        return left / max(size, 1e-300)

    def from_agreement(self) -> dict[str, Element]:
        """A first guess of the stream's map from activations alone."""
        return self.identity | {STREAM: self._turned(self._nothing())}

    def descend(
        self,
        start: Elements | Descent,
        *,
        most: int,
        tolerance: float = 1e-4,
        watch: Callable[[int, float], None] | None = None,
    ) -> Descent:
        """Sweep until the distance stops falling, from a state or where another descent of this board stopped.

        The value of a state is measured exactly, by the sweep that starts there.
        """
        past = start if isinstance(start, Descent) else Descent(dict(start), (), False)
        if past.converged:
            return past
        state, heads = past.ahead or (past.elements, past.heads)
        best, found, history = past.elements, past.heads, list(past.history) if past.ahead else []
        for number in range(most):
            square, proposed, matched = self.sweep(state)
            if history and not square < history[-1]:
                return Descent(best, tuple(history), True, found)
            settled = bool(history) and (
                history[-1] - square <= tolerance * history[-1] or square <= ROUNDING[self.b.dtype] * history[0]
            )
            best, found = state, heads
            history.append(square)
            if watch:
                watch(number + 1, square)
            if settled:
                return Descent(best, tuple(history), True, found)
            state, heads = proposed, matched
        return Descent(best, tuple(history), False, found, (state, heads))

    def sweep(self, elements: Elements) -> tuple[float, dict[str, Element], dict[str, HeadMatch]]:
        """The objective at these elements, and better ones. Reads each model once, a block at a time."""
        now = dict(elements)
        matched: dict[str, HeadMatch] = {}
        square = self.agreement.missing(STREAM, now[STREAM]) if self.turns else 0.0
        on_stream = self._nothing() if self.turns else None
        for name, tensors in blocks(self.arch).items():
            if tensors and (name == ENDS or name in self.b.part.groups or self.turns):
                more, part = self._visit(name, now, matched)
                give_back()
                square, on_stream = square + more, on_stream + part if on_stream else None
        if on_stream:
            now[STREAM] = self._turned(on_stream)
        return square, now, matched

    def _visit(self, name: str, now: dict[str, Element], matched: dict[str, HeadMatch]) -> tuple[float, Overlap]:
        """Match one block; what the objective had there, and its overlap on the stream. Nothing of it stays behind."""
        square, on_stream = 0.0, self._nothing()
        for a, b in self._pieces(name):
            if name in self.b.part.groups:
                square += self._match(name, a, b, now, matched)
            else:
                square += _square(a, Acting(self.arch, now), b)
            if self.turns:
                on_stream = on_stream + self._on_stream(a, b, now)
        return square, on_stream

    def _pieces(self, name: str) -> Iterator[tuple[Tensors, Tensors]]:
        return zip(self.a.pieces(name), self.b.pieces(name), strict=True)

    def _nothing(self) -> Overlap:
        return empty(self.arch.sizes.d_model, torch.zeros((), dtype=self.b.dtype, device=self.b.device))

    def _turned(self, found: Overlap) -> Element:
        return match_space(stream_of(self.arch), found.joined(self.agreement.benefit(STREAM, found.primal)))

    def _match(
        self, name: str, a: Tensors, raw: Tensors, now: dict[str, Element], matched: dict[str, HeadMatch]
    ) -> float:
        """Give this space a better element, if there is one; what the objective had here before."""
        elsewhere = Acting(self.arch, {n: g for n, g in now.items() if n != name})
        b = {n: elsewhere.tensor(n, t) for n, t in raw.items()}
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
        return _square(a, Acting(self.arch, {name: element}), b) + self.agreement.missing(name, element)

    def _on_stream(self, a: Tensors, b: Tensors, now: Elements) -> Overlap:
        """What this block adds to the overlap on the stream, with B's other spaces where they have moved to."""
        others = Acting(self.arch, {n: g for n, g in now.items() if n != STREAM})
        moved = {n: others.tensor(n, t) for n, t in b.items()}
        return overlap(self.arch, STREAM, a, moved, moved, now[STREAM], double=True)


def _square(a: Tensors, action: Acting, b: Tensors) -> float:
    return sum(float((a[name] - action.tensor(name, t)).square_().sum(dtype=torch.float64)) for name, t in b.items())


def _doubled(tensors: Tensors) -> dict[str, Tensor]:
    return {name: t.to(torch.float64) for name, t in tensors.items()}
