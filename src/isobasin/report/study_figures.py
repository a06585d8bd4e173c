"""The figures of a study, PNG and SVG, from its results alone. matplotlib is imported on use."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isobasin.report import figures, text
from isobasin.report.text import Number
from isobasin.study.results import (
    NAIVE,
    SCOPE_TITLES,
    STAGES,
    CellResult,
    JsonObject,
    PairResult,
    Study,
    Sweep,
    ablation,
    data_name,
    is_main,
    model_name,
    position_comparisons,
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
DPI = 140  # lower than in other figures: a study has dozens, and they are kept with its results
MATCHERS = ("naive", "weights", "activations", "learned", "reference")
_STAGE_COLOURS = {"none": "#9ecae1", "orthogonal": "#4292c6", "full": "#08519c"}

Drawing = tuple[str, figures.Size, figures.Draw]  # file name, size, function that draws


def matcher_of(label: str) -> str:
    """The matcher of a label such as `weights/none`, which gives it its colour; `other` if it is unknown."""
    found = label.partition("/")[0]
    return found if found in MATCHERS else "other"


def main_labels(cell: CellResult) -> list[str]:
    """The naive path and the main matchers of a cell."""
    return [label for label in (NAIVE, *cell.labels) if is_main(label)]


def sweep_labels(sweep: Sweep) -> list[str]:
    """The main matchers that all cells of a sweep have."""
    found = [scores(cell) for _, cell in sweep.cells]
    return [label for label in found[0] if is_main(label) and all(label in each for each in found)]


def write_figures(study: Study, folder: Path) -> list[Path]:
    """Write every figure of the study as PNG and SVG; the folder is created."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []
    for name, size, draw in _drawings(study):
        found += figures.save_figure([folder / f"{name}{suffix}" for suffix in SUFFIXES], size, draw, dpi=DPI)
    return found


def _drawings(study: Study) -> Iterator[Drawing]:
    names = dict(zip(map(id, study.cells), file_names(study.cells)))
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


def file_names(cells: Sequence[CellResult]) -> list[str]:
    """A distinct file name for each cell."""
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
    labels = main_labels(cell)
    rows, columns = len(cell.metrics), len(cell.pairs)

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(rows, columns, squeeze=False, sharey="row", sharex=True)
        for axes_row, metric in zip(grid, cell.metrics):
            for axes, pair in zip(axes_row, cell.pairs):
                _pair_panel(axes, pair, labels, metric, last=metric == cell.metrics[-1])
            axes_row[0].set_ylabel(text.metric_title(metric))
        for axes, pair in zip(grid[0], cell.pairs):
            axes.set_title(f"seeds {pair.name}")
        figures.add_legend(figure, grid[0][0])
        n = cell.pairs[0].facts.get("n_samples")
        samples = f"{n:,} test samples" if isinstance(n, int) else ""
        figures.add_caption(figure, title(cell), _scope(cell), size_name(cell), samples)

    return name, (max(5.6, 3.5 * columns), 1.2 + 2.55 * rows), draw


def _pair_panel(axes: "Axes", pair: PairResult, labels: Sequence[str], metric: str, *, last: bool) -> None:
    scale = figures.metric_scale(metric)
    for label in labels:
        style = "--" if label.startswith("reference") else "-"
        values = figures.as_nan(pair.curve(label, metric), scale)
        axes.plot(pair.facts["lambdas"], values, style, color=figures.COLOURS[matcher_of(label)], lw=1.9, label=label)
    naive = pair.curve(NAIVE, metric)
    figures.add_chord(axes, figures.as_nan([naive[0], naive[-1]], scale), zorder=1, label=figures.CHORD)
    shown = labels[:3]  # the barriers that fit below a panel
    if "weights" in labels:
        shown = [label for label in (NAIVE, "weights", "learned") if label in labels]
    barriers = ", ".join(f"{label} {text.barrier(metric, pair.barrier(label, metric))}" for label in shown)
    axes.set_xlabel(f"{'λ' if last else ''}\nbarrier: {barriers}".strip(), fontsize=8.5, color=figures.MUTED)
    _set_path_axes(axes)


def _permutations(cell: CellResult, name: str) -> Drawing:
    """All head permutations as thin lines, the chosen one bold."""
    found = ablation(cell, "heads")

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(1, len(found), squeeze=False, sharey=True)[0]
        for axes, each in zip(grid, found):
            xs, chosen = each["lambdas"], each["chosen"]
            for number, values in enumerate(each["curves"]):
                if number != chosen:
                    label = "other permutations" if number == (0 if chosen else 1) else "_"
                    axes.plot(xs, figures.as_nan(values), color="#9a9a9a", lw=0.7, alpha=0.8, label=label)
            axes.plot(xs, figures.as_nan(each["naive_curve"]), "--", color=figures.INK, lw=1.3, label="naive")
            axes.plot(xs, figures.as_nan(each["curves"][chosen]), color=figures.BLUE, lw=2.6, label="chosen by Stage 1")
            normalised = text.MISSING if each["normalised"] is None else f"{each['normalised']:.1f}"
            axes.set_title(f"rank {each['rank']} of {len(each['curves'])}, L̂ = {normalised}")
            axes.set_xlabel("λ")
            _set_path_axes(axes)
        grid[0].set_ylabel(text.metric_title("loss"))
        figures.add_legend(figure, grid[0])
        figures.add_caption(figure, f"Every permutation of the heads: {title(cell)}", _scope(cell), size_name(cell))

    return name, (max(5.6, 3.5 * len(found)), 3.9), draw


