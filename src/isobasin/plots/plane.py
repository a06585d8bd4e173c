"""The loss on the plane through A, B and aligned B."""

from pathlib import Path
from typing import TYPE_CHECKING

from isobasin.errors import IsobasinError
from isobasin.plots.canvas import COLOURS, INK, caption, joined, measured_on, write_figure
from isobasin.report.facts import how_aligned
from isobasin.report.fields import short, text
from isobasin.report.levels import SAND, bands
from isobasin.report.reading import Source, read_result
from isobasin.report.result import Plane

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

_HALO = "white"


def plot_plane(result: Source, out: str | Path, *, pair: str | None = None) -> Path:
    """Write the contour picture with the models marked and both straight lines drawn."""
    found = read_result(result)
    chosen = found.pair(pair)
    plane = chosen.plane if chosen else None
    if chosen is None or plane is None:
        raise IsobasinError(
            f"pair {text(pair or 'A-B')}: the result has no loss plane; run `isobasin path --plane` to measure it"
        )

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        _contours(figure, axes, plane)
        _models(axes, plane, chosen.a.letter, chosen.b.letter)
        axes.set(xlabel=f"along {chosen.a.letter} to {chosen.b.letter}", ylabel="across")
        title = f"Loss on the plane through {chosen.a.letter}, {chosen.b.letter} and {chosen.b.letter} aligned"
        caption(figure, title, joined(how_aligned(chosen), measured_on(found)))

    return write_figure(out, (6.6, _height(plane)), draw)


def _height(plane: Plane) -> float:
    """Inches, so that an equal scale leaves no empty paper: the panel is about 4.9 wide."""
    shape = _high(plane) / _wide(plane) if _is_level(plane) else 0.9
    return 1.15 + 4.9 * shape


def _wide(plane: Plane) -> float:
    return plane.x[-1] - plane.x[0]


def _high(plane: Plane) -> float:
    return plane.y[-1] - plane.y[0]


def _is_level(plane: Plane) -> bool:
    """Whether one scale fits both axes: distances on the plane are those between the weights."""
    return _high(plane) > 0 and 0.3 < _wide(plane) / _high(plane) < 3


def _contours(figure: "Figure", axes: "Axes", plane: Plane) -> None:
    import numpy as np

    axes.set_facecolor("#f0f0f0")  # shows where the loss is not finite
    levels = bands(plane)
    if levels is not None and min(len(plane.x), len(plane.y)) >= 2:
        loss = np.ma.masked_invalid([[np.nan if v is None else v for v in row] for row in plane.loss])
        filled = axes.contourf(plane.x, plane.y, loss, levels=levels, cmap=_sand(), extend="max")
        axes.contour(plane.x, plane.y, loss, levels=levels, colors="#7a4a12", linewidths=0.5, alpha=0.35)
        bar = figure.colorbar(filled, ax=axes, shrink=0.95, anchor=(0, 1), pad=0.02, format="%.3g")
        bar.set_label("Loss (nats)")
        bar.outline.set_visible(False)
    else:
        axes.text(0.5, 0.5, "no finite loss, or the same everywhere", transform=axes.transAxes, ha="center")
    if _is_level(plane):
        axes.set_aspect("equal", anchor="N")
    axes.set(xlim=(plane.x[0], plane.x[-1]), ylim=(plane.y[0], plane.y[-1]))


def _sand() -> "Colormap":
    """From almost white, where the loss is low, to brown: the aligned line's blue shows on all of it."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("sand", SAND)


def _models(axes: "Axes", plane: Plane, a: str, b: str) -> None:
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground=_HALO)]
    for end, colour, name in ((b, COLOURS["naive"], "naive"), (f"{b} aligned", COLOURS["aligned"], "aligned")):
        if a in plane.points and end in plane.points:
            xs, ys = zip(plane.points[a], plane.points[end])
            style = (0, (4, 2)) if name == "naive" else "-"
            axes.plot(xs, ys, color=INK if name == "naive" else colour, lw=1.6, ls=style, path_effects=halo, zorder=4)
    for name, (x, y) in plane.points.items():
        colour = COLOURS["aligned"] if name.endswith("aligned") else INK
        axes.plot([x], [y], "o", color=colour, ms=8, mec="white", mew=1.5, zorder=5, clip_on=False)
        axes.annotate(
            short(name, 20), (x, y), (7, 7), textcoords="offset points", weight="bold", color=colour, zorder=6,
            path_effects=halo,
        )  # fmt: skip
