"""Figures for papers: matplotlib figures, and PNG, SVG or PDF files by the ending of the name.

Colours are those of Okabe and Ito, which readers with the common forms of colour blindness can tell apart. The naive
path is grey in every figure.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from isobasin.errors import IsobasinError
from isobasin.files import atomic_write, check_output_file
from isobasin.report import text
from isobasin.report.result import (
    METRICS,
    SAND,
    HasResult,
    LossPlane,
    ModelInfo,
    PairResult,
    PathCurves,
    PathResult,
    Source,
    bands,
    components,
    heat_map,
    how_aligned,
    read_result,
)
from isobasin.report.text import Number, short

INK, MUTED, GRID = "#222222", "#666666", "#ececec"
BLUE, GREEN, ORANGE, PURPLE, YELLOW = "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#E69F00"
COLOURS = {
    "naive": "#8a8a8a", "aligned": BLUE, "weights": BLUE, "activations": GREEN, "learned": ORANGE, "reference": PURPLE,
    "other": "#b8860b",
}  # fmt: skip
SUFFIXES = (".png", ".svg", ".pdf")
CHORD = "between the ends"  # the straight line that a barrier is measured from
DASHES: Any = (0, (4, 3))
_MAX_NUMBERED = 26  # more layers than this leave no room for numbers in the cells of a heat map
_MAX_BARS = 80  # components of an explanation that fit on one page
_SIMILAR = 0.05  # a lower similarity score marks no matching layer
_STYLE: Any = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.formatter.useoffset": False,
    **dict.fromkeys(("xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize"), 9),
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,  # a `$` in a name starts no formula
    "svg.hashsalt": "isobasin",
}

Draw = Callable[[Figure], None]
Size = tuple[float, float]  # width and height in inches
_CLIP = re.compile(rb'(?<=id=")p[0-9a-f]{10}(?=")|(?<=url\(#)p[0-9a-f]{10}(?=\))')
_TAG = re.compile(rb"<\w[^>]*>")
_LONG_DECIMAL = re.compile(rb"\b[1-9]\d*\.\d{4,}\b")


class ShownFigure(Figure):
    """A figure that a notebook shows where it is the value of a cell, with or without pyplot."""

    def _repr_png_(self) -> bytes:
        return _encode(self, "png")


def new_figure(paths: Sequence[Path], size: Size, draw: Draw, *, dpi: int = 200) -> Figure:
    """Draw once on a new figure and write it to each path, by the ending of its name; older files are replaced.

    The user's own matplotlib settings neither change the figure nor are changed by it.
    """
    for path in paths:
        if path.suffix.lower() not in SUFFIXES:
            raise IsobasinError(f"{path}: no kind of picture is known by {path.suffix!r}, expected .png, .svg or .pdf")
        check_output_file(path, force=True, kind="figure")
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        # A name may hold letters that the font does not have; matplotlib then draws a box.
        warnings.filterwarnings("ignore", message=".*[Gg]lyph.*missing")
        figure = ShownFigure(figsize=size, dpi=dpi, layout="constrained")
        draw(figure)
        made = [_encode(figure, path.suffix.lower().removeprefix(".")) for path in paths]
    for path, data in zip(paths, made):
        atomic_write(path, data)
    return figure


def _places(out: str | Path | None) -> list[Path]:
    return [] if out is None else [Path(out)]


def _encode(figure: Figure, kind: str) -> bytes:
    # Without a date the same result gives the same file.
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    data = io.BytesIO()
    figure.savefig(data, format=kind, metadata=dates)
    return _round_coordinates(_number_clips(data.getvalue())) if kind == "svg" else data.getvalue()


def _round_coordinates(svg: bytes) -> bytes:
    """Round coordinates to thousandths of a point: the last bits of a layout vary between runs.

    Layouts often fall on a half of such a unit, so a small amount is added first. Scales below 1, texts and comments
    stay as they are.

    >>> _round_coordinates(b'<g at="398.867187 3.0625"/><g at="398.867188 3.062499 0.015625">2.70014</g>')
    b'<g at="398.867 3.063"/><g at="398.867 3.063 0.015625">2.70014</g>'
    """
    return _TAG.sub(lambda tag: _LONG_DECIMAL.sub(lambda found: b"%.3f" % (float(found[0]) + 1e-5), tag[0]), svg)


def _number_clips(svg: bytes) -> bytes:
    """Number the clip paths: matplotlib names them by a hash over the last bits of a layout, which vary."""
    names: dict[bytes, bytes] = {}
    return _CLIP.sub(lambda found: names.setdefault(found[0], b"clip%d" % len(names)), svg)


def add_caption(figure: Figure, title: str, *parts: str) -> None:
    """A title, and under it in grey the parts that are not empty."""
    engine = figure.get_layout_engine()
    height = figure.get_figheight()
    if engine is not None:
        engine.set(rect=(0.005, 0.01, 0.99, 1 - 0.56 / height), w_pad=0.08)  # type: ignore[call-arg]
    figure.text(0.02, 1 - 0.10 / height, title, fontsize=12, weight="bold", va="top")
    most = int(13 * figure.get_figwidth())  # characters that fit on one line
    below = short("  ·  ".join(part for part in parts if part), most)
    figure.text(0.02, 1 - 0.34 / height, below, fontsize=9, color=MUTED, va="top")


def add_legend(figure: Figure, axes: Axes) -> None:
    """Under the panels, in as many columns as fit; the straight line between the ends comes last."""
    found = sorted(zip(*axes.get_legend_handles_labels()), key=lambda entry: entry[1] == CHORD)
    if found:
        handles, labels = zip(*found)
        columns = min(max(2, int(figure.get_figwidth() / 1.4)), len(found))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)


def add_grid(axes: Axes) -> None:
    axes.grid(axis="y", color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)


def set_lambda_axis(axes: Axes, ticks: Sequence[float], margin: float) -> None:
    axes.set_xlim(-margin, 1 + margin)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])


def add_chord(axes: Axes, ends: Sequence[float], **options: Any) -> None:
    """The thin dashed line between the values at the ends."""
    axes.plot([0, 1], ends, color=INK, lw=0.8, ls=DASHES, **options)


def as_nan(values: Sequence[Number], scale: float = 1.0) -> list[float]:
    """Numbers for matplotlib: NaN, which leaves a gap, where a value is missing."""
    return [math.nan if value is None else scale * value for value in values]


def metric_scale(metric: str) -> float:
    return 100.0 if metric == "accuracy" else 1.0


def add_bars(
    axes: Axes, i: int, n: int, shares: Sequence[Number], words: Sequence[str | None], *, label: str, colour: str,
    text_colour: str, thickness: float,
) -> None:  # fmt: skip
    """The i-th of n bars in each row, with its words beside it; together they fill `thickness` of the row."""
    each = thickness / n
    places = [row + (i - (n - 1) / 2) * each for row in range(len(shares))]
    widths = [share or 0.0 for share in shares]
    axes.barh(places, widths, height=each * 0.9, color=colour, label=label)
    for place, width, word in zip(places, widths, words):
        if word is not None:
            shift, side = (4, "left") if width >= 0 else (-4, "right")
            axes.annotate(
                word, (width, place), (shift, 0), textcoords="offset points", ha=side, va="center", fontsize=8,
                color=text_colour,
            )  # fmt: skip


def set_bar_axes(axes: Axes, names: Sequence[str], *, edge: float, margin: float, fontsize: float) -> None:
    """Names of the rows, downwards, and shares in per cent."""
    axes.set_yticks(range(len(names)), names, fontsize=fontsize)
    axes.set_ylim(len(names) - 1 + edge, -edge)
    axes.margins(x=margin)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def add_heat_map(
    figure: Figure,
    values: Sequence[Sequence[Number]],
    rows: Sequence[str],
    columns: Sequence[str],
    show: Callable[[Number], str],
    *,
    fontsize: float,
    bar_format: Any = None,
) -> Axes:
    """Cells of values between 0 and 1, each with its number where there is room; about 24 names on each axis."""
    import numpy as np

    axes = figure.subplots()
    masked = np.ma.masked_invalid([as_nan(row) for row in values])
    image = axes.pcolormesh(masked, cmap="Blues", vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
    for names, set_ticks in ((rows, axes.set_yticks), (columns, axes.set_xticks)):
        shown = range(0, len(names), max(1, len(names) // 24))
        set_ticks([k + 0.5 for k in shown], [names[k] for k in shown])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    if len(columns) <= _MAX_NUMBERED and len(rows) <= _MAX_NUMBERED:
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                colour = "white" if value is not None and value > 0.68 else INK
                axes.text(j + 0.5, i + 0.5, show(value), ha="center", va="center", color=colour, fontsize=fontsize)
    bar = figure.colorbar(image, ax=axes, pad=0.02, ticks=[0, 0.5, 1], format=bar_format)
    bar.outline.set_visible(False)
    return axes


def _measured_on(result: PathResult) -> str:
    """The task in a few words."""
    name, samples = result.task.get("name"), result.task.get("n_samples")
    words = [short(name, 24)] if name else []
    words += [f"{samples:,} samples"] if isinstance(samples, int) else []
    return ", ".join(words)


def _no_part(pair: str | None, part: str) -> IsobasinError:
    return IsobasinError(f"pair {text.clean(pair or 'A-B')}: the result has no {part}")


def plot_path(result: Source, out: str | Path | None = None, *, metric: str = "loss") -> Figure:
    """The curve of a metric, and of accuracy beside it where it was measured; one column for each pair.

    `result` is a `Curve`, or a path.json: its path or its content. The figure is also written to `out`, if given. The
    thin dashed line joins the ends; the bracket is the barrier, max over λ of curve − line.
    """
    found = read_result(result)
    measured = [m for m in METRICS if any(m in pair.metrics for pair in found.pairs)]
    if metric not in measured:
        raise IsobasinError(f"metric {short(metric)!r} was not measured, expected one of {', '.join(measured)}")
    metrics = [metric, "accuracy"] if metric != "accuracy" and "accuracy" in measured else [metric]
    n_pairs = len(found.pairs)
    # The metrics of one pair stand side by side; several pairs stand as columns.
    rows, columns = (1, len(metrics)) if n_pairs == 1 else (len(metrics), n_pairs)
    size = ({1: 5.4, 2: 8.6}.get(columns, 3.7 * columns), 0.65 + 3.3 * rows)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(rows, columns, squeeze=False, sharey="row" if n_pairs > 1 else "none")
        panels = grid[0] if n_pairs == 1 else grid.T.ravel()
        for axes, (pair, name) in zip(panels, [(pair, name) for pair in found.pairs for name in metrics]):
            _path_panel(axes, pair, name)
        for row in grid:
            for axes in row[1:] if n_pairs > 1 else ():
                axes.set_ylabel("")
        how = dict.fromkeys(how_aligned(pair) for pair in found.pairs)
        if len({pair.key for pair in found.pairs}) < n_pairs:  # one pair, aligned in several ways
            for axes, pair in zip(grid[0], found.pairs):
                axes.set_title(how_aligned(pair), loc="left")
            how = {}
        letters = list(dict.fromkeys(letter for pair in found.pairs for letter in (pair.a.letter, pair.b.letter)))
        title = f"The straight line between {', '.join(letters[:-1])} and {letters[-1]}"
        add_caption(figure, title, "; ".join(how), _measured_on(found))
        add_legend(figure, grid[0][0])

    return new_figure(_places(out), size, draw)


def _path_panel(axes: Axes, pair: PairResult, metric: str) -> None:
    for name, path in pair.paths.items():
        if metric in path.curves:
            _curve(axes, pair, path, name, metric)
    axes.set_ylabel(text.metric_title(metric))
    axes.set_xlabel("λ", labelpad=1)
    set_lambda_axis(axes, (0, 0.25, 0.5, 0.75, 1), 0.03)
    _end(axes, pair.a, 0.0, "left")
    _end(axes, pair.b, 1.0, "right")
    add_grid(axes)
    axes.margins(y=0.1)
    if metric == "perplexity" and _spans_decades(pair):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: text.number(value, 3))
        axes.yaxis.set_minor_formatter(lambda value, _: "")


def _end(axes: Axes, model: ModelInfo, place: float, side: Literal["left", "right"]) -> None:
    """The model at this end, under its λ."""
    name = model.letter if model.name == model.letter else f"{model.letter}  {short(model.name, 18)}"
    axes.annotate(
        name, (place, 0), (0, -19), xycoords="axes fraction", textcoords="offset points", ha=side, va="top",
        weight="bold", fontsize=9,
    )  # fmt: skip


def _spans_decades(pair: PairResult) -> bool:
    values = [v for path in pair.paths.values() for v in path.curves.get("perplexity", ()) if v is not None]
    return bool(values) and min(values) > 0 and max(values) > 50 * min(values)


def _curve(axes: Axes, pair: PairResult, path: PathCurves, name: str, metric: str) -> None:
    values = as_nan(path.curves[metric], metric_scale(metric))
    front = 4 if name == "aligned" else 3
    dots = "o" if len(values) <= 51 else ""
    axes.plot(pair.lambdas, values, color=COLOURS[name], lw=2, marker=dots, ms=3, label=name, zorder=front)
    if metric != "perplexity" and not (math.isnan(values[0]) or math.isnan(values[-1])):
        drawn = any(other.get_gid() == "chord" for other in axes.lines)
        add_chord(axes, [values[0], values[-1]], gid="chord", label="_" if drawn else CHORD, zorder=2)
    gaps = path.not_finite(pair.lambdas, metric)
    if gaps:
        axes.plot(gaps, [0.02] * len(gaps), "x", color=ORANGE, ms=6, transform=axes.get_xaxis_transform(), zorder=6)
        message = f"{name}: not finite at λ = {text.number_list(gaps, 3)}"
        height = 1.01 if name == "naive" else 1.06
        axes.text(0.5, height, message, transform=axes.transAxes, ha="center", fontsize=8.5, color=ORANGE)
    _bracket(axes, pair, path, name, metric)


def _bracket(axes: Axes, pair: PairResult, path: PathCurves, name: str, metric: str) -> None:
    """From the straight line to the curve at the barrier's λ, with its height."""
    barrier, values, scale = path.barrier(metric), path.curves[metric], metric_scale(metric)
    first, last = values[0], values[-1]
    if not barrier.height or barrier.lam is None or first is None or last is None:
        return
    lam = barrier.lam
    foot = (1 - lam) * first + lam * last
    top = foot + (barrier.height if metric == "loss" else -barrier.height)
    colour = COLOURS[name] if name == "aligned" else MUTED
    ends = {"arrowstyle": "|-|,widthA=0.3,widthB=0.3", "color": colour, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (lam, scale * top), (lam, scale * foot), arrowprops=ends, zorder=5)
    share, shift, anchor = _label_place(pair, name, metric, lam)
    axes.annotate(
        f"barrier {text.barrier(metric, barrier.height)}",
        (lam, scale * (foot + share * (top - foot))),
        shift,
        textcoords="offset points",
        **anchor,
        fontsize=9,
        color=colour,
        zorder=7,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85},  # a curve may run behind it
    )


