"""Where the numbers come from: models, task, versions and the command that made them."""

from collections.abc import Mapping
from typing import Any

from isobasin.report.fields import short, text
from isobasin.report.markup import Html, element
from isobasin.report.result import PathResult

_HASH = 16  # characters of a hash that are shown; all of it is in the title
_DEEPEST = 3


def provenance_section(result: PathResult, index: int, title: str) -> Html:
    """All of it: what is not known by name is shown under its own."""
    command = result.provenance.get("command")
    rest = {key: value for key, value in result.provenance.items() if key != "command"}
    parts = [_group(f"Model {model.letter}", model.facts) for model in result.models if model.facts]
    parts += [_group("Task", result.task)] if result.task else []
    parts += [_group("Run", rest)] if rest else []
    return element(
        "section",
        element("h2", title),
        _command(text(command)) if command else None,
        element("div", *parts, class_="groups"),
        element(
            "details",
            element("summary", "The result as JSON"),
            element("p", element("a", "Download path.json", class_="download", href="#", download="path.json")),
            element("pre", class_="json", tabindex=0, aria_label="The result as JSON"),
        ),
        class_="provenance",
        data_result=index,
    )


def _command(command: str) -> Html:
    return element(
        "div", element("pre", element("code", command), tabindex=0, aria_label="Command"),
        element("button", "Copy", type="button", class_="copy", aria_label="Copy the command"), class_="command",
    )  # fmt: skip


def _group(title: str, facts: Mapping[str, Any]) -> Html:
    pairs = [
        item
        for key, value in _flat(facts)
        for item in (element("dt", short(key.replace("_", " "), 40)), _value(key, value))
    ]
    return element("section", element("h3", title), element("dl", *pairs), class_="facts")


def _flat(facts: Mapping[str, Any], prefix: str = "", depth: int = 1) -> list[tuple[str, Any]]:
    """Nested objects as `settings batch size`; what is nested deeper is shown as it is."""
    found: list[tuple[str, Any]] = []
    for key, value in facts.items():
        name = f"{prefix}{text(key)}"
        if isinstance(value, Mapping) and depth < _DEEPEST:
            found += _flat(value, f"{name} ", depth + 1)
        else:
            found.append((name, value))
    return found


def _value(key: str, value: Any) -> Html:
    if value is None:
        return element("dd", "–")
    shown = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else text(value)
    if key.endswith(("sha256", "fingerprint", "git")) and len(shown) > _HASH:
        return element("dd", element("code", f"{shown[:_HASH]}…", title=shown))
    return element("dd", shown)
