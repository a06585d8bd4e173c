"""HTML from values: text is escaped because there is no other way to put it in."""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from isobasin.report.fields import text

Attribute = str | int | float | bool | None


@dataclass(frozen=True)
class Html:
    """A finished piece of a page. Only `element` and `joined` make one."""

    source: str

    def __str__(self) -> str:
        return self.source


Child = Html | str | int | None


def element(tag: str, *children: Child, **attributes: Attribute) -> Html:
    """One element. `class_` is class, `aria_label` is aria-label; None and False leave an attribute out.

    >>> print(element("td", "a < b", class_="number", title=None))
    <td class="number">a &lt; b</td>
    """
    named = "".join(_attribute(name, value) for name, value in attributes.items())
    return Html(f"<{tag}{named}>{joined(children)}</{tag}>")


def joined(children: Iterable[Child]) -> Html:
    return Html("".join(_child(child) for child in children))


def _child(child: Child) -> str:
    if child is None:
        return ""
    return child.source if isinstance(child, Html) else escape(text(child))


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = name.removesuffix("_").replace("_", "-")
    shown = f"{value:.6g}" if isinstance(value, float) else text(value)
    return f" {name}" if value is True else f' {name}="{escape(shown)}"'
