"""The tables of the study's page."""

from collections.abc import Sequence

from isobasin.report.markup import Child, Html, element, joined
from isobasin.report.pictures import bar
from isobasin.report.wording import NONE, measured, percent, plain

from .page_charts import kind_of
from .results import NAIVE, CellResult
from .tables import (
    Facing,
    Score,
    ablation,
    data_name,
    is_main,
    mean,
    model_name,
    positions_name,
    quality,
    scores,
    size_name,
    title,
)

STATUS = {"failed": "failed", "not filled": "not filled"}


def table(caption: str, heads: Sequence[str], rows: Sequence[Html], kind: str = "") -> Html:
    """A table that scrolls by itself where it is wide, its caption above, which does not; the first column names the
    row."""
    head = element("tr", *(element("th", name, scope="col") for name in heads))
    made = element("table", element("thead", head), element("tbody", *rows), class_=f"study {kind}", aria_label=caption)
    scroll = element("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)
    return element("div", element("p", caption, class_="caption"), scroll, class_="tabled")


def row(name: Child, cells: Sequence[Child], kind: str | None = None) -> Html:
    shown = [
        cell if isinstance(cell, Html) and cell.source.startswith("<td") else element("td", cell) for cell in cells
    ]
    return element("tr", element("th", name, scope="row"), *shown, class_=kind)


def scope_table(cells: Sequence[CellResult], anchors: Sequence[str]) -> Html:
    """One row for each cell of a scope; what is not done says so in place of numbers."""
    labels = list(dict.fromkeys(label for cell in cells for label in scores(cell) if is_main(label)))
    columns = [label for label in labels if label != NAIVE]
    heads = ("model and data", "positions", "quality", "baseline", NAIVE, *columns, "connected")
    rows = [_scope_row(cell, anchor, columns) for cell, anchor in zip(cells, anchors)]
    caption = "Mean loss barrier in nats; below it the share of the naive one, and how many pairs are connected"
    return table(caption, heads, rows, "cells")


def _scope_row(cell: CellResult, anchor: str, columns: Sequence[str]) -> Html:
    words = f"{model_name(cell)} on {data_name(cell)}"
    named = joined([element("a", words, href=f"#{anchor}"), element("small", size_name(cell))])
    start: list[Child] = [
        positions_name(cell).removesuffix(" positions"),
        quality_words(cell),
        measured("accuracy", cell.baseline),
    ]
    if not cell.done:
        why = element("small", cell.why) if cell.why else None
        words = STATUS.get(cell.status, cell.status)
        note = element("td", words, why, colspan=len(columns) + 2, class_=f"status {words.replace(' ', '-')}")
        return row(named, [*start, note], "undone")
    found = scores(cell)
    connected = [label for label in columns if label in found and found[label].connected]
    words = "by all" if len(connected) == len(columns) > 2 else ", ".join(connected)
    answer = element("td", words or "no", class_="yes" if connected else "no")
    return row(named, [*start, _naive(found[NAIVE]), *(_score(found.get(label)) for label in columns), answer])


def quality_words(cell: CellResult) -> str:
    """How good its models are: bits per byte of text, accuracy of classes."""
    bits, accuracy = quality(cell, "bits_per_byte"), quality(cell, "accuracy")
    return f"{bits:.3f} bits" if bits is not None else measured("accuracy", accuracy)


def _naive(score: Score) -> Html:
    return element("td", element("b", measured("loss", score.mean)), class_="s-naive")


def _score(score: Score | None) -> Html:
    if score is None:
        return element("td", NONE)
    words = f"{percent(score.share)}, {score.n_connected} of {len(score.each)}"
    moved = None if score.same_function else element("small", f"outputs moved by {plain(score.output_change, 2)}!")
    return element(
        "td",
        element("b", measured("loss", score.mean)),
        element("small", words),
        moved,
        class_=f"s-{kind_of(score.label)}",
    )


def share_table(caption: str, found: Sequence[tuple[CellResult, dict[str, Score]]], names: Sequence[str]) -> Html:
    """Shares of the naive barrier with bars, one row for each cell, one column for each name."""
    shares = [s for _, by_name in found for score in by_name.values() if (s := score.share) is not None]
    high = max([0.01, *shares])

    def cell_of(by_name: dict[str, Score], name: str) -> Html:
        share = by_name[name].share if name in by_name else None
        return element("td", element("span", percent(share)), bar(share, 0.0, high, "aligned"))

    rows = [
        row(
            _named(cell),
            [measured("loss", next(iter(by_name.values())).naive_mean), *(cell_of(by_name, n) for n in names)],
        )
        for cell, by_name in found
    ]
    return table(caption, ("cell", NAIVE, *names), rows, "bars")


def half_table(caption: str, found: Sequence[tuple[CellResult, dict[str, Score]]], names: Sequence[str]) -> Html:
    """Losses half-way, the naive one first; the lowest is bold."""
    rows = []
    for cell, by_name in found:
        halves = [scores(cell)[NAIVE].half, *(by_name[name].half for name in names)]
        lowest = min((half for half in halves if half is not None), default=None)
        shown = [NONE if half is None else f"{half:.4f}" for half in halves]
        rows.append(row(_named(cell), [element("b", w) if h == lowest else w for h, w in zip(halves, shown)]))
    return table(caption, ("cell", NAIVE, *names), rows)


def _named(cell: CellResult, *, scope: bool = True) -> Html:
    words = f"{cell.about.get('scope')}, {size_name(cell)}" if scope else size_name(cell)
    return joined([title(cell), element("small", words)])


def rank_table(cells: Sequence[CellResult]) -> Html:
    """Where Stage 1's choice stands among the permutations that were measured, pair by pair."""
    rows = []
    for cell in cells:
        found = ablation(cell, "heads")
        n = len(found[0]["permutations"])
        ranks = ", ".join(str(each["rank"]) for each in found)
        hats = ", ".join(NONE if (hat := each["normalised"]) is None else f"{hat:.1f}" for each in found)
        naive = mean([each["naive"] for each in found])
        chosen = mean([each["loss"][each["chosen"]] for each in found])
        best = mean([min((x for x in each["loss"] if x is not None), default=None) for each in found])
        rows.append(row(_named(cell), [f"{ranks} of {n}", hats, *(measured("loss", x) for x in (naive, chosen, best))]))
    caption = "The chosen permutation among all that were measured: rank and L̂ by pair, mean losses half-way"
    return table(caption, ("cell", "rank", "L̂", NAIVE, "chosen", "best"), rows)


def facing_table(found: Sequence[Facing], labels: Sequence[str]) -> Html:
    """Absolute positions beside rotary ones: the naive barrier, and what each matcher leaves of it."""
    rows = []
    for each in found:
        sides = (scores(each.absolute), scores(each.rotary))
        named = joined(
            [
                f"{model_name(each.absolute)} on {data_name(each.absolute)}",
                element("small", f"{each.absolute.about.get('scope')}, {size_name(each.absolute)}"),
            ]
        )
        naive = [measured("loss", side[NAIVE].mean) for side in sides]
        shares = [percent(side[label].share) if label in side else NONE for label in labels for side in sides]
        rows.append(row(named, [str(each.absolute.about.get("positions")), *naive, *shares]))
    pairs = [f"{label}, {side}" for label in labels for side in ("absolute", "RoPE")]
    heads = ("cell", "absolute is", f"{NAIVE}, absolute", f"{NAIVE}, RoPE", *pairs)
    return table("Naive barrier in nats, and the share of it that is left, by kind of positions", heads, rows)


def layer_table(cells: Sequence[CellResult]) -> Html:
    """The loss after one layer's attention was drawn anew."""
    rows = []
    for cell in cells:
        for found in ablation(cell, "layers"):
            rises = [loss - found["before"] for loss in found["loss"]]
            high = max([1e-9, *rises])
            for layer, (loss, rise) in enumerate(zip(found["loss"], rises)):
                named = _named(cell, scope=False) if not layer else ""
                shown = element("td", bar(rise, min(0.0, *rises), high, "aligned"))
                before = measured("loss", found["before"]) if not layer else ""
                rows.append(row(named, [str(layer), before, measured("loss", loss), shown]))
    caption = "Loss after the attention of one layer alone was drawn anew (mean over draws); the bar is its rise"
    return table(caption, ("cell", "layer", "trained", "drawn anew", "rise"), rows, "layers")


def control_table(cells: Sequence[CellResult]) -> Html:
    """A model against itself in disguise: means over draws."""
    rows = []
    for cell in cells:
        for found in ablation(cell, "control"):
            for side in ("inside", "outside"):
                each = found[side]
                naive, aligned = (mean([pair[k] for pair in each["excess"]]) for k in (0, 1))
                before, after = (mean([pair[k] for pair in each["distance"]]) for k in (0, 1))
                moved = plain(max(each["function_change"]), 2)
                numbers = [
                    measured("loss", naive),
                    measured("loss", aligned),
                    f"{plain(before, 3)} → {plain(after, 2)}",
                ]
                rows.append(row(_named(cell, scope=False), [f"{side}: {each['element'][0]}", moved, *numbers]))
    caption = (
        "Q–K of a model changed inside and outside its group, then aligned to itself: rise of the loss over the model"
    )
    return table(caption, ("cell", "change", "outputs moved", "rise, naive", "rise, aligned", "distance"), rows)


def model_table(cells: Sequence[CellResult]) -> Html:
    """Every model that was trained, once."""
    rows, seen = [], set()
    for cell in cells:
        for seed, facts in cell.models:
            key = repr(facts.get("job"))
            if key in seen:
                continue
            seen.add(key)
            numbers = [measured(m, facts.get(m)) for m in ("loss", "accuracy", "bits_per_byte")]
            steps, size = (f"{facts[k]:,}" if facts.get(k) else NONE for k in ("n_steps", "n_params"))
            rows.append(row(_named(cell), [str(seed), *numbers, steps, size, plain(facts.get("seconds"), 3)]))
    heads = ("cell", "seed", "loss", "accuracy", "bits per byte", "steps", "parameters", "seconds")
    return table("Every model on its test data", heads, rows)
