"""Layer × layer: which layer of B is like which layer of A."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobasin.errors import IsobasinError
from isobasin.plots.canvas import ACCENT, INK, caption, joined, write_figure
from isobasin.report.fields import short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NUMBERED = 26  # more layers than this leave no room for numbers in the cells
_SURE = 0.05  # a score below this marks no partner


def plot_likeness(facts: Mapping[str, Any], out: str | Path, *, names: tuple[str, str] = ("A", "B")) -> Path:
    """Write the heat map of the layer-to-layer scores in `Likeness.facts`, a frame around the best of every column."""
    matrix = facts.get("layers")
    if not matrix:
        raise IsobasinError("the result has no layer-to-layer matrix; ask for it with `distance(a, b, layers=True)`")
    null = facts["null"]

    def draw(figure: "Figure") -> None:
        _cells(figure, matrix, facts["best_in_a"], names)
        unrelated = f"unrelated models score at most {max(0.0, null['largest']):.3f}"
        caption(figure, "Which layer is like which", joined(f"whole model {facts['score']:.3f}", unrelated))

    tall, wide = len(matrix), len(matrix[0])
    size = min(max(4.9, 2.3 + 0.5 * wide), 15.0), min(max(2.6, 1.5 + 0.36 * tall), 15.0)
    return write_figure(out, size, draw)


def _cells(figure: "Figure", matrix: list[list[float]], best: list[int], names: tuple[str, str]) -> None:
    from matplotlib.patches import Rectangle

    axes = figure.subplots()
    tall, wide = len(matrix), len(matrix[0])
    image = axes.pcolormesh(matrix, cmap="Blues", vmin=0, vmax=1, edgecolors="white", linewidth=1.5)
    for count, ticks in ((wide, axes.set_xticks), (tall, axes.set_yticks)):
        shown = range(0, count, max(1, count // 24))
        ticks([k + 0.5 for k in shown], [str(k) for k in shown])
    axes.set_xlabel(f"layer of {short(names[1], 32)}")
    axes.set_ylabel(f"layer of {short(names[0], 32)}")
    axes.invert_yaxis()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    for j, i in enumerate(best):
        if matrix[i][j] > _SURE:
            axes.add_patch(Rectangle((j, i), 1, 1, fill=False, edgecolor=ACCENT, linewidth=2))
    if max(tall, wide) <= _NUMBERED:
        for i, row in enumerate(matrix):
            for j, value in enumerate(row):
                colour = "white" if value > 0.68 else INK
                axes.text(j + 0.5, i + 0.5, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    bar = figure.colorbar(image, ax=axes, pad=0.02, ticks=[0, 0.5, 1])
    bar.outline.set_visible(False)
