"""The page of a lineage: the trees of related models, a heat map of all pairs, and the evidence of every edge."""

from bisect import bisect_right
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from isobasin.compare.lineage import Edge, Lineage, Row
from isobasin.files import atomic_write, check_output_file
from isobasin.report import svg, text
from isobasin.report.layout import assemble, asset, json_details, scroll_table, table_row
from isobasin.report.text import Html, concat, element, short

_STEP = 16.0  # width of one level of a tree
_MOST_LEVELS = 12  # deeper models stand at the last level
_STEPS = (0.3, 0.6, 0.9, 0.98, 0.9999)  # similarities between the colours of the heat map
_NAME = 48  # letters of a name


def write_lineage_page(found: Lineage, out: str | Path, *, force: bool = False) -> Path:
    """Write the page of a lineage; the write is atomic."""
    path = Path(out)
    check_output_file(path, force=force, kind="page", inputs=[])
    atomic_write(path, render(found).encode("utf-8"))
    return path


def render(found: Lineage) -> str:
    """The text of the page."""
    title = f"How are these {len(found.models)} models related?"
    sections = (_overview(found), _trees(found), _heat(found), _edges(found), _models(found), _data())
    body = concat(section for section in sections if section is not None)
    return assemble(title, body, charts=[], results=[found.to_dict()], more_style=asset("lineage_page.css"))


def _section(title: str, *children: Html | None) -> Html:
    return element("section", element("h2", title), *children, class_="pair")


def _overview(found: Lineage) -> Html:
    n_trees = sum(len(tree) > 1 for tree in found.trees)
    alone = [tree[0] for tree in found.trees if len(tree) == 1]
    words = f"{n_trees} {'group' if n_trees == 1 else 'groups'} of related models"
    words += f", and {len(alone)} related to none of the others." if alone else "."
    known = sum(edge.directed for edge in found.edges)
    rule = (
        f"{known} of {len(found.edges)} relations have a direction that the weights show"
        f"{' or that follows from the base' if found.base else ''}. Weights alone do not tell a fine-tune from what it "
        "was made of; such models are called relatives."
    )
    sentence = element("p", words[:1].upper() + words[1:], class_="sentence")
    return element("div", sentence, element("p", rule, class_="rule"), class_="verdict")


# -- trees ------------------------------------------------------------------------------------------------------------


def _trees(found: Lineage) -> Html:
    groups = [tree for tree in found.trees if len(tree) > 1]
    figures = (_group(found, number, names) for number, names in enumerate(groups, 1))
    alone = [tree[0] for tree in found.trees if len(tree) == 1]
    names = (element("li", short(name, _NAME)) for name in alone)
    rest = element("div", element("h3", "Related to none of the others"), element("ul", *names)) if alone else None
    legend = element(
        "p",
        "Each model stands below the one that it is connected to. Solid lines have a direction, from above to below; "
        "dashed lines have none. The number is the distance: 0.01 is one per cent of the weights, modulo symmetry.",
        class_="caption",
    )
    return _section("Family trees", legend, *figures, rest)


def _group(found: Lineage, number: int, names: Sequence[str]) -> Html:
    rows = [row for row in found.outline if row.name in names]
    return element("div", element("h3", f"Group {number}: {len(names)} models"), _tree(rows))


def _tree(rows: Sequence[Row]) -> Html:
    lines = (_tree_row(rows, k) for k in range(len(rows)))
    return element("figure", *lines, class_="tree", role="group", aria_label=f"Tree of {len(rows)} models")


def _tree_row(rows: Sequence[Row], k: int) -> Html:
    row = rows[k]
    depth = min(row.depth, _MOST_LEVELS)
    rail = svg.picture(_STEP * depth, 100, f"rail rail-{depth}", *_rail(rows, k)) if depth else None
    name = element("b", short(row.name, _NAME), class_="name")
    edge = row.edge
    relation = element("span", f"{edge.words} · {text.number(edge.distance, 2)}", class_="words") if edge else None
    kind = f" is-{edge.kind}" if edge else ""
    return element("div", rail, element("span", name, relation, class_=f"model level-{depth}{kind}"), class_="row")


