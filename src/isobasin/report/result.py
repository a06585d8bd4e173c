"""Reads and validates path.json, and derives what figures and pages state about it: verdict, table rows, exactness.

An untrusted document becomes a frozen `PathResult`, or a one-line error. Absent parts stay absent. A malformed part is
an error that names its place in the document.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from isobasin.errors import IsobasinError
from isobasin.files import strict_json
from isobasin.path.barrier import CONNECTED_NATS, RISING, barrier, is_connected, midpoint
from isobasin.report.text import NBSP, Number, clean, number, number_list, percent, short

SCHEMA = 1
METRICS = ("loss", "accuracy", "perplexity", "bits_per_byte")
PATHS = ("naive", "aligned")
WITH_BARRIER = ("loss", "accuracy")
MAX_BYTES = 50_000_000
MAX_ABS = 1e30  # a larger number counts as not finite: differences of such numbers could overflow in a figure
MAX_ITEMS = 10_001  # points of a curve, rows of a plane, layers
_MAX_DEPTH = 20
RULE = f"connected means a loss barrier of at most {CONNECTED_NATS} nats, or of at most 5{NBSP}% of the naive one"
# Machine epsilon of each floating-point type.
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
EXACT = 1e-6  # an output change up to this counts as rounding; 10 epsilon where that is more
# The loss plane is drawn in bands of these colours, interpolated.
N_BANDS = 12
SAND = ("#fffdf4", "#fdf0cf", "#f6d9a0", "#e8b873", "#cf8f4e", "#a96532")
_CEILING = 0.95  # losses above this quantile share the last band: a few large losses must not hide the low ones

State = Literal["connected", "already connected", "not connected", "not measured"]

Values = tuple[Number, ...]


@dataclass(frozen=True)
class ModelInfo:
    """One end of a path: its letter (A, B, C), its name, and what the file says about it."""

    letter: str
    name: str
    details: Mapping[str, Any]

    @property
    def label(self) -> str:
        return self.letter if self.name == self.letter else f"{self.letter} ({self.name})"


@dataclass(frozen=True)
class BarrierPoint:
    """The largest rise of a curve above the straight line between its ends (accuracy: fall below), and its λ."""

    height: Number
    lam: Number


@dataclass(frozen=True)
class PathCurves:
    """One path, naive or aligned: values of each metric at each λ, and the barriers of loss and accuracy."""

    curves: Mapping[str, Values]
    barriers: Mapping[str, BarrierPoint]

    def barrier(self, metric: str) -> BarrierPoint:
        return self.barriers.get(metric, BarrierPoint(None, None))

    def not_finite(self, lambdas: tuple[float, ...], metric: str) -> tuple[float, ...]:
        """Each λ at which the metric was not finite."""
        return tuple(lam for lam, value in zip(lambdas, self.curves.get(metric, ())) if value is None)


@dataclass(frozen=True)
class LayerChange:
    """What alignment did to one space of one layer; layer None: a space of the whole model."""

    layer: int | None
    space: str
    before: Number
    after: Number
    output_change: Number

    @property
    def gain(self) -> Number:
        """1 − after/before: the share of the distance that alignment removed; None where there was none."""
        if self.before is None or self.after is None or self.before <= 0:
            return None
        return 1 - self.after / self.before


@dataclass(frozen=True)
class AlignmentSummary:
    """How B was aligned to A, and what that changed."""

    scope: str
    matcher: str
    stage2: str
    before: Number
    after: Number
    output_change: Number
    layers: tuple[LayerChange, ...]


@dataclass(frozen=True)
class LossPlane:
    """Loss on a plane through A, B and aligned B; one row of `loss` for each y."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    loss: tuple[Values, ...]
    points: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class PairResult:
    """Two models and the paths between them: λ = 0 is `a`, λ = 1 is `b`."""

    key: str
    a: ModelInfo
    b: ModelInfo
    lambdas: tuple[float, ...]
    paths: Mapping[str, PathCurves]
    alignment: AlignmentSummary | None
    explain: Mapping[str, Mapping[str, Number]]  # by path: the share of the barrier that each component carries
    plane: LossPlane | None

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(m for m in METRICS if any(m in path.curves for path in self.paths.values()))