def _label_place(pair: PairResult, name: str, metric: str, lam: float) -> tuple[float, tuple[int, int], Any]:
    """Where a barrier's height covers no curve: share of the bracket, shift in points, anchor."""
    up = 1 if metric == "loss" else -1
    outside = "bottom" if up > 0 else "top"
    left, right = {"ha": "left", "va": "center"}, {"ha": "right", "va": "center"}
    heights = {key: path.barrier(metric).height or 0.0 for key, path in pair.paths.items()}
    high = heights.get("aligned", 0.0) > 0.4 * heights.get("naive", 0.0)
    if name == "aligned":
        return (0.25, (-6, 0), right) if high else (1.0, (-6, 5 * up), {"ha": "right", "va": outside})
    if high:
        return 1.0, (0, 4 * up), {"ha": "center", "va": outside}
    return (0.1, (6, 0), left) if lam < 0.65 else (0.2, (-6, 0), right)


def plot_explain(result: Source, out: str | Path | None = None, *, pair: str | None = None) -> Figure:
    """Bars: by how much the barrier falls when a component's outputs are mixed instead of its weights."""
    found = read_result(result)
    chosen = found.pair(pair)
    names = components(chosen)[:_MAX_BARS] if chosen else []
    if chosen is None or not names:
        raise _no_part(pair, "explanation; run `isobasin path --explain` to measure it")

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for i, (path, shares) in enumerate(chosen.explain.items()):
            add_bars(
                axes, i, len(chosen.explain), [shares.get(name) for name in names],
                [text.percent(shares[name]) if name in shares else None for name in names],
                label=path, colour=COLOURS[path], text_colour=MUTED if path == "naive" else COLOURS[path],
                thickness=0.72,
            )  # fmt: skip
        set_bar_axes(axes, [short(name, 30) for name in names], edge=0.6, margin=0.14, fontsize=9)
        axes.axvline(0, color=INK, lw=0.8)
        axes.set_xlabel("fall of the barrier when outputs are mixed instead of weights")
        add_legend(figure, axes)
        between = f"{chosen.a.letter} to {chosen.b.letter}"
        title = "Share of the barrier that sits in each component"
        add_caption(figure, title, between, how_aligned(chosen), _measured_on(found))

    return new_figure(_places(out), (7.0, 1.5 + 0.42 * len(names)), draw)


