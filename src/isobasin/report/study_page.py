"""The report of a study: summary.json, figures and one self-contained page, from the study's JSON alone."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from isobasin.errors import IsobasinError
from isobasin.files import atomic_write, check_kind, check_output_file, disk_errors, is_of_kind
from isobasin.path.barrier import CONNECTED_NATS
from isobasin.report import figures, text
from isobasin.report.layout import (
    TERMS,
    Row,
    assemble,
    asset,
    bar_cell,
    figure,
    json_details,
    linked,
    scroll_table,
    swatch,
    table_row,
    term,
)
from isobasin.report.result import RULE
from isobasin.report.svg import Dot, LogScale, Range, Series, bar, dot_strip, log_axis, panel, value_range
from isobasin.report.text import Child, Html, Number, concat, element
from isobasin.study.results import (
    NAIVE,
    SCOPE_TITLES,
    STAGES,
    CellResult,
    JsonObject,
    PairResult,
    Score,
    Study,
    Sweep,
    by_scope,
    data_name,
    distance_cells,
    is_main,
    mean,
    model_name,
    position_comparisons,
    positions_name,
    quality,
    read_study,
    scores,
    size_name,
    stage2_cells,
    study_title,
    summary_row,
    sweeps,
    title,
    what_varies,
)
from isobasin.study.store import read_json, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAGE, SUMMARY, FIGURES = "report.html", "summary.json", "figures"
MAX_PERMUTATION_FIGURES = 4
SUFFIXES = (".png", ".svg")
DPI = 140  # lower than in other figures: a study has dozens, and they are kept with its results
_STAGE_COLOURS = {"none": "#9ecae1", "orthogonal": "#4292c6", "full": "#08519c"}

Scored = Sequence[tuple[CellResult, dict[str, Score]]]
Watch = Callable[[int, int], None]  # (figures drawn, of)
Drawing = tuple[str, figures.Size, figures.Draw]  # file name, size, function that draws


def write_study_report(folder: Path, output: Path | None = None, *, watch: Watch | None = None) -> Path:
    """Write report.html, summary.json and figures/ into the folder, of a packed study NAME.jsonl into NAME; `output` is
    another place for the page.

    `watch(done, of)` is called after each figure.
    """
    folder = Path(folder)
    study = read_study(folder)
    if folder.is_file():
        folder = folder.with_suffix("")
        folder.mkdir(exist_ok=True)
    place = folder / PAGE if output is None else Path(output)
    check_output_file(place, force=True, kind="page")
    names = {path.name for path in write_figures(study, folder / FIGURES, watch)}
    for old in (folder / FIGURES / name for name in _old_figures(folder) - names):
        if old.is_file() and is_of_kind(old, "figure"):
            old.unlink()
    rows = [summary_row(cell) for cell in study.cells]
    write_json(folder / SUMMARY, {"name": study.name, "cells": rows, "figures": sorted(names)})
    atomic_write(place, render(study))
    return place


def _old_figures(folder: Path) -> set[str]:
    """Figures of the previous report. Those that are not written again belong to cells that no longer exist."""
    try:
        names = read_json(folder / SUMMARY)["figures"]
        return {name for name in names if Path(name).name == name}
    except (IsobasinError, KeyError, TypeError):
        return set()


def matcher_of(label: str) -> str:
    """The matcher of a label such as `weights/none`, which gives it its colour; `other` if it is unknown."""
    found = label.partition("/")[0]
    return found if found in figures.COLOURS else "other"


def main_labels(cell: CellResult) -> list[str]:
    """The naive path and the main matchers of a cell."""
    return [label for label in (NAIVE, *cell.labels) if is_main(label)]


def scope_and_size(cell: CellResult) -> str:
    return f"{cell.about.get('scope')}, {size_name(cell)}"


# The page.


def render(study: Study) -> str:
    """The text of the page: an overview of all cells, then folded sections."""
    anchors = {id(cell): f"cell-{i + 1}" for i, cell in enumerate(study.cells)}
    varies = what_varies(study.cells)
    optional = (
        _positions_section(study),
        _stage2_section(study),
        _heads_section(study),
        _layers_section(study),
        _control_section(study),
        _sweeps_section(study),
        _curves_section(study, anchors, varies),
        _models_section(study),
        _runs_section(study),
    )
    scopes = [_scope_section(scope, cells, anchors, varies) for scope, cells in by_scope(study.cells).items()]
    return assemble(
        f"{study_title(study)}: which models are linearly connected?",
        concat([_intro(study), _overview(study), _unfold(), *scopes, *optional]),
        charts=[],
        results=[[summary_row(cell) for cell in study.cells]],
        more_style=asset("study_page.css"),
    )


def _unfold() -> Html:
    return element("button", "Open all sections", type="button", id="unfold")


def _section(name: str, anchor: str, said: str, *children: Html | None, **attributes: int) -> Html:
    """A folded section. What it found is said beside its name."""
    head = element("summary", element("h2", name), element("span", said, class_="said"))
    return element("section", element("details", head, *children, class_="fold"), id=anchor, **attributes)


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _table(caption: str, heads: Sequence[Child], rows: Sequence[Html], kind: str = "") -> Html:
    """A table that scrolls sideways under a caption that does not; the first column names the row."""
    scroll = scroll_table(caption, heads, rows, f"study {kind}")
    return element("div", element("p", caption, class_="caption"), scroll, class_="tabled")


def _cell_name(cell: CellResult, *, scope: bool = True) -> Html:
    return concat([title(cell), element("small", scope_and_size(cell) if scope else size_name(cell))])


def _intro(study: Study) -> Html:
    """How many cells are done, and how many of them each matcher connects."""
    n = Counter(cell.status for cell in study.cells)
    words = [f"{n['done']} of {len(study.cells)} cells are filled"]
    words += [f"{n['failed']} failed and not averaged"] * bool(n["failed"])
    words += [f"{n['not filled']} not filled yet"] * bool(n["not filled"])
    connected = _connected(study.cells)
    more = f" Cells in which every pair is connected: {connected}." if connected else ""
    return element(
        "div",
        element("p", f"{', '.join(words)}.{more}", class_="sentence"),
        element("p", linked(f"Rule: {RULE}. Both numbers are always given."), class_="rule"),
        class_="verdict",
    )


def _connected(cells: Sequence[CellResult]) -> str:
    """In how many cells every pair is connected: without alignment, and by each main matcher."""
    found: dict[str, list[bool]] = {}
    for cell in cells:
        for label, score in scores(cell).items():
            if is_main(label):
                found.setdefault(label, []).append(score.connected)
    names = {NAIVE: "without alignment"}
    return ", ".join(f"{names.get(label, f'by {label}')} {sum(each)} of {len(each)}" for label, each in found.items())


# The overview: the mean barrier of every cell, by scope and matcher.


def _overview(study: Study) -> Html | None:
    """One strip for each scope and matcher, one dot for each cell."""
    done = {scope: [cell for cell in cells if cell.done] for scope, cells in by_scope(study.cells).items()}
    means = [score.mean for cells in done.values() for cell in cells for score in _main_scores(cell)]
    known = [value for value in means if value is not None]
    if not known:
        return None
    scale = LogScale.around(known)
    rows = [row for scope, cells in done.items() if cells for row in _overview_rows(scope, cells, scale)]
    axis = element("tr", element("td"), element("td", log_axis(scale, CONNECTED_NATS)), element("td"))
    table = element("table", element("tbody", *rows, axis), class_="overview drawing", aria_label="All cells")
    caption = concat(
        [
            "Mean ", term("barrier"), " of each cell in ", term("nats"),
            f", on a logarithmic axis; at the left up to {scale.low:g}. Filled: every pair of the cell is connected. "
            f"The line is {CONNECTED_NATS} nats. Right: cells in which every pair is connected.",
        ]
    )  # fmt: skip
    return figure(
        f"{study.name}-overview", _overview_numbers(done), table, element("figcaption", caption), kind="whole"
    )


def _main_scores(cell: CellResult) -> list[Score]:
    return [score for label, score in scores(cell).items() if is_main(label)]


def _overview_rows(scope: str, cells: Sequence[CellResult], scale: LogScale) -> Iterator[Html]:
    yield element("tr", element("th", SCOPE_TITLES.get(scope, scope), colspan=3, scope="rowgroup"), class_="group")
    for label in dict.fromkeys(score.label for cell in cells for score in _main_scores(cell)):
        found = [(cell, scores(cell)[label]) for cell in cells if label in scores(cell)]
        n = sum(score.connected for _, score in found)
        dots = [
            Dot(score.mean, score.connected, f"{title(cell)}, {size_name(cell)}: {text.metric('loss', score.mean)}")
            for cell, score in found
            if score.mean is not None
        ]
        said = f"{label}: barriers {', '.join(text.metric('loss', dot.value) for dot in dots)}"
        strip = dot_strip(dots, scale, CONNECTED_NATS, matcher_of(label), label=said)
        name = element("th", _explained(label), scope="row")
        yield element("tr", name, element("td", strip), element("td", f"{n} of {len(found)}"))


def _explained(label: str) -> Child:
    """The name of a matcher, with its definition if there is one."""
    return term(label) if label in TERMS else label


def _overview_numbers(done: dict[str, list[CellResult]]) -> list[Row]:
    rows: list[Row] = [("scope", "cell", "size", "path", "mean barrier", "share", "pairs connected", "pairs")]
    for scope, cells in done.items():
        for cell in cells:
            start = (scope, title(cell), size_name(cell))
            rows += [(*start, s.label, s.mean, s.share, s.n_connected, len(s.each)) for s in _main_scores(cell)]
    return rows


# The cells of each scope.


def _scope_section(scope: str, cells: Sequence[CellResult], anchors: dict[int, str], varies: dict[int, str]) -> Html:
    """One row for each cell of a scope; a cell that is not done has its status instead of numbers."""
    labels = list(dict.fromkeys(label for cell in cells for label in scores(cell) if is_main(label)))
    columns = [label for label in labels if label != NAIVE]
    heads = (
        "model and data", "positions", "quality", "baseline", term(NAIVE), *map(_explained, columns), "connected",
    )  # fmt: skip
    rows = [_scope_row(cell, anchors[id(cell)], columns, varies.get(id(cell))) for cell in cells]
    caption = "Mean loss barrier in nats; below it the share of the naive one, and how many pairs are connected"
    connected = _connected(cells)
    said = _count(len(cells), "cell") + (f"; connected: {connected}" if connected else "")
    return _section(SCOPE_TITLES.get(scope, scope), f"scope-{scope}", said, _table(caption, heads, rows, "cells"))


def _scope_row(cell: CellResult, anchor: str, columns: Sequence[str], varies: str | None) -> Html:
    link = element("a", f"{model_name(cell)} on {data_name(cell)}", href=f"#{anchor}")
    name = concat([link, element("small", size_name(cell)), _varies(varies)])
    bits = quality(cell, "bits_per_byte")
    start = [
        positions_name(cell).removesuffix(" positions"),
        f"{bits:.3f} bits" if bits is not None else text.metric("accuracy", quality(cell, "accuracy")),
        text.metric("accuracy", cell.baseline),
    ]
    if not cell.done:
        why = element("small", cell.why) if cell.why else None
        kind = f"status {cell.status.replace(' ', '-')}"
        note = element("td", cell.status, why, colspan=len(columns) + 2, class_=kind)
        return table_row(name, *start, note, kind="undone")
    found = scores(cell)
    connected = [label for label in columns if label in found and found[label].connected]
    words = "no naive barrier" if found[NAIVE].connected else ", ".join(connected)
    answer = element("td", words or "no", class_="flat" if found[NAIVE].connected else "yes" if connected else "no")
    naive = element("td", element("b", text.metric("loss", found[NAIVE].mean)), class_="s-naive")
    return table_row(name, *start, naive, *(_score(found.get(label)) for label in columns), answer)


def _varies(words: str | None) -> Html | None:
    return element("small", f"varies: {words}", class_="varies") if words else None


def _score(score: Score | None) -> Html:
    if score is None:
        return element("td", text.MISSING)
    moved = f"outputs moved by {text.number(score.output_change, 2)}!"
    return element(
        "td",
        element("b", text.metric("loss", score.mean)),
        element("small", f"{text.percent(score.share)}, {score.n_connected} of {len(score.each)}"),
        None if score.same_function else element("small", moved),
        class_=f"s-{matcher_of(score.label)}",
    )


# Comparisons of cells and of variants of the matchers.


def _positions_section(study: Study) -> Html | None:
    found = position_comparisons(study.cells)
    if not found:
        return None
    labels = [label for label in ("weights", "learned") if any(label in scores(rotary) for _, rotary in found)]
    pairs = [f"{label}, {side}" for label in labels for side in ("absolute", "RoPE")]
    heads = ("cell", "absolute is", f"{NAIVE}, absolute", f"{NAIVE}, RoPE", *pairs)
    caption = "Naive barrier in nats, and the share of it that is left, by kind of positions"
    rows = []
    for cell, rotary in found:
        sides = (scores(cell), scores(rotary))
        name = concat([f"{model_name(cell)} on {data_name(cell)}", element("small", scope_and_size(cell))])
        naive = [text.metric("loss", side[NAIVE].mean) for side in sides]
        both = [side[label].share if label in side else None for label in labels for side in sides]
        rows.append(table_row(name, str(cell.about.get("positions")), *naive, *map(text.percent, both)))
    said = f"{_count(len(found), 'pair')} of cells that differ in their positions only"
    return _section("Absolute against rotary positions", "positions", said, _table(caption, heads, rows))


def _share_table(caption: str, found: Scored, names: Sequence[str]) -> Html:
    """Shares of the naive barrier with bars, one row for each cell, one column for each name."""
    shares = [s for _, by_name in found for score in by_name.values() if (s := score.share) is not None]
    high = max([0.01, *shares])
    rows = []
    for cell, by_name in found:
        each = [by_name[name].share if name in by_name else None for name in names]
        naive = text.metric("loss", next(iter(by_name.values())).naive_mean)
        rows.append(table_row(_cell_name(cell), naive, *(bar_cell(share, 0.0, high, "aligned") for share in each)))
    return _table(caption, ("cell", NAIVE, *names), rows, "bars")


def _midpoint_table(caption: str, found: Scored, names: Sequence[str]) -> Html:
    """Losses at the midpoint, the naive one first; the lowest is bold."""
    rows = []
    for cell, by_name in found:
        losses = [scores(cell)[NAIVE].half, *(by_name[name].half for name in names)]
        lowest = min((loss for loss in losses if loss is not None), default=None)
        shown = [(loss, text.MISSING if loss is None else f"{loss:.4f}") for loss in losses]
        rows.append(
            table_row(_cell_name(cell), *(element("b", word) if loss == lowest else word for loss, word in shown))
        )
    return _table(caption, ("cell", NAIVE, *names), rows)


def _stage2_section(study: Study) -> Html | None:
    found = stage2_cells(study.cells)
    if not found:
        return None
    names = list(STAGES.values())
    caption = "Naive barrier in nats, and the share of it that is left without Stage 2, with rotations alone, in full"
    middle = "Mean loss at the midpoint: it orders the three also where none of them leaves a barrier"
    paper = "The paper gives 62–91 %, 10–16 % and 7–12 % (first layer replaced)."
    tables = (_share_table(caption, found, names), _midpoint_table(middle, found, names))
    said, words = _count(len(found), "cell"), element("p", _stage2_mean(found), f" {paper}")
    return _section("Stage 2: inside the heads", "stage2", said, words, *tables)


def _stage2_mean(found: Scored) -> str:
    """The mean share of each variant over the cells of the paper's scope that have a naive barrier."""
    first = [by_name for cell, by_name in found if cell.about.get("scope") == "first-attention"]
    rising = [by_name for by_name in first if by_name["full"].naive_mean]
    if not rising:
        return "No cell with a re-initialised first attention has a naive barrier."
    means = {name: mean([by_name[name].share for by_name in rising]) for name in STAGES.values()}
    words = ", ".join(f"{name} {text.percent(value)}" for name, value in means.items())
    flat = len(first) - len(rising)
    rest = f" ({flat} more {'has' if flat == 1 else 'have'} no naive barrier)" if flat else ""
    cells = f"{len(rising)} cell{'' if len(rising) == 1 else 's'}"
    return f"Mean over {cells} with a re-initialised first attention{rest}: {words}."


