"""The parts of the study's page, each from the cells that have something to say about it."""

from collections.abc import Sequence

from isobasin.report.facts import RULE
from isobasin.report.markup import Html, element
from isobasin.report.wording import TITLES, UNITS, percent, plain, rise

from .page_charts import Series, kind_of, panel, value_range
from .page_tables import (
    control_table,
    facing_table,
    half_table,
    layer_table,
    model_table,
    rank_table,
    scope_table,
    share_table,
)
from .results import NAIVE, CellResult, Facts, Measured, Study
from .tables import (
    SCOPE_TITLES,
    STAGES,
    Score,
    Sweep,
    ablation,
    by_scope,
    counts,
    distance_cells,
    facing_cells,
    is_main,
    mean,
    scores,
    size_name,
    stage2_cells,
    sweeps,
    title,
)

MOST_CURVES = 4  # permutation figures that are shown open


def part(name: str, anchor: str, *children: Html | None) -> Html:
    return element("section", element("h2", name), *children, class_="pair", id=anchor)


def intro(study: Study) -> Html:
    """What is there, and how many cells are connected by which matcher."""
    n = counts(study.cells)
    words = [f"{n['done']} of {len(study.cells)} cells are filled"]
    words += [f"{n['failed']} failed and not averaged"] * bool(n["failed"])
    words += [f"{n['not filled']} not filled yet"] * bool(n["not filled"])
    found = [scores(cell) for cell in study.cells if cell.done]
    labels = list(dict.fromkeys(label for each in found for label in each if is_main(label) and label != NAIVE))
    told = []
    for label in labels:
        having = [each[label] for each in found if label in each]
        told.append(f"{label} {sum(score.connected for score in having)} of {len(having)}")
    connected = f" Connected in every pair, by matcher: {', '.join(told)}." if told else ""
    return element(
        "div",
        element("p", f"{', '.join(words)}.{connected}", class_="sentence"),
        element("p", f"Rule: {RULE}. Both numbers are always given.", class_="rule"),
        class_="verdict",
    )


def contents(parts: Sequence[tuple[str, str]]) -> Html:
    links = [element("li", element("a", name, href=f"#{anchor}")) for name, anchor in parts]
    return element("nav", element("ul", *links), aria_label="Contents", class_="contents")


def scope_parts(study: Study, anchors: dict[int, str]) -> list[tuple[str, str, Html]]:
    """A table for each scope, in the order of the paper."""
    found = []
    for scope, cells in by_scope(study.cells).items():
        name = SCOPE_TITLES.get(scope, scope)
        table = scope_table(cells, [anchors[id(cell)] for cell in cells])
        found.append((name, f"scope-{scope}", part(name, f"scope-{scope}", table)))
    return found


def positions_part(study: Study) -> Html | None:
    found = facing_cells(study.cells)
    if not found:
        return None
    labels = [label for label in ("weights", "learned") if any(label in scores(each.rotary) for each in found)]
    return part("Absolute against rotary positions", "positions", facing_table(found, labels))


def stage2_part(study: Study) -> Html | None:
    found = stage2_cells(study.cells)
    if not found:
        return None
    names = list(STAGES.values())
    caption = "Naive barrier in nats, and the share of it that is left without Stage 2, with rotations alone, in full"
    halves = "Mean loss half-way: it orders the three also where none of them leaves a barrier"
    paper = "The paper gives 62–91 %, 10–16 % and 7–12 % (first layer replaced)."
    tables = (share_table(caption, found, names), half_table(halves, found, names))
    return part("Stage 2: inside the heads", "stage2", element("p", _stage2_words(found), f" {paper}"), *tables)


def _stage2_words(found: Sequence[tuple[CellResult, dict[str, Score]]]) -> str:
    """The mean share of each variant, of the paper's scope alone and where there is a barrier to have a share of."""
    first = [by_name for cell, by_name in found if cell.about.get("scope") == "first-attention"]
    rising = [by_name for by_name in first if by_name["full"].naive_mean]
    if not rising:
        return "No cell with the first attention drawn anew has a naive barrier."
    means = {name: mean([by_name[name].share for by_name in rising]) for name in STAGES.values()}
    words = ", ".join(f"{name} {percent(value)}" for name, value in means.items())
    flat = len(first) - len(rising)
    rest = f" ({flat} more {'has' if flat == 1 else 'have'} no naive barrier)" if flat else ""
    cells = f"{len(rising)} cell{'' if len(rising) == 1 else 's'}"
    return f"Mean over {cells} with the first attention drawn anew{rest}: {words}."