def plot_layers(result: Source, out: str | Path | None = None, *, pair: str | None = None) -> Figure:
    """The heat map of 1 − after/before by layer and space; an empty cell was not part of the scope."""
    chosen = read_result(result).pair(pair)
    if chosen is None or chosen.alignment is None or not chosen.alignment.layers:
        raise _no_part(pair, "layers of an alignment; run `isobasin path --align`")
    table = heat_map(chosen.alignment.layers)
    gains = [[cell.gain if cell else None for cell in row] for row in zip(*table.cells)]  # spaces by layers
    names = ["all" if layer is None else str(layer) for layer in table.layers]

    def draw(figure: Figure) -> None:
        axes = add_heat_map(
            figure,
            gains,
            [short(space, 18) for space in table.spaces],
            names,
            lambda gain: text.MISSING if gain is None else f"{100 * max(-9.99, gain):.0f}",
            fontsize=9,
            bar_format=lambda value, _: f"{100 * value:.0f} %",
        )
        axes.set_xlabel("layer")
        moved = f"{chosen.b.letter} aligned to {chosen.a.letter}"
        add_caption(figure, "Share of the distance that alignment removed", moved, how_aligned(chosen))

    wide = min(max(5.6, 1.9 + 0.56 * len(table.layers)), 15.0)
    return new_figure(_places(out), (wide, 1.85 + 0.5 * len(table.spaces)), draw)


