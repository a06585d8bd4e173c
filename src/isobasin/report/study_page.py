"""The report of a study: summary.json, figures and one self-contained page, from the study's JSON alone."""

from collections.abc import Sequence
from pathlib import Path

from isobasin.errors import IsobasinError
from isobasin.files import atomic_write, check_output_file
from isobasin.report import text
from isobasin.report.page import assemble, asset, bar_cell, json_details, scroll_table, swatch
from isobasin.report.study_figures import main_labels, matcher_of, scope_and_size, sweep_labels, write_figures
from isobasin.report.summary import RULE
from isobasin.report.svg import Range, Series, bar, panel, value_range
from isobasin.report.text import Child, Html, concat, element
from isobasin.study.results import (
    NAIVE,
    SCOPE_TITLES,
    STAGES,
    CellResult,
    JsonObject,
    PairResult,
    PositionComparison,
    Score,
    Study,
    Sweep,
    ablation,
    by_scope,
    counts,
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
    summary_row,
    sweeps,
    title,
)
from isobasin.study.store import read_json, write_json

PAGE, SUMMARY, FIGURES = "report.html", "summary.json", "figures"
MAX_PERMUTATION_FIGURES = 4

Scored = Sequence[tuple[CellResult, dict[str, Score]]]


def write_study_report(folder: Path, output: Path | None = None, *, figures: bool = True) -> Path:
    """Write report.html, summary.json and figures/ into the folder; `output` is another place for the page.

    >>> write_study_report(Path("results/digits"))  # doctest: +SKIP
    PosixPath('results/digits/report.html')
    """
    folder = Path(folder)
    place = folder / PAGE if output is None else Path(output)
    study = read_study(folder)
    check_output_file(place, force=True)
    names = _old_figures(folder)
    if figures:
        new = {path.name for path in write_figures(study, folder / FIGURES)}
        for name in names - new:
            (folder / FIGURES / name).unlink(missing_ok=True)
        names = new
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


def render(study: Study) -> str:
    """The text of the page."""
    anchors = {id(cell): f"cell-{i + 1}" for i, cell in enumerate(study.cells)}
    sections = _scope_sections(study, anchors)
    optional = (
        ("Absolute against RoPE", "positions", _positions_section(study)),
        ("Stage 2", "stage2", _stage2_section(study)),
        ("Stage 1", "heads", _heads_section(study)),
        ("Layers", "layers", _layers_section(study)),
        ("Control", "control", _control_section(study)),
        ("Sweeps", "sweeps", _sweeps_section(study)),
        ("Curves", "curves", _curves_section(study, anchors)),
        ("Models", "models", _models_section(study)),
        ("Runs", "runs", _runs_section(study)),
    )
    sections += [(name, anchor, made) for name, anchor, made in optional if made is not None]
    links = [element("li", element("a", name, href=f"#{anchor}")) for name, anchor, _ in sections]
    contents = element("nav", element("ul", *links), aria_label="Contents", class_="contents")
    return assemble(
        f"{study.name}: which models are linearly connected?",
        concat([_intro(study), contents, *(made for _, _, made in sections)]),
        charts=[],
        results=[[summary_row(cell) for cell in study.cells]],
        more_style=asset("study_page.css"),
    )


def _section(name: str, anchor: str, *children: Html | None) -> Html:
    return element("section", element("h2", name), *children, class_="pair", id=anchor)


def _table(caption: str, heads: Sequence[str], rows: Sequence[Html], kind: str = "") -> Html:
    """A table that scrolls sideways under a caption that does not; the first column names the row."""
    scroll = scroll_table(caption, heads, rows, f"study {kind}")
    return element("div", element("p", caption, class_="caption"), scroll, class_="tabled")