def _heads_section(study: Study) -> Html | None:
    cells = [cell for cell in study.cells if cell.ablations["heads"]]
    distances = distance_cells(study.cells)
    if not cells and not distances:
        return None
    words = "L̂ = 100 (L of the chosen − L of the best) / (L naive − L of the best), L the loss at the midpoint."
    parts: list[Html] = []
    if cells:
        shown = cells[:MAX_PERMUTATION_FIGURES]
        parts = [element("p", words), _rank_table(cells), *map(_permutations, shown, file_names(shown))]
    if distances:
        names = list(dict.fromkeys(name for _, by_name in distances for name in by_name))
        caption = "Share of the naive barrier that is left when heads are paired by another distance"
        parts.append(_share_table(caption, distances, names))
    ranks = [each["rank"] for cell in cells for each in cell.ablations["heads"]]
    said = f"the chosen permutation is the best in {sum(rank == 1 for rank in ranks)} of {_count(len(ranks), 'pair')}"
    said = said if ranks else f"other head distances in {_count(len(distances), 'cell')}"
    return _section("Stage 1: which head is which", "heads", said, *parts)


def _rank_table(cells: Sequence[CellResult]) -> Html:
    """The rank of Stage 1's choice among the permutations that were measured, by pair."""
    rows = []
    for cell in cells:
        found = cell.ablations["heads"]
        ranks = ", ".join(str(each["rank"]) for each in found)
        hats = ", ".join(text.MISSING if (hat := each["normalised"]) is None else f"{hat:.1f}" for each in found)
        naive = mean([each["naive"] for each in found])
        chosen = mean([each["loss"][each["chosen"]] for each in found])
        best = mean([min((x for x in each["loss"] if x is not None), default=None) for each in found])
        losses = (text.metric("loss", value) for value in (naive, chosen, best))
        rows.append(table_row(_cell_name(cell), f"{ranks} of {len(found[0]['permutations'])}", hats, *losses))
    caption = "The chosen permutation among all that were measured: rank and L̂ by pair, mean losses at the midpoint"
    return _table(caption, ("cell", "rank", "L̂", NAIVE, "chosen", "best"), rows)


