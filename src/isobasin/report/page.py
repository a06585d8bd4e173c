"""The report of path results: one self-contained HTML page that makes no request and allows scripts only by hash."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.files import atomic_write, check_output_file
from isobasin.report import svg, text
from isobasin.report.layout import (
    TERMS,
    Row,
    assemble,
    bar_cell,
    figure,
    json_details,
    linked,
    scroll_table,
    swatch,
    table_row,
    term,
    term_id,
)
from isobasin.report.result import (
    RULE,
    LayerChange,
    PairResult,
    PathCurves,
    PathResult,
    Source,
    bands,
    components,
    epsilon_of,
    exactness,
    heat_map,
    how_aligned,
    layer_name,
    read_result,
    table_rows,
    verdict,
)
from isobasin.report.text import Child, Html, concat, element, short

MAX_BYTES = 3_000_000
_HASH_LENGTH = 16  # characters of a hash that are shown; the whole hash is in the title attribute
_MAX_NESTING = 3  # of provenance; deeper objects are shown as they are
_COLOURED = ("naive", "aligned", "weights", "learned", "activations", "reference", "other")
_STATES = {
    "connected": "Connected",
    "already connected": "Connected already",
    "not connected": "Not connected",
    "not measured": "Not measured",
}


def write_report(results: Sequence[Source], out: str | Path, *, force: bool = False) -> Path:
    """Write the page for one or more results of `isobasin path`; the write is atomic."""
    path = Path(out)
    inputs = [Path(source) for source in results if isinstance(source, str | Path)]
    check_output_file(path, force=force, kind="page", inputs=inputs)
    page = render([read_result(source) for source in results]).encode("utf-8")
    if len(page) > MAX_BYTES:
        raise IsobasinError(
            f"{path}: the page would have {len(page) / 1e6:.1f} MB, expected at most {MAX_BYTES / 1e6:.0f}; "
            "report fewer files at once, or measure a coarser --plane"
        )
    atomic_write(path, page)
    return path


def render(results: Sequence[PathResult]) -> str:
    """The text of the page."""
    if not results:
        raise IsobasinError("no result to report, expected at least one path.json")
    pairs = [pair for result in results for pair in result.pairs]
    anchors = [f"r{i + 1}-{pair.key}" for i, result in enumerate(results) for pair in result.pairs]
    models = {(_ends(p), p.a.details.get("sha256"), p.b.details.get("sha256")) for p in pairs}
    again = len(models) < len(pairs)  # a pair that was aligned in several ways
    groups = _aligned_in_several_ways(pairs)
    body: list[Html | None] = [_overview(pairs, anchors, again) if len(pairs) > 1 else None]
    body += [_together(group, len(pairs) + i) for i, group in enumerate(groups)]
    chart = 0
    for i, result in enumerate(results):
        for pair in result.pairs:
            heading = f"{_ends(pair)}: {how_aligned(pair)}" if again else _ends(pair)
            body.append(_pair_section(result, pair, anchors[chart], chart, heading, alone=len(pairs) == 1))
            chart += 1
        title = "Provenance" if len(results) == 1 else f"Provenance of result {i + 1}"
        body.append(_provenance_section(result, i, title))
    title = f"Which of {len(models)} pairs of models are linearly connected?"
    if len(models) == 1:
        title = f"Are {short(pairs[0].a.name, 40)} and {short(pairs[0].b.name, 40)} linearly connected?"
    charts = [_chart_data(pair, pair.paths) for pair in pairs]
    charts += [_chart_data(group[0], _paths_of(group)) for group in groups]
    return assemble(title, concat(body), charts=charts, results=[result.raw for result in results])


def _ends(pair: PairResult) -> str:
    return f"{pair.a.label} to {pair.b.label}"


def _overview(pairs: Sequence[PairResult], anchors: Sequence[str], again: bool) -> Html:
    """The verdicts of all pairs; where one occurs `again`, also how each was aligned."""
    rows = []
    for pair, anchor in zip(pairs, anchors):
        found = verdict(pair)
        link = element("a", f"{short(pair.a.label, 24)} to {short(pair.b.label, 24)}", href=f"#{anchor}")
        numbers = (text.number(found.naive), text.number(found.aligned), text.percent(found.share))
        rows.append(table_row(link, *([how_aligned(pair)] if again else []), found.state, *numbers))
    caption = "Loss barriers in nats, and the share of the naive one that is left"
    heads = ("pair", *(["alignment"] if again else []), "verdict", "naive", "aligned", "share")
    return scroll_table("All pairs", heads, rows, "summary", caption)


def _aligned_in_several_ways(pairs: Sequence[PairResult]) -> list[list[PairResult]]:
    """Pairs of one naive path that were aligned differently: their curves belong in one picture."""
    groups: dict[str, list[PairResult]] = {}
    for pair in pairs:
        if "aligned" in pair.paths:
            groups.setdefault(repr((pair.a.label, pair.b.label, pair.lambdas, pair.paths["naive"])), []).append(pair)
    return [group for group in groups.values() if len(group) > 1]


def _paths_of(group: Sequence[PairResult]) -> dict[str, PathCurves]:
    """The naive path and each aligned one, by its matcher, and a number where that does not tell them apart."""
    names = [short(pair.alignment.matcher, 16) if pair.alignment else "aligned" for pair in group]
    if len({"naive", *names}) <= len(names):
        names = [f"{name} {i}" for i, name in enumerate(names, 1)]
    aligned = {name: pair.paths["aligned"] for name, pair in zip(names, group)}
    return {"naive": group[0].paths["naive"], **aligned}


def _together(group: Sequence[PairResult], chart: int) -> Html:
    """The curves of one pair that was aligned in several ways."""
    first, paths = group[0], _paths_of(group)
    ways = [f"{name} ({how_aligned(pair)})" for name, pair in zip([n for n in paths if n != "naive"], group)]
    caption = linked(
        f"{_ends(first)} along the straight line, naive and aligned in {len(ways)} ways: {'; '.join(ways)}. "
        "A bracket marks each barrier."
    )
    metrics = [m for m in first.metrics if any(m in path.curves for path in paths.values())]
    return _curve_figure(f"{first.key}-all", first, paths, metrics, chart, caption)


# The sections of one pair.


def _pair_section(result: PathResult, pair: PairResult, anchor: str, chart: int, heading: str, *, alone: bool) -> Html:
    """Everything about one pair; the heading of a page's only pair is hidden, since the page's title names it."""
    return element(
        "section",
        element("h2", heading, id=f"{anchor}-title", class_="unseen" if alone else None),
        _verdict(pair),
        _curves(result, pair, anchor, chart),
        _numbers(pair),
        _distances(pair),
        _explanation(pair),
        _plane(pair),
        _exactness(pair),
        class_="pair",
        id=anchor,
        aria_labelledby=f"{anchor}-title",
    )


def _block(title: str, *children: Html) -> Html:
    return element("section", element("h3", title), *children, class_="block")


def _table(caption: str, heads: Sequence[Child], rows: Sequence[Html], kind: str) -> Html:
    return scroll_table(caption, heads, rows, kind, caption)


def _verdict(pair: PairResult) -> Html:
    found = verdict(pair)
    badge = element("strong", f"{_STATES[found.state]}.", class_="state")
    return element(
        "div",
        element("p", badge, " ", linked(found.sentence), class_="sentence"),
        element("p", linked(f"Rule: {RULE}."), class_="rule"),
        class_=f"verdict {found.state.replace(' ', '-')}",
    )


def _curves(result: PathResult, pair: PairResult, anchor: str, chart: int) -> Html:
    """The place where the script draws, with its controls and a note for readers without scripts."""
    task = result.task.get("name")
    where = f" Measured on {short(task, 40)}." if task else ""
    caption = linked(
        f"Along the straight line from {pair.a.letter} (λ = 0) to {pair.b.letter} (λ = 1): "
        f"{how_aligned(pair)}.{where} The dashed line joins the ends; a bracket marks the barrier."
    )
    return _curve_figure(f"{pair.key}-curve", pair, pair.paths, pair.metrics, chart, caption, id=f"{anchor}-curve")


def _curve_figure(
    name: str,
    pair: PairResult,
    paths: Mapping[str, PathCurves],
    metrics: Sequence[str],
    chart: int,
    caption: Html,
    **attributes: str,
) -> Html:
    """The canvas of a chart, with its controls and a note for readers without scripts."""
    switches = [
        element(
            "button", swatch(kind), path, type="button", data_path=path, aria_pressed="true",
            data_term=term_id(path) if path in TERMS else None,
        )
        for path, kind in _kinds(paths).items()
    ]  # fmt: skip
    options = [element("option", text.metric_title(metric), value=metric) for metric in metrics]
    chooser = element("label", "Metric ", element("select", *options, data_metric=True))
    return figure(
        name,
        _curve_rows(pair.lambdas, paths),
        element("div", element("div", *switches, role="group", aria_label="Paths shown"), chooser, class_="controls"),
        element("div", class_="canvas drawing"),
        element("p", class_="readout", aria_live="polite"),
        element("noscript", element("p", "The curve is drawn by a script; the numbers are in the table below.")),
        element("figcaption", caption),
        kind="curve",
        data_chart=chart,
        **attributes,
    )


def _kinds(paths: Iterable[str]) -> dict[str, str]:
    """The class that colours each path: its own name where a colour belongs to it, otherwise one that is free."""
    names = list(paths)
    free = [kind for kind in _COLOURED if kind not in names]
    return {name: name if name in _COLOURED else free[i % len(free)] for i, name in enumerate(names)}


def _curve_rows(lambdas: Sequence[float], paths: Mapping[str, PathCurves]) -> list[Row]:
    columns = {f"{name} {metric}": values for name, path in paths.items() for metric, values in path.curves.items()}
    return [("lambda", *columns), *zip(lambdas, *columns.values())]


def _chart_data(pair: PairResult, paths: Mapping[str, PathCurves]) -> dict[str, Any]:
    """What the script draws: validated numbers, and names."""
    return {
        "a": {"letter": pair.a.letter, "name": short(pair.a.name, 40)},
        "b": {"letter": pair.b.letter, "name": short(pair.b.name, 40)},
        "titles": {metric: text.metric_title(metric) for metric in pair.metrics},
        "lambdas": pair.lambdas,
        "kinds": _kinds(paths),
        "lines": {name: path.curves for name, path in paths.items()},
        "barriers": {
            name: {metric: [found.height, found.lam] for metric, found in path.barriers.items()}
            for name, path in paths.items()
        },
    }


def _numbers(pair: PairResult) -> Html:
    ends = (linked(f"{pair.a.letter} (λ = 0)"), linked(f"{pair.b.letter} (λ = 1)"))
    heads = ("", ends[0], "middle", ends[1], term("barrier"), "at λ")
    rows = []
    for metric, found in groupby(table_rows(pair), key=lambda row: row.metric):
        name = element("th", linked(text.metric_title(metric)), colspan=len(heads), scope="rowgroup")
        rows.append(element("tr", name, class_="group"))
        for row in found:
            height, lam = row.barrier.height, row.barrier.lam
            values = [text.metric(metric, value) for value in (row.start, row.middle, row.end)]
            cells = [*values, text.barrier(metric, height), text.number(lam if height else None, 3)]
            rows.append(table_row(concat([swatch(row.path), row.path]), *cells, kind=row.path))
    return _block("Numbers", _table("Ends, middle and barrier, naive against aligned", heads, rows, "numbers"))


def _distances(pair: PairResult) -> Html | None:
    found = pair.alignment
    if found is None or not found.layers:
        return None
    table = heat_map(found.layers)
    rows = [table_row(layer_name(layer), *map(_heat_cell, cells)) for layer, cells in zip(table.layers, table.cells)]
    caption = "Share of the distance to the reference that alignment removed, and the distance before → after"
    heads = ("", *(short(space, 24) for space in table.spaces))
    words = "The distance over all tensors of the scope was not measured."
    if found.before is not None and found.after is not None:
        change = f"from {text.number(found.before)} to {text.number(found.after)}"
        words = f"Over all tensors of the scope the relative distance went {change}."
    numbers: list[Row] = [("layer", "space", "distance before", "distance after", "share removed")]
    numbers += [(layer_name(c.layer), c.space, c.before, c.after, c.gain) for c in found.layers]
    drawn = figure(f"{pair.key}-layers", numbers, _table(caption, heads, rows, "heat"), kind="tabular")
    return _block("What alignment removed", element("p", words), drawn)


def _heat_cell(cell: LayerChange | None) -> Html:
    if cell is None or cell.gain is None:
        return element("td", text.MISSING, class_="none")
    step = max(0, min(5, int(6 * cell.gain)))
    distances = element("small", f"{text.number(cell.before, 3)} → {text.number(cell.after, 3)}")
    return element("td", element("b", text.percent(cell.gain)), " ", distances, class_=f"g{step}")


def _explanation(pair: PairResult) -> Html | None:
    if not pair.explain:
        return None
    shares = [share for found in pair.explain.values() for share in found.values() if share is not None]
    low, high = min([0.0, *shares]), max([0.01, *shares])
    rows = []
    for name in components(pair):
        bars = [bar_cell(found.get(name), low, high, path) for path, found in pair.explain.items()]
        rows.append(table_row(short(name, 40), *bars))
    note = (
        "Mixing the outputs of a component instead of its weights takes its own barrier away; "
        "the share is how far the whole barrier then falls. Shares need not add up to 100 %."
    )
    table = _table("Share of the barrier carried by each component", ("", *pair.explain), rows, "explain")
    numbers: list[Row] = [("component", *pair.explain)]
    numbers += [(name, *(found.get(name) for found in pair.explain.values())) for name in components(pair)]
    drawn = figure(f"{pair.key}-components", numbers, table, kind="tabular")
    return _block("Where the barrier sits", element("p", note), drawn)


def _plane(pair: PairResult) -> Html | None:
    if pair.plane is None:
        return None
    a, b = pair.a.letter, pair.b.letter
    picture, levels = svg.plane_picture(pair.plane, a, b), bands(pair.plane)
    if picture is None or levels is None:
        return _block("Loss on the plane", element("p", "No two finite losses on the plane differ."))
    lowest, highest = text.axis_numbers([levels[0], levels[-1]], 3)
    low, high = element("span", lowest), element("span", f"{highest} and above")
    legend = element("p", low, svg.scale_picture(), high, class_="legend")
    across = element("p", f"horizontal: along {a} to {b}; vertical: across it, in the same unit", class_="axes")
    words = linked(
        f"The plane through {a}, {b} and {b} aligned; dashed the naive line, solid the aligned one. Loss in nats."
    )
    numbers: list[Row] = [("y by x", *pair.plane.x)]
    numbers += [(y, *row) for y, row in zip(pair.plane.y, pair.plane.loss)]
    parts = (element("div", picture, across, legend, class_="drawing"), element("figcaption", words))
    return _block("Loss on the plane", figure(f"{pair.key}-plane", numbers, *parts, kind="surface"))


def _exactness(pair: PairResult) -> Html | None:
    sentence, epsilon = exactness(pair), epsilon_of(pair.b)
    if pair.alignment is None or sentence is None:
        return None
    changes = [(layer, layer.output_change) for layer in pair.alignment.layers if layer.output_change is not None]
    if not changes:
        return _block("Exactness", element("p", sentence))
    low, high = svg.log_range([change for _, change in changes] + ([epsilon] if epsilon else []))
    rows = []
    for layer, change in changes:
        name = f"{layer_name(layer.layer)}, {short(layer.space, 20)}"
        rows.append(table_row(name, text.number(change, 2), svg.log_strip(change, epsilon, low, high)))
    caption = f"Largest relative change of a layer's outputs, on a logarithmic scale from 1e{low} to 1e{high}"
    if epsilon:
        caption += f"; the thin line is the step of {pair.b.details['dtype']}, {text.number(epsilon, 2)}"
    numbers: list[Row] = [("layer", "space", "change of outputs")]
    numbers += [(layer_name(layer.layer), layer.space, change) for layer, change in changes]
    table = _table(caption, ("", "change", ""), rows, "exactness")
    return _block("Exactness", element("p", sentence), figure(f"{pair.key}-exactness", numbers, table, kind="tabular"))


# Provenance: models, task, versions and the command. Unknown keys are shown too.


def _provenance_section(result: PathResult, index: int, title: str) -> Html:
    command = result.provenance.get("command")
    run = {key: value for key, value in result.provenance.items() if key != "command"}
    groups = [(f"Model {model.letter}", model.details) for model in result.models]
    groups += [("Task", result.task), ("Run", run)]
    code = element("pre", element("code", text.clean(command)), tabindex=0, aria_label="Command")
    shown = (code, element("button", "Copy", type="button", class_="copy", aria_label="Copy the command"))
    return element(
        "section",
        element("h2", title),
        element("div", *shown, class_="command") if command else None,
        element("div", *(_group(name, details) for name, details in groups if details), class_="groups"),
        json_details("The result as JSON", "path.json"),
        class_="provenance",
        data_result=index,
    )


def _group(title: str, details: Mapping[str, Any]) -> Html:
    items = [
        item
        for key, value in _flatten(details)
        for item in (element("dt", short(key.replace("_", " "), 40)), _value(key, value))
    ]
    return element("section", element("h3", title), element("dl", *items), class_="facts")


def _flatten(details: Mapping[str, Any], prefix: str = "", depth: int = 1) -> list[tuple[str, Any]]:
    """Nested objects as `settings batch size`."""
    found: list[tuple[str, Any]] = []
    for key, value in details.items():
        name = f"{prefix}{text.clean(key)}"
        if isinstance(value, Mapping) and depth < _MAX_NESTING:
            found += _flatten(value, f"{name} ", depth + 1)
        else:
            found.append((name, value))
    return found


def _value(key: str, value: Any) -> Html:
    if value is None:
        return element("dd", text.MISSING)
    is_large = isinstance(value, int) and not isinstance(value, bool) and value >= 10_000
    shown = f"{value:,}" if is_large else text.clean(value)
    if key.endswith(("sha256", "fingerprint", "git")) and len(shown) > _HASH_LENGTH:
        return element("dd", element("code", f"{shown[:_HASH_LENGTH]}…", title=shown))
    return element("dd", shown)