@dataclass(frozen=True)
class PathResult:
    """A whole file. `raw` is what was read, as strict JSON values."""

    models: tuple[ModelInfo, ...]
    pairs: tuple[PairResult, ...]
    task: Mapping[str, Any]
    provenance: Mapping[str, Any]
    raw: Mapping[str, Any]

    def pair(self, key: str | None) -> PairResult | None:
        """The pair of that name, or the first where no name is given."""
        return next((pair for pair in self.pairs if key in (None, pair.key)), None)


@runtime_checkable
class HasResult(Protocol):
    """An object that can be written as a result file, such as a curve of `evaluate_path`."""

    def to_dict(self) -> dict[str, Any]: ...


Source = Mapping[str, Any] | Path | str | PathResult | HasResult


def read_result(source: Source) -> PathResult:
    """Read and validate a result from a mapping or a path.json."""
    if isinstance(source, PathResult):
        return source
    if isinstance(source, HasResult):
        source = source.to_dict()
    name = clean(source) if isinstance(source, Path | str) else "path.json"
    try:
        document = strict_json(source if isinstance(source, Mapping) else _load(Path(source)), max_depth=_MAX_DEPTH)
    except ValueError as error:
        whole = Field(None, "the document")
        raise whole.error("a file of `isobasin path`", f"nested deeper than {_MAX_DEPTH}") from error
    if (document.get("kind"), document.get("schema")) != ("isobasin.path", SCHEMA):
        found = f"{document.get('kind')!r:.40}, schema {document.get('schema')!r:.20}"
        raise IsobasinError(
            f"{name}: kind {clean(found)}, expected 'isobasin.path', schema {SCHEMA}: "
            "give what `isobasin path -o` wrote"
        )
    try:
        return _parse(Field(document, ""))
    except IsobasinError as error:
        raise IsobasinError(str(error).replace("path.json", name, 1)) from error


def barrier_of(lambdas: tuple[float, ...], values: Values, *, rising: bool = False) -> BarrierPoint:
    """The barrier as `path.curve.barrier` defines it.

    Unknown where a value is missing, or where there is no point between the ends.

    >>> barrier_of((0.0, 0.5, 1.0), (1.0, 4.0, 2.0))
    BarrierPoint(height=2.5, lam=0.5)
    """
    known = [value for value in values if value is not None]
    if len(known) < max(len(values), 3):
        return BarrierPoint(None, None)
    found = barrier(lambdas, known, rising=rising)
    return BarrierPoint(found.height, found.lam)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise IsobasinError(f"{path}: larger than {MAX_BYTES:,} bytes, expected a file of `isobasin path`")
        value = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise IsobasinError(
            f"{path}: can not be read ({error.strerror}); expected a file of `isobasin path`"
        ) from error
    except (ValueError, RecursionError) as error:
        raise IsobasinError(
            f"{path}: not valid JSON ({clean(error)}); expected what `isobasin path -o` wrote"
        ) from error
    if not isinstance(value, dict):
        raise IsobasinError(f"{path}: holds a JSON {type(value).__name__}, expected an object of `isobasin path`")
    return value