def _figure(
    name: str,
    rows: Sequence[Row],
    panels: Sequence[Html],
    kinds: dict[str, str],
    *,
    above: str | None = None,
    below: str | None = None,
) -> Html:
    """Panels side by side under the key of their colours, with a caption above or below them."""
    key = [element("span", swatch(f"s-{kind}"), label) for label, kind in kinds.items()]
    drawing = (element("p", *key, class_="key"), element("div", *panels, class_="panels"))
    return figure(
        name,
        rows,
        element("figcaption", above, class_="above") if above else None,
        element("div", *drawing, class_="drawing"),
        element("figcaption", below) if below else None,
        kind="small",
    )


def _permutations(cell: CellResult, name: str) -> Html:
    """All permutations as thin lines, the chosen one bold, one panel for each pair."""
    found = cell.ablations["heads"]
    y = value_range([values for each in found for values in (*each["curves"], each["naive_curve"])])
    panels, rows = [], [("pair", "lambda", NAIVE, *(f"permutation {i}" for i in range(len(found[0]["curves"]))))]
    for n, each in enumerate(found, 1):
        series = [Series(values, "thin") for i, values in enumerate(each["curves"]) if i != each["chosen"]]
        series += [Series(each["naive_curve"], "naive dashed"), Series(each["curves"][each["chosen"]], "weights")]
        rank = f"λ; the chosen one has rank {each['rank']}"
        words = f"{len(each['curves'])} permutations, the chosen one is number {each['rank']}"
        panels.append(panel(each["lambdas"], series, y, ends=("0", "1"), below=rank, title=words, beside="Loss (nats)"))
        rows += [(str(n), *values) for values in zip(each["lambdas"], each["naive_curve"], *each["curves"])]
    below = (
        f"{title(cell)}, {cell.about.get('scope')}: loss along the line for every permutation (thin), the chosen one"
        " (bold) and the naive path (dashed)."
    )
    kinds = {"naive": "naive", "chosen": "weights"}
    return _figure(f"heads-{name}", rows, panels, kinds, below=below)


