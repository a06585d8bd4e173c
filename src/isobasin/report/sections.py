"""The parts of the page, each from the facts of one pair."""

from isobasin.report.facts import (
    RULE,
    Row,
    Verdict,
    exactness,
    heat_map,
    how_aligned,
    layer_name,
    share_rows,
    table_rows,
    verdict,
)
from isobasin.report.fields import short
from isobasin.report.levels import bands
from isobasin.report.markup import Html, element, joined
from isobasin.report.pictures import bar, log_range, log_strip, plane_picture, scale_picture
from isobasin.report.result import Alignment, LayerChange, Pair, PathResult, Share
from isobasin.report.wording import NONE, TITLES, UNITS, measured, percent, plain, rise

_STATES = {
    "connected": "Connected",
    "already connected": "Connected already",
    "not connected": "Not connected",
    "not measured": "Not measured",
}


def pair_section(result: PathResult, pair: Pair, anchor: str, chart: int, *, alone: bool = False) -> Html:
    """Everything the page says about one pair; one that is alone is named by the title of the page already."""
    return element(
        "section",
        element("h2", f"{pair.a.label} to {pair.b.label}", id=f"{anchor}-title", class_="unseen" if alone else None),
        verdict_part(verdict(pair)),
        curve_part(result, pair, anchor, chart),
        table_part(pair),
        heat_part(pair),
        explain_part(pair),
        plane_part(pair),
        exactness_part(pair),
        class_="pair",
        id=anchor,
        aria_labelledby=f"{anchor}-title",
    )


def verdict_part(found: Verdict) -> Html:
    badge = element("strong", f"{_STATES[found.state]}.", class_="state")
    return element(
        "div",
        element("p", badge, " ", found.sentence, class_="sentence"),
        element("p", f"Rule: {RULE}.", class_="rule"),
        class_=f"verdict {found.state.replace(' ', '-')}",
    )


