"""Bringing a whole model B next to A: stream, heads and units together, then every free coordinate."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.action import Action
from isobasin.arch import Space
from isobasin.gauge import Coordinate, NormCoordinate, Stage
from isobasin.groups import Element, Monomial
from isobasin.match.activations_whole import Agreement, check_tables
from isobasin.match.canonical import STREAM, Canonical, blocks
from isobasin.match.matchers import ActivationMatching, Matcher, WeightMatching
from isobasin.match.scales import best_scales
from isobasin.match.sweep import Board, Descent
from isobasin.symmetries import Symmetry, symmetry
from isobasin.transform import Transform, Value
from isobasin.views import Doubled, Tensors, View, chain
from isobasin.weights import Weights

SWEEPS = 30
TRIAL = 3  # sweeps before the starts are compared
WIDE = 2**24  # numbers in a block above which the model is swept in float32, and with few sweeps
FOUND = 1e-3  # a start that leaves this little of the squared distance needs no other beside it


Watch = Callable[[int, float], None] | None


@dataclass(frozen=True)
class Found:
    """Elements between the canonical forms of a scope, the descent that led to them, and the transform they make."""

    elements: Mapping[str, Element]
    descent: Descent
    transform: Transform


def match_whole(
    a: Weights,
    b: Weights,
    matcher: Matcher,
    *,
    device: torch.device,
    sweeps: int = SWEEPS,
    watch: Watch = None,
) -> Found:
    """The elements and coordinates of the matcher's scope that bring B closest to A, by sweeps from several starts."""
    board = _board(a, b, matcher, device)
    if isinstance(matcher, ActivationMatching):
        check_tables(b.arch, matcher.agreements)
        agreement = Agreement.of(matcher.agreements, matcher.pull, board.a, board.b)
        board = replace(board, agreement=agreement)
    descent = _swept_once(board, sweeps, watch) if _is_wide(b) else _swept(board, sweeps, watch)
    elements = {
        name: board.a.balance(name).inverse() @ g @ board.b.balance(name) if _scaled(b, name) else g
        for name, g in descent.elements.items()
    }
    return Found(elements, descent, dressed(a, b, board.b.part, elements, device))


def ends_left(a: Weights, b: Weights, *, device: torch.device) -> float:
    """What the best map of the stream leaves between embeddings, positions and heads: ‖A − gB‖² / (‖A‖² + ‖B‖²).

    0 for copies, and next to 1 for models that have nothing in common, the wider their tables the nearer.
    """
    return _board(a, b, WeightMatching(scope="model"), device).ends_left()


def _board(a: Weights, b: Weights, matcher: Matcher, device: torch.device) -> Board:
    part, dtype = symmetry(b.arch).scoped(matcher.scope), torch.float32 if _is_wide(b) else torch.float64
    return Board(Canonical(a, part, dtype, device), Canonical(b, part, dtype, device), matcher)


def _swept(board: Board, sweeps: int, watch: Watch) -> Descent:
    """Every start for a few sweeps, the best one to its end; rotations inside heads first, then the whole group."""
    rough = replace(board, matcher=_rough(board.matcher))
    trials = [rough.descend(start, most=TRIAL) for start in _starts(board)]
    best = rough.descend(min(trials, key=lambda t: t.square).elements, most=sweeps, watch=watch)
    return board.descend(best.elements, most=sweeps, watch=watch)


def _swept_once(board: Board, sweeps: int, watch: Watch) -> Descent:
    """The same for models whose every sweep takes minutes: the whole group from the first sweep on, none of them done
    twice, and an end where one gains less than a thousandth."""
    trials: list[Descent] = []
    for start in _starts(board):
        trials.append(board.descend(start, most=2, tolerance=1e-3))
        if trials[-1].square <= FOUND * trials[-1].history[0]:
            break
    return board.descend(min(trials, key=lambda t: t.square), most=sweeps, tolerance=1e-3, watch=watch)


def _rough(matcher: Matcher) -> Matcher:
    """Rotations inside heads while the stream still moves: they have a closed form, and the rest can wait."""
    if isinstance(matcher, WeightMatching | ActivationMatching):
        return replace(matcher, stage2="orthogonal")
    return matcher


