"""The inline SVG of both pages. Colours are classes or attributes: the pages allow no inline style."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from isobasin.report import text
from isobasin.report.result import N_BANDS, SAND, LossPlane, bands
from isobasin.report.text import Html, Number, element, short

Point = tuple[float, float]
Range = tuple[float, float]


def picture(width: float, height: float, kind: str, *shapes: Html, label: str | None = None) -> Html:
    """An svg element. One without a label is stretched to its place, and hidden from screen readers."""
    hidden = label is None
    return element(
        "svg",
        *shapes,
        viewBox=f"0 0 {width:.6g} {height:.6g}",
        preserveAspectRatio="none" if hidden else None,
        class_=kind,
        aria_hidden="true" if hidden else None,
        role=None if hidden else "img",
        aria_label=label,
    )


def rectangle(
    x: float, y: float, width: float, height: float, kind: str | None = None, fill: str | None = None
) -> Html:
    return element("rect", x=x, y=y, width=width, height=height, class_=kind, fill=fill)


@dataclass(frozen=True)
class Frame:
    """Maps numbers in the ranges x and y to a box of the picture, y upwards."""

    x: Range
    y: Range
    left: float
    right: float
    top: float
    bottom: float

    def place(self, x: float, y: float) -> Point:
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + across * (self.right - self.left), self.bottom - up * (self.bottom - self.top)


# Bars and marks in tables.


def bar(value: Number, low: float, high: float, kind: str) -> Html:
    """A horizontal bar from zero to a value, on an axis from low to high."""
    width = (high - low) or 1.0
    zero, at = (100 * (v - low) / width for v in (0.0, value or 0.0))
    filled = rectangle(min(zero, at), 0, abs(at - zero), 8, f"fill-{kind}")
    return picture(100, 8, "bar", filled, rectangle(zero, 0, 0.4, 8, "axis"))


def log_range(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten around positive values.

    >>> log_range([2e-7, 1.2e-6])
    (-7, -5)
    """
    powers = [math.log10(value) for value in values if value > 0] or [0.0]
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    return low, max(high, low + 1)


def log_strip(value: Number, epsilon: Number, low: int, high: int) -> Html:
    """A mark at the logarithm of a value, and a thin line at the epsilon of its floating-point type."""
    marks = []
    for number, kind, width in ((epsilon, "floor", 0.6), (value, "mark", 1.6)):
        if number is not None and number > 0:
            at = 100 * (math.log10(number) - low) / (high - low)
            marks.append(rectangle(max(0.0, min(at, 100 - width)), 0, width, 8, kind))
    return picture(100, 8, "strip", rectangle(0, 3.6, 100, 0.8, "track"), *marks)


# Dots on a logarithmic axis that is as wide as its place: horizontal coordinates are percentages.

_STRIP_HEIGHT = 24.0  # pixels
_START, _END = 12.0, 98.0  # of the axis, in per cent; what is below its range stands on the left of it
_TOUCHING, _CROWDED = 1.6, 0.95  # per cent: dots nearer than that are set apart vertically; step between columns
_LEVELS = (0.0, -6.0, 6.0)


@dataclass(frozen=True)
class LogScale:
    """Powers of ten from `low` to `high`."""

    low: float
    high: float

    @classmethod
    def around(cls, values: Sequence[float]) -> "LogScale":
        """From 0.001 to the power of ten above the largest value."""
        top = max([1.0, *values])
        return cls(1e-3, 10.0 ** math.ceil(math.log10(top)))

    def place(self, value: float) -> float:
        """In per cent of the width.

        >>> scale = LogScale(0.001, 10.0)
        >>> scale.place(0.0), scale.place(0.1), scale.place(10.0)
        (12.0, 55.0, 98.0)
        """
        share = math.log10(max(value, self.low) / self.low) / math.log10(self.high / self.low)
        return round(_START + (_END - _START) * share, 2)

    @property
    def powers(self) -> list[float]:
        n = round(math.log10(self.high / self.low))
        return [self.low * 10**i for i in range(n + 1)]


@dataclass(frozen=True)
class Dot:
    """A value, whether its dot is filled, and what it stands for."""

    value: float
    filled: bool
    title: str


def dot_strip(dots: Sequence[Dot], scale: LogScale, limit: float, kind: str, *, label: str) -> Html:
    """A row of dots; the line is the limit."""
    marks = []
    for dot, (x, level) in _places(dots, scale):
        y = _STRIP_HEIGHT / 2 + _LEVELS[level]
        state = f"s-{kind} {'filled' if dot.filled else 'hollow'}"
        marks.append(element("circle", element("title", dot.title), cx=f"{x:g}%", cy=y, r=4, class_=state))
    return _strip(_STRIP_HEIGHT, *_vertical(scale, limit), *marks, label=label)