def _row(name: Child, *cells: Child, kind: str | None = None) -> Html:
    """A row of a table; a cell that is not a td element yet becomes one."""
    shown = [
        cell if isinstance(cell, Html) and cell.source.startswith("<td") else element("td", cell) for cell in cells
    ]
    return element("tr", element("th", name, scope="row"), *shown, class_=kind)


def _cell_name(cell: CellResult, *, scope: bool = True) -> Html:
    return concat([title(cell), element("small", scope_and_size(cell) if scope else size_name(cell))])


def _intro(study: Study) -> Html:
    """How many cells are done, and how many of them each matcher connects."""
    n = counts(study.cells)
    words = [f"{n['done']} of {len(study.cells)} cells are filled"]
    words += [f"{n['failed']} failed and not averaged"] * bool(n["failed"])
    words += [f"{n['not filled']} not filled yet"] * bool(n["not filled"])
    connected: dict[str, list[bool]] = {}
    for cell in study.cells:
        for label, score in scores(cell).items():
            if is_main(label) and label != NAIVE:
                connected.setdefault(label, []).append(score.connected)
    by_matcher = ", ".join(f"{label} {sum(each)} of {len(each)}" for label, each in connected.items())
    more = f" Connected in every pair, by matcher: {by_matcher}." if connected else ""
    return element(
        "div",
        element("p", f"{', '.join(words)}.{more}", class_="sentence"),
        element("p", f"Rule: {RULE}. Both numbers are always given.", class_="rule"),
        class_="verdict",
    )


def _scope_sections(study: Study, anchors: dict[int, str]) -> list[tuple[str, str, Html | None]]:
    """A table for each scope, in the order of the paper."""
    found: list[tuple[str, str, Html | None]] = []
    for scope, cells in by_scope(study.cells).items():
        name, anchor = SCOPE_TITLES.get(scope, scope), f"scope-{scope}"
        found.append((name, anchor, _section(name, anchor, _scope_table(cells, anchors))))
    return found


def _scope_table(cells: Sequence[CellResult], anchors: dict[int, str]) -> Html:
    """One row for each cell of a scope; a cell that is not done has its status instead of numbers."""
    labels = list(dict.fromkeys(label for cell in cells for label in scores(cell) if is_main(label)))
    columns = [label for label in labels if label != NAIVE]
    heads = ("model and data", "positions", "quality", "baseline", NAIVE, *columns, "connected")
    rows = [_scope_row(cell, anchors[id(cell)], columns) for cell in cells]
    caption = "Mean loss barrier in nats; below it the share of the naive one, and how many pairs are connected"
    return _table(caption, heads, rows, "cells")


def _scope_row(cell: CellResult, anchor: str, columns: Sequence[str]) -> Html:
    link = element("a", f"{model_name(cell)} on {data_name(cell)}", href=f"#{anchor}")
    name = concat([link, element("small", size_name(cell))])
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
        return _row(name, *start, note, kind="undone")
    found = scores(cell)
    connected = [label for label in columns if label in found and found[label].connected]
    words = "by all" if len(connected) == len(columns) > 2 else ", ".join(connected)
    answer = element("td", words or "no", class_="yes" if connected else "no")
    naive = element("td", element("b", text.metric("loss", found[NAIVE].mean)), class_="s-naive")
    return _row(name, *start, naive, *(_score(found.get(label)) for label in columns), answer)


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
    labels = [label for label in ("weights", "learned") if any(label in scores(each.rotary) for each in found)]
    pairs = [f"{label}, {side}" for label in labels for side in ("absolute", "RoPE")]
    heads = ("cell", "absolute is", f"{NAIVE}, absolute", f"{NAIVE}, RoPE", *pairs)
    caption = "Naive barrier in nats, and the share of it that is left, by kind of positions"
    table = _table(caption, heads, [_facing_row(each, labels) for each in found])
    return _section("Absolute against rotary positions", "positions", table)


