"""Text of pages and figures: cleaned names, formatted numbers, escaped HTML."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

MISSING = "–"
NBSP = "\N{NO-BREAK SPACE}"
TITLES = {"loss": "Loss", "accuracy": "Accuracy", "perplexity": "Perplexity", "bits_per_byte": "Bits per byte"}
UNITS = {"loss": "nats", "accuracy": "%", "perplexity": "", "bits_per_byte": "bits"}
# Control characters, invisible characters, bidirectional controls and surrogates: a name must look like what it is.
_HIDDEN = ((0, 0x20), (0x7F, 0xA0), (0x61C, 0x61D), (0x200B, 0x2010), (0x2028, 0x202F), (0x2060, 0x2070),
           (0xD800, 0xE000), (0xFEFF, 0xFF00))  # fmt: skip
_REPLACEMENTS = {code: "\N{REPLACEMENT CHARACTER}" for span in _HIDDEN for code in range(*span)}

Number = float | None  # None: not finite, or absent


def clean(value: object) -> str:
    """Any value as visible text: hidden characters are replaced."""
    return str(value).translate(_REPLACEMENTS)


def short(value: object, width: int = 32) -> str:
    """Clean text of at most `width` characters; a longer one loses its middle, since names differ at both ends."""
    whole = clean(value)
    if len(whole) <= width:
        return whole
    head = (width - 1) // 2
    return f"{whole[:head]}…{whole[len(whole) - (width - 1 - head) :]}"


def metric_title(metric: str) -> str:
    """The name of a metric with its unit, if it has one: `Loss (nats)`."""
    return f"{TITLES[metric]} ({UNITS[metric]})" if UNITS[metric] else TITLES[metric]


def number(value: Number, digits: int = 4) -> str:
    """Significant digits, with a power of ten only where the plain number would be long.

    >>> number(1.20412), number(0.03), number(1.5e-7), number(123456.0)
    ('1.204', '0.03', '1.5e-7', '1.235e5')
    """
    if value is None:
        return MISSING
    if value == 0 or 1e-4 <= abs(value) < 10**digits:
        return _minus(f"{value:.{digits}g}")
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    mantissa = mantissa.rstrip("0").rstrip(".")
    return _minus(f"{mantissa}e{int(exponent)}")


def axis_numbers(values: Sequence[float], digits: int = 4) -> list[str]:
    """Numbers of an axis, with so many significant digits or as many more as tell neighbours apart.

    >>> axis_numbers([0.25, 0.5]), axis_numbers([2.70505, 2.7051]), axis_numbers([0.0, 1e-5])
    (['0.25', '0.5'], ['2.70505', '2.7051'], ['0', '1e-5'])
    """
    steps = [abs(b - a) for a, b in pairwise(values)]
    if not steps or not min(steps):
        return [number(value, digits) for value in values]
    found = [0.0 if abs(value) < 1e-6 * min(steps) else value for value in values]
    while digits < 12 and any(abs(float(f"{value:.{digits}g}") - value) > 0.1 * min(steps) for value in found):
        digits += 1
    return [number(value, digits) for value in found]


def percent(value: Number) -> str:
    """A share as a percentage, with a no-break space before the sign.

    >>> [percent(share).replace("\N{NO-BREAK SPACE}", " ") for share in (0.026, 1, -0.04, 12.3456)]
    ['2.6 %', '100 %', '−4 %', '1,235 %']
    """
    if value is None:
        return MISSING
    size = abs(100 * value)
    digits = 0 if size >= 1000 else 1 if size >= 0.05 or size == 0 else 3
    if size >= 1e6:
        return f"{number(100 * value)}{NBSP}%"
    shown = f"{100 * value:,.{digits}f}"
    return _minus(f"{shown.rstrip('0').rstrip('.') if '.' in shown else shown}{NBSP}%")


def metric(name: str, value: Number) -> str:
    """A value of a metric in a column: accuracy as a percentage, the others with three or four decimals.

    >>> metric("loss", 0.21), metric("loss", 0.03104), metric("perplexity", 1234.5)
    ('0.210', '0.0310', '1234.5')
    """
    if value is None:
        return MISSING
    if name == "accuracy":
        return f"{100 * value:.1f}{NBSP}%" if abs(value) < 1e4 else percent(value)
    size = abs(value)
    if value != 0 and not 1e-3 <= size < 1e6:
        return number(value, 3)
    return _minus(f"{value:.{1 if size >= 100 else 3 if size >= 0.1 or value == 0 else 4}f}")


def barrier(name: str, value: Number) -> str:
    """The height of a barrier. That of accuracy is in percentage points (`pt`), to tell it from a share."""
    return metric(name, value).replace("%", "pt")


def number_list(values: tuple[float, ...], most: int = 4) -> str:
    """Numbers in a sentence.

    >>> number_list((0.25, 0.5, 0.75)), number_list((0.1, 0.2, 0.3, 0.4, 0.5, 0.6))
    ('0.25, 0.5 and 0.75', '0.1, 0.2, 0.3, 0.4 and 2 more')
    """
    words = [number(value, 3) for value in values]
    if len(words) > most:
        words = [*words[:most], f"{len(words) - most} more"]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _minus(number: str) -> str:
    return number.replace("-", "−", 1) if number.startswith("-") else number


@dataclass(frozen=True)
class Html:
    """Escaped HTML. Only `element` and `concat` construct it, so all text in a page is escaped."""

    source: str

    def __str__(self) -> str:
        return self.source


Child = Html | str | int | None
Attribute = str | int | float | bool | None


def element(tag: str, *children: Child, **attributes: Attribute) -> Html:
    """One element. `class_` is class, `aria_label` is aria-label; None and False leave an attribute out."""
    named = "".join(_attribute(name, value) for name, value in attributes.items())
    return Html(f"<{tag}{named}>{concat(children)}</{tag}>")


def concat(children: Iterable[Child]) -> Html:
    """Children one after the other; None is left out."""
    return Html("".join(c.source if isinstance(c, Html) else escape(clean(c)) for c in children if c is not None))


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    name = name.removesuffix("_").replace("_", "-")
    shown = f"{value:.6g}" if isinstance(value, float) else clean(value)
    return f" {name}" if value is True else f' {name}="{escape(shown)}"'
