"""The study's figures for papers, PNG and SVG, from its results alone. matplotlib is imported on use."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isobasin.plots.canvas import INK, MUTED, caption, joined, write_figure_as
from isobasin.report.wording import TITLES, UNITS, percent, rise

from .page_charts import kind_of
from .results import NAIVE, CellResult, Facts, Measured, Study
from .tables import (
    SCOPE_TITLES,
    STAGES,
    Sweep,
    ablation,
    data_name,
    facing_cells,
    is_main,
    model_name,
    scores,
    size_name,
    stage2_cells,
    sweeps,
    title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg")
DPI = 140  # a study has dozens of figures, and they are kept with its results
# Okabe and Ito's colours; naive is grey, as in every figure of this project.
COLOURS = {
    "naive": "#8a8a8a", "weights": "#0072B2", "activations": "#009E73", "learned": "#D55E00", "reference": "#CC79A7",
    "other": "#b8860b",
}  # fmt: skip
_STAGE_COLOURS = {"none": "#9ecae1", "orthogonal": "#4292c6", "full": "#08519c"}

Drawing = tuple[str, tuple[float, float], Callable[["Figure"], None]]  # name, size in inches, how


def write_figures(study: Study, folder: Path) -> list[Path]:
    """Everything there is to draw, each as PNG and SVG; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []
    for name, size, draw in _all(study):
        found += write_figure_as([folder / f"{name}{suffix}" for suffix in SUFFIXES], size, draw, dpi=DPI)
    return found


def _all(study: Study) -> Iterator[Drawing]:
    names = dict(zip(map(id, study.cells), slugs(study.cells)))
    for cell in study.cells:
        name = names[id(cell)]
        if cell.done:
            yield _curves(cell, name)
        if ablation(cell, "heads"):
            yield _permutations(cell, f"heads-{name}")
        for found in ablation(cell, "layers"):
            yield _layers(cell, found, f"layers-{name}")
        for found in ablation(cell, "control"):
            yield _control(cell, found, f"control-{name}")
    yield from _stage2(study)
    yield from _positions(study)
    for sweep in sweeps(study.cells):
        _, first = sweep.cells[0]
        yield _sweep(sweep, f"sweep-{sweep.what}-{names[id(first)]}")


def slugs(cells: Sequence[CellResult]) -> list[str]:
    """A file name for each cell, no two alike."""
    found: list[str] = []
    for cell in cells:
        about = cell.about
        heads = about.get("finetune_heads") or about.get("heads")
        words = [about.get("model"), data_name(cell), about.get("positions")]
        size = f"{about.get('layers')}x{heads}x{about.get('width')}"
        words += [size, about.get("scope"), *(["frozen"] if about.get("frozen") else [])]
        plain = re.sub(r"[^a-z0-9]+", "-", "-".join(map(str, words)).lower()).strip("-")
        same = sum(name == plain or re.fullmatch(rf"{re.escape(plain)}-v\d+", name) is not None for name in found)
        found.append(f"{plain}-v{same + 1}" if same else plain)
    return found


def _curves(cell: CellResult, name: str) -> Drawing:
    """The paper's panels: a column for each pair, a row for each metric, naive and by matcher."""
    labels = [label for label in (NAIVE, *cell.labels) if is_main(label)]
    rows, columns = len(cell.metrics), len(cell.pairs)

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(rows, columns, squeeze=False, sharey="row", sharex=True)
        for axes_row, metric in zip(grid, cell.metrics):
            for axes, pair in zip(axes_row, cell.pairs):
                _pair_panel(axes, pair, labels, metric, last=metric == cell.metrics[-1])
            unit = f" ({UNITS[metric]})" if UNITS[metric] else ""
            axes_row[0].set_ylabel(f"{TITLES[metric]}{unit}")
        for axes, pair in zip(grid[0], cell.pairs):
            axes.set_title(f"seeds {pair.name}")
        _legend(figure, grid[0][0])
        caption(figure, title(cell), joined(_scope(cell), size_name(cell), _samples(cell)))

    return name, (max(5.6, 3.5 * columns), 1.2 + 2.55 * rows), draw