def plot_similarity(
    result: Mapping[str, Any] | HasResult, out: str | Path | None = None, *, names: tuple[str, str] = ("A", "B")
) -> Figure:
    """The heat map of the layer-to-layer scores of `distance`, with a frame around the best of every column."""
    facts = result.to_dict() if isinstance(result, HasResult) else result
    matrix = facts.get("layers")
    if not matrix:
        raise IsobasinError("the result has no layer-to-layer matrix; ask for it with `distance(a, b, layers=True)`")
    tall, wide = len(matrix), len(matrix[0])

    def draw(figure: Figure) -> None:
        from matplotlib.patches import Rectangle

        rows, columns = ([str(k) for k in range(n)] for n in (tall, wide))
        axes = add_heat_map(figure, matrix, rows, columns, lambda score: f"{score:.2f}", fontsize=8)
        axes.set_xlabel(f"layer of {short(names[1], 32)}")
        axes.set_ylabel(f"layer of {short(names[0], 32)}")
        for j, i in enumerate(facts["best_in_a"]):
            if matrix[i][j] > _SIMILAR:
                axes.add_patch(Rectangle((j, i), 1, 1, fill=False, edgecolor=ORANGE, linewidth=2))
        unrelated = f"unrelated models score at most {max(0.0, facts['null']['largest']):.3f}"
        add_caption(figure, "Which layer is like which", f"whole model {facts['score']:.3f}", unrelated)

    size = min(max(4.9, 2.3 + 0.5 * wide), 15.0), min(max(2.6, 1.5 + 0.36 * tall), 15.0)
    return new_figure(_places(out), size, draw)