# Ablations of single models.


def _with_ablation(study: Study, kind: str) -> list[CellResult]:
    """Cells with an ablation of that kind; of those that share its result the first."""
    found: dict[str, CellResult] = {}
    for cell in study.cells:
        if cell.ablations[kind]:
            found.setdefault(repr([each.get("job") for each in cell.ablations[kind]]), cell)
    return list(found.values())


def _layers_section(study: Study) -> Html | None:
    """The loss after the attention of one layer was re-initialised."""
    cells = _with_ablation(study, "layers")
    rows = [row for cell in cells for found in cell.ablations["layers"] for row in _layer_rows(cell, found)]
    caption = "Loss after the attention of one layer alone was re-initialised (mean over draws); the bar is its rise"
    table = _table(caption, ("cell", "layer", "trained", "re-initialised", "rise"), rows, "layers")
    said = _count(len(cells), "model")
    return _section("One layer's attention re-initialised", "layers", said, table) if cells else None


def _layer_rows(cell: CellResult, found: JsonObject) -> list[Html]:
    rises = [loss - found["before"] for loss in found["loss"]]
    low, high = min([0.0, *rises]), max([1e-9, *rises])
    rows = []
    for layer, (loss, rise) in enumerate(zip(found["loss"], rises)):
        name, before = ("", "") if layer else (_cell_name(cell, scope=False), text.metric("loss", found["before"]))
        rows.append(table_row(name, str(layer), before, text.metric("loss", loss), bar(rise, low, high, "aligned")))
    return rows