def _facing_row(each: PositionComparison, labels: Sequence[str]) -> Html:
    cell, sides = each.absolute, (scores(each.absolute), scores(each.rotary))
    name = concat([f"{model_name(cell)} on {data_name(cell)}", element("small", scope_and_size(cell))])
    naive = [text.metric("loss", side[NAIVE].mean) for side in sides]
    shares = [text.percent(side[label].share) if label in side else text.MISSING for label in labels for side in sides]
    return _row(name, str(cell.about.get("positions")), *naive, *shares)


def _share_table(caption: str, found: Scored, names: Sequence[str]) -> Html:
    """Shares of the naive barrier with bars, one row for each cell, one column for each name."""
    shares = [s for _, by_name in found for score in by_name.values() if (s := score.share) is not None]
    high = max([0.01, *shares])
    rows = []
    for cell, by_name in found:
        each = [by_name[name].share if name in by_name else None for name in names]
        naive = text.metric("loss", next(iter(by_name.values())).naive_mean)
        rows.append(_row(_cell_name(cell), naive, *(bar_cell(share, 0.0, high, "aligned") for share in each)))
    return _table(caption, ("cell", NAIVE, *names), rows, "bars")


def _midpoint_table(caption: str, found: Scored, names: Sequence[str]) -> Html:
    """Losses at the midpoint, the naive one first; the lowest is bold."""
    rows = []
    for cell, by_name in found:
        losses = [scores(cell)[NAIVE].half, *(by_name[name].half for name in names)]
        lowest = min((loss for loss in losses if loss is not None), default=None)
        shown = [(loss, text.MISSING if loss is None else f"{loss:.4f}") for loss in losses]
        rows.append(_row(_cell_name(cell), *(element("b", word) if loss == lowest else word for loss, word in shown)))
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
    return _section("Stage 2: inside the heads", "stage2", element("p", _stage2_mean(found), f" {paper}"), *tables)


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
    cells = [cell for cell in study.cells if ablation(cell, "heads")]
    distances = distance_cells(study.cells)
    if not cells and not distances:
        return None
    words = "L̂ = 100 (L of the chosen − L of the best) / (L naive − L of the best), L the loss at the midpoint."
    parts: list[Html] = []
    if cells:
        parts = [element("p", words), _rank_table(cells), *map(_permutations, cells[:MAX_PERMUTATION_FIGURES])]
    if distances:
        names = list(dict.fromkeys(name for _, by_name in distances for name in by_name))
        caption = "Share of the naive barrier that is left when heads are paired by another distance"
        parts.append(_share_table(caption, distances, names))
    return _section("Stage 1: which head is which", "heads", *parts)


def _rank_table(cells: Sequence[CellResult]) -> Html:
    """The rank of Stage 1's choice among the permutations that were measured, by pair."""
    rows = []
    for cell in cells:
        found = ablation(cell, "heads")
        ranks = ", ".join(str(each["rank"]) for each in found)
        hats = ", ".join(text.MISSING if (hat := each["normalised"]) is None else f"{hat:.1f}" for each in found)
        naive = mean([each["naive"] for each in found])
        chosen = mean([each["loss"][each["chosen"]] for each in found])
        best = mean([min((x for x in each["loss"] if x is not None), default=None) for each in found])
        losses = (text.metric("loss", value) for value in (naive, chosen, best))
        rows.append(_row(_cell_name(cell), f"{ranks} of {len(found[0]['permutations'])}", hats, *losses))
    caption = "The chosen permutation among all that were measured: rank and L̂ by pair, mean losses at the midpoint"
    return _table(caption, ("cell", "rank", "L̂", NAIVE, "chosen", "best"), rows)


def _figure(panels: Sequence[Html], *, above: str | None = None, below: str | None = None) -> Html:
    """Panels side by side with a caption above or below them."""
    return element(
        "figure",
        element("figcaption", above, class_="above") if above else None,
        element("div", *panels, class_="panels"),
        element("figcaption", below) if below else None,
        class_="small",
    )


