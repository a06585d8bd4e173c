"""What figures and pages state about a result, as plain values: the verdict, table rows, exactness of the alignment."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from isobasin.path.curve import CONNECTED_NATS, is_connected, midpoint
from isobasin.report import text
from isobasin.report.result import METRICS, BarrierPoint, LayerChange, LossPlane, ModelInfo, PairResult
from isobasin.report.text import Number, short

RULE = f"connected means a loss barrier of at most {CONNECTED_NATS} nats, or of at most 5{text.NBSP}% of the naive one"
# Machine epsilon of each floating-point type.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
EXACT = 1e-6  # an output change up to this counts as rounding; 10 epsilon where that is more
# The loss plane is drawn in bands of these colours, interpolated.
N_BANDS = 12
SAND = ("#fffdf4", "#fdf0cf", "#f6d9a0", "#e8b873", "#cf8f4e", "#a96532")
_CEILING = 0.95  # losses above this quantile share the last band: a few large losses must not hide the low ones

State = Literal["connected", "already connected", "not connected", "not measured"]


@dataclass(frozen=True)
class PathVerdict:
    """Whether a pair is linearly connected, and the loss barriers that decide it."""

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


def verdict(pair: PairResult) -> PathVerdict:
    """Decide whether two models are linearly connected.

    Connected: the aligned loss barrier is at most 5 % of the naive one, or at most 0.02 nats. A naive barrier of at
    most 0.02 nats means connected already. A curve with a value that is not finite has no barrier: not measured.
    """
    naive = pair.paths["naive"].barrier("loss").height
    path = pair.paths.get("aligned")
    aligned = path.barrier("loss").height if path else None
    state = _state(naive, aligned, has_aligned=path is not None)
    models = f"{short(pair.a.label, 60)} and {short(pair.b.label, 60)}"
    return PathVerdict(state, f"{models} {_reason(state, pair, naive, aligned)}", naive, aligned)


def _state(naive: Number, aligned: Number, *, has_aligned: bool) -> State:
    if naive is not None and naive <= CONNECTED_NATS:
        return "already connected"
    if aligned is not None:
        return "connected" if is_connected(aligned, naive) else "not connected"
    return "not measured" if has_aligned or naive is None else "not connected"


def _reason(state: State, pair: PairResult, naive: Number, aligned: Number) -> str:
    """The second half of the verdict's sentence."""
    if state == "already connected":
        after = "" if aligned is None else f"; after alignment it is {_nats(aligned)}"
        return f"are linearly connected already without alignment: the naive loss barrier is {_nats(naive)}{after}."
    if len(pair.lambdas) < 3:
        return "could not be judged: only the two ends were measured; more --points are needed."
    if state == "not measured":
        name = "aligned" if "aligned" in pair.paths else "naive"
        also = _no_naive_barrier(pair) if naive is None else f"; the naive barrier is {_nats(naive)}"
        start = f"could not be judged: the loss on the {name} path is not finite at λ = {_gaps(pair, name)}"
        return f"{start}{also if name == 'aligned' else ''}."
    if "aligned" not in pair.paths:
        return f"are not linearly connected: the naive loss barrier is {_nats(naive)}; alignment was not tried."
    if naive is None or aligned is None:
        start = "are linearly connected after alignment" if state == "connected" else "are not linearly connected"
        return f"{start}: the aligned loss barrier is {_nats(aligned)}{_no_naive_barrier(pair)}."
    if state == "connected":
        start = "are linearly connected after alignment: the loss barrier falls"
    else:
        change = "only falls" if aligned < naive else "does not fall: it goes"
        start = f"are not linearly connected: with alignment the loss barrier {change}"
    return f"{start} from {text.number(naive)} to {_nats(aligned)}, {text.percent(aligned / naive)} of the naive one."


def _no_naive_barrier(pair: PairResult) -> str:
    return f"; the naive path has no barrier to compare with, its loss is not finite at λ = {_gaps(pair, 'naive')}"


def _gaps(pair: PairResult, path: str) -> str:
    return text.number_list(pair.paths[path].not_finite(pair.lambdas, "loss"))


def _nats(value: Number) -> str:
    return f"{text.number(value)} nats"


@dataclass(frozen=True)
class TableRow:
    """A metric on one path: at both ends, at the midpoint, and its barrier."""

    metric: str
    path: str
    start: Number
    middle: Number
    end: Number
    barrier: BarrierPoint


def table_rows(pair: PairResult) -> list[TableRow]:
    """Rows by metric, naive before aligned; the midpoint is the λ nearest to ½."""
    middle = midpoint(pair.lambdas)
    return [
        TableRow(metric, name, values[0], values[middle], values[-1], path.barrier(metric))
        for metric in METRICS
        for name, path in pair.paths.items()
        if (values := path.curves.get(metric)) is not None
    ]


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


def epsilon_of(model: ModelInfo) -> Number:
    """The epsilon of the model's floating-point type, if that is known."""
    return EPSILON.get(str(model.details.get("dtype")))


def exactness(pair: PairResult) -> str | None:
    """Whether aligned B is still the same function, as a sentence; None where nothing was aligned."""
    if pair.alignment is None:
        return None
    change, b = pair.alignment.output_change, pair.b.letter
    if change is None:
        return f"Whether {b} aligned computes the same function as {b} was not measured."
    moved = text.number(change, 2)
    if change <= max(EXACT, 10 * (epsilon_of(pair.b) or 0.0)):
        return f"{b} aligned computes the same function as {b}: outputs moved by at most {moved}."
    return f"Outputs of {b} aligned differ from those of {b} by up to {moved}, more than rounding does."


def components(pair: PairResult) -> list[str]:
    """The components of the explanation, in their order."""
    return list(dict.fromkeys(name for shares in pair.explain.values() for name in shares))


def bands(plane: LossPlane) -> tuple[float, ...] | None:
    """Ascending levels from the lowest loss, growing quadratically; None where there is nothing to tell apart."""
    known = sorted(value for row in plane.loss for value in row if value is not None)
    if not known:
        return None
    low, high = known[0], known[min(int(_CEILING * len(known)), len(known) - 1)]
    high = high if high > low else known[-1]
    levels = tuple(low + (high - low) * (i / N_BANDS) ** 2 for i in range(N_BANDS + 1))
    # Equal neighbours: the range is below the resolution of the numbers.
    return levels if all(a < b for a, b in pairwise(levels)) else None


def how_aligned(pair: PairResult) -> str:
    """Scope and matcher, for the caption of every figure."""
    found = pair.alignment
    if found is None:
        return "not aligned" if "aligned" not in pair.paths else "alignment not described"
    words = [f"scope {found.scope}", f"matcher {found.matcher}"]
    return ", ".join(words + [f"stage 2 {found.stage2}"] * bool(found.stage2))