def _layers(cell: CellResult, found: JsonObject, name: str) -> Drawing:
    """The loss after the attention of one layer was re-initialised, by layer."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        places = range(len(found["loss"]))
        axes.bar(places, found["loss"], width=0.62, color=figures.BLUE)
        for place, draws in zip(places, found["draws"]):
            axes.plot([place] * len(draws), figures.as_nan(draws), "o", ms=3, color=figures.INK)
        axes.axhline(found["before"], color=figures.INK, lw=0.9, ls=figures.DASHES, label="as trained")
        axes.set_xticks(list(places))
        axes.set_xlabel("layer whose attention was drawn anew")
        axes.set_ylabel(text.metric_title("loss"))
        figures.add_legend(figure, axes)
        figures.add_caption(
            figure, f"One layer drawn anew: {title(cell)}", size_name(cell), "bars are means, dots are draws"
        )

    return name, (max(5.2, 1.8 + 0.55 * len(found["loss"])), 3.6), draw


def _control(cell: CellResult, found: JsonObject, name: str) -> Drawing:
    """The loss on the path to a reparametrised copy of the model, before and after alignment."""

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(1, 2, sharey=True)
        for axes, side in zip(grid, ("inside", "outside")):
            for path in (NAIVE, "aligned"):
                for number, curves in enumerate(found[side]["curves"]):
                    label = "_" if number else path
                    axes.plot(
                        found["lambdas"], figures.as_nan(curves[path]), color=figures.COLOURS[path], lw=1.8, label=label
                    )
            axes.set_title(f"{side} the group: {found[side]['element'][0]}")
            axes.set_xlabel("λ, from the model to itself disguised")
            _set_path_axes(axes)
        grid[0].set_ylabel(text.metric_title("loss"))
        figures.add_legend(figure, grid[0])
        draws = f"{len(found['inside']['element'])} draws each"
        figures.add_caption(figure, f"The control: {title(cell)}", size_name(cell), draws)

    return name, (8.2, 3.9), draw


def _stage2(study: Study) -> Iterator[Drawing]:
    """The share of the naive barrier that is left, by variant of Stage 2."""
    found = stage2_cells(study.cells)
    groups = {
        stage: (_STAGE_COLOURS[stage], [by_name[stage].share for _, by_name in found]) for stage in STAGES.values()
    }
    names = [f"{title(cell)}\n{scope_and_size(cell)}" for cell, _ in found]
    about = "none: heads paired, nothing else; mean barrier over mean naive barrier"
    if found:
        yield _share_bars("stage2", 0.78, names, groups, "What Stage 2 leaves of the naive barrier", about)


def _positions(study: Study) -> Iterator[Drawing]:
    """The share of the naive barrier that is left, absolute against rotary positions."""
    both = [(each.absolute, each.rotary) for each in position_comparisons(study.cells)]
    both = [cells for cells in both if all("weights" in scores(cell) for cell in cells)]
    groups = {
        kind: (colour, [scores(cells[i])["weights"].share for cells in both])
        for i, (kind, colour) in enumerate((("absolute", figures.YELLOW), ("RoPE", figures.BLUE)))
    }
    names = [f"{model_name(cell)} on {data_name(cell)}\n{scope_and_size(cell)}" for cell, _ in both]
    about = "share of the naive barrier that matcher weights leaves"
    if both:
        yield _share_bars("positions", 0.66, names, groups, "Absolute against rotary positions", about)


def _share_bars(
    name: str,
    row_height: float,
    rows: Sequence[str],
    groups: dict[str, tuple[str, list[Number]]],
    heading: str,
    about: str,
) -> Drawing:
    """Grouped bars: for each group its colour and the share in each row."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for i, (label, (colour, shares)) in enumerate(groups.items()):
            words = [text.percent(share) for share in shares]
            figures.add_bars(
                axes, i, len(groups), shares, words, label=label, colour=colour, text_colour=figures.INK, thickness=0.78
            )  # fmt: skip
        figures.set_bar_axes(axes, rows, edge=0.55, margin=0.12, fontsize=8.5)
        figures.add_legend(figure, axes)
        figures.add_caption(figure, heading, about)

    return name, (7.4, 1.6 + row_height * len(rows)), draw


def _sweep(sweep: Sweep, name: str) -> Drawing:
    """The mean barrier against the number that varies."""
    first = sweep.cells[0][1]
    found = [scores(cell) for _, cell in sweep.cells]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        places = range(len(sweep.cells))
        for label in sweep_labels(sweep):
            values = figures.as_nan([each[label].mean for each in found])
            axes.plot(places, values, "o-", color=figures.COLOURS[matcher_of(label)], label=label, clip_on=False)
        axes.set_xticks(list(places), [f"{number:g}" for number, _ in sweep.cells])
        axes.set_xlabel(sweep.what)
        axes.set_ylabel("Mean loss barrier (nats)")
        axes.set_ylim(bottom=0)
        figures.add_grid(axes)
        figures.add_legend(figure, axes)
        heading = f"Barrier against {sweep.what}: {title(first)}"
        figures.add_caption(figure, heading, _scope(first), size_name(first, but=sweep.what))

    return name, (6.0, 4.0), draw


def _set_path_axes(axes: "Axes") -> None:
    figures.set_lambda_axis(axes, (0, 0.5, 1), 0.02)
    figures.add_grid(axes)


def _scope(cell: CellResult) -> str:
    scope = str(cell.about.get("scope"))
    return SCOPE_TITLES.get(scope, scope)


def scope_and_size(cell: CellResult) -> str:
    return f"{cell.about.get('scope')}, {size_name(cell)}"