def _control_section(study: Study) -> Html | None:
    cells = _with_ablation(study, "control")
    if not cells:
        return None
    words = (
        "A model is compared with itself after Q and K of every head were changed. Inside the group (a complex number "
        "per rotary pair under RoPE, any invertible matrix without it) outputs stay, and alignment reverts the change. "
        "Outside it (any invertible matrix under RoPE, which leaves QKᵀ as it is; the queries alone without) the "
        "function is another one, and alignment can not remove the rise of the loss."
    )
    heads = ("cell", "change", "outputs moved", "rise, naive", "rise, aligned", "distance")
    caption = (
        "Q–K of a model changed inside and outside its group, then aligned to itself: rise of the loss over the model"
    )
    each = [(cell, found) for cell in cells for found in cell.ablations["control"]]
    rows = [_control_row(cell, side, found[side]) for cell, found in each for side in ("inside", "outside")]
    table = _table(caption, heads, rows)
    said = _count(len(each), "model")
    return _section("The control: inside and outside the group", "control", said, element("p", words), table)


def _control_row(cell: CellResult, side: str, found: JsonObject) -> Html:
    """A model against a reparametrised copy of itself: means over draws."""
    rises = [text.metric("loss", mean([pair[k] for pair in found["excess"]])) for k in (0, 1)]
    before, after = (mean([pair[k] for pair in found["distance"]]) for k in (0, 1))
    distance = f"{text.number(before, 3)} → {text.number(after, 2)}"
    moved = text.number(max(found["function_change"]), 2)
    return table_row(_cell_name(cell, scope=False), f"{side}: {found['element'][0]}", moved, *rises, distance)


