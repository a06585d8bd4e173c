"""Where the barrier sits: the share of it that each component carries."""

from pathlib import Path
from typing import TYPE_CHECKING

from isobasin.errors import IsobasinError
from isobasin.plots.canvas import COLOURS, INK, MUTED, caption, joined, legend, measured_on, write_figure
from isobasin.report.facts import how_aligned, share_rows
from isobasin.report.fields import short, text
from isobasin.report.reading import Source, read_result
from isobasin.report.result import Pair
from isobasin.report.wording import percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST = 80  # bars that one page can hold


def plot_explain(result: Source, out: str | Path, *, pair: str | None = None) -> Path:
    """Write bars: by how much the barrier falls when a component's outputs are mixed instead of its weights."""
    found = read_result(result)
    chosen = found.pair(pair)
    rows = share_rows(chosen)[:_MOST] if chosen else []
    if chosen is None or not rows:
        raise IsobasinError(
            f"pair {text(pair or 'A-B')}: the result has no explanation; run `isobasin path --explain` to measure it"
        )

    def draw(figure: "Figure") -> None:
        _bars(figure, chosen)
        below = joined(f"{chosen.a.letter} to {chosen.b.letter}", how_aligned(chosen), measured_on(found))
        caption(figure, "Share of the barrier that sits in each component", below)

    return write_figure(out, (7.0, 1.5 + 0.42 * len(rows)), draw)


def _bars(figure: "Figure", pair: Pair) -> None:
    rows = share_rows(pair)[:_MOST]
    axes = figure.subplots()
    paths = [path for path in ("naive", "aligned") if path in pair.explain]
    thick = 0.72 / len(paths)
    for i, path in enumerate(paths):
        shares = [row.naive if path == "naive" else row.aligned for row in rows]
        widths = [share.share if share and share.share is not None else 0.0 for share in shares]
        places = [j + (i - (len(paths) - 1) / 2) * thick for j in range(len(rows))]
        axes.barh(places, widths, height=thick * 0.9, color=COLOURS[path], label=path)
        for place, share, width in zip(places, shares, widths):
            if share is not None:
                offset, side = ((4, 0), "left") if width >= 0 else ((-4, 0), "right")
                colour = MUTED if path == "naive" else COLOURS[path]
                axes.annotate(
                    percent(share.share), (width, place), offset, textcoords="offset points", ha=side, va="center",
                    fontsize=8, color=colour,
                )  # fmt: skip
    axes.set_yticks(range(len(rows)), [short(row.name, 30) for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.14)
    axes.axvline(0, color=INK, lw=0.8)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    axes.set_xlabel("fall of the barrier when outputs are mixed instead of weights")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    legend(figure, axes)