def curve_part(result: PathResult, pair: Pair, anchor: str, chart: int) -> Html:
    """The place where the script draws, with its controls and what to read without it."""
    switches = [
        element("button", element("span", class_=f"swatch {path}", aria_hidden="true"), path, type="button",
                data_path=path, aria_pressed="true")
        for path in pair.lines
    ]  # fmt: skip
    options = [element("option", TITLES[metric], value=metric) for metric in pair.metrics]
    chooser = element("label", "Metric ", element("select", *options, data_metric=True))
    task = result.task.get("name")
    where = f" Measured on {short(task, 40)}." if task else ""
    caption = (
        f"Along the straight line from {pair.a.letter} (λ = 0) to {pair.b.letter} (λ = 1): {how_aligned(pair)}.{where}"
        " The dashed line joins the ends; a bracket marks the barrier."
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


def table_part(pair: Pair) -> Html:
    a, b = pair.a.letter, pair.b.letter
    heads = ("", f"{a} (λ = 0)", "middle", f"{b} (λ = 1)", "barrier", "at λ")
    rows, last = [], ""
    for row in table_rows(pair):
        if row.metric != last:
            unit = UNITS[row.metric]
            name = f"{TITLES[row.metric]} ({unit})" if unit else TITLES[row.metric]
            rows.append(element("tr", element("th", name, colspan=len(heads), scope="rowgroup"), class_="group"))
            last = row.metric
        rows.append(_table_row(row))
    return _block("Numbers", _table("Ends, middle and barrier, naive against aligned", heads, rows, "numbers"))


def _table_row(row: Row) -> Html:
    values = (measured(row.metric, value) for value in (row.start, row.middle, row.end))
    cells = [*values, rise(row.metric, row.barrier.height), plain(row.barrier.lam if row.barrier.height else None, 3)]
    named = element("th", element("span", class_=f"swatch {row.path}", aria_hidden="true"), row.path, scope="row")
    return element("tr", named, *(element("td", cell) for cell in cells), class_=row.path)


def heat_part(pair: Pair) -> Html | None:
    if pair.alignment is None or not pair.alignment.layers:
        return None
    table = heat_map(pair.alignment.layers)
    rows = [
        element("tr", element("th", layer_name(layer), scope="row"), *(_heat_cell(cell) for cell in row))
        for layer, row in zip(table.layers, table.cells)
    ]
    caption = "Share of the distance to the reference that alignment removed, and the distance before → after"
    heads = ("", *(short(space, 24) for space in table.spaces))
    return _block(
        "What alignment removed", element("p", _distance(pair.alignment)), _table(caption, heads, rows, "heat")
    )


def _distance(found: Alignment) -> str:
    if found.before is None or found.after is None:
        return "The distance over all tensors of the scope was not measured."
    return (
        f"Over all tensors of the scope the relative distance went from {plain(found.before)} to {plain(found.after)}."
    )


def _heat_cell(cell: LayerChange | None) -> Html:
    if cell is None or cell.gain is None:
        return element("td", NONE, class_="none")
    step = max(0, min(5, int(6 * cell.gain)))
    distances = element("small", f"{plain(cell.before, 3)} → {plain(cell.after, 3)}")
    return element("td", element("b", percent(cell.gain)), " ", distances, class_=f"g{step}")


def explain_part(pair: Pair) -> Html | None:
    rows = share_rows(pair)
    if not rows:
        return None
    paths = [path for path in ("naive", "aligned") if path in pair.explain]
    shares = [s.share for found in pair.explain.values() for s in found if s.share is not None]
    low, high = min([0.0, *shares]), max([0.01, *shares])

    def cell(share: Share | None, path: str) -> Html:
        value = share.share if share else None
        return element("td", element("span", percent(value)), bar(value, low, high, path))

    lines = [
        element("tr", element("th", short(row.name, 40), scope="row"),
                *(cell(row.naive if path == "naive" else row.aligned, path) for path in paths))
        for row in rows
    ]  # fmt: skip
    note = (
        "Mixing the outputs of a component instead of its weights takes its own barrier away; "
        "the share is how far the whole barrier then falls. Shares need not add up to 100 %."
    )
    table = _table("Share of the barrier carried by each component", ("", *paths), lines, "explain")
    return _block("Where the barrier sits", element("p", note), table)


def plane_part(pair: Pair) -> Html | None:
    if pair.plane is None:
        return None
    picture, levels = plane_picture(pair.plane, pair.a.letter, pair.b.letter), bands(pair.plane)
    if picture is None or levels is None:
        return _block("Loss on the plane", element("p", "No two finite losses on the plane differ."))
    low, high = element("span", plain(levels[0], 3)), element("span", f"{plain(levels[-1], 3)} and above")
    legend = element("p", low, scale_picture(), high, class_="legend")
    a, b = pair.a.letter, pair.b.letter
    words = f"The plane through {a}, {b} and {b} aligned; dashed the naive line, solid the aligned one. Loss in nats."
    figure = element("figure", picture, legend, element("figcaption", words), class_="surface")
    return _block("Loss on the plane", figure)


def exactness_part(pair: Pair) -> Html | None:
    found = exactness(pair)
    if found is None:
        return None
    sentence = element("p", found.sentence)
    if not found.layers:
        return _block("Exactness", sentence)
    values = [layer.output_change or 0.0 for layer in found.layers]
    low, high = log_range([*values, *([found.floor] if found.floor else [])])
    rows = [
        element("tr", element("th", f"{layer_name(layer.layer)}, {short(layer.space, 20)}", scope="row"),
                element("td", plain(value, 2)), element("td", log_strip(value, found.floor, low, high)))
        for layer, value in zip(found.layers, values)
    ]  # fmt: skip
    beside = f"; the thin line is the step of {found.dtype}, {plain(found.floor, 2)}" if found.floor else ""
    caption = f"Largest relative change of a layer's outputs, on a logarithmic scale from 1e{low} to 1e{high}{beside}"
    return _block("Exactness", sentence, _table(caption, ("", "change", ""), rows, "exactness"))


def _block(title: str, *children: Html) -> Html:
    return element("section", element("h3", title), *children, class_="block")


def _table(caption: str, heads: tuple[str, ...], rows: list[Html], kind: str) -> Html:
    head = element("tr", *(element("th" if name else "td", name, scope="col" if name else None) for name in heads))
    table = element(
        "table", element("caption", caption), element("thead", head), element("tbody", joined(rows)), class_=kind
    )
    # A wide table scrolls by itself, and can be scrolled by keys; the page does not.
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label=caption)