def _places(dots: Sequence[Dot], scale: LogScale) -> list[tuple[Dot, tuple[float, int]]]:
    """Where each dot stands, and on which of three levels. Those below the scale fill columns on the left of it."""
    below = [dot for dot in dots if dot.value <= scale.low]
    found = [(dot, (1 + _CROWDED * (i // 3), i % 3)) for i, dot in enumerate(below)]
    last, level = -100.0, 0
    for dot in sorted((dot for dot in dots if dot.value > scale.low), key=lambda dot: dot.value):
        x = scale.place(dot.value)
        level = (level + 1) % 3 if x - last < _TOUCHING else 0
        last = x
        found.append((dot, (x, level)))
    return found


def log_axis(scale: LogScale, limit: float) -> Html:
    """The numbers below strips of that scale."""
    first, *others = scale.powers
    shown = [element("text", f"≤ {text.number(first)}", x="0%", y=16, text_anchor="start")]
    for power in others:
        anchor = "end" if power == scale.high else "middle"
        shown.append(element("text", text.number(power, 3), x=f"{scale.place(power):g}%", y=16, text_anchor=anchor))
    return _strip(22.0, *shown, label=f"from {scale.low:g} to {scale.high:g} nats; the line is {limit:g}")


def _vertical(scale: LogScale, limit: float) -> list[Html]:
    places = [(scale.place(power), "grid") for power in scale.powers] + [(scale.place(limit), "limit")]
    return [element("line", x1=f"{x}%", x2=f"{x}%", y1=0, y2=_STRIP_HEIGHT, class_=kind) for x, kind in places]


def _strip(height: float, *shapes: Html, label: str) -> Html:
    return element("svg", *shapes, width="100%", height=height, class_="strip-row", role="img", aria_label=label)


# Curves over common points.

_WIDTH, _HEIGHT = 320.0, 232.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 310.0, 28.0, 190.0  # the box that the grid fills


@dataclass(frozen=True)
class Series:
    """One curve: its values at the points of the panel, None where one is missing, and the class that colours it."""

    values: Sequence[Number]
    kind: str


def panel(
    xs: Sequence[float],
    series: Sequence[Series],
    y: Range,
    *,
    ends: tuple[str, str],
    below: str,
    title: str,
    beside: str = "",
    percent: bool = False,
    dots: bool = False,
) -> Html:
    """Curves over common points. `ends` name the first and the last point, `below` and `beside` the axes."""
    frame = Frame((xs[0], xs[-1]), y, _LEFT + 6, _RIGHT - 6, _TOP, _BOTTOM)
    curves = [shape for one in series for shape in _curve(frame, xs, one, dots=dots)]
    under = _BOTTOM + 17
    names = [
        element("text", beside, x=0, y=14, class_="end"),
        element("text", short(ends[0], 20), x=_LEFT, y=under, text_anchor="start", class_="end"),
        element("text", short(ends[1], 20), x=_RIGHT, y=under, text_anchor="end", class_="end"),
        element("text", below, x=(_LEFT + _RIGHT) / 2, y=_HEIGHT - 7, text_anchor="middle"),
    ]
    return picture(_WIDTH, _HEIGHT, "panel", *_grid(frame, percent=percent), *curves, *names, label=title)


def value_range(groups: Sequence[Sequence[Number]]) -> Range:
    """From the smallest to the largest value of all groups, with a margin; values that agree to 1e-4 look flat."""
    known = [value for values in groups for value in values if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    margin = max(0.07 * (high - low), 1e-4 * abs(high)) if high > low else 0.05 * abs(high) or 1.0
    return low - margin, high + margin


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round numbers between two others.

    >>> [round(tick, 6) for tick in ticks(0.02, 1.17)]
    [0.25, 0.5, 0.75, 1.0]
    """
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((k * power for k in (1, 2, 2.5, 5, 10) if k * power >= raw), 10 * power)
    first = math.ceil(low / step - 1e-9)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _grid(frame: Frame, *, percent: bool) -> list[Html]:
    found = []
    places = ticks(*frame.y)
    for tick, shown in zip(places, text.axis_numbers([(100 if percent else 1) * tick for tick in places])):
        _, y = frame.place(frame.x[0], tick)
        found.append(element("line", x1=_LEFT, x2=_RIGHT, y1=y, y2=y, class_="grid"))
        label = f"{shown} %" if percent else shown
        found.append(element("text", label, x=_LEFT - 5, y=y + 4, text_anchor="end"))
    return found


def _curve(frame: Frame, xs: Sequence[float], one: Series, *, dots: bool) -> list[Html]:
    """A path with a gap where a value is missing, and a cross on the axis below each gap."""
    pieces, marks, pen = [], [], "M"
    for x, value in zip(xs, one.values):
        if value is None:
            at, _ = frame.place(x, frame.y[0])
            marks.append(element("path", d=f"M{at - 4:.1f},{_BOTTOM - 9:.1f}l8,8m0,-8l-8,8", class_="hole"))
            pen = "M"
            continue
        across, up = frame.place(x, value)
        pieces.append(f"{pen}{across:.1f},{up:.1f}")
        pen = "L"
        if dots:
            marks.append(element("circle", cx=across, cy=up, r=4, class_=f"s-{one.kind}"))
    return [element("path", d="".join(pieces), class_=f"s-{one.kind}"), *marks]


# The loss plane as bands of colour.

_PLANE_WIDTH, _CELLS = 480.0, 160


def band_of(value: float, levels: tuple[float, ...]) -> int:
    """The index of the band that holds a loss; the last band takes everything above."""
    return max(0, min(bisect_right(levels, value) - 1, len(levels) - 2))


def interpolate(plane: LossPlane, n: int) -> np.ndarray:
    """The loss at the centres of n × n cells, bilinear between the measured points; NaN beside a missing one."""
    loss = np.array([[math.nan if value is None else value for value in row] for row in plane.loss])
    for grid in (np.array(plane.x), np.array(plane.y)):  # along the last axis, which is then the first
        at = grid[0] + (np.arange(n) + 0.5) / n * (grid[-1] - grid[0])
        i = np.clip(np.searchsorted(grid, at, side="right") - 1, 0, len(grid) - 2)
        share = (at - grid[i]) / (grid[i + 1] - grid[i])
        loss = ((1 - share) * loss[:, i] + share * loss[:, i + 1]).T
    return loss


def plane_picture(plane: LossPlane, a: str, b: str) -> Html | None:
    """Bands of loss, the two straight lines and the models; None where no loss is finite or all are equal."""
    levels = bands(plane)
    if levels is None:
        return None
    x, y = (plane.x[0], plane.x[-1]), (plane.y[0], plane.y[-1])
    height = _PLANE_WIDTH * min(max((y[1] - y[0]) / (x[1] - x[0]), 0.4), 1.6)
    frame = Frame(x, y, 0.0, _PLANE_WIDTH, 0.0, height)
    points = {name: frame.place(*point) for name, point in plane.points.items()}
    lines = [
        element("path", d=f"M{_coordinates(points[a])}L{_coordinates(points[end])}", class_=f"{layer} {kind}")
        for end, kind in ((b, "naive"), (f"{b} aligned", "aligned"))
        if a in points and end in points
        for layer in ("halo", "segment")
    ]
    low, high = text.axis_numbers([levels[0], levels[-1]])
    label = f"Loss on the plane through {', '.join(short(name) for name in points)}, from {low} to {high} and above"
    background = element("rect", width=_PLANE_WIDTH, height=height, class_="unknown")
    middle = sum(x for x, _ in points.values()) / max(len(points), 1)
    models = [shape for name, at in points.items() for shape in _model(name, at, middle)]
    shapes = (background, *_band_paths(plane, levels, height), *lines, *models)
    return picture(_PLANE_WIDTH, height, "plane", *shapes, label=label)


def scale_picture() -> Html:
    """The colours of the bands in their order."""
    return picture(N_BANDS, 1, "scale", *(rectangle(i, 0, 1.02, 1, fill=colour(i)) for i in range(N_BANDS)))


def colour(band: int) -> str:
    """The colour of a band, interpolated between the stops of the palette.

    >>> colour(0), colour(11)
    ('#fffdf4', '#a96532')
    """
    at = band / (N_BANDS - 1) * (len(SAND) - 1)
    i = min(int(at), len(SAND) - 2)
    parts = [
        round((1 - at + i) * int(SAND[i][k : k + 2], 16) + (at - i) * int(SAND[i + 1][k : k + 2], 16))
        for k in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts)


def _band_paths(plane: LossPlane, levels: tuple[float, ...], height: float) -> list[Html]:
    """One path per band, made of horizontal runs of cells: a small file, and no seams between the cells."""
    step, rise = _PLANE_WIDTH / _CELLS, height / _CELLS
    runs: dict[int, list[str]] = {}
    for i, row in enumerate(interpolate(plane, _CELLS)):
        start = 0
        for band, run in groupby(None if math.isnan(value) else band_of(value, levels) for value in row):
            n = len(list(run))
            if band is not None:
                corner = f"M{start * step:.4g},{height - (i + 1) * rise:.4g}"
                runs.setdefault(band, []).append(f"{corner}h{n * step:.4g}v{rise:.4g}H{start * step:.4g}z")
            start += n
    return [
        element("path", d="".join(pieces), fill=colour(band), stroke=colour(band), stroke_width=0.8)
        for band, pieces in sorted(runs.items())
    ]


def _coordinates(point: Point) -> str:
    return f"{point[0]:.4g},{point[1]:.4g}"


def _model(name: str, at: Point, middle: float) -> tuple[Html, Html]:
    """A dot, and the name beside it: away from the middle of all models, where no line is, if there is room."""
    kind = "aligned" if name.endswith("aligned") else "end"
    wide = 11 * len(short(name, 20)) + 11
    right = at[0] + wide > _PLANE_WIDTH or (at[0] < middle and at[0] > wide)
    label = element(
        "text", short(name, 20), x=at[0] + (-11 if right else 11), y=at[1] - 10, class_=f"point {kind}",
        text_anchor="end" if right else "start",
    )  # fmt: skip
    return element("circle", cx=at[0], cy=at[1], r=6.5, class_=f"dot {kind}"), label