def _rail(rows: Sequence[Row], k: int) -> list[Html]:
    """The lines to the left of a model: those that pass by, its own, and the one to the models below it."""
    depths = [min(row.depth, _MOST_LEVELS) for row in rows]
    depth, shapes = depths[k], []
    for level in range(1, depth + 1):
        after = next((n for n in range(k + 1, len(rows)) if depths[n] <= level), None)
        goes_on = after is not None and depths[after] == level
        x = (level - 0.5) * _STEP
        if level == depth:
            shapes.append(_line((x, 0), (x, 50), rows[k].edge))
            shapes.append(_line((x, 50), (x + 0.5 * _STEP, 50), rows[k].edge))
            shapes += [_line((x, 50), (x, 100), rows[after].edge)] if goes_on and after is not None else []
        elif goes_on and after is not None:
            shapes.append(_line((x, 0), (x, 100), rows[after].edge))
    return shapes


def _line(start: svg.Point, end: svg.Point, edge: Edge | None) -> Html:
    kind = "known" if edge is not None and edge.directed else "unknown"
    return element("path", d=f"M{start[0]:.4g},{start[1]:.4g}L{end[0]:.4g},{end[1]:.4g}", class_=kind)


# -- pairs ------------------------------------------------------------------------------------------------------------


def _heat(found: Lineage) -> Html:
    order = _in_tree_order(found)
    heads = ("", *(str(k + 1) for k in range(len(order))))
    rows = [
        table_row(f"{k + 1} {short(found.models[i].name, 28)}", *(_cell(found, i, j) for j in order))
        for k, i in enumerate(order)
    ]
    caption = (
        "Similarity in per cent: the median over the tensors of the cosine between two models in a common basis; 100 "
        "for copies. Pairs that can not be compared, or that embeddings and heads show to be unrelated, are empty."
    )
    table = scroll_table("Similarity of all pairs", heads, rows, "heat pairs")
    return _section("All pairs", element("p", caption, class_="caption"), table)


def _in_tree_order(found: Lineage) -> list[int]:
    """Related models next to each other, in the order of the trees."""
    number = {model.name: i for i, model in enumerate(found.models)}
    order = [number[row.name] for row in found.outline]
    return [*order, *(i for i in range(len(found.models)) if i not in order)]


def _cell(found: Lineage, i: int, j: int) -> Html:
    similar, distance = found.similarity[i][j], found.distance[i][j]
    if similar is None:
        return element("td", "", class_="none")
    step = bisect_right(_STEPS, similar)
    names = f"{found.models[i].name}, {found.models[j].name}: similarity {similar:.4f}"
    title = names if distance is None else f"{names}, distance {distance:.2g}"
    return element("td", f"{max(0, round(100 * similar))}", class_=f"g{step}", title=title)


def _edges(found: Lineage) -> Html | None:
    if not found.edges:
        return None
    rows = [
        table_row(
            short(edge.child, _NAME),
            edge.kind,
            ", ".join(short(parent, _NAME) for parent in edge.parents) if edge.weights is None else edge.words,
            "known" if edge.directed else "not known",
            text.number(edge.distance, 2) if isfinite(edge.distance) else "",
            element("td", edge.evidence, class_="evidence"),
        )
        for edge in found.edges
    ]
    heads = ("model", "relation", "to", "direction", "distance", "evidence")
    return _section("Evidence", scroll_table("All relations", heads, rows, "summary edges"))


def _models(found: Lineage) -> Html:
    rows = [
        table_row(short(m.name, _NAME), m.family, str(m.n_layers), f"{m.n_params:,}", m.dtype, short(m.source, 60))
        for m in found.models
    ]
    heads = ("model", "type", "layers", "parameters", "stored in", "source")
    return _section("Models", scroll_table("Models", heads, rows, "summary sources"))


def _data() -> Html:
    return element("section", json_details("The result as JSON", "lineage.json"), class_="provenance", data_result=0)