def plot_plane(result: Source, out: str | Path | None = None, *, pair: str | None = None) -> Figure:
    """The contours of the loss on the plane through A, B and aligned B, with both straight lines."""
    found = read_result(result)
    chosen = found.pair(pair)
    plane = chosen.plane if chosen else None
    if chosen is None or plane is None:
        raise _no_part(pair, "loss plane; run `isobasin path --plane` to measure it")
    a, b = chosen.a.letter, chosen.b.letter
    wide, high = plane.x[-1] - plane.x[0], plane.y[-1] - plane.y[0]
    # One scale for both axes, if the shape allows it: distances on the plane are those between the weights.
    equal = 0.3 < wide / high < 3

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        _contours(figure, axes, plane)
        if equal:
            axes.set_aspect("equal", anchor="N")
        axes.set(xlim=(plane.x[0], plane.x[-1]), ylim=(plane.y[0], plane.y[-1]))
        _plane_models(axes, plane, a, b)
        axes.set(xlabel=f"along {a} to {b}", ylabel="across")
        title = f"Loss on the plane through {a}, {b} and {b} aligned"
        add_caption(figure, title, how_aligned(chosen), _measured_on(found))

    # The panel is about 4.9 inches wide: a height that leaves no empty space around it.
    return new_figure(_places(out), (6.6, 1.15 + 4.9 * (high / wide if equal else 0.9)), draw)


