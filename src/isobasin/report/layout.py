"""What both pages are made of: the page around its body, tables, figures with downloads, and terms with definitions."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from isobasin.report import svg, text
from isobasin.report.text import Child, Html, concat, element

SCRIPTS = ("page.js", "downloads.js")
# Terms that a page explains, by the word that is shown.
TERMS = {
    "λ": "A point of the straight line between two models: the weights (1 − λ)·A + λ·B. λ = 0 is A, and λ = 1 is B.",
    "naive": "Without alignment: the weights of both models as they are stored.",
    "aligned": "After a symmetry moved B close to A. B still computes the same function.",
    "barrier": "The largest rise of the loss above the straight line that joins the losses of the two ends.",
    "nats": "The unit of the loss: cross-entropy with natural logarithms. One bit is 0.69 nats, and a guess among ten "
    "equal classes costs 2.3 nats.",
    "share": "A barrier divided by the naive barrier: how much of the barrier alignment leaves.",
    "weights": "Aligned by the weights alone, without data.",
    "activations": "Aligned by the activations of both models on data.",
    "learned": "Aligned by gradient descent over the symmetries: the loss between the models is minimised.",
    "reference": "Aligned by the paper's own procedure.",
}
_IN_SENTENCES = ("λ", "naive", "aligned", "barrier", "nats")
_WORDS = re.compile(rf"(?<!\w)({'|'.join(_IN_SENTENCES)})(?!\w)")
_FORMATS = ("SVG", "PNG", "CSV")

Row = Sequence[str | int | float | None]  # of a CSV file


def assemble(title: str, body: Html, *, charts: Sequence[Any], results: Sequence[Any], more_style: str = "") -> str:
    """The page around a body: style, script, the definitions of its terms, and the data of charts and downloads."""
    style, script = asset("page.css") + more_style, "".join(map(asset, SCRIPTS))
    parts = {
        "policy": f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'",
        "title": concat([title]).source,
        "style": style,
        "body": concat([body, _definitions(body)]).source,
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


# Terms: links to their definitions at the end of the page, which the script shows beside the word.


def term(name: str, shown: Child = None) -> Html:
    """A word that explains itself where it is pointed at, focused or touched."""
    return element("a", name if shown is None else shown, class_="term", href=f"#{term_id(name)}")


def term_id(name: str) -> str:
    return f"term-{'lambda' if name == 'λ' else name}"


def linked(sentence: str) -> Html:
    """A sentence in which the first occurrence of each term is a link to its definition."""
    seen: set[str] = set()
    parts: list[Child] = []
    for i, part in enumerate(_WORDS.split(sentence)):
        is_term = i % 2 == 1 and part not in seen
        seen |= {part} if i % 2 else set()
        parts.append(term(part) if is_term else part)
    return concat(parts)


def _definitions(body: Html) -> Html | None:
    """The definitions of the terms that a body refers to."""
    used = [name for name in TERMS if f'{term_id(name)}"' in body.source]
    if not used:
        return None
    items = [item for name in used for item in (element("dt", name), element("dd", TERMS[name], id=term_id(name)))]
    heading = element("h2", "Terms", id="terms-title")
    return element("section", heading, element("dl", *items), class_="terms", aria_labelledby="terms-title")


# Tables.


def scroll_table(label: str, heads: Sequence[Child], rows: Sequence[Html], kind: str, caption: Child = None) -> Html:
    """A table in a region that scrolls sideways, also by keys, so that a wide table does not widen the page."""
    head = element("tr", *(element("th" if name else "td", name, scope="col" if name else None) for name in heads))
    table = element(
        "table",
        element("caption", caption) if caption else None,
        element("thead", head),
        element("tbody", *rows),
        class_=f"{kind} drawing",
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


def swatch(kind: str) -> Html:
    return element("span", class_=f"swatch {kind}", aria_hidden="true")


# Figures and downloads.


def figure(name: str, rows: Sequence[Row], *children: Child, kind: str, **attributes: text.Attribute) -> Html:
    """A figure with its downloads. The child of class `drawing` is the picture; `rows` are the CSV, heads first."""
    buttons = [
        element("button", kind, type="button", data_save=kind.lower(), aria_label=f"Download {name} as {kind}")
        for kind in _FORMATS
    ]
    return element(
        "figure",
        *children,
        element("p", "Download ", *buttons, class_="downloads"),
        class_=kind,
        data_name=name,
        data_rows=json.dumps([list(map(_rounded, row)) for row in rows], ensure_ascii=False, separators=(",", ":")),
        **attributes,
    )


def _rounded(value: str | int | float | None) -> str | int | float | None:
    """Seven digits, as float32 has them: a page of many curves would otherwise be half as long again."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def json_details(title: str, file: str) -> Html:
    """A closed block in which the script shows a result as JSON and offers it as a download."""
    return element(
        "details",
        element("summary", title),
        element("p", element("a", f"Download {file}", class_="download", href="#", download=file)),
        element("pre", class_="json", tabindex=0, aria_label=title),
    )
