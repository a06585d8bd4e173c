"""What a report says, as plain values: the verdict, the rows of its tables, the exactness of the alignment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from isobasin.report.fields import short
from isobasin.report.result import METRICS, Barrier, LayerChange, Line, Number, Pair, Share
from isobasin.report.wording import NBSP, listed, percent, plain

CONNECTED_SHARE = 0.05  # of the naive barrier
CONNECTED_NATS = 0.02
RULE = f"connected means a loss barrier of at most {CONNECTED_NATS} nats, or of at most 5{NBSP}% of the naive one"
# The smallest relative step of each floating type: what one rounding may move.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
EXACT = 1e-6  # what counts as rounding wherever the type does not round more coarsely

State = Literal["connected", "already connected", "not connected", "not measured"]


@dataclass(frozen=True)
class Verdict:
    """One answer for one pair, with the numbers it rests on."""

    state: State
    sentence: str
    naive: Number
    aligned: Number

    @property
    def share(self) -> Number:
        """Aligned barrier over naive barrier."""
        if self.naive is None or self.aligned is None or self.naive <= 0:
            return None
        return self.aligned / self.naive


def verdict(pair: Pair) -> Verdict:
    """Whether the straight line between the two models has no barrier worth the name.

    Connected: the aligned loss barrier is at most 5 % of the naive one, or at most 0.02 nats. A naive barrier of at
    most 0.02 nats means connected already. A barrier over a curve with a hole is not measured, never guessed.
    """
    naive = pair.lines["naive"].barrier("loss").height
    line = pair.lines.get("aligned")
    aligned = line.barrier("loss").height if line else None
    state = _state(naive, aligned, has_aligned=line is not None)
    who = f"{_named(pair.a.label)} and {_named(pair.b.label)}"
    return Verdict(state, f"{who} {_because(state, pair, naive, aligned)}", naive, aligned)


def _named(label: str) -> str:
    return short(label, 60)


def _state(naive: Number, aligned: Number, *, has_aligned: bool) -> State:
    if naive is not None and naive <= CONNECTED_NATS:
        return "already connected"
    if aligned is not None:
        small = aligned <= CONNECTED_NATS or (naive is not None and aligned <= CONNECTED_SHARE * naive)
        return "connected" if small else "not connected"
    return "not measured" if has_aligned or naive is None else "not connected"


def _because(state: State, pair: Pair, naive: Number, aligned: Number) -> str:
    if state == "already connected":
        after = "" if aligned is None else f"; after alignment it is {_nats(aligned)}"
        return f"are linearly connected already without alignment: the naive loss barrier is {_nats(naive)}{after}."
    if len(pair.lambdas) < 3:
        return "could not be judged: only the two ends were measured; more --points are needed."
    if state == "not measured":
        name = "aligned" if "aligned" in pair.lines else "naive"
        also = (
            "" if name == "naive" else f"; the naive barrier is {_nats(naive)}" if naive is not None else _holes(pair)
        )
        where = listed(pair.lines[name].holes(pair.lambdas, "loss"))
        return f"could not be judged: the loss on the {name} path is not finite at λ = {where}{also}."
    if "aligned" not in pair.lines:
        return f"are not linearly connected: the naive loss barrier is {_nats(naive)}; alignment was not tried."
    if naive is None:
        start = "are linearly connected after alignment" if state == "connected" else "are not linearly connected"
        return f"{start}: the aligned loss barrier is {_nats(aligned)}{_holes(pair)}."
    return f"{_compared(state, naive, aligned)}, {percent((aligned or 0.0) / naive)} of the naive one."


def _compared(state: State, naive: float, aligned: Number) -> str:
    if state == "connected":
        return f"are linearly connected after alignment: the loss barrier falls from {plain(naive)} to {_nats(aligned)}"
    change = "only falls" if aligned is not None and aligned < naive else "does not fall: it goes"
    return (
        f"are not linearly connected: with alignment the loss barrier {change} from {plain(naive)} to {_nats(aligned)}"
    )


def _holes(pair: Pair) -> str:
    where = listed(pair.lines["naive"].holes(pair.lambdas, "loss"))
    return f"; the naive path has no barrier to compare with, its loss is not finite at λ = {where}"


def _nats(value: Number) -> str:
    return f"{plain(value)} nats"


@dataclass(frozen=True)
class Row:
    """One line of the table: a metric on one path, at both ends, in the middle, and its barrier."""

    metric: str
    path: str
    start: Number
    middle: Number
    end: Number
    barrier: Barrier


def table_rows(pair: Pair) -> list[Row]:
    """Rows by metric, naive before aligned; the middle is the point nearest to λ = ½."""
    return [
        _row(metric, path, line, middle_of(pair.lambdas))
        for metric in METRICS
        for path, line in pair.lines.items()
        if metric in line.curves
    ]


def _row(metric: str, path: str, line: Line, middle: int) -> Row:
    values = line.curves[metric]
    return Row(metric, path, values[0], values[middle], values[-1], line.barrier(metric))


def middle_of(lambdas: Sequence[float]) -> int:
    """The index of the λ nearest to ½."""
    return min(range(len(lambdas)), key=lambda i: abs(lambdas[i] - 0.5))


@dataclass(frozen=True)
class HeatMap:
    """Share of distance removed: one row per layer, one column per space; None where nothing was measured."""

    layers: tuple[int | None, ...]
    spaces: tuple[str, ...]
    cells: tuple[tuple[LayerChange | None, ...], ...]


def heat_map(changes: Sequence[LayerChange]) -> HeatMap:
    """Layers ascending, spaces of the whole model last; spaces in the order in which they occur."""
    layers = sorted({change.layer for change in changes}, key=lambda layer: (layer is None, layer or 0))
    spaces = tuple(dict.fromkeys(change.space for change in changes))
    found = {(change.layer, change.space): change for change in changes}
    cells = tuple(tuple(found.get((layer, space)) for space in spaces) for layer in layers)
    return HeatMap(tuple(layers), spaces, cells)


def layer_name(layer: int | None) -> str:
    return "whole model" if layer is None else f"layer {layer}"


@dataclass(frozen=True)
class Exactness:
    """How far alignment moved the outputs of B, beside the step of its floating type."""

    sentence: str
    floor: Number
    dtype: str
    layers: tuple[LayerChange, ...]


def exactness(pair: Pair) -> Exactness | None:
    """Whether aligned B is still the same function; None where nothing was aligned."""
    if pair.alignment is None:
        return None
    dtype = str(pair.b.facts.get("dtype") or "")
    floor = EPSILON.get(dtype)
    change, b = pair.alignment.output_change, pair.b.letter
    if change is None:
        sentence = f"Whether {b} aligned computes the same function as {b} was not measured."
    elif change <= max(EXACT, 10 * (floor or 0.0)):
        sentence = f"{b} aligned computes the same function as {b}: outputs moved by at most {plain(change, 2)}."
    else:
        sentence = (
            f"Outputs of {b} aligned differ from those of {b} by up to {plain(change, 2)}, more than rounding does."
        )
    layers = tuple(layer for layer in pair.alignment.layers if layer.output_change is not None)
    return Exactness(sentence, floor, short(dtype, 16), layers)


@dataclass(frozen=True)
class ShareRow:
    name: str
    naive: Share | None
    aligned: Share | None


def share_rows(pair: Pair) -> list[ShareRow]:
    """Components of the explanation, in their order, naive beside aligned."""
    found = {path: {share.name: share for share in shares} for path, shares in pair.explain.items()}
    naive, aligned = found.get("naive", {}), found.get("aligned", {})
    return [ShareRow(name, naive.get(name), aligned.get(name)) for name in dict.fromkeys([*naive, *aligned])]


def how_aligned(pair: Pair) -> str:
    """Scope and matcher, for the caption of every figure."""
    found = pair.alignment
    if found is None:
        return "not aligned" if "aligned" not in pair.lines else "alignment not described"
    words = [f"scope {found.scope}", f"matcher {found.matcher}"]
    return ", ".join(words + [f"stage 2 {found.stage2}"] * bool(found.stage2))
