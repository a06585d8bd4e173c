"""Loss along the straight line between two models, naive beside aligned, with the barrier marked."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from isobasin.errors import IsobasinError
from isobasin.plots.canvas import ACCENT, COLOURS, INK, MUTED, caption, joined, legend, measured_on, write_figure
from isobasin.report.facts import how_aligned
from isobasin.report.fields import short
from isobasin.report.reading import Source, read_result
from isobasin.report.result import METRICS, Line, Model, Pair
from isobasin.report.wording import TITLES, UNITS, listed, plain, rise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Height as a share of the bracket, shift in points, and how the text is anchored.
Label = tuple[float, tuple[int, int], Literal["left", "center", "right"], Literal["bottom", "center", "top"]]


def plot_path(result: Source, out: str | Path, *, metric: str = "loss") -> Path:
    """Write the curve of a metric, and of accuracy beside it where it was measured; one column for each pair.

    The thin dashed line joins the ends; the bracket is the barrier, max over λ of curve − line.
    """
    found = read_result(result)
    if metric not in METRICS or not any(metric in pair.metrics for pair in found.pairs):
        raise IsobasinError(
            f"metric {short(metric)!r} was not measured, expected one of "
            f"{', '.join(m for m in METRICS if any(m in pair.metrics for pair in found.pairs))}"
        )
    with_accuracy = metric != "accuracy" and any("accuracy" in pair.metrics for pair in found.pairs)
    metrics = [metric, "accuracy"] if with_accuracy else [metric]
    n_pairs = len(found.pairs)
    # One pair lies flat, its metrics side by side; several stand as columns, as papers show triples.
    rows, columns = (1, len(metrics)) if n_pairs == 1 else (len(metrics), n_pairs)
    size = ({1: 5.4, 2: 8.6}.get(columns, 3.7 * columns), 0.65 + 3.3 * rows)

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(rows, columns, squeeze=False, sharey="row" if n_pairs > 1 else "none")
        panels = grid[0] if n_pairs == 1 else grid.T.ravel()
        jobs = [(pair, name) for pair in found.pairs for name in metrics]
        for axes, (pair, name) in zip(panels, jobs):
            _panel(axes, pair, name)
        for row in grid:
            for axes in row[1:] if n_pairs > 1 else ():
                axes.set_ylabel("")
        how = list(dict.fromkeys(how_aligned(pair) for pair in found.pairs))
        caption(figure, _title(found.pairs), joined("; ".join(how), measured_on(found)))
        legend(figure, grid[0][0])

    return write_figure(out, size, draw)


def _title(pairs: tuple[Pair, ...]) -> str:
    letters = list(dict.fromkeys(letter for pair in pairs for letter in (pair.a.letter, pair.b.letter)))
    return f"The straight line between {', '.join(letters[:-1])} and {letters[-1]}"


def _panel(axes: "Axes", pair: Pair, metric: str) -> None:
    scale = 100.0 if metric == "accuracy" else 1.0
    for name, line in pair.lines.items():
        if metric in line.curves:
            _curve(axes, pair, line, name, metric, scale)
    unit = UNITS[metric]
    axes.set_ylabel(f"{TITLES[metric]} ({unit})" if unit else TITLES[metric])
    axes.set_xlabel("λ", labelpad=1)
    axes.set_xlim(-0.03, 1.03)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    _end(axes, pair.a, 0.0, "left")
    _end(axes, pair.b, 1.0, "right")
    axes.grid(axis="y", color="#ececec", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(y=0.1)
    if metric == "perplexity" and _spans_decades(pair):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: plain(value, 3))
        axes.yaxis.set_minor_formatter(lambda value, _: "")


def _end(axes: "Axes", model: Model, place: float, side: Literal["left", "right"]) -> None:
    """Which model stands at this end, under its λ."""
    name = model.letter if model.name == model.letter else f"{model.letter}  {short(model.name, 18)}"
    axes.annotate(
        name, (place, 0), (0, -19), xycoords="axes fraction", textcoords="offset points", ha=side, va="top",
        weight="bold", fontsize=9,
    )  # fmt: skip


def _spans_decades(pair: Pair) -> bool:
    values = [v for line in pair.lines.values() for v in line.curves.get("perplexity", ()) if v is not None]
    return bool(values) and min(values) > 0 and max(values) > 50 * min(values)


def _curve(axes: "Axes", pair: Pair, line: Line, name: str, metric: str, scale: float) -> None:
    values = [float("nan") if value is None else scale * value for value in line.curves[metric]]
    colour, front = COLOURS[name], 4 if name == "aligned" else 3
    dots = "o" if len(values) <= 51 else ""
    axes.plot(pair.lambdas, values, color=colour, lw=2, marker=dots, ms=3, label=name, zorder=front)
    if metric != "perplexity" and not (math.isnan(values[0]) or math.isnan(values[-1])):
        drawn = any(other.get_gid() == "chord" for other in axes.lines)
        chord: dict[str, Any] = {"gid": "chord", "label": "_" if drawn else "between the ends", "zorder": 2}
        axes.plot([0, 1], [values[0], values[-1]], color=INK, lw=0.8, ls=(0, (4, 3)), **chord)
    holes = line.holes(pair.lambdas, metric)
    if holes:
        axes.plot(holes, [0.02] * len(holes), "x", color=ACCENT, ms=6, transform=axes.get_xaxis_transform(), zorder=6)
        message = f"{name}: not finite at λ = {listed(holes, 3)}"
        height = 1.01 if name == "naive" else 1.06
        axes.text(0.5, height, message, transform=axes.transAxes, ha="center", fontsize=8.5, color=ACCENT)
    _bracket(axes, pair, line, name, metric, scale)


def _bracket(axes: "Axes", pair: Pair, line: Line, name: str, metric: str, scale: float) -> None:
    """From the straight line to the curve at the barrier's λ, with its height."""
    barrier, values = line.barrier(metric), line.curves[metric]
    first, last = values[0], values[-1]
    if not barrier.height or barrier.lam is None or first is None or last is None:
        return
    lam = barrier.lam
    foot = (1 - lam) * first + lam * last
    top = foot + (barrier.height if metric == "loss" else -barrier.height)
    colour = COLOURS[name] if name == "aligned" else MUTED
    ends = {"arrowstyle": "|-|,widthA=0.3,widthB=0.3", "color": colour, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (lam, scale * top), (lam, scale * foot), arrowprops=ends, zorder=5)
    share, shift, side, across = _label(pair, name, metric, lam)
    axes.annotate(
        f"barrier {rise(metric, barrier.height)}",
        (lam, scale * (foot + share * (top - foot))),
        shift,
        textcoords="offset points",
        ha=side,
        va=across,
        fontsize=9,
        color=colour,
        zorder=7,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},  # a curve may run behind it
    )


def _label(pair: Pair, name: str, metric: str, lam: float) -> Label:
    """Where a barrier's number stands on its bracket: off the curves, whichever of them is high.

    Beside a low aligned curve the naive number stands inside the hill, low, where it is wide, and the aligned one just
    outside its own; where the aligned curve is high too, it is the other way round.
    """
    up = 1 if metric == "loss" else -1
    outside: Literal["bottom", "top"] = "bottom" if up > 0 else "top"
    naive, aligned = (
        line.barrier(metric).height or 0.0 if (line := pair.lines.get(path)) else 0.0 for path in ("naive", "aligned")
    )
    high = aligned > 0.4 * naive
    if name == "naive":
        if high:
            return 1.0, (0, 4 * up), "center", outside
        return (0.1, (6, 0), "left", "center") if lam < 0.65 else (0.2, (-6, 0), "right", "center")
    return (0.25, (-6, 0), "right", "center") if high else (1.0, (-6, 5 * up), "right", outside)
