"""The still pictures of the page, as SVG whose colours and sizes are attributes: the page allows no inline style."""

import math
from collections.abc import Sequence

from isobasin.report.fields import short
from isobasin.report.levels import SAND, band_of, bands, refined
from isobasin.report.markup import Html, element
from isobasin.report.result import Number, Plane
from isobasin.report.wording import plain

_CELLS = 160
_WIDTH = 480.0


def bar(value: Number, low: float, high: float, kind: str) -> Html:
    """A horizontal bar from zero to a value, on an axis from low to high."""
    width = (high - low) or 1.0
    zero, at = (100 * (v - low) / width for v in (0.0, value or 0.0))
    return element(
        "svg",
        element("rect", x=min(zero, at), y=0, width=abs(at - zero), height=8, class_=f"fill-{kind}"),
        element("rect", x=zero, y=0, width=0.4, height=8, class_="axis"),
        viewBox="0 0 100 8",
        preserveAspectRatio="none",
        class_="bar",
        aria_hidden="true",
    )


def log_range(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten around positive values.

    >>> log_range([2e-7, 1.2e-6])
    (-7, -5)
    """
    powers = [math.log10(value) for value in values if value > 0] or [0.0]
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    return low, max(high, low + 1)


def log_strip(value: Number, floor: Number, low: int, high: int) -> Html:
    """A mark at the logarithm of a value, beside the line of the floating type's own step."""
    marks = []
    for number, kind, width in ((floor, "floor", 0.6), (value, "mark", 1.6)):
        if number is not None and number > 0:
            at = 100 * (math.log10(number) - low) / (high - low)
            marks.append(element("rect", x=max(0.0, min(at, 100 - width)), y=0, width=width, height=8, class_=kind))
    track = element("rect", x=0, y=3.6, width=100, height=0.8, class_="track")
    return element(
        "svg", track, *marks, viewBox="0 0 100 8", preserveAspectRatio="none", class_="strip", aria_hidden="true"
    )


def plane_picture(plane: Plane, a: str, b: str) -> Html | None:
    """Bands of loss, the two straight lines and the models; None where no loss is finite or all are equal."""
    levels = bands(plane)
    if levels is None:
        return None
    wide, high = plane.x[-1] - plane.x[0], plane.y[-1] - plane.y[0]
    height = _WIDTH * min(max(high / wide, 0.4), 1.6)

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return _WIDTH * (point[0] - plane.x[0]) / wide, height * (1 - (point[1] - plane.y[0]) / high)

    points = {name: place(point) for name, point in plane.points.items()}
    lines = [
        element("path", d=f"M{_pair(points[a])}L{_pair(points[end])}", class_=f"{layer} {kind}")
        for end, kind in ((b, "naive"), (f"{b} aligned", "aligned"))
        if a in points and end in points
        for layer in ("halo", "segment")
    ]
    return element(
        "svg",
        element("rect", width=_WIDTH, height=height, class_="unknown"),
        *_bands(plane, levels, height),
        *lines,
        *(_model(name, at) for name, at in points.items()),
        viewBox=f"0 0 {_WIDTH:.0f} {height:.6g}",
        class_="plane",
        role="img",
        aria_label=f"Loss on the plane through {', '.join(short(name) for name in points)}, from {plain(levels[0])} "
        f"to {plain(levels[-1])} and above",
    )


def scale_picture(n: int = 12) -> Html:
    """The colours of the bands in their order."""
    cells = [element("rect", x=i, y=0, width=1.02, height=1, fill=colour(i, n)) for i in range(n)]
    return element("svg", *cells, viewBox=f"0 0 {n} 1", preserveAspectRatio="none", class_="scale", aria_hidden="true")


def colour(band: int, n: int) -> str:
    """The colour of a band, interpolated between the stops of the palette.

    >>> colour(0, 12), colour(11, 12)
    ('#fffdf4', '#a96532')
    """
    at = band / (n - 1) * (len(SAND) - 1)
    i = min(int(at), len(SAND) - 2)
    parts = [
        round((1 - at + i) * int(SAND[i][k : k + 2], 16) + (at - i) * int(SAND[i + 1][k : k + 2], 16))
        for k in (1, 3, 5)
    ]
    return "#" + "".join(f"{part:02x}" for part in parts)


def _bands(plane: Plane, levels: tuple[float, ...], height: float) -> list[Html]:
    """One path per band, made of horizontal runs of cells: small, and without seams."""
    step, rise, n = _WIDTH / _CELLS, height / _CELLS, len(levels) - 1
    runs: dict[int, list[str]] = {}
    for i, row in enumerate(refined(plane, _CELLS)):
        found = [None if value is None else band_of(value, levels) for value in row]
        start = 0
        for j in range(1, _CELLS + 1):
            if j < _CELLS and found[j] == found[start]:
                continue
            band = found[start]
            if band is not None:
                corner = f"M{start * step:.4g},{height - (i + 1) * rise:.4g}"
                runs.setdefault(band, []).append(f"{corner}h{(j - start) * step:.4g}v{rise:.4g}H{start * step:.4g}z")
            start = j
    return [
        element("path", d="".join(pieces), fill=colour(band, n), stroke=colour(band, n), stroke_width=0.8)
        for band, pieces in sorted(runs.items())
    ]


def _pair(point: tuple[float, float]) -> str:
    return f"{point[0]:.4g},{point[1]:.4g}"


def _model(name: str, at: tuple[float, float]) -> Html:
    kind = "aligned" if name.endswith("aligned") else "end"
    right = at[0] > 0.7 * _WIDTH
    label = element(
        "text", short(name, 20), x=at[0] + (-11 if right else 11), y=at[1] - 10, class_=f"point {kind}",
        text_anchor="end" if right else "start",
    )  # fmt: skip
    return Html(f"{element('circle', cx=at[0], cy=at[1], r=6.5, class_=f'dot {kind}')}{label}")