def _permutations(cell: CellResult) -> Html:
    """All permutations as thin lines, the chosen one bold, one panel for each pair."""
    found = ablation(cell, "heads")
    y = value_range([values for each in found for values in (*each["curves"], each["naive_curve"])])
    panels = []
    for each in found:
        series = [Series(values, "thin") for i, values in enumerate(each["curves"]) if i != each["chosen"]]
        series += [Series(each["naive_curve"], "naive dashed"), Series(each["curves"][each["chosen"]], "weights")]
        rank = f"rank {each['rank']}"
        words = f"{len(each['curves'])} permutations, the chosen one is number {each['rank']}"
        panels.append(panel(each["lambdas"], series, y, ends=("λ = 0", "1"), below=rank, title=words))
    below = (
        f"{title(cell)}, {cell.about.get('scope')}: loss along the line for every permutation (thin), the chosen one"
        " (bold) and the naive path (dashed)."
    )
    return _figure(panels, below=below)


# Ablations of single models.


def _with_ablation(study: Study, kind: str) -> list[CellResult]:
    """Cells with an ablation of that kind; of those that share its result the first."""
    found: dict[str, CellResult] = {}
    for cell in study.cells:
        if ablation(cell, kind):
            found.setdefault(repr([each.get("job") for each in ablation(cell, kind)]), cell)
    return list(found.values())


def _layers_section(study: Study) -> Html | None:
    """The loss after the attention of one layer was re-initialised."""
    cells = _with_ablation(study, "layers")
    rows = [row for cell in cells for found in ablation(cell, "layers") for row in _layer_rows(cell, found)]
    caption = "Loss after the attention of one layer alone was re-initialised (mean over draws); the bar is its rise"
    table = _table(caption, ("cell", "layer", "trained", "re-initialised", "rise"), rows, "layers")
    return _section("One layer's attention re-initialised", "layers", table) if cells else None


def _layer_rows(cell: CellResult, found: JsonObject) -> list[Html]:
    rises = [loss - found["before"] for loss in found["loss"]]
    low, high = min([0.0, *rises]), max([1e-9, *rises])
    rows = []
    for layer, (loss, rise) in enumerate(zip(found["loss"], rises)):
        name, before = ("", "") if layer else (_cell_name(cell, scope=False), text.metric("loss", found["before"]))
        rows.append(_row(name, str(layer), before, text.metric("loss", loss), bar(rise, low, high, "aligned")))
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
    rows = [
        _control_row(cell, side, found[side])
        for cell in cells
        for found in ablation(cell, "control")
        for side in ("inside", "outside")
    ]
    table = _table(caption, heads, rows)
    return _section("The control: inside and outside the group", "control", element("p", words), table)


def _control_row(cell: CellResult, side: str, found: JsonObject) -> Html:
    """A model against a reparametrised copy of itself: means over draws."""
    rises = [text.metric("loss", mean([pair[k] for pair in found["excess"]])) for k in (0, 1)]
    before, after = (mean([pair[k] for pair in found["distance"]]) for k in (0, 1))
    distance = f"{text.number(before, 3)} → {text.number(after, 2)}"
    moved = text.number(max(found["function_change"]), 2)
    return _row(_cell_name(cell, scope=False), f"{side}: {found['element'][0]}", moved, *rises, distance)


def _sweeps_section(study: Study) -> Html | None:
    found = sweeps(study.cells)
    figures = element("div", *map(_sweep, found), class_="panels")
    return _section("Against heads, width, depth and training time", "sweeps", figures) if found else None


