"""Layer × space: how much of the distance alignment removed."""

from pathlib import Path
from typing import TYPE_CHECKING

from isobasin.errors import IsobasinError
from isobasin.plots.canvas import INK, caption, joined, write_figure
from isobasin.report.facts import HeatMap, heat_map, how_aligned
from isobasin.report.fields import short, text
from isobasin.report.reading import Source, read_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBERED = 26  # more layers than this leave no room for numbers in the cells


def plot_layers(result: Source, out: str | Path, *, pair: str | None = None) -> Path:
    """Write the heat map of 1 − after/before; an empty cell was not part of the scope."""
    found = read_result(result)
    chosen = found.pair(pair)
    if chosen is None or chosen.alignment is None or not chosen.alignment.layers:
        raise IsobasinError(
            f"pair {text(pair or 'A-B')}: the result has no layers of an alignment; run `isobasin path --align`"
        )
    table = heat_map(chosen.alignment.layers)

    def draw(figure: "Figure") -> None:
        _cells(figure, table)
        below = joined(f"{chosen.b.letter} aligned to {chosen.a.letter}", how_aligned(chosen))
        caption(figure, "Share of the distance that alignment removed", below)

    wide = min(max(5.6, 1.9 + 0.56 * len(table.layers)), 15.0)
    return write_figure(out, (wide, 1.85 + 0.5 * len(table.spaces)), draw)


def _cells(figure: "Figure", table: HeatMap) -> None:
    import numpy as np

    axes = figure.subplots()
    gains = [[cell.gain if cell else None for cell in row] for row in zip(*table.cells)]  # spaces by layers
    values = np.ma.masked_invalid([[np.nan if g is None else g for g in row] for row in gains])
    image = axes.pcolormesh(values, cmap="Blues", vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
    axes.set_yticks([i + 0.5 for i in range(len(table.spaces))], [short(space, 18) for space in table.spaces])
    step = max(1, len(table.layers) // 24)
    shown = range(0, len(table.layers), step)
    names = ["all" if table.layers[j] is None else str(table.layers[j]) for j in shown]
    axes.set_xticks([j + 0.5 for j in shown], names)
    axes.invert_yaxis()
    axes.set_xlabel("layer")
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    if len(table.layers) <= _NUMBERED:
        for i, row in enumerate(gains):
            for j, gain in enumerate(row):
                number = "–" if gain is None else f"{100 * max(-9.99, gain):.0f}"
                colour = "white" if gain is not None and gain > 0.68 else INK
                axes.text(j + 0.5, i + 0.5, number, ha="center", va="center", color=colour, fontsize=9)
    bar = figure.colorbar(image, ax=axes, pad=0.02, ticks=[0, 0.5, 1], format=lambda value, _: f"{100 * value:.0f} %")
    bar.outline.set_visible(False)