@dataclass(frozen=True)
class Field:
    """A value of the document and its place in it, such as `curves.A-B.naive.loss[3]`; None where it is absent."""

    value: Any
    place: str

    def error(self, expected: str, found: str | None = None) -> IsobasinError:
        """The error for a value that is not what it should be; `found` describes it where it is too long to show."""
        found = clean(repr(self.value))[:60] if found is None else found
        return IsobasinError(
            f"path.json: {clean(self.place)} is {found}, expected {expected}; write the file again by `isobasin path`"
        )

    def members(self) -> Mapping[str, Any]:
        """The members of the JSON object; none where it is absent."""
        if self.value is None:
            return {}
        if not isinstance(self.value, Mapping):
            raise self.error("an object")
        return self.value

    def __getitem__(self, key: str) -> "Field":
        """One member of the JSON object."""
        return Field(self.members().get(key), f"{self.place}.{key}" if self.place else key)

    def entries(self) -> "list[Field]":
        """The entries of the list; none where it is absent."""
        if self.value is None:
            return []
        if not isinstance(self.value, list | tuple):
            raise self.error("a list")
        if len(self.value) > MAX_ITEMS:
            raise self.error(f"at most {MAX_ITEMS} entries", f"a list of {len(self.value)}")
        return [Field(value, f"{self.place}[{i}]") for i, value in enumerate(self.value)]

    def objects(self) -> "list[Field]":
        """The entries of a list of objects."""
        found = self.entries()
        for entry in found:
            if not isinstance(entry.value, Mapping):
                raise entry.error("an object")
        return found

    def text(self, default: str) -> str:
        return clean(self.value or default)

    def number(self) -> Number:
        """A finite number, or None for null and what is not finite."""
        value = self.value
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error("a number or null")
        return float(value) if abs(value) <= MAX_ABS else None

    def numbers(self) -> Values:
        return tuple(entry.number() for entry in self.entries())

    def finite(self) -> tuple[float, ...]:
        """Numbers none of which may be missing."""
        found = []
        for entry in self.entries():
            value = entry.number()
            if value is None:
                raise entry.error("a finite number")
            found.append(value)
        return tuple(found)


def _ascending(values: tuple[float, ...]) -> bool:
    return len(values) >= 2 and all(a < b for a, b in pairwise(values))


def _parse(document: Field) -> PathResult:
    lambdas = document["lambdas"].finite()
    if not _ascending(lambdas) or lambdas[0] != 0 or lambdas[-1] != 1:
        raise Field(list(lambdas), "lambdas").error("ascending numbers from 0 to 1")
    if not document["curves"].members():
        raise document["curves"].error("at least one pair such as 'A-B'")
    entries = {letter: document["models"][letter] for letter in document["models"].members()}
    models = {letter: ModelInfo(letter, e["name"].text(letter), e.members()) for letter, e in entries.items()}
    pairs = tuple(_pair(document, key, lambdas, models) for key in document["curves"].members())
    ends = {model.letter: model for pair in pairs for model in (pair.a, pair.b)}
    return PathResult(
        models=tuple(ends[letter] for letter in sorted(ends)),
        pairs=pairs,
        task=document["task"].members(),
        provenance=document["provenance"].members(),
        raw=document.members(),
    )


def _pair(document: Field, key: str, lambdas: tuple[float, ...], models: Mapping[str, ModelInfo]) -> PairResult:
    letters = key.split("-")
    if len(letters) != 2 or not all(len(letter) == 1 and letter.isalpha() for letter in letters):
        raise Field(key, "a pair in curves").error("two letters such as 'A-B'")
    a, b = (models.get(letter, ModelInfo(letter, letter, {})) for letter in letters)
    curves = document["curves"][key]
    if curves["naive"].value is None:
        raise curves["naive"].error("an object of curves")
    return PairResult(
        key=key,
        a=a,
        b=b,
        lambdas=lambdas,
        paths={name: _path(document, key, name, lambdas) for name in PATHS if curves[name].value is not None},
        alignment=_alignment(document["alignment"][key]),
        explain=_explain(document["explain"][key]),
        plane=_plane(document["plane"][key], *letters),
    )