def _sweeps_section(study: Study) -> Html | None:
    found = sweeps(study.cells)
    drawn = element("div", *map(_sweep, found), class_="panels")
    what = ", ".join(dict.fromkeys(sweep.what for sweep in found))
    said = f"{_count(len(found), 'group')} of cells that differ in one number: {what}"
    return _section("Against heads, width, depth and training time", "sweeps", said, drawn) if found else None


def _sweep(sweep: Sweep) -> Html:
    """The mean barrier against the number that varies."""
    series = [Series(values, matcher_of(label)) for label, values in sweep.means.items()]
    first = sweep.cells[0][1]
    fixed = f"{first.about.get('scope')}, {size_name(first, but=sweep.what)}"
    words = f"{title(first)}, {fixed}: mean barrier (nats) against {sweep.what}"
    numbers = [text.number(number) for number, _ in sweep.cells]
    drawn = panel(
        list(range(len(numbers))), series, value_range([s.values for s in series] + [[0.0]]),
        ends=(numbers[0], numbers[-1]), below=f"{sweep.what}: {', '.join(numbers)}",
        title=f"{words}, {', '.join(sweep.means)}", beside="Mean barrier (nats)", dots=True,
    )  # fmt: skip
    rows = [(sweep.what, *sweep.means), *zip([number for number, _ in sweep.cells], *sweep.means.values())]
    name = f"sweep-{sweep.what}-{file_names([first])[0]}"
    return _figure(name, rows, [drawn], _series_kinds(sweep.means), below=words)


def _series_kinds(labels: Iterable[str]) -> dict[str, str]:
    return {label: matcher_of(label) for label in labels}


def _curves_section(study: Study, anchors: dict[int, str], varies: dict[int, str]) -> Html:
    cells = [cell for scope in by_scope(study.cells).values() for cell in scope]
    shown = [
        _curves(cell, anchors[id(cell)], name, varies.get(id(cell))) for cell, name in zip(cells, file_names(cells))
    ]
    n = sum(len(cell.pairs) for cell in cells if cell.done)
    return _section("Curves", "curves", f"{_count(n, 'pair')} of models in {_count(len(cells), 'cell')}", *shown)


def _curves(cell: CellResult, anchor: str, name: str, varies: str | None) -> Html:
    """The paper's panels: one for each pair and metric, naive and by each main matcher."""
    heading = f"{title(cell)}, {cell.about.get('scope')}"
    if not cell.done:
        why = f"{cell.status}{f': {cell.why}' if cell.why else ''}"
        return element("p", element("b", heading), f" ({size_name(cell)}): {why}.", id=anchor, class_="status")
    head = element("summary", heading, " ", element("small", size_name(cell)), " ", _varies(varies))
    panels = [_pair_panels(cell, metric, name) for metric in cell.metrics]
    return element("details", head, *panels, id=anchor, class_="curves")


def _pair_panels(cell: CellResult, metric: str, name: str) -> Html:
    labels = main_labels(cell)
    y = value_range([pair.curve(label, metric) for pair in cell.pairs for label in labels])
    rows: list[Row] = [("seeds", "lambda", *labels)]
    for pair in cell.pairs:
        curves = [pair.curve(label, metric) for label in labels]
        rows += [(pair.name, *values) for values in zip(pair.facts["lambdas"], *curves)]
    panels = [_pair_panel(pair, labels, metric, y) for pair in cell.pairs]
    above = text.metric_title(metric)
    return _figure(f"{name}-{metric}", rows, panels, _series_kinds(labels), above=above)


