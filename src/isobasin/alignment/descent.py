"""Block coordinate descent: each space in turn takes its best element while the others stay.

One sweep reads each model once, block by block: the units or heads of a block are matched with the stream where it
stands, and the block's overlap on the stream is added up; at the end one Procrustes (or assignment) moves the stream.
The objective never rises from sweep to sweep: an element that would raise it is not taken. Where the stream is held,
blocks are independent and one visit of each is enough.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from isobasin.alignment.heads import HeadMatch, NoHeadMatcher
from isobasin.alignment.problem import AlignmentProblem, Elements, overlap, squared_distance
from isobasin.arch import HeadSpace
from isobasin.errors import VerificationError
from isobasin.groups import Element, Overlap
from isobasin.symmetries.attention import attention_matrices
from isobasin.symmetries.symmetry import symmetry
from isobasin.views import AsFloat64, Tensors, trim_heap
from isobasin.weights import Weights

SWEEPS = 30
TRIAL_SWEEPS = 3  # before the starts are compared
COPY_THRESHOLD = 1e-3  # a start that leaves this share of the squared distance needs no other beside it
# A distance this much smaller than at the start is rounding (squared).
ROUNDING = {torch.float64: 1e-20, torch.float32: 1e-11}
OnSweep = Callable[[int, float], None] | None


@dataclass(frozen=True)
class SweepState:
    """Where the sweeps ended: elements between the normal forms, and the objective sweep by sweep.

    `proposed` is what the last sweep proposed, if no sweep has measured it yet: where to go on from.
    """

    elements: Elements
    history: tuple[float, ...]
    converged: bool
    heads: Mapping[str, HeadMatch] = field(default_factory=dict)
    proposed: tuple[Elements, Mapping[str, HeadMatch]] | None = None

    @property
    def square(self) -> float:
        return self.history[-1]


def solve(problem: AlignmentProblem, *, sweeps: int = SWEEPS, on_sweep: OnSweep = None) -> SweepState:
    """The elements between the normal forms that bring B closest to A."""
    if not problem.moves_stream:
        square, elements, matched = sweep(problem, problem.identity)
        return SweepState(elements, (square,), True, matched)
    if problem.wide:
        return _solve_wide(problem, sweeps, on_sweep)
    return _solve_small(problem, sweeps, on_sweep)


def _solve_small(problem: AlignmentProblem, sweeps: int, on_sweep: OnSweep) -> SweepState:
    """Every start for a few sweeps, the best one to its end; rotations inside heads first, then the whole group."""
    rough = problem.with_matcher(problem.matcher.rough())
    trials = [descend(rough, start, most=TRIAL_SWEEPS) for start in _starts(problem)]
    best = descend(rough, min(trials, key=lambda t: t.square).elements, most=sweeps, on_sweep=on_sweep)
    return descend(problem, best.elements, most=sweeps, on_sweep=on_sweep)


def _solve_wide(problem: AlignmentProblem, sweeps: int, on_sweep: OnSweep) -> SweepState:
    """The same for models whose every sweep takes minutes: the whole group from the first sweep on, no sweep done
    twice, and an end where one gains less than a thousandth."""
    trials: list[SweepState] = []
    for start in _starts(problem):
        trials.append(descend(problem, start, most=2, tolerance=1e-3))
        if trials[-1].square <= COPY_THRESHOLD * trials[-1].history[0]:
            break
    return descend(problem, min(trials, key=lambda t: t.square), most=sweeps, tolerance=1e-3, on_sweep=on_sweep)


def _starts(problem: AlignmentProblem) -> list[dict[str, Element]]:
    start = [from_embeddings(problem), problem.identity]
    known = [stream for stream in problem.streams if stream in problem.activation_term.tables]
    if known:  # the maps of streams from activations alone
        start.append(problem.identity | {s: _nearest(problem, s, _nothing(problem, s)) for s in known})
    return start


def from_embeddings(problem: AlignmentProblem) -> dict[str, Element]:
    """A first guess of the map of each stream, from embeddings, head and the stream's biases alone."""
    here = problem.identity
    for stream in problem.streams:
        found = _nothing(problem, stream)
        for a, b in problem.pieces(stream):
            found = found + _stream_overlap(problem, stream, a, b, here)
        here[stream] = _nearest(problem, stream, found)
    return here


def embedding_distance(a: Weights, b: Weights, *, device: torch.device) -> float:
    """What the best map of the stream leaves between embeddings, positions and heads: ‖A − gB‖² / (‖A‖² + ‖B‖²).

    0 for copies, and next to 1 for models that have nothing in common, the wider their tables the nearer.
    """
    problem = AlignmentProblem(a, b, symmetry(b.arch), NoHeadMatcher(), device)
    action, left, size = problem.act(from_embeddings(problem) if problem.moves_stream else problem.identity), 0.0, 0.0
    for pieces in (each for stream in problem.arch.streams for each in problem.pieces(stream)):
        x, y = ({name: t for name, t in piece.items() if t.ndim > 1} for piece in pieces)  # gains are folded: all 1
        left += squared_distance(x, action, y)
        size += sum(float(t.square().sum(dtype=torch.float64)) for t in (*x.values(), *y.values()))
    return left / max(size, 1e-300)