def _path(document: Field, key: str, name: str, lambdas: tuple[float, ...]) -> PathCurves:
    entry = document["curves"][key][name]
    curves = {metric: entry[metric].numbers() for metric in METRICS if entry[metric].value is not None}
    for metric, values in curves.items():
        if len(values) != len(lambdas):
            raise entry[metric].error(f"one value for each of {len(lambdas)} lambdas", f"a list of {len(values)}")
    if "loss" not in curves:
        raise entry["loss"].error("a list of losses")
    barriers = {}
    for metric in WITH_BARRIER:
        height, lam = (document[part][key][name][metric].number() for part in ("barrier", "barrier_lambda"))
        computed = barrier_of(lambdas, curves.get(metric, ()), rising=metric in RISING)
        barriers[metric] = computed
        if height is not None and computed.height is not None:  # the file gives it, and its curve has one
            place = lam if lam is not None and 0 <= lam <= 1 else computed.lam
            barriers[metric] = BarrierPoint(max(height, 0.0), place)
    return PathCurves(curves, barriers)


def _alignment(entry: Field) -> AlignmentSummary | None:
    if not entry.members():
        return None
    return AlignmentSummary(
        scope=entry["scope"].text("unknown"),
        matcher=entry["matcher"].text("unknown"),
        stage2=entry["stage2"].text(""),
        before=entry["distance_before"].number(),
        after=entry["distance_after"].number(),
        output_change=entry["max_output_change"].number(),
        layers=tuple(_layer(item) for item in entry["per_layer"].objects()),
    )


def _layer(entry: Field) -> LayerChange:
    layer = entry["layer"].value
    if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or abs(layer) > 10**6):
        raise entry["layer"].error("a whole number or null")
    return LayerChange(
        layer=layer,
        space=entry["space"].text("heads"),
        before=entry["distance_before"].number(),
        after=entry["distance_after"].number(),
        output_change=entry["max_output_change"].number(),
    )


def _explain(entry: Field) -> dict[str, dict[str, Number]]:
    items = {path: entry[path]["components"].objects() for path in PATHS}
    return {
        path: {c["name"].text("unnamed"): c["share"].number() for c in found} for path, found in items.items() if found
    }


def _plane(entry: Field, a: str, b: str) -> LossPlane | None:
    if not entry.members():
        return None
    x, y = entry["x"].finite(), entry["y"].finite()
    if not _ascending(x) or not _ascending(y):
        raise Field(None, f"{entry.place}.x or y").error("at least two ascending numbers", "not ascending")
    loss = tuple(row.numbers() for row in entry["loss"].entries())
    if len(loss) != len(y) or any(len(row) != len(x) for row in loss):
        raise entry["loss"].error(f"{len(y)} rows of {len(x)}", f"{len(loss)} rows")
    points = entry["points"].members()
    # A plane names its points by their roles, whichever pair it belongs to.
    roles = {"A": a, "B": b, "B aligned": f"{b} aligned"}
    if not set(points) <= set(roles):
        roles = {}
    places = {}
    for name in points:
        values = entry["points"][name].finite()
        if len(values) != 2:
            raise entry["points"][name].error("two numbers")
        places[clean(roles.get(name, name))] = (values[0], values[1])
    return LossPlane(x, y, loss, places)


# What figures and pages state about a result.


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
    """Decide by RULE whether two models are linearly connected. A naive barrier of at most 0.02 nats means connected
    already. A curve with a value that is not finite has no barrier: not measured."""
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
    return f"{start} from {number(naive)} to {_nats(aligned)}, {percent(aligned / naive)} of the naive one."


def _no_naive_barrier(pair: PairResult) -> str:
    return f"; the naive path has no barrier to compare with, its loss is not finite at λ = {_gaps(pair, 'naive')}"


def _gaps(pair: PairResult, path: str) -> str:
    return number_list(pair.paths[path].not_finite(pair.lambdas, "loss"))


def _nats(value: Number) -> str:
    return f"{number(value)} nats"


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
    moved = number(change, 2)
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
