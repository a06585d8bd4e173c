"""Small charts of the study's page, as SVG: colours come from the page's style, so that they follow light and dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from isobasin.report.fields import short
from isobasin.report.markup import Html, element
from isobasin.report.wording import plain

WIDTH, HEIGHT = 320.0, 216.0
LEFT, RIGHT, TOP, BOTTOM = 50.0, 10.0, 12.0, 42.0
KINDS = ("naive", "weights", "activations", "learned", "reference")

Number = float | None


def kind_of(label: str) -> str:
    """The class that gives a matcher its colour; variants share that of their matcher."""
    found = label.partition("/")[0]
    return found if found in KINDS else "other"


@dataclass(frozen=True)
class Series:
    """One curve: its values at the points of the panel, None where there is none, and the class that colours it."""

    values: Sequence[Number]
    kind: str


@dataclass(frozen=True)
class Frame:
    """Where numbers lie in a panel."""

    x: tuple[float, float]
    y: tuple[float, float]

    def place(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + 6 + across * (WIDTH - LEFT - RIGHT - 12), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def value_range(groups: Sequence[Sequence[Number]]) -> tuple[float, float]:
    """From the smallest to the largest value of all groups, with a little room."""
    known = [value for values in groups for value in values if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    room = 0.07 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def panel(
    xs: Sequence[float],
    series: Sequence[Series],
    y: tuple[float, float],
    *,
    ends: tuple[str, str],
    below: str,
    title: str,
    percent: bool = False,
    dots: bool = False,
) -> Html:
    """Curves over common points. `ends` name the first and the last point, `below` the axis."""
    frame = Frame((xs[0], xs[-1]), y)
    lines = [part for one in series for part in _line(frame, xs, one, dots=dots)]
    return element(
        "svg",
        *_grid(frame, percent=percent),
        *lines,
        *_ends(ends, below),
        viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}",
        class_="panel",
        role="img",
        aria_label=title,
    )


def steps(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two others.

    >>> [round(step, 6) for step in steps(0.02, 1.17)]
    [0.25, 0.5, 0.75, 1.0]
    """
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((k * power for k in (1, 2, 2.5, 5, 10) if k * power >= raw), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(frame: Frame, *, percent: bool) -> list[Html]:
    found = []
    for tick in steps(*frame.y):
        _, y = frame.place(frame.x[0], tick)
        shown = f"{plain(100 * tick, 4)} %" if percent else plain(tick if abs(tick) > 1e-12 else 0, 4)
        found.append(element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="grid"))
        found.append(element("text", shown, x=LEFT - 5, y=y + 4, text_anchor="end"))
    return found


def _ends(ends: tuple[str, str], below: str) -> list[Html]:
    y = HEIGHT - BOTTOM + 17
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [
        element("text", short(ends[0], 20), x=LEFT, y=y, text_anchor="start", class_="end"),
        element("text", short(ends[1], 20), x=WIDTH - RIGHT, y=y, text_anchor="end", class_="end"),
        element("text", below, x=middle, y=HEIGHT - 7, text_anchor="middle"),
    ]


def _line(frame: Frame, xs: Sequence[float], one: Series, *, dots: bool) -> list[Html]:
    """A path with gaps where a value is missing, and a cross on the axis below each gap."""
    pieces, found, pen = [], [], "M"
    for x, value in zip(xs, one.values):
        if value is None:
            at, _ = frame.place(x, frame.y[0])
            cross = f"M{at - 4:.1f},{HEIGHT - BOTTOM - 9:.1f}l8,8m0,-8l-8,8"
            found.append(element("path", d=cross, class_="hole"))
            pen = "M"
            continue
        across, up = frame.place(x, value)
        pieces.append(f"{pen}{across:.1f},{up:.1f}")
        pen = "L"
        if dots:
            found.append(element("circle", cx=across, cy=up, r=4, class_=f"s-{one.kind}"))
    return [element("path", d="".join(pieces), class_=f"s-{one.kind}"), *found]
