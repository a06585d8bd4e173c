"""The report of path results: one self-contained HTML page that makes no request and allows scripts only by hash."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.files import atomic_write, check_output_file
from isobasin.report import svg, text
from isobasin.report.result import (
    RULE,
    LayerChange,
    PairResult,
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
    check_output_file(path, force=force, kind="HTML", inputs=inputs)
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
    body: list[Html | None] = [_overview(pairs, anchors, again) if len(pairs) > 1 else None]
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
    charts = [_chart_data(pair) for pair in pairs]
    return assemble(title, concat(body), charts=charts, results=[result.raw for result in results])


# The page around its body, and the parts that the study's page has too.


def assemble(title: str, body: Html, *, charts: Sequence[Any], results: Sequence[Any], more_style: str = "") -> str:
    """The page around a body: style, script, and the data of the script's charts and downloads."""
    style, script = asset("page.css") + more_style, asset("page.js")
    parts = {
        "policy": f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "title": concat([title]).source,
        "style": style,
        "body": body.source,
        "charts": embed(charts),
        "results": embed(results),
        "script": script,
    }
    # One pass: a placeholder inside a part is not replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], asset("page.html"))


def embed(value: Any) -> str:
    """JSON that can not end the script element around it, and that is valid JavaScript."""
    found = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return found


def asset(name: str) -> str:
    return resources.files("isobasin.report").joinpath(name).read_text("utf-8")


def _digest(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode('utf-8')).digest()).decode('ascii')}"


def scroll_table(label: str, heads: Sequence[str], rows: Sequence[Html], kind: str, caption: str | None = None) -> Html:
    """A table in a region that scrolls sideways, also by keys, so that a wide table does not widen the page."""
    head = element("tr", *(element("th" if name else "td", name, scope="col" if name else None) for name in heads))
    table = element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", head),
        element("tbody", *rows),
        class_=kind,
        aria_label=None if caption else label,
    )
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=label)


def table_row(name: Child, *cells: Child, kind: str | None = None) -> Html:
    """A row of a table; a cell that is not a td element yet becomes one."""
    shown = [
        cell if isinstance(cell, Html) and cell.source.startswith("<td") else element("td", cell) for cell in cells
    ]
    return element("tr", element("th", name, scope="row"), *shown, class_=kind)


def bar_cell(share: float | None, low: float, high: float, kind: str) -> Html:
    """A cell of a table with a share in per cent and its bar."""
    return element("td", element("span", text.percent(share)), svg.bar(share, low, high, kind))


def json_details(title: str, file: str) -> Html:
    """A closed block in which the script shows a result as JSON and offers it as a download."""
    return element(
        "details",
        element("summary", title),
        element("p", element("a", f"Download {file}", class_="download", href="#", download=file)),
        element("pre", class_="json", tabindex=0, aria_label=title),
    )


def swatch(kind: str) -> Html:
    return element("span", class_=f"swatch {kind}", aria_hidden="true")


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


def _table(caption: str, heads: Sequence[str], rows: Sequence[Html], kind: str) -> Html:
    return scroll_table(caption, heads, rows, kind, caption)


def _verdict(pair: PairResult) -> Html:
    found = verdict(pair)
    badge = element("strong", f"{_STATES[found.state]}.", class_="state")
    return element(
        "div",
        element("p", badge, " ", found.sentence, class_="sentence"),
        element("p", f"Rule: {RULE}.", class_="rule"),
        class_=f"verdict {found.state.replace(' ', '-')}",
    )


def _curves(result: PathResult, pair: PairResult, anchor: str, chart: int) -> Html:
    """The place where the script draws, with its controls and a note for readers without scripts."""
    switches = [
        element("button", swatch(path), path, type="button", data_path=path, aria_pressed="true") for path in pair.paths
    ]
    options = [element("option", text.TITLES[metric], value=metric) for metric in pair.metrics]
    chooser = element("label", "Metric ", element("select", *options, data_metric=True))
    task = result.task.get("name")
    where = f" Measured on {short(task, 40)}." if task else ""
    caption = (
        f"Along the straight line from {pair.a.letter} (λ = 0) to {pair.b.letter} (λ = 1): "
        f"{how_aligned(pair)}.{where} The dashed line joins the ends; a bracket marks the barrier."
    )
    return element(
        "figure",
        element("div", element("div", *switches, role="group", aria_label="Paths shown"), chooser, class_="controls"),
        element("div", class_="canvas"),
        element("p", class_="readout", aria_live="polite"),
        element("noscript", element("p", "The curve is drawn by a script; the numbers are in the table below.")),
        element("figcaption", caption),
        class_="curve",
        data_chart=chart,
        id=f"{anchor}-curve",
    )


def _chart_data(pair: PairResult) -> dict[str, Any]:
    """What the script draws: validated numbers, and names."""
    return {
        "a": {"letter": pair.a.letter, "name": short(pair.a.name, 18)},
        "b": {"letter": pair.b.letter, "name": short(pair.b.name, 18)},
        "lambdas": pair.lambdas,
        "lines": {name: path.curves for name, path in pair.paths.items()},
        "barriers": {
            name: {metric: [found.height, found.lam] for metric, found in path.barriers.items()}
            for name, path in pair.paths.items()
        },
    }


def _numbers(pair: PairResult) -> Html:
    heads = ("", f"{pair.a.letter} (λ = 0)", "middle", f"{pair.b.letter} (λ = 1)", "barrier", "at λ")
    rows = []
    for metric, found in groupby(table_rows(pair), key=lambda row: row.metric):
        name = element("th", text.metric_title(metric), colspan=len(heads), scope="rowgroup")
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
    return _block("What alignment removed", element("p", words), _table(caption, heads, rows, "heat"))


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
    return _block("Where the barrier sits", element("p", note), table)


def _plane(pair: PairResult) -> Html | None:
    if pair.plane is None:
        return None
    a, b = pair.a.letter, pair.b.letter
    picture, levels = svg.plane_picture(pair.plane, a, b), bands(pair.plane)
    if picture is None or levels is None:
        return _block("Loss on the plane", element("p", "No two finite losses on the plane differ."))
    low = element("span", text.number(levels[0], 3))
    high = element("span", f"{text.number(levels[-1], 3)} and above")
    legend = element("p", low, svg.scale_picture(), high, class_="legend")
    words = f"The plane through {a}, {b} and {b} aligned; dashed the naive line, solid the aligned one. Loss in nats."
    figure = element("figure", picture, legend, element("figcaption", words), class_="surface")
    return _block("Loss on the plane", figure)


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
    return _block("Exactness", element("p", sentence), _table(caption, ("", "change", ""), rows, "exactness"))


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
