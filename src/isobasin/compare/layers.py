"""Every layer of A beside every layer of B: which layer was taken from which."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from isobasin.compare.normal_form import parts
from isobasin.compare.similarity import Meeting, Parted
from isobasin.errors import ArchitectureError
from isobasin.groups import Element
from isobasin.match.canonical import ENDS
from isobasin.match.comparable import check_comparable, rope
from isobasin.weights import Weights

KINDS = ("heads", "ff")
Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class LayerMatrix:
    """`heads[i][j]` and `units[i][j]`: likeness of layer i of A and layer j of B: similarity or, `above`, score."""

    heads: Table
    units: Table

    @property
    def matrix(self) -> Table:
        """Heads and units together."""
        return tuple(tuple((h + u) / 2 for h, u in zip(*rows)) for rows in zip(self.heads, self.units))

    @property
    def best_in_a(self) -> tuple[int, ...]:
        """For every layer of B the layer of A that it is most like."""
        return tuple(max(range(len(self.matrix)), key=lambda i: self.matrix[i][j]) for j in range(len(self.matrix[0])))

    @property
    def best_in_b(self) -> tuple[int, ...]:
        return tuple(max(range(len(row)), key=lambda j: row[j]) for row in self.matrix)

    @property
    def facts(self) -> dict[str, object]:
        return {
            "layers": [list(row) for row in self.matrix],
            "best_in_a": list(self.best_in_a),
            "best_in_b": list(self.best_in_b),
        }

    def pairs(self, a: Parted, b: Parted) -> list[tuple[str, str]]:
        """Parts that belong together: each layer of the shallower model with its best partner, then the rest."""
        if len(self.heads) >= len(self.heads[0]):
            layers = [(i, j) for j, i in enumerate(self.best_in_a)]
        else:
            layers = list(enumerate(self.best_in_b))
        return [*(_named(kind, i, j) for i, j in layers for kind in KINDS), *_others(a, b)]

    def above(self, level: Mapping[str, float]) -> "LayerMatrix":
        """As scores: similarity above that of unrelated models (their mean over the parts of a kind), never below 0."""
        means = {kind: fmean(v for space, v in level.items() if layer_spaces(space)[0] == kind) for kind in KINDS}
        return replace(self, heads=_above(self.heads, means["heads"]), units=_above(self.units, means["ff"]))


def _above(table: Table, level: float) -> Table:
    return tuple(tuple(max(0.0, (s - level) / max(1 - level, 1e-300)) for s in row) for row in table)


def similarities(a: Parted, b: Parted, stream: Element) -> LayerMatrix:
    """All pairs of layers, given the map between the streams."""

    def table(kind: str) -> Table:
        mine, theirs = (_layers(model, kind) for model in (a, b))
        return tuple(tuple(Meeting.of(a, b, x, y, stream).pair().similarity for y in theirs) for x in mine)

    return LayerMatrix(table("heads"), table("ff"))


def layer_pairs(a: Parted, b: Parted) -> list[tuple[str, str]]:
    """A first guess: layers at the same relative depth, and what lies behind the layers."""
    n, m = len(_layers(a, "heads")), len(_layers(b, "heads"))
    fewer = min(n, m)
    layers = [(k * n // fewer, k * m // fewer) for k in range(fewer)]
    return [*(_named(kind, i, j) for i, j in layers for kind in KINDS), *_others(a, b)]


def layer_spaces(space: str) -> tuple[str, int | None]:
    """`heads3` is ("heads", 3); `pool` is ("pool", None)."""
    found = re.fullmatch(r"(heads|ff)(\d+)", space)
    return (found[1], int(found[2])) if found else (space, None)


def _named(kind: str, i: int, j: int) -> tuple[str, str]:
    return f"{kind}{i}", f"{kind}{j}"


def _layers(model: Parted, kind: str) -> list[str]:
    return [space for space in model.spaces if layer_spaces(space)[0] == kind]


def _others(a: Parted, b: Parted) -> list[tuple[str, str]]:
    mine, theirs = ([s for s in model.spaces if layer_spaces(s)[1] is None] for model in (a, b))
    return list(zip(mine, theirs, strict=True))


def check_alike(a: Weights, b: Weights) -> None:
    """The same architecture, but for the number of layers; anything else is a user's mistake."""
    if a.arch.sizes.n_layers == b.arch.sizes.n_layers:
        check_comparable(a, b)
        return
    if a.arch.family != b.arch.family:
        _refuse("family", a.arch.family, b.arch.family)
    for key, value in vars(a.arch.sizes).items():
        if key != "n_layers" and value != vars(b.arch.sizes)[key]:
            _refuse(key, value, vars(b.arch.sizes)[key])
    if rope(a.config) != rope(b.config):
        _refuse("rotary positions", rope(a.config), rope(b.config))
    for space in (ENDS, "heads0", "ff0"):
        shapes = [[m.arch.shapes[n] for n in parts(m.arch)[space]] for m in (a, b)]
        if shapes[0] != shapes[1]:
            _refuse(f"tensors of {space or 'embeddings and head'}", *map(str, shapes))


def _refuse(what: str, a: object, b: object) -> None:
    raise ArchitectureError(
        f"{what}: A has {a}, B has {b}; only models of one architecture, of any depth, can be compared"
    )