def descend(
    problem: AlignmentProblem,
    start: Elements | SweepState,
    *,
    most: int,
    tolerance: float = 1e-4,
    on_sweep: OnSweep = None,
) -> SweepState:
    """Sweep until the distance stops falling, from a state or where another descent of this problem stopped.

    The value of a state is measured exactly, by the sweep that starts there.
    """
    past = start if isinstance(start, SweepState) else SweepState(dict(start), (), False)
    if past.converged:
        return past
    state, heads = past.proposed or (past.elements, past.heads)
    best, found, history = past.elements, past.heads, list(past.history) if past.proposed else []
    for number in range(most):
        square, proposed, matched = sweep(problem, state)
        if history and not square < history[-1]:
            return SweepState(best, tuple(history), True, found)
        settled = bool(history) and (
            history[-1] - square <= tolerance * history[-1] or square <= ROUNDING[problem.dtype] * history[0]
        )
        best, found = state, heads
        history.append(square)
        if on_sweep:
            on_sweep(number + 1, square)
        if settled:
            return SweepState(best, tuple(history), True, found)
        state, heads = proposed, matched
    return SweepState(best, tuple(history), False, found, (state, heads))


def sweep(problem: AlignmentProblem, elements: Elements) -> tuple[float, dict[str, Element], dict[str, HeadMatch]]:
    """The objective at these elements, and better ones. Reads each model once, a block at a time."""
    now = dict(elements)
    matched: dict[str, HeadMatch] = {}
    square, on_streams = 0.0, {stream: _nothing(problem, stream) for stream in problem.streams}
    for stream in problem.streams:
        square += problem.activation_term.missing(stream, now[stream])
    for name in problem.blocks:
        square += _visit(problem, name, now, matched, on_streams)
        trim_heap()
    for stream in problem.streams:
        now[stream] = _nearest(problem, stream, on_streams[stream] + _overlap_between_streams(problem, stream, now))
    return square, now, matched


def _visit(
    problem: AlignmentProblem,
    name: str,
    now: dict[str, Element],
    matched: dict[str, HeadMatch],
    on_streams: dict[str, Overlap],
) -> float:
    """Match one block; what the objective had there. Its overlap on each stream is added, and nothing else stays."""
    square = 0.0
    for a, b in problem.pieces(name):
        if name in problem.part.groups and name not in problem.streams:
            square += _match(problem, name, a, b, now, matched)
        else:
            square += squared_distance(a, problem.act(now), b)
        one_stream = {n: t for n, t in b.items() if n not in problem.between_streams}
        for stream in problem.streams:
            on_streams[stream] = on_streams[stream] + _stream_overlap(problem, stream, a, one_stream, now)
    return square


def _match(
    problem: AlignmentProblem,
    name: str,
    a: Tensors,
    raw: Tensors,
    now: dict[str, Element],
    matched: dict[str, HeadMatch],
) -> float:
    """Give this space a better element, if there is one; what the objective had here before."""
    elsewhere = problem.act({n: g for n, g in now.items() if n != name})
    b = {n: elsewhere.tensor(n, t) for n, t in raw.items()}
    before = problem.objective(name, now[name], a, b)
    space = problem.arch.spaces[name]
    proposed: Element
    if isinstance(space, HeadSpace):
        heads_a, heads_b = (attention_matrices(problem.arch, space, AsFloat64(t)) for t in (a, b))
        matched[name] = problem.matcher.match(heads_a, heads_b, space)
        proposed = matched[name].element
        check_element(problem, name, proposed)
    else:
        proposed = _nearest(problem, name, overlap(problem.arch, name, a, b, a, now[name]))
    # With the stream held this is the one visit, and the distances of the stored weights decide afterwards.
    if not problem.moves_stream or problem.objective(name, proposed, a, b) < before:
        now[name] = proposed
    return before


def check_element(problem: AlignmentProblem, name: str, element: Element) -> None:
    """Refuse an element outside the group of its space: it would change the function, however near it is."""
    group = problem.part.groups[name]
    if not group.contains(element):
        raise VerificationError(
            f"{name}: the element found is not in {group}, so it would change the function; nothing was written: "
            "try --stage2 orthogonal, and please report the models"
        )


def _nothing(problem: AlignmentProblem, stream: str) -> Overlap:
    return Overlap.empty(problem.arch.streams[stream].size, torch.zeros((), dtype=problem.dtype, device=problem.device))


def _nearest(problem: AlignmentProblem, name: str, found: Overlap) -> Element:
    benefit = problem.activation_term.benefit(name, found.primal)
    return problem.part.groups[name].nearest(found.with_benefit(benefit))


def _stream_overlap(problem: AlignmentProblem, stream: str, a: Tensors, b: Tensors, now: Elements) -> Overlap:
    """What these tensors add to the overlap on a stream, with B's other spaces where they have moved to."""
    others = problem.act({n: g for n, g in now.items() if n != stream})
    moved = {n: others.tensor(n, t) for n, t in b.items() if stream in problem.arch.spaces_of(n)}
    if not moved:
        return _nothing(problem, stream)
    return overlap(problem.arch, stream, a, moved, moved, now[stream], double=True)


def _overlap_between_streams(problem: AlignmentProblem, stream: str, now: Elements) -> Overlap:
    """The overlap on a stream of the tensors between it and others, with those where they have moved to."""
    found = _nothing(problem, stream)
    for block in (name for name in problem.arch.streams if problem.between_streams & set(problem.arch.blocks[name])):
        for a, b in problem.pieces(block):
            between = {n: t for n, t in b.items() if n in problem.between_streams}
            found = found + _stream_overlap(problem, stream, a, between, now)
    return found
