"""Block coordinate descent: each space in turn takes its best element while the others stay.

One sweep reads each model once, block by block: the units or heads of a block are matched with the stream where it
stands, and the block's overlap on the stream is added up; at the end one Procrustes (or assignment) moves the stream.
The objective never rises from sweep to sweep: an element that would raise it is not taken. Where the stream is held,
blocks are independent and one visit of each is enough; for copies too, as embeddings and head give the stream's map.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from isobasin.alignment.heads import HeadMatch, NoHeadMatcher
from isobasin.alignment.problem import AlignmentProblem, Elements, overlap, squared_distance
from isobasin.arch import HeadSpace
from isobasin.errors import VerificationError
from isobasin.groups import Element, Overlap
from isobasin.rounding import rounding_units
from isobasin.symmetries.attention import attention_matrices
from isobasin.symmetries.symmetry import symmetry
from isobasin.views import AsFloat64, Tensors, trim_heap
from isobasin.weights import Weights

SWEEPS = 30
RELATED_THRESHOLD = 0.5  # of the squared size of embeddings and head; models that one map leaves less of may be copies
BLOCKS_AT_ONCE = 8  # on an accelerator
TRIAL_SWEEPS = 3  # before the starts are compared
COPY_THRESHOLD = 0.03  # a start that leaves this share of the squared distance needs no other beside it
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
    start, left = from_embeddings(problem)
    copy = _as_copy(problem, start) if left <= RELATED_THRESHOLD and not problem.activation_term.tables else None
    if copy is not None:
        if on_sweep:
            on_sweep(1, copy.square)
        return descend(problem, copy, most=sweeps, tolerance=1e-3 if problem.wide else 1e-6, on_sweep=on_sweep)
    solve_from = _solve_wide if problem.wide else _solve_small
    return solve_from(problem, _starts(problem, start), sweeps, on_sweep)


def _as_copy(problem: AlignmentProblem, start: Elements) -> SweepState | None:
    """Where one visit of every block leads, with the stream moved as embeddings and head say; None if that leaves more
    than copies and fine-tuned models do. Converged if what it leaves is rounding."""
    before, after, elements, matched = match_blocks(problem, start)
    if not after <= COPY_THRESHOLD * before:
        return None
    units = [max(r.unit for r in rounding_units(w).values()) for w in (problem.a, problem.b)]
    floor = max(ROUNDING[problem.dtype], sum(unit**2 for unit in units))
    return SweepState(elements, (before, after), after <= floor * before, matched)


def _solve_small(
    problem: AlignmentProblem, starts: list[dict[str, Element]], sweeps: int, on_sweep: OnSweep
) -> SweepState:
    """Every start for a few sweeps, the best one to its end; rotations inside heads first, then the whole group."""
    rough = problem.with_matcher(problem.matcher.rough())
    trials = [descend(rough, start, most=TRIAL_SWEEPS) for start in starts]
    best = descend(rough, min(trials, key=lambda t: t.square).elements, most=sweeps, on_sweep=on_sweep)
    return descend(problem, best.elements, most=sweeps, on_sweep=on_sweep)


def _solve_wide(
    problem: AlignmentProblem, starts: list[dict[str, Element]], sweeps: int, on_sweep: OnSweep
) -> SweepState:
    """The same for models whose every sweep takes minutes: no sweep is done twice, and the descent ends where one gains
    less than a thousandth."""
    rough = problem.with_matcher(problem.matcher.rough())
    trials: list[SweepState] = []
    for start in starts:
        trials.append(descend(rough, start, most=2, tolerance=1e-3))
        if trials[-1].square <= COPY_THRESHOLD * trials[-1].history[0]:
            break
    best = descend(rough, min(trials, key=lambda t: t.square), most=sweeps, tolerance=1e-3, on_sweep=on_sweep)
    _, after, elements, matched = match_blocks(problem, best.elements)
    found = SweepState(elements, (*best.history, after), best.converged, matched)
    if not after <= COPY_THRESHOLD * best.history[0]:
        return found
    return descend(problem, replace(found, converged=False), most=sweeps, tolerance=1e-3, on_sweep=on_sweep)


def _starts(problem: AlignmentProblem, from_tables: dict[str, Element]) -> list[dict[str, Element]]:
    start = [from_tables, problem.identity]
    known = [stream for stream in problem.streams if stream in problem.activation_term.tables]
    if known:  # the maps of streams from activations alone
        start.append(problem.identity | {s: _nearest(problem, s, _nothing(problem, s)) for s in known})
    return start


def from_embeddings(problem: AlignmentProblem) -> tuple[dict[str, Element], float]:
    """A first guess of the map of each stream, from embeddings, head and the stream's biases alone, and what it leaves:
    ‖A − gB‖² / (‖A‖² + ‖B‖²), 0 for copies, and next to 1 for models that have nothing in common."""
    here, left, size = problem.identity, 0.0, 0.0
    for stream in problem.streams:
        found = _nothing(problem, stream)
        for a, b in problem.pieces(stream):
            found = found + _stream_overlap(problem, stream, a, b, here)
            size += _square_of_tables(a) + _square_of_tables(b)
        here[stream] = _nearest(problem, stream, found)
        gain = float((here[stream].signed_matrix().to(found.primal) * found.self_dual).sum())
        left -= 2 * gain
    return here, max(0.0, 1 + left / max(size, 1e-300))


def _square_of_tables(tensors: Tensors) -> float:
    """Of the matrices alone: gains are folded, and the same in every model."""
    return float(sum(t.square().sum(dtype=torch.float64) for t in tensors.values() if t.ndim > 1))


def embedding_distance(a: Weights, b: Weights, *, device: torch.device) -> float:
    """What the best map of the stream leaves between embeddings, positions and heads: ‖A − gB‖² / (‖A‖² + ‖B‖²).

    0 for copies, and next to 1 for models that have nothing in common, the wider their tables the nearer.
    """
    problem = AlignmentProblem(a, b, symmetry(b.arch), NoHeadMatcher(), device)
    elements = from_embeddings(problem)[0] if problem.moves_stream else problem.identity
    action, left, size = problem.act(elements), 0.0, 0.0
    for pieces in (each for stream in problem.arch.streams for each in problem.pieces(stream)):
        x, y = ({name: t for name, t in piece.items() if t.ndim > 1} for piece in pieces)  # gains are folded: all 1
        left += squared_distance(x, action, y)
        size += _square_of_tables(x) + _square_of_tables(y)
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
    on_streams = {stream: _nothing(problem, stream) for stream in problem.streams}
    square, _, now, matched = match_blocks(problem, elements, on_streams)
    for stream in problem.streams:
        now[stream] = _nearest(problem, stream, on_streams[stream] + _overlap_between_streams(problem, stream, now))
        _forget_copies(problem, elements[stream])
    return square, now, matched


def match_blocks(
    problem: AlignmentProblem, elements: Elements, on_streams: dict[str, Overlap] | None = None
) -> tuple[float, float, dict[str, Element], dict[str, HeadMatch]]:
    """Better elements for every block, while the streams stay; the objective at the elements given and at these. The
    overlaps of the blocks on the streams are added to `on_streams`."""
    now = dict(elements)
    matched: dict[str, HeadMatch] = {}
    before = sum(problem.activation_term.missing(stream, now[stream]) for stream in problem.streams)
    after = before
    for name, found in _visits(problem, now, add_overlaps=on_streams is not None):
        before, after = before + found.before, after + found.after
        if found.element is not None:
            now[name] = found.element
        if found.heads is not None:
            matched[name] = found.heads
        if on_streams is not None:
            _add(on_streams, found.on_streams)
        del found  # its tables of the streams are not kept during the next visit
    return before, after, now, matched


def _add(on_streams: dict[str, Overlap], more: Mapping[str, Overlap]) -> None:
    for stream, part in more.items():
        on_streams[stream] = on_streams[stream] + part


@dataclass(frozen=True)
class _Visit:
    """What a visit of one block found: the objective there before and after, the element and how its heads were
    matched, and the overlap of the block on each stream."""

    before: float
    after: float
    element: Element | None = None
    heads: HeadMatch | None = None
    on_streams: Mapping[str, Overlap] = field(default_factory=dict)


def _visits(problem: AlignmentProblem, now: Elements, *, add_overlaps: bool) -> Iterator[tuple[str, _Visit]]:
    """Visit every block in turn, with the elements found so far. On an accelerator several at a time where they share
    no space but the streams: the host solves the assignments and the factors inside heads of some meanwhile."""
    if problem.device.type != "cuda" or not problem.blocks_are_separate:
        for name in problem.blocks:
            past = now.get(name)
            yield name, _visit(problem, name, now, add_overlaps)
            if name not in problem.streams:
                _forget_copies(problem, past, now.get(name))
            if problem.device.type == "cpu":
                trim_heap()
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // BLOCKS_AT_ONCE))
    try:
        with ThreadPoolExecutor(BLOCKS_AT_ONCE) as pool:
            start = dict(now)
            visits = pool.map(lambda name: _visit(problem, name, start, add_overlaps), problem.blocks)
            yield from zip(problem.blocks, visits)
    finally:
        torch.set_num_threads(threads)


def _forget_copies(problem: AlignmentProblem, *elements: Element | None) -> None:
    """Free what elements keep to act faster, where memory is short; there are many more of them than are in use."""
    if not problem.held:
        for element in filter(None, elements):
            element.forget_copies()


def _visit(problem: AlignmentProblem, name: str, now: Elements, add_overlaps: bool) -> _Visit:
    """Match one block. Nothing but its overlap on each stream stays."""
    total, on_streams = _Visit(0.0, 0.0), dict[str, Overlap]()
    for a, b in problem.pieces(name):
        if name in problem.part.groups and name not in problem.streams:
            found = _match(problem, name, a, b, now)
        else:
            square = squared_distance(a, problem.act(now), b)
            found = _Visit(square, square)
        if add_overlaps:
            here = now if found.element is None else {**now, name: found.element}
            one_stream = {n: t for n, t in b.items() if n not in problem.between_streams}
            for stream in problem.streams:
                part = _stream_overlap(problem, stream, a, one_stream, here)
                on_streams[stream] = on_streams[stream] + part if stream in on_streams else part
        total = replace(found, before=total.before + found.before, after=total.after + found.after)
    return replace(total, on_streams=on_streams)


def _match(problem: AlignmentProblem, name: str, a: Tensors, raw: Tensors, now: Elements) -> _Visit:
    """A better element for this space, if there is one."""
    elsewhere = problem.act({n: g for n, g in now.items() if n != name})
    b = {n: elsewhere.tensor(n, t) for n, t in raw.items()}
    before = problem.objective(name, now[name], a, b)
    space = problem.arch.spaces[name]
    proposed: Element
    heads: HeadMatch | None = None
    if isinstance(space, HeadSpace):
        heads_a, heads_b = (attention_matrices(problem.arch, space, AsFloat64(t)) for t in (a, b))
        heads = problem.matcher.match(heads_a, heads_b, space)
        proposed = heads.element
        check_element(problem, name, proposed)
    else:
        proposed = _nearest(problem, name, overlap(problem.arch, name, a, b, a, now[name]))
    after = problem.objective(name, proposed, a, b)
    # With the stream held this is the one visit, and the distances of the stored weights decide afterwards.
    if not problem.moves_stream or after < before:
        return _Visit(before, after, proposed, heads)
    return _Visit(before, before, None, heads)


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
