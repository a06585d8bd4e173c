"""One self-contained page: no request, no inline style, and scripts only by their hash."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.files import check_place, write_whole
from isobasin.report.facts import verdict
from isobasin.report.fields import short
from isobasin.report.markup import Html, element, joined
from isobasin.report.provenance import provenance_section
from isobasin.report.reading import Source, read_result
from isobasin.report.result import Pair, PathResult
from isobasin.report.sections import pair_section
from isobasin.report.wording import percent, plain

MAX_BYTES = 3_000_000


def write_report(results: Sequence[Source], out: str | Path, *, force: bool = False) -> Path:
    """Write the page for one or more results of `isobasin path`; it appears whole or not at all."""
    path = Path(out)
    check_place(path, force=force)
    page = render([read_result(source) for source in results]).encode("utf-8")
    if len(page) > MAX_BYTES:
        raise IsobasinError(
            f"{path}: the page would have {len(page) / 1e6:.1f} MB, expected at most {MAX_BYTES / 1e6:.0f}; "
            "report fewer files at once, or measure a coarser --plane"
        )
    write_whole(path, page)
    return path


def render(results: Sequence[PathResult]) -> str:
    """The text of the page."""
    if not results:
        raise IsobasinError("no result to report, expected at least one path.json")
    pairs = [(i, result, pair) for i, result in enumerate(results) for pair in result.pairs]
    anchors = [f"r{i + 1}-{pair.key}" for i, _, pair in pairs]
    title = _title([pair for _, _, pair in pairs])
    body: list[Html | None] = [_summary([pair for _, _, pair in pairs], anchors) if len(pairs) > 1 else None]
    for i, result in enumerate(results):
        body += [
            pair_section(result, pair, anchor, chart, alone=len(pairs) == 1)
            for chart, ((j, _, pair), anchor) in enumerate(zip(pairs, anchors))
            if i == j
        ]
        body.append(
            provenance_section(result, i, "Provenance" if len(results) == 1 else f"Provenance of result {i + 1}")
        )
    charts = [chart_of(pair) for _, _, pair in pairs]
    return assembled(title, joined(body), charts=charts, results=[result.raw for result in results])


def assembled(title: str, body: Html, *, charts: Sequence[Any], results: Sequence[Any], more_style: str = "") -> str:
    """The page around a body: style, script, and the numbers that the script draws or hands out."""
    style, script = _asset("page.css") + more_style, _asset("page.js")
    parts = {
        "policy": _policy(style, script),
        "title": joined([title]).source,
        "style": style,
        "body": body.source,
        "charts": embedded(charts),
        "results": embedded(results),
        "script": script,
    }
    # One pass: what is put in is not read again, whatever it holds.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def embedded(value: Any) -> str:
    """JSON that can not end the script element it stands in, nor break a line of a script."""
    found = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        found = found.replace(character, f"\\u{ord(character):04x}")
    return found


def chart_of(pair: Pair) -> dict[str, Any]:
    """What the script draws: numbers that were checked, and names."""
    return {
        "a": {"letter": pair.a.letter, "name": short(pair.a.name, 18)},
        "b": {"letter": pair.b.letter, "name": short(pair.b.name, 18)},
        "lambdas": pair.lambdas,
        "lines": {path: line.curves for path, line in pair.lines.items()},
        "barriers": {
            path: {metric: [found.height, found.lam] for metric, found in line.barriers.items()}
            for path, line in pair.lines.items()
        },
    }


def _title(pairs: Sequence[Pair]) -> str:
    if len(pairs) == 1:
        return f"Are {short(pairs[0].a.name, 40)} and {short(pairs[0].b.name, 40)} linearly connected?"
    return f"Which of {len(pairs)} pairs of models are linearly connected?"


def _summary(pairs: Sequence[Pair], anchors: Sequence[str]) -> Html:
    heads = ("pair", "verdict", "naive", "aligned", "share")
    rows = []
    for pair, anchor in zip(pairs, anchors):
        found = verdict(pair)
        link = element("a", f"{short(pair.a.label, 24)} to {short(pair.b.label, 24)}", href=f"#{anchor}")
        cells = (found.state, plain(found.naive), plain(found.aligned), percent(found.share))
        rows.append(element("tr", element("th", link, scope="row"), *(element("td", cell) for cell in cells)))
    caption = element("caption", "Loss barriers in nats, and the share of the naive one that is left")
    head = element("thead", element("tr", *(element("th", head, scope="col") for head in heads)))
    table = element("table", caption, head, element("tbody", *rows), class_="summary")
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label="All pairs")


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(source: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(source.encode('utf-8')).digest()).decode('ascii')}"


def _asset(name: str) -> str:
    return resources.files("isobasin.report").joinpath(name).read_text("utf-8")