def _contours(figure: Figure, axes: Axes, plane: LossPlane) -> None:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    axes.set_facecolor("#f0f0f0")  # shows where the loss is not finite
    levels = bands(plane)
    if levels is None:
        axes.text(0.5, 0.5, "no finite loss, or the same everywhere", transform=axes.transAxes, ha="center")
        return
    loss = np.ma.masked_invalid([as_nan(row) for row in plane.loss])
    # From almost white, where the loss is low, to brown: the blue of the aligned line is visible on all of it.
    sand = LinearSegmentedColormap.from_list("sand", SAND)
    filled = axes.contourf(plane.x, plane.y, loss, levels=levels, cmap=sand, extend="max")
    axes.contour(plane.x, plane.y, loss, levels=levels, colors="#7a4a12", linewidths=0.5, alpha=0.35)
    bar = figure.colorbar(filled, cax=axes.inset_axes((1.03, 0, 0.05, 1)))  # as tall as the axes, whatever their shape
    places = list(bar.get_ticks())
    bar.set_ticks(places, labels=text.axis_numbers(places, 3))
    bar.set_label("Loss (nats)")
    bar.outline.set_visible(False)


def _plane_models(axes: Axes, plane: LossPlane, a: str, b: str) -> None:
    from matplotlib.patheffects import withStroke

    halo = [withStroke(linewidth=3, foreground="white")]
    for end, colour, style in ((b, INK, (0, (4, 2))), (f"{b} aligned", COLOURS["aligned"], "-")):
        if a in plane.points and end in plane.points:
            xs, ys = zip(plane.points[a], plane.points[end])
            axes.plot(xs, ys, color=colour, lw=1.6, ls=style, path_effects=halo, zorder=4)
    for name, (x, y) in plane.points.items():
        colour = COLOURS["aligned"] if name.endswith("aligned") else INK
        axes.plot([x], [y], "o", color=colour, ms=8, mec="white", mew=1.5, zorder=5, clip_on=False)
        axes.annotate(
            short(name, 20), (x, y), (7, 7), textcoords="offset points", weight="bold", color=colour, zorder=6,
            path_effects=halo,
        )  # fmt: skip