def _pair_panel(axes: "Axes", pair: Measured, labels: Sequence[str], metric: str, *, last: bool) -> None:
    scale = 100.0 if metric == "accuracy" else 1.0
    xs = pair.facts["lambdas"]
    for label in labels:
        values = _numbers(pair.curve(label, metric), scale)
        line = "--" if label.startswith("reference") else "-"
        axes.plot(xs, values, line, color=COLOURS[kind_of(label)], lw=1.9, label=label)
    ends = _numbers([pair.curve(NAIVE, metric)[0], pair.curve(NAIVE, metric)[-1]], scale)
    axes.plot([0, 1], ends, color=INK, lw=0.8, ls=(0, (4, 3)), zorder=1, label="between the ends")
    told = [f"{label} {rise(metric, pair.barrier(label, metric))}" for label in _spoken(labels)]
    axes.set_xlabel(f"{'λ' if last else ''}\nbarrier: {', '.join(told)}".strip(), fontsize=8.5, color=MUTED)
    _plain_axes(axes)


def _spoken(labels: Sequence[str]) -> list[str]:
    """The barriers that fit below a panel."""
    return (
        [label for label in (NAIVE, "weights", "learned") if label in labels]
        if "weights" in labels
        else list(labels[:3])
    )


def _permutations(cell: CellResult, name: str) -> Drawing:
    """All head permutations as thin lines, the chosen one bold."""
    found = ablation(cell, "heads")

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
        for axes, each in zip(grid, found):
            for number, values in enumerate(each["curves"]):
                first = number == (0 if each["chosen"] else 1)
                if number != each["chosen"]:
                    label = "other permutations" if first else "_"
                    axes.plot(each["lambdas"], _numbers(values), color="#9a9a9a", lw=0.7, alpha=0.8, label=label)
            axes.plot(each["lambdas"], _numbers(each["naive_curve"]), "--", color=INK, lw=1.3, label="naive")
            chosen = _numbers(each["curves"][each["chosen"]])
            axes.plot(each["lambdas"], chosen, color=COLOURS["weights"], lw=2.6, label="chosen by Stage 1")
            hat = "–" if each["normalised"] is None else f"{each['normalised']:.1f}"
            axes.set_title(f"rank {each['rank']} of {len(each['curves'])}, L̂ = {hat}")
            axes.set_xlabel("λ")
            _plain_axes(axes)
        grid[0].set_ylabel("Loss (nats)")
        _legend(figure, grid[0])
        caption(figure, f"Every permutation of the heads: {title(cell)}", joined(_scope(cell), size_name(cell)))

    return name, (max(5.6, 3.5 * len(found)), 3.9), draw


def _layers(cell: CellResult, found: Facts, name: str) -> Drawing:
    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        places = range(len(found["loss"]))
        axes.bar(places, found["loss"], width=0.62, color=COLOURS["weights"])
        for place, draws in zip(places, found["draws"]):
            axes.plot([place] * len(draws), _numbers(draws), "o", ms=3, color=INK)
        axes.axhline(found["before"], color=INK, lw=0.9, ls=(0, (4, 3)), label="as trained")
        axes.set_xticks(list(places))
        axes.set_xlabel("layer whose attention was drawn anew")
        axes.set_ylabel("Loss (nats)")
        _legend(figure, axes)
        caption(
            figure, f"One layer drawn anew: {title(cell)}", joined(size_name(cell), "bars are means, dots are draws")
        )

    return name, (max(5.2, 1.8 + 0.55 * len(found["loss"])), 3.6), draw


def _control(cell: CellResult, found: Facts, name: str) -> Drawing:
    """How far the loss rises on the way to the disguised model, before and after alignment."""

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(1, 2, sharey=True)
        for axes, side in zip(grid, ("inside", "outside")):
            for path, colour in ((NAIVE, COLOURS["naive"]), ("aligned", COLOURS["weights"])):
                for number, curves in enumerate(found[side]["curves"]):
                    label = path if not number else "_"
                    axes.plot(found["lambdas"], _numbers(curves[path]), color=colour, lw=1.8, label=label)
            axes.set_title(f"{side} the group: {found[side]['element'][0]}")
            axes.set_xlabel("λ, from the model to itself disguised")
            _plain_axes(axes)
        grid[0].set_ylabel("Loss (nats)")
        _legend(figure, grid[0])
        caption(
            figure,
            f"The control: {title(cell)}",
            joined(size_name(cell), f"{len(found['inside']['element'])} draws each"),
        )

    return name, (8.2, 3.9), draw