def _sweep(sweep: Sweep) -> Html:
    """The mean barrier against the number that varies."""
    xs = [number for number, _ in sweep.cells]
    found = [scores(cell) for _, cell in sweep.cells]
    labels = sweep_labels(sweep)
    series = [Series([each[label].mean for each in found], matcher_of(label)) for label in labels]
    first = sweep.cells[0][1]
    fixed = f"{first.about.get('scope')}, {size_name(first, but=sweep.what)}"
    words = f"{title(first)}, {fixed}: mean barrier (nats) against {sweep.what}, {', '.join(labels)}"
    numbers = [text.number(x) for x in xs]
    drawn = panel(
        list(range(len(xs))), series, value_range([s.values for s in series] + [[0.0]]),
        ends=(numbers[0], numbers[-1]), below=f"{sweep.what}: {', '.join(numbers)}", title=words, dots=True,
    )  # fmt: skip
    return element("figure", drawn, element("figcaption", words), class_="small")


def _curves_section(study: Study, anchors: dict[int, str]) -> Html:
    cells = [_curves(cell, anchors[id(cell)]) for scope in by_scope(study.cells).values() for cell in scope]
    labels = [label for cell in study.cells if cell.done for label in (NAIVE, *cell.labels)]
    kinds = [kind for kind in dict.fromkeys(map(matcher_of, labels)) if kind != "other"]
    key = [element("span", swatch(f"s-{kind}"), kind) for kind in kinds]
    return _section("Curves", "curves", element("p", *key, class_="key"), *cells)


def _curves(cell: CellResult, anchor: str) -> Html:
    """The paper's panels: one for each pair and metric, naive and by each main matcher."""
    name = f"{title(cell)}, {cell.about.get('scope')}"
    if not cell.done:
        why = f"{cell.status}{f': {cell.why}' if cell.why else ''}"
        return element("p", element("b", name), f" ({size_name(cell)}): {why}.", id=anchor, class_="status")
    head = element("summary", name, " ", element("small", size_name(cell)))
    figures = [_pair_panels(cell, metric) for metric in cell.metrics]
    return element("details", head, *figures, id=anchor, class_="curves", open=True)


def _pair_panels(cell: CellResult, metric: str) -> Html:
    labels = main_labels(cell)
    y = value_range([pair.curve(label, metric) for pair in cell.pairs for label in labels])
    return _figure([_pair_panel(pair, labels, metric, y) for pair in cell.pairs], above=text.metric_title(metric))


def _pair_panel(pair: PairResult, labels: Sequence[str], metric: str, y: Range) -> Html:
    series = [Series(pair.curve(label, metric), matcher_of(label)) for label in labels]
    shown = ", ".join(f"{label} {text.barrier(metric, pair.barrier(label, metric))}" for label in labels)
    first, second = pair.seeds
    words = f"{text.TITLES[metric]} from seed {first} to seed {second}; barriers: {shown}"
    drawn = panel(
        pair.facts["lambdas"], series, y, ends=(f"seed {first}", f"seed {second}"), below="λ", title=words,
        percent=metric == "accuracy",
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
            rows.append(_row(_cell_name(cell), str(seed), *numbers, *counted, text.number(facts.get("seconds"), 3)))
    heads = ("cell", "seed", "loss", "accuracy", "bits per byte", "steps", "parameters", "seconds")
    table = _table("Every model on its test data", heads, rows)
    return _section("Models", "models", element("details", element("summary", "Every model"), table))


def _runs_section(study: Study) -> Html:
    """The commands, where they are known, and all rows as JSON."""
    commands = "\n".join(dict.fromkeys(str(run["command"]) for run in study.runs if run.get("command")))
    runs = [
        f"{r.get('created')}: version {r.get('version')}, torch {r.get('torch')}, {r.get('device')}" for r in study.runs
    ]
    return element(
        "section",
        element("h2", "Where the numbers come from"),
        element("p", f"{len(runs)} runs filled this study." if runs else "The runs are not recorded."),
        element("pre", element("code", commands), tabindex=0, aria_label="Commands") if commands else None,
        element("ul", *(element("li", run) for run in runs)) if runs else None,
        json_details("All rows as JSON", "summary.json"),
        class_="provenance",
        id="runs",
        data_result=0,
    )