def _starts(board: Board) -> list[dict[str, Element]]:
    if not board.turns:
        return [board.identity]
    guess = [board.from_agreement()] if STREAM in board.agreement.tables else []
    return [board.from_ends(), board.identity, *guess]


def _scaled(b: Weights, name: str) -> bool:
    space = b.arch.spaces[name]
    return isinstance(space, Space) and space.kind in ("positive", "scaled")


def _is_wide(b: Weights) -> bool:
    return max(sum(torch.Size(b.arch.shapes[n]).numel() for n in names) for names in blocks(b.arch).values()) > WIDE


def dressed(
    a: Weights,
    b: Weights,
    part: Symmetry,
    elements: Mapping[str, Element],
    device: torch.device,
    *,
    folded: bool = False,
) -> Transform:
    """The elements, with every free coordinate at the value nearest to A's, and units scaled to A's own.

    Where `folded`, gains and shifts stay folded instead of taking A's values.
    """
    reference, moving = Doubled(a, device), Doubled(b, device)
    coordinates = [c for c in part.coordinates.values() if c.usable(reference) and c.usable(moving)]
    view, gauge = _dress(b, elements, coordinates, reference, moving, folded)
    finer = {name: _rescaled(name, g, view, reference, b) for name, g in elements.items() if _scaled(b, name)}
    if finer:
        elements = {**elements, **finer}
        view, gauge = _dress(b, elements, coordinates, reference, moving, folded)
    return Transform(b.arch.family, dict(b.arch.spaces), elements, gauge)


def _dress(
    b: Weights,
    elements: Mapping[str, Element],
    coordinates: list[Coordinate],
    reference: Tensors,
    moving: Tensors,
    folded: bool,
) -> tuple[Tensors, dict[str, Value]]:
    """B after the elements have acted on its folded form, with the coordinates set one stage after the other."""
    norms = {c: _gain_and_shift(c, moving, reference) for c in coordinates if isinstance(c, NormCoordinate)}
    if folded:
        norms = {c: c.canonical(value) for c, value in norms.items()}
    flat = View(moving, chain(*(c.set(c.canonical(value)) for c, value in norms.items())))
    view: Tensors = View(flat, Action(b.arch, elements).changes())
    gauge: dict[str, Value] = {}
    for stage in Stage:
        chosen = [c for c in coordinates if c.stage == stage]
        # A reader's mean is set before its norm, but what is nearest shows only behind A's own gain and shift.
        seen = View(view, chain(*(c.set(value) for c, value in norms.items()))) if stage < Stage.NORM else view
        after = {c: norms[c] if isinstance(c, NormCoordinate) else c.nearest(seen, reference) for c in chosen}
        gauge |= {c.name: Value(_as_tall(c.read(moving), value).cpu(), value.cpu()) for c, value in after.items()}
        view = View(view, chain(*(c.set(value) for c, value in after.items()))) if chosen else view
    return view, gauge


def _gain_and_shift(c: NormCoordinate, moving: Tensors, reference: Tensors) -> Tensor:
    """A's gain, and its shift unless one of the two models has one that its readers can not take up."""
    return c.read(reference)[: len(c.read(moving))]


def _as_tall(value: Tensor, like: Tensor) -> Tensor:
    return value[: len(like)] if value.dim() else value


def _rescaled(name: str, g: Element, view: Tensors, reference: Tensors, b: Weights) -> Element:
    """The unit scales that are best beside A as it is, gains and all; folded forms weigh inputs differently."""
    assert isinstance(g, Monomial)
    arch, sums = b.arch, {key: torch.zeros(g.n, dtype=torch.float64) for key in ("u", "d", "p", "q")}
    for tensor in blocks(arch)[name]:
        for axis, words in enumerate(arch.tensors[tensor].roles[0].axes):
            term = words.terms[0] if len(words.terms) == 1 else None
            if term is None or term.name != name or term.magnitude:
                continue
            mine, theirs = (t[tensor].movedim(axis, 0).reshape(g.n, -1).cpu() for t in (view, reference))
            size, product = ("d", "q") if term.dual else ("u", "p")
            sums[size] += mine.square().sum(1)
            sums[product] += (mine * theirs).sum(1)
    space = arch.spaces[name]
    assert isinstance(space, Space)
    return Monomial(g.index, g.scale * best_scales(**sums, signs=space.kind == "scaled"))