def _stage2(study: Study) -> Iterator[Drawing]:
    found = stage2_cells(study.cells)
    if not found:
        return

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for i, stage in enumerate(STAGES.values()):
            shares = [by_name[stage].share for _, by_name in found]
            _bars(axes, i, shares, stage, _STAGE_COLOURS[stage], n=len(STAGES))
        _rows_on(axes, [f"{title(cell)}\n{_sized(cell)}" for cell, _ in found])
        _legend(figure, axes)
        caption(
            figure,
            "What Stage 2 leaves of the naive barrier",
            "none: heads paired, nothing else; mean barrier over mean naive barrier",
        )

    yield "stage2", (7.4, 1.6 + 0.78 * len(found)), draw


def _positions(study: Study) -> Iterator[Drawing]:
    found = [each for each in facing_cells(study.cells) if "weights" in scores(each.absolute)]
    found = [each for each in found if "weights" in scores(each.rotary)]
    if not found:
        return

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for i, (kind, colour) in enumerate((("absolute", "#E69F00"), ("RoPE", "#0072B2"))):
            cells = [each.rotary if i else each.absolute for each in found]
            _bars(axes, i, [scores(cell)["weights"].share for cell in cells], kind, colour, n=2)
        both = [each.absolute for each in found]
        _rows_on(axes, [f"{model_name(cell)} on {data_name(cell)}\n{_sized(cell)}" for cell in both])
        _legend(figure, axes)
        caption(figure, "Absolute against rotary positions", "share of the naive barrier that matcher weights leaves")

    yield "positions", (7.4, 1.6 + 0.66 * len(found)), draw


def _bars(axes: "Axes", i: int, shares: Sequence[float | None], label: str, colour: str, *, n: int) -> None:
    """The i-th of n bars in each row, with its number."""
    thick = 0.78 / n
    places = [row + (i - (n - 1) / 2) * thick for row in range(len(shares))]
    axes.barh(places, [share or 0.0 for share in shares], height=0.9 * thick, color=colour, label=label)
    for place, share in zip(places, shares):
        axes.annotate(
            percent(share),
            (share or 0.0, place),
            (4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=INK,
        )


def _rows_on(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=8.5)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def _sweep(sweep: Sweep, name: str) -> Drawing:
    first = sweep.cells[0][1]
    found = [scores(cell) for _, cell in sweep.cells]
    labels = [label for label in found[0] if is_main(label) and all(label in each for each in found)]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        places = range(len(sweep.cells))
        for label in labels:
            values = _numbers([each[label].mean for each in found])
            axes.plot(places, values, "o-", color=COLOURS[kind_of(label)], label=label, clip_on=False)
        axes.set_xticks(list(places), [f"{number:g}" for number, _ in sweep.cells])
        axes.set_xlabel(sweep.what)
        axes.set_ylabel("Mean loss barrier (nats)")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#ececec", linewidth=0.7)
        _legend(figure, axes)
        said = joined(_scope(first), size_name(first, but=sweep.what))
        caption(figure, f"Barrier against {sweep.what}: {title(first)}", said)

    return name, (6.0, 4.0), draw


def _plain_axes(axes: "Axes") -> None:
    axes.set_xlim(-0.02, 1.02)
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes.grid(axis="y", color="#ececec", linewidth=0.7)
    axes.set_axisbelow(True)


def _legend(figure: "Figure", axes: "Axes") -> None:
    handles, labels = axes.get_legend_handles_labels()
    most = max(2, int(figure.get_figwidth() / 1.4))  # that fit beside each other
    figure.legend(handles, labels, loc="outside lower center", ncols=min(most, len(labels)), fontsize=9)


def _numbers(values: Sequence[float | None], scale: float = 1.0) -> list[float]:
    return [math.nan if value is None else scale * value for value in values]


def _scope(cell: CellResult) -> str:
    scope: Any = cell.about.get("scope")
    return SCOPE_TITLES.get(scope, str(scope))


def _sized(cell: CellResult) -> str:
    return f"{cell.about.get('scope')}, {size_name(cell)}"


def _samples(cell: CellResult) -> str:
    n = cell.pairs[0].facts.get("n_samples")
    return f"{n:,} test samples" if isinstance(n, int) else ""