def _pair_panel(pair: PairResult, labels: Sequence[str], metric: str, y: Range) -> Html:
    series = [Series(pair.curve(label, metric), matcher_of(label)) for label in labels]
    shown = ", ".join(f"{label} {text.barrier(metric, pair.barrier(label, metric))}" for label in labels)
    first, second = pair.seeds
    words = f"{text.TITLES[metric]} from seed {first} to seed {second}; barriers: {shown}"
    drawn = panel(
        pair.facts["lambdas"], series, y, ends=(f"seed {first}", f"seed {second}"), below="λ, from 0 to 1", title=words,
        beside=text.metric_title(metric), percent=metric == "accuracy",
    )  # fmt: skip
    return element("div", drawn, element("p", f"barriers: {shown}", class_="numbers-below"))


def _models_section(study: Study) -> Html:
    """Every model that was trained, once."""
    rows, seen = [], set()
    for cell in study.cells:
        for seed, facts in cell.models:
            key = repr(facts.get("job"))
            if key in seen:
                continue
            seen.add(key)
            numbers = [text.metric(metric, facts.get(metric)) for metric in ("loss", "accuracy", "bits_per_byte")]
            counted = [f"{facts[k]:,}" if facts.get(k) else text.MISSING for k in ("n_steps", "n_params")]
            rows.append(
                table_row(_cell_name(cell), str(seed), *numbers, *counted, text.number(facts.get("seconds"), 3))
            )
    heads = ("cell", "seed", "loss", "accuracy", "bits per byte", "steps", "parameters", "seconds")
    table = _table("Every model on its test data", heads, rows)
    return _section("Models", "models", f"{_count(len(rows), 'model')} on their test data", table)


def _runs_section(study: Study) -> Html:
    """The commands, where they are known, and all rows as JSON."""
    commands = "\n".join(dict.fromkeys(str(run["command"]) for run in study.runs if run.get("command")))
    runs = [
        f"{r.get('created')}: version {r.get('version')}, torch {r.get('torch')}, {r.get('device')}" for r in study.runs
    ]
    said = f"{_count(len(runs), 'run')} filled this study" if runs else "the runs are not recorded"
    return _section(
        "Where the numbers come from",
        "runs",
        said,
        element("pre", element("code", commands), tabindex=0, aria_label="Commands") if commands else None,
        element("ul", *(element("li", run) for run in runs)) if runs else None,
        json_details("All rows as JSON", "summary.json"),
        data_result=0,
    )


# The figures.


def write_figures(study: Study, folder: Path, watch: Watch | None = None) -> list[Path]:
    """Write every figure of the study as PNG and SVG; the folder is created."""
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []
    drawings = list(_drawings(study))
    places = [[folder / f"{name}{suffix}" for suffix in SUFFIXES] for name, _, _ in drawings]
    for path in chain(*places):
        check_kind(path, "figure")
    for done, (paths, (_, size, draw)) in enumerate(zip(places, drawings, strict=True), 1):
        figures.new_figure(paths, size, draw, dpi=DPI)
        found += paths
        if watch:
            watch(done, len(drawings))
    return found


def _drawings(study: Study) -> Iterator[Drawing]:
    names = dict(zip(map(id, study.cells), file_names(study.cells)))
    for cell in study.cells:
        name = names[id(cell)]
        if cell.done:
            yield _plot_curves(cell, name)
        if cell.ablations["heads"]:
            yield _plot_permutations(cell, f"heads-{name}")
        for found in cell.ablations["layers"]:
            yield _plot_layers(cell, found, f"layers-{name}")
        for found in cell.ablations["control"]:
            yield _plot_control(cell, found, f"control-{name}")
    yield from _plot_stage2(study)
    yield from _plot_positions(study)
    for sweep in sweeps(study.cells):
        _, first = sweep.cells[0]
        yield _plot_sweep(sweep, f"sweep-{sweep.what}-{names[id(first)]}")


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


def _plot_curves(cell: CellResult, name: str) -> Drawing:
    """The paper's panels: a column for each pair, a row for each metric, naive and by matcher."""
    labels = main_labels(cell)
    rows, columns = len(cell.metrics), len(cell.pairs)

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(rows, columns, squeeze=False, sharey="row", sharex=True)
        for axes_row, metric in zip(grid, cell.metrics):
            for axes, pair in zip(axes_row, cell.pairs):
                _plot_pair(axes, pair, labels, metric, last=metric == cell.metrics[-1])
            axes_row[0].set_ylabel(text.metric_title(metric))
        for axes, pair in zip(grid[0], cell.pairs):
            axes.set_title(f"seeds {pair.name}")
        figures.add_legend(figure, grid[0][0])
        n = cell.pairs[0].facts.get("n_samples")
        samples = f"{n:,} test samples" if isinstance(n, int) else ""
        figures.add_caption(figure, title(cell), _scope_title(cell), size_name(cell), samples)

    return name, (max(5.6, 3.5 * columns), 1.2 + 2.55 * rows), draw