def heads_part(study: Study) -> Html | None:
    cells = [cell for cell in study.cells if ablation(cell, "heads")]
    distances = distance_cells(study.cells)
    if not cells and not distances:
        return None
    said = element("p", "L̂ = 100 (L of the chosen − L of the best) / (L naive − L of the best), L the loss half-way.")
    parts: list[Html | None] = [said, rank_table(cells), *map(_permutations, cells[:MOST_CURVES])] if cells else []
    if distances:
        names = list(dict.fromkeys(name for _, by_name in distances for name in by_name))
        caption = "Share of the naive barrier that is left when heads are paired by another distance"
        parts.append(share_table(caption, distances, names))
    return part("Stage 1: which head is which", "heads", *parts)


def _permutations(cell: CellResult) -> Html:
    """All arrangements as thin lines, the chosen one bold, one panel for each pair."""
    found = ablation(cell, "heads")
    y = value_range([values for each in found for values in (*each["curves"], each["naive_curve"])])
    panels = [_permutation_panel(each, y) for each in found]
    words = (
        f"{title(cell)}, {cell.about.get('scope')}: loss along the line for every permutation (thin), the chosen one"
    )
    return element(
        "figure",
        element("div", *panels, class_="panels"),
        element("figcaption", f"{words} (bold) and the naive path (dashed)."),
        class_="small",
    )


def _permutation_panel(each: Facts, y: tuple[float, float]) -> Html:
    chosen = each["chosen"]
    thin = [Series(values, "thin") for i, values in enumerate(each["curves"]) if i != chosen]
    bold = [Series(each["naive_curve"], "naive dashed"), Series(each["curves"][chosen], "weights")]
    words = f"{len(each['curves'])} permutations, the chosen one is number {each['rank']}"
    return panel(each["lambdas"], [*thin, *bold], y, ends=("λ = 0", "1"), below=f"rank {each['rank']}", title=words)


def layers_part(study: Study) -> Html | None:
    cells = _once([cell for cell in study.cells if ablation(cell, "layers")], "layers")
    return part("One layer's attention drawn anew", "layers", layer_table(cells)) if cells else None


def control_part(study: Study) -> Html | None:
    cells = _once([cell for cell in study.cells if ablation(cell, "control")], "control")
    if not cells:
        return None
    said = (
        "A model is compared with itself after Q and K of every head were changed. Inside the group (a complex number "
        "per rotary pair under RoPE, any invertible matrix without it) outputs stay, and alignment takes the change "
        "back. Outside it (any invertible matrix under RoPE, which leaves QKᵀ as it is; the queries alone without) the "
        "function is another one, and alignment can not take the rise of the loss away."
    )
    return part("The control: inside and outside the group", "control", element("p", said), control_table(cells))


def _once(cells: Sequence[CellResult], kind: str) -> list[CellResult]:
    """Cells may share a result: the first of them shows it."""
    found: dict[str, CellResult] = {}
    for cell in cells:
        found.setdefault(repr([each.get("job") for each in ablation(cell, kind)]), cell)
    return list(found.values())


def sweeps_part(study: Study) -> Html | None:
    found = sweeps(study.cells)
    if not found:
        return None
    figures = [element("div", *map(_sweep, found), class_="panels")]
    return part("Against heads, width, depth and training time", "sweeps", *figures)


def _sweep(sweep: Sweep) -> Html:
    xs = [number for number, _ in sweep.cells]
    found = [scores(cell) for _, cell in sweep.cells]
    labels = [label for label in found[0] if is_main(label) and all(label in each for each in found)]
    series = [Series([each[label].mean for each in found], kind_of(label)) for label in labels]
    first = sweep.cells[0][1]
    fixed = f"{first.about.get('scope')}, {size_name(first, but=sweep.what)}"
    words = f"{title(first)}, {fixed}: mean barrier (nats) against {sweep.what}, {', '.join(labels)}"
    drawn = panel(
        list(range(len(xs))), series, value_range([s.values for s in series] + [[0.0]]),
        ends=(plain(xs[0]), plain(xs[-1])), below=f"{sweep.what}: {', '.join(map(plain, xs))}", title=words, dots=True,
    )  # fmt: skip
    return element("figure", drawn, element("figcaption", words), class_="small")


