"""From a path.json, untrusted, to a `PathResult`: absent parts stay absent, malformed ones are errors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from isobasin.errors import IsobasinError
from isobasin.report.fields import ascending, finite, list_at, number, numbers, object_at, strict, text, unlike, wrong
from isobasin.report.result import (
    METRICS,
    PATHS,
    Alignment,
    Barrier,
    LayerChange,
    Line,
    Model,
    Pair,
    PathResult,
    Plane,
    Share,
    Values,
)

SCHEMA = 1
MAX_BYTES = 50_000_000
# Metrics that have a barrier, and the direction in which they get worse.
WORSE = {"loss": 1.0, "accuracy": -1.0}

_ROLES = {"A", "B", "B aligned"}


@runtime_checkable
class Measured(Protocol):
    """Anything that can say what a result file would say of it: a curve of `evaluate_path`."""

    def as_result(self) -> dict[str, Any]: ...


Source = Mapping[str, Any] | Path | str | PathResult | Measured


def read_result(source: Source) -> PathResult:
    """A result from a mapping or from a path.json, checked.

    >>> read_result({"kind": "isobasin.path", "schema": 1, "lambdas": [0, 1],
    ...     "curves": {"A-B": {"naive": {"loss": [1, 2]}}}}).pairs[0].a.label
    'A'
    """
    if isinstance(source, PathResult):
        return source
    if isinstance(source, Measured):
        source = source.as_result()
    document = strict(source if isinstance(source, Mapping) else _load(Path(source)))
    if (document.get("kind"), document.get("schema")) != ("isobasin.path", SCHEMA):
        found = f"{document.get('kind')!r:.40}, schema {document.get('schema')!r:.20}"
        raise IsobasinError(
            f"{_place(source)}: kind {text(found)}, expected 'isobasin.path', schema {SCHEMA}: "
            "give what `isobasin path -o` wrote"
        )
    try:
        return _parse(document)
    except IsobasinError as error:
        raise IsobasinError(str(error).replace("path.json", _place(source), 1)) from error


def barrier_of(lambdas: tuple[float, ...], values: Values, worse: float = 1.0) -> Barrier:
    """max over λ of worse · (L(λ) − ((1−λ) L(0) + λ L(1))), never below 0, and its λ.

    Unknown where the curve has a hole, or no point between its ends.

    >>> barrier_of((0.0, 0.5, 1.0), (1.0, 4.0, 2.0))
    Barrier(height=2.5, lam=0.5)
    """
    known = [value for value in values if value is not None]
    if len(known) < max(len(values), 3):
        return Barrier(None, None)
    first, last = known[0], known[-1]
    rise = [worse * (value - ((1 - lam) * first + lam * last)) for lam, value in zip(lambdas, known)]
    top = max(range(len(rise)), key=rise.__getitem__)
    return Barrier(max(rise[top], 0.0), lambdas[top])


def _place(source: object) -> str:
    return text(source) if isinstance(source, Path | str) else "path.json"


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
            f"{path}: not valid JSON ({text(error)}); expected what `isobasin path -o` wrote"
        ) from error
    if not isinstance(value, dict):
        raise IsobasinError(f"{path}: holds a JSON {type(value).__name__}, expected an object of `isobasin path`")
    return value


def _parse(document: Mapping[str, Any]) -> PathResult:
    lambdas = finite(list_at(document, "lambdas", ""), "lambdas")
    if not ascending(lambdas) or lambdas[0] != 0 or lambdas[-1] != 1:
        raise wrong("lambdas", list(lambdas), "ascending numbers from 0 to 1")
    curves = object_at(document, "curves", "")
    if not curves:
        raise wrong("curves", document.get("curves"), "at least one pair such as 'A-B'")
    models = _models(object_at(document, "models", ""))
    pairs = tuple(_pair(document, key, lambdas, models) for key in curves)
    ends = {model.letter: model for pair in pairs for model in (pair.a, pair.b)}
    return PathResult(
        models=tuple(ends[letter] for letter in sorted(ends)),
        pairs=pairs,
        task=object_at(document, "task", ""),
        provenance=object_at(document, "provenance", ""),
        raw=document,
    )


def _models(entries: Mapping[str, Any]) -> dict[str, Model]:
    facts = {letter: object_at(entries, letter, "models.") for letter in entries}
    return {letter: Model(letter, text(found.get("name") or letter), found) for letter, found in facts.items()}


def _pair(document: Mapping[str, Any], key: str, lambdas: tuple[float, ...], models: Mapping[str, Model]) -> Pair:
    letters = key.split("-")
    if len(letters) != 2 or not all(len(letter) == 1 and letter.isalpha() for letter in letters):
        raise wrong("a pair in curves", key, "two letters such as 'A-B'")
    a, b = (models.get(letter, Model(letter, letter, {})) for letter in letters)
    curves = object_at(object_at(document, "curves", ""), key, "curves.")
    lines = {name: _line(document, key, name, lambdas) for name in PATHS if curves.get(name) is not None}
    if "naive" not in lines:
        raise wrong(f"curves.{key}.naive", None, "an object of curves")
    return Pair(
        key=key,
        a=a,
        b=b,
        lambdas=lambdas,
        lines=lines,
        alignment=_alignment(document, key),
        explain=_explain(document, key),
        plane=_plane(document, key),
    )


def _line(document: Mapping[str, Any], key: str, name: str, lambdas: tuple[float, ...]) -> Line:
    place = f"curves.{key}.{name}."
    entries = object_at(object_at(object_at(document, "curves", ""), key, "curves."), name, f"curves.{key}.")
    curves = {}
    for metric in METRICS:
        if entries.get(metric) is None:
            continue
        values = numbers(list_at(entries, metric, place), f"{place}{metric}")
        if len(values) != len(lambdas):
            raise unlike(
                f"{place}{metric}", f"a list of {len(values)}", f"one value for each of {len(lambdas)} lambdas"
            )
        curves[metric] = values
    if "loss" not in curves:
        raise wrong(f"{place}loss", None, "a list of losses")
    return Line(curves, {metric: _barrier(document, key, name, metric, curves, lambdas) for metric in WORSE})


def _barrier(
    document: Mapping[str, Any],
    key: str,
    name: str,
    metric: str,
    curves: Mapping[str, Values],
    lambdas: tuple[float, ...],
) -> Barrier:
    """What the file says; what its curve says where the file says nothing."""
    computed = barrier_of(lambdas, curves.get(metric, ()), WORSE[metric])
    height, lam = (
        number(
            object_at(object_at(object_at(document, part, ""), key, f"{part}."), name, f"{part}.{key}.").get(metric),
            f"{part}.{key}.{name}.{metric}",
        )
        for part in ("barrier", "barrier_lambda")
    )
    if height is None or computed.height is None:
        return computed
    known = lam is not None and 0 <= lam <= 1
    return Barrier(max(height, 0.0), lam if known else computed.lam)


def _alignment(document: Mapping[str, Any], key: str) -> Alignment | None:
    entry = object_at(object_at(document, "alignment", ""), key, "alignment.")
    if not entry:
        return None
    place = f"alignment.{key}."
    layers = [_layer(item, f"{place}per_layer[{i}]") for i, item in enumerate(list_at(entry, "per_layer", place))]
    return Alignment(
        scope=text(entry.get("scope") or "unknown"),
        matcher=text(entry.get("matcher") or "unknown"),
        stage2=text(entry.get("stage2") or ""),
        before=number(entry.get("distance_before"), f"{place}distance_before"),
        after=number(entry.get("distance_after"), f"{place}distance_after"),
        output_change=number(entry.get("max_output_change"), f"{place}max_output_change"),
        layers=tuple(layers),
    )


def _layer(item: Any, place: str) -> LayerChange:
    if not isinstance(item, Mapping):
        raise wrong(place, item, "an object")
    layer = item.get("layer")
    if layer is not None and (isinstance(layer, bool) or not isinstance(layer, int) or abs(layer) > 10**6):
        raise wrong(f"{place}.layer", layer, "a whole number or null")
    return LayerChange(
        layer=layer,
        space=text(item.get("space") or "heads"),
        before=number(item.get("distance_before"), f"{place}.distance_before"),
        after=number(item.get("distance_after"), f"{place}.distance_after"),
        output_change=number(item.get("max_output_change"), f"{place}.max_output_change"),
    )


def _explain(document: Mapping[str, Any], key: str) -> dict[str, tuple[Share, ...]]:
    entry = object_at(object_at(document, "explain", ""), key, "explain.")
    found = {}
    for name in PATHS:
        place = f"explain.{key}.{name}."
        items = list_at(object_at(entry, name, f"explain.{key}."), "components", place)
        shares = tuple(_share(item, f"{place}components[{i}]") for i, item in enumerate(items))
        if shares:
            found[name] = shares
    return found


def _share(item: Any, place: str) -> Share:
    if not isinstance(item, Mapping):
        raise wrong(place, item, "an object")
    return Share(
        name=text(item.get("name") or "unnamed"),
        barrier=number(item.get("barrier"), f"{place}.barrier"),
        share=number(item.get("share"), f"{place}.share"),
    )


def _plane(document: Mapping[str, Any], key: str) -> Plane | None:
    entry = object_at(object_at(document, "plane", ""), key, "plane.")
    if not entry:
        return None
    place = f"plane.{key}."
    x, y = (finite(list_at(entry, axis, place), f"{place}{axis}") for axis in "xy")
    if not ascending(x) or not ascending(y):
        raise unlike(f"{place}x or y", "not ascending", "at least two ascending numbers")
    loss = tuple(
        numbers(row if isinstance(row, list) else [row], f"{place}loss[{i}]")
        for i, row in enumerate(list_at(entry, "loss", place))
    )
    if len(loss) != len(y) or any(len(row) != len(x) for row in loss):
        raise unlike(f"{place}loss", f"{len(loss)} rows", f"{len(y)} rows of {len(x)}")
    points = object_at(entry, "points", place)
    a, b = key.split("-")
    # A plane names its points by their roles, whichever pair it belongs to.
    roles = {"A": a, "B": b, "B aligned": f"{b} aligned"} if set(points) <= _ROLES else {}
    return Plane(x, y, loss, {text(roles.get(name, name)): _point(points, name, place) for name in points})


def _point(points: Mapping[str, Any], name: str, place: str) -> tuple[float, float]:
    values = finite(list_at(points, name, f"{place}points."), f"{place}points.{name}")
    if len(values) != 2:
        raise wrong(f"{place}points.{name}", list(values), "two numbers")
    return values[0], values[1]