def _plot_pair(axes: "Axes", pair: PairResult, labels: Sequence[str], metric: str, *, last: bool) -> None:
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


def _plot_permutations(cell: CellResult, name: str) -> Drawing:
    """All head permutations as thin lines, the chosen one bold."""
    found = cell.ablations["heads"]

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
        figures.add_caption(
            figure, f"Every permutation of the heads: {title(cell)}", _scope_title(cell), size_name(cell)
        )

    return name, (max(5.6, 3.5 * len(found)), 3.9), draw


def _plot_layers(cell: CellResult, found: JsonObject, name: str) -> Drawing:
    """The loss after the attention of one layer was re-initialised, by layer."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        places = range(len(found["loss"]))
        axes.bar(places, found["loss"], width=0.62, color=figures.BLUE)
        for place, draws in zip(places, found["draws"]):
            axes.plot([place] * len(draws), figures.as_nan(draws), "o", ms=3, color=figures.INK)
        axes.axhline(found["before"], color=figures.INK, lw=0.9, ls=figures.DASHES, label="as trained")
        axes.set_xticks(list(places))
        axes.set_xlabel("layer whose attention was re-initialised")
        axes.set_ylabel(text.metric_title("loss"))
        figures.add_legend(figure, axes)
        figures.add_caption(
            figure, f"One layer re-initialised: {title(cell)}", size_name(cell), "bars are means, dots are draws"
        )

    return name, (max(5.2, 1.8 + 0.55 * len(found["loss"])), 3.6), draw


def _plot_control(cell: CellResult, found: JsonObject, name: str) -> Drawing:
    """The loss on the path to a reparametrised copy of the model, before and after alignment."""

    def draw(figure: "Figure") -> None:
        grid = figure.subplots(1, 2, sharey=True)
        for axes, side in zip(grid, ("inside", "outside")):
            for path in (NAIVE, "aligned"):
                for number, curves in enumerate(found[side]["curves"]):
                    label, values = "_" if number else path, figures.as_nan(curves[path])
                    axes.plot(found["lambdas"], values, color=figures.COLOURS[path], lw=1.8, label=label)
            axes.set_title(f"{side} the group: {found[side]['element'][0]}")
            axes.set_xlabel("λ, from the model to its scrambled copy")
            _set_path_axes(axes)
        grid[0].set_ylabel(text.metric_title("loss"))
        figures.add_legend(figure, grid[0])
        draws = f"{len(found['inside']['element'])} draws each"
        figures.add_caption(figure, f"The control: {title(cell)}", size_name(cell), draws)

    return name, (8.2, 3.9), draw


def _plot_stage2(study: Study) -> Iterator[Drawing]:
    """The share of the naive barrier that is left, by variant of Stage 2."""
    found = stage2_cells(study.cells)
    groups = {
        stage: (_STAGE_COLOURS[stage], [by_name[stage].share for _, by_name in found]) for stage in STAGES.values()
    }
    names = [f"{title(cell)}\n{scope_and_size(cell)}" for cell, _ in found]
    about = "none: heads paired, nothing else; mean barrier over mean naive barrier"
    if found:
        yield _share_bars("stage2", 0.78, names, groups, "What Stage 2 leaves of the naive barrier", about)


def _plot_positions(study: Study) -> Iterator[Drawing]:
    """The share of the naive barrier that is left, absolute against rotary positions."""
    both = [each for each in position_comparisons(study.cells) if all("weights" in scores(cell) for cell in each)]
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


def _plot_sweep(sweep: Sweep, name: str) -> Drawing:
    """The mean barrier against the number that varies."""
    first = sweep.cells[0][1]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        places = range(len(sweep.cells))
        for label, values in sweep.means.items():
            colour = figures.COLOURS[matcher_of(label)]
            axes.plot(places, figures.as_nan(values), "o-", color=colour, label=label, clip_on=False)
        axes.set_xticks(list(places), [f"{number:g}" for number, _ in sweep.cells])
        axes.set_xlabel(sweep.what)
        axes.set_ylabel("Mean loss barrier (nats)")
        axes.set_ylim(bottom=0)
        figures.add_grid(axes)
        figures.add_legend(figure, axes)
        heading = f"Barrier against {sweep.what}: {title(first)}"
        figures.add_caption(figure, heading, _scope_title(first), size_name(first, but=sweep.what))

    return name, (6.0, 4.0), draw


def _set_path_axes(axes: "Axes") -> None:
    figures.set_lambda_axis(axes, (0, 0.5, 1), 0.02)
    figures.add_grid(axes)


def _scope_title(cell: CellResult) -> str:
    scope = str(cell.about.get("scope"))
    return SCOPE_TITLES.get(scope, scope)