def curves_part(study: Study, anchors: dict[int, str]) -> Html:
    cells = [_curves(cell, anchors[id(cell)]) for scope in by_scope(study.cells).values() for cell in scope]
    kinds = list(dict.fromkeys(kind_of(label) for cell in study.cells if cell.done for label in (NAIVE, *cell.labels)))
    key = [
        element("span", element("span", class_=f"swatch s-{kind}", aria_hidden="true"), kind)
        for kind in kinds
        if kind != "other"
    ]
    return part("Curves", "curves", element("p", *key, class_="key"), *cells)


def _curves(cell: CellResult, anchor: str) -> Html:
    """The paper's panels: one for each pair and metric, naive and by each main matcher."""
    name = f"{title(cell)}, {cell.about.get('scope')}"
    if not cell.done:
        why = f"{cell.status}{f': {cell.why}' if cell.why else ''}"
        return element("p", element("b", name), f" ({size_name(cell)}): {why}.", id=anchor, class_="status")
    panels = [_row_of_panels(cell, metric) for metric in cell.metrics]
    return element(
        "details",
        element("summary", name, " ", element("small", size_name(cell))),
        *panels,
        id=anchor,
        class_="curves",
        open=True,
    )


def _row_of_panels(cell: CellResult, metric: str) -> Html:
    labels = [label for label in (NAIVE, *cell.labels) if is_main(label)]
    y = value_range([pair.curve(label, metric) for pair in cell.pairs for label in labels])
    unit = f" ({UNITS[metric]})" if UNITS[metric] else ""
    panels = [_pair_panel(pair, labels, metric, y) for pair in cell.pairs]
    return element(
        "figure",
        element("figcaption", f"{TITLES[metric]}{unit}", class_="above"),
        element("div", *panels, class_="panels"),
        class_="small",
    )


def _pair_panel(pair: Measured, labels: Sequence[str], metric: str, y: tuple[float, float]) -> Html:
    series = [Series(pair.curve(label, metric), kind_of(label)) for label in labels]
    barriers = [(label, pair.barrier(label, metric)) for label in labels]
    shown = ", ".join(f"{label} {rise(metric, height)}" for label, height in barriers)
    first, second = pair.seeds
    words = f"{TITLES[metric]} from seed {first} to seed {second}; barriers: {shown}"
    drawn = panel(
        pair.facts["lambdas"], series, y, ends=(f"seed {first}", f"seed {second}"), below="λ", title=words,
        percent=metric == "accuracy",
    )  # fmt: skip
    return element("div", drawn, element("p", f"barriers: {shown}", class_="numbers-below"))


def models_part(study: Study) -> Html:
    return part("Models", "models", element("details", element("summary", "Every model"), model_table(study.cells)))


def runs_part(study: Study) -> Html:
    """The commands, where they are known, and all rows as JSON."""
    commands = list(dict.fromkeys(str(run["command"]) for run in study.runs if run.get("command")))
    told = [
        f"{r.get('created')}: version {r.get('version')}, torch {r.get('torch')}, {r.get('device')}" for r in study.runs
    ]
    shown = (
        [element("pre", element("code", "\n".join(commands)), tabindex=0, aria_label="Commands")] if commands else []
    )
    return element(
        "section",
        element("h2", "Where the numbers come from"),
        element("p", f"{len(study.runs)} runs filled this study." if study.runs else "The runs are not recorded."),
        *shown,
        element("ul", *(element("li", line) for line in told)) if told else None,
        element(
            "details",
            element("summary", "All rows as JSON"),
            element("p", element("a", "Download summary.json", class_="download", href="#", download="summary.json")),
            element("pre", class_="json", tabindex=0, aria_label="All rows as JSON"),
        ),
        class_="provenance",
        id="runs",
        data_result=0,
    )
