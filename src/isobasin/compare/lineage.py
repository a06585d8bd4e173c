"""The lineage of many checkpoints: copies, casts, averages, pruned and shortened models, relatives, unrelated ones.

Every model is read once for its sketch. Models that are stored in one basis are recognised by their numbers; one of
each such cluster is then aligned to another cluster, where fingerprints, or embeddings and heads, say that it may be
related. In one basis all is linear algebra (`derivation`).

An edge has a direction only where the weights show it. A fine-tune and what it was made from look alike: the edge
between them is `relative`, without direction, unless the caller names the base.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from math import isfinite
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from isobasin.alignment.trunk import trunk_pair
from isobasin.arch import Architecture
from isobasin.compare.averages import AverageCheck, PrunedCheck
from isobasin.compare.confirmation import SAME_LINE, CastCheck, CopyCheck, LayersCheck, SumCheck
from isobasin.compare.derivation import LEAST_ZEROS, Basis, Mixture, shows_average
from isobasin.compare.distance import check_same_blocks
from isobasin.compare.equivalence import settings_text
from isobasin.compare.sketch import (
    NOT_COMPARABLE,
    Attempt,
    Failed,
    Moved,
    MoveTo,
    Numbers,
    Sketch,
    SketchOf,
    agreement,
    do,
    gram_similarity,
    reason_of,
    renamed,
    repeats_layers,
    stored_layers,
    with_heads_alike,
)
from isobasin.config_keys import differing_settings
from isobasin.display import Shown, Summary, notebook_progress
from isobasin.errors import ArchitectureError, IsobasinError
from isobasin.symmetries.normal_form import norms_without_bias
from isobasin.symmetries.transform import Transform
from isobasin.weights import ModelSource, Weights, load
from isobasin.workers import open_workers

# Median over the tensors of the cosine after alignment, measured on tiny models: unrelated ones trained on one text at
# most 0.42, averages of two unrelated ones and their parents at least 0.68, fine-tunes 0.93.
RELATED = 0.6
UNDECIDED = 0.5
ONE_BASIS = 0.4  # the smallest of these cosines, of two models that are stored in one basis
GRAM_LEAST = 0.2  # correlation of embeddings and heads, below which two models are not aligned
ANOTHER_TRY = 0.02  # how much more like a new member of a family a model must be, to be aligned again
SAME_LEAST = 1e-5
SAME_TENSOR = 4.0  # times the rounding: one tensor of a copy
MOST_STEPS = 3  # between the fingerprints of a model and a scrambled copy in a narrow type
CLEAR = 0.8  # of two candidates, the nearer one must be at most this share as far away
AVERAGE_ROUNDING = 2.0  # times the rounding of the stored types: what is left of an average in one basis
# Share of the distance to the nearest parent that may be left of an average: where it is stored in the basis of a
# parent (measured: 1e-6), and where all are stored in other bases (measured: 0.06).
AVERAGE_BESIDE = 1e-3
AVERAGE_MOVED = 0.1
AVERAGE_SHARE = 0.7  # what may be left of such an average before it is looked at closely
AS_GOOD = 3.0  # averages that leave at most so many times as much as the best one are as good
LEFT_OF_ROW = 0.5  # of the distance of a row to the nearest parent, or the usual one: a row of such an average
MOST_CHECKS = 3  # averages of one model that are looked at closely

Kind = Literal["copy", "cast", "merge", "pruned", "layers", "descendant", "relative", "undecided"]
Table = tuple[tuple[float | None, ...], ...]
WORDS: Mapping[Kind, str] = {
    "copy": "copy; which came first is not known",
    "cast": "rounded to a narrower type",
    "pruned": "pruned",
    "layers": "some of the layers",
    "descendant": "comes from the base",
    "relative": "relative; direction not known",
    "undecided": "undecided",
}


SAME_NUMBERS = "the same numbers"
NEAR = "near each other; weights do not show which came first"
SAME_TRUNK = "equal in what both have: they differ in heads or in the vocabulary"
SAME_MATRICES = "no difference in the numbers of matrices that were compared; they differ in others"
SAME_MODEL = "equal fingerprints, and equal weights modulo symmetry up to rounding"
SAME_FUNCTION = "equal fingerprints, and `isobasin equal` says same"


@dataclass(frozen=True)
class Edge:
    """A relation of models. `directed`: the weights, or the base that the caller named, show which is the child."""

    kind: Kind
    parents: tuple[str, ...]
    child: str
    directed: bool
    distance: float
    evidence: str
    weights: tuple[float, ...] | None = None
    layers: tuple[int, ...] | None = None  # of the parent that the child has

    @property
    def main_parent(self) -> str:
        """The parent with the largest weight."""
        weights = self.weights or (1.0,) * len(self.parents)
        return self.parents[weights.index(max(weights))]

    @property
    def words(self) -> str:
        """The relation in words."""
        if self.weights:
            parts = " + ".join(f"{w:.3g} × {p}" for w, p in zip(self.weights, self.parents))
            return parts if self.directed else f"{parts}; direction not known"
        kept = "" if self.layers is None else f" (layers {', '.join(map(str, self.layers))})"
        return WORDS[self.kind] + kept

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"kind": self.kind, "parents": list(self.parents), "child": self.child}
        distance = self.distance if isfinite(self.distance) else None
        found |= {"direction": "known" if self.directed else "unknown", "distance": distance}
        found |= {"weights": list(self.weights)} if self.weights else {}
        found |= {"layers": list(self.layers)} if self.layers is not None else {}
        return found | {"evidence": self.evidence}

    def __str__(self) -> str:
        if self.weights:
            parts = " + ".join(f"{w:.3g} × {p}" for w, p in zip(self.weights, self.parents))
            return f"{self.child} = {parts}"
        arrow = "→" if self.directed else "–"
        return f"{' + '.join(self.parents)} {arrow} {self.child}: {self.kind}"


@dataclass(frozen=True)
class Row:
    """A row of an outline: a model, its depth, and the edge to the model that it stands below."""

    depth: int
    name: str
    edge: Edge | None


@dataclass(frozen=True)
class LineageModel:
    """A model of a lineage. Models with the same `family_tree` number are related."""

    name: str
    source: str
    family: str
    n_layers: int
    n_params: int
    dtype: str
    fingerprint: str
    family_tree: int

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True, repr=False)
class Lineage(Shown):
    """What `lineage` found. `similarity` and `distance` are tables over the models; None where two can not be compared,
    or where embeddings and head show that they are not related.

    A similarity is the median over the tensors of the cosine in a common basis: 1 for copies.
    """

    models: tuple[LineageModel, ...]
    edges: tuple[Edge, ...]
    similarity: Table = field(repr=False)
    distance: Table = field(repr=False)
    base: str | None = None

    def edges_of(self, *kinds: Kind) -> tuple[Edge, ...]:
        """The edges of these kinds."""
        return tuple(edge for edge in self.edges if edge.kind in kinds)

    @cached_property
    def outline(self) -> tuple["Row", ...]:
        """The models of all trees of two and more, each below the model that it is connected to."""
        return tuple(row for tree in self.trees if len(tree) > 1 for row in self._rows(tree))

    def _rows(self, tree: Sequence[str]) -> Iterator["Row"]:
        """Edges with a direction lead from the parent with the largest weight to the child, others both ways."""
        near: dict[str, list[tuple[str, Edge]]] = {name: [] for name in tree}
        for edge in (e for e in self.edges if e.kind != "undecided" and e.child in near):
            near[edge.main_parent].append((edge.child, edge))
            if not edge.directed and edge.kind != "merge":
                near[edge.child].append((edge.main_parent, edge))
        children = {edge.child for edge in self.edges if edge.directed or edge.kind in ("copy", "merge")}
        seen: set[str] = set()

        def below(name: str, depth: int, edge: Edge | None) -> Iterator[Row]:
            seen.add(name)
            yield Row(depth, name, edge)
            for other, link in sorted(near[name], key=lambda each: each[1].distance):
                if other not in seen:
                    yield from below(other, depth + 1, link)

        for root in sorted(tree, key=lambda n: (n != self.base, n in children, -len(near[n]))):
            if root not in seen:
                yield from below(root, 0, None)

    @property
    def trees(self) -> tuple[tuple[str, ...], ...]:
        """The names of related models, the largest group first; a model without relatives is alone."""
        numbers = sorted({m.family_tree for m in self.models})
        return tuple(tuple(m.name for m in self.models if m.family_tree == number) for number in numbers)

    @property
    def unrelated(self) -> tuple[str, ...]:
        """The names of models without relatives that were compared with all others."""
        unknown = {name for edge in self.edges_of("undecided") for name in (*edge.parents, edge.child)}
        return tuple(tree[0] for tree in self.trees if len(tree) == 1 and tree[0] not in unknown)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of `isobasin lineage`."""
        return {
            "models": [model.to_dict() for model in self.models],
            "edges": [edge.to_dict() for edge in self.edges],
            "trees": [list(tree) for tree in self.trees],
            "similarity": [list(row) for row in self.similarity],
            "distance": [list(row) for row in self.distance],
            "base": self.base,
        }

    def summary(self) -> Summary:
        """The edges, one row for each."""
        rows = [
            (str(edge), f"{edge.distance:.3g}" if isfinite(edge.distance) else "", edge.evidence) for edge in self.edges
        ]
        alone = [tree[0] for tree in self.trees if len(tree) == 1]
        unknown = [name for name in alone if name not in self.unrelated]
        labelled = {"unrelated": self.unrelated, "not compared with all": unknown}
        facts = {label: ", ".join(names) for label, names in labelled.items() if names}
        title = f"{len(self.models)} models in {len(self.trees)} groups"
        return Summary(title, facts, ("relation", "distance", "evidence"), rows)


def lineage(
    models: Sequence[ModelSource],
    *,
    names: Sequence[str] | None = None,
    base: int | str | None = None,
    engine: str = "local",
    workers: int | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Lineage:
    """Which of these models are copies, averages, pruned, shortened or otherwise related, and which are unrelated.

    `base` is the model that its relatives come from, by name or number: edges without a direction then point away
    from it. Models given
    as folders or hub ids are read by `workers` processes (by default one for each core), or by Ray (`engine="ray"`);
    others in this process. `watch(done, of)` counts the models read and the alignments.
    """
    if len(models) < 2:
        raise IsobasinError(f"a lineage of {len(models)} models: expected at least two")
    named = _names(models, names)
    if isinstance(base, int) and not 0 <= base < len(models):
        raise IsobasinError(f"base {base}: expected the number of a model, from 0 to {len(models) - 1}, or its name")
    base = named[base] if isinstance(base, int) else base and _name_of(base, models, named)
    if base is not None and base not in named:
        raise IsobasinError(f"base {base!r} is none of the models ({', '.join(named)}); name one of them")
    in_files = all(isinstance(model, str | Path) for model in models)
    if engine == "ray" and not in_files:
        raise IsobasinError("engine ray needs models in folders that all machines can read, not models in memory")
    size = workers if in_files else 1
    with (
        TemporaryDirectory(prefix="isobasin-lineage-") as folder,
        open_workers(do, engine=engine, size=size, log=Path(folder) / "workers.log") as run,
        notebook_progress("comparing", watch) as shown,
    ):
        search = _Search(tuple(models), tuple(named), base, _Counted(run, shown))
        return search.found()


def _names(models: Sequence[ModelSource], names: Sequence[str] | None) -> list[str]:
    """A short name for each model: the last parts of its path that tell it from the others."""
    if names is not None:
        if len(names) != len(models) or len(set(names)) < len(names):
            raise IsobasinError(f"{len(names)} names for {len(models)} models: expected one for each, all different")
        return list(names)
    parts = [Path(m).parts if isinstance(m, str | Path) else (f"model {i + 1}",) for i, m in enumerate(models)]
    for depth in range(1, max(map(len, parts)) + 1):
        found = [str(Path(*each[-depth:])) for each in parts]
        if len(set(found)) == len(found):
            return found
    repeated = next(name for name in found if found.count(name) > 1)
    raise IsobasinError(f"{repeated}: given twice; name every model once")


def _name_of(base: str, models: Sequence[ModelSource], named: Sequence[str]) -> str:
    """The name of a model that is given by its name or its folder, with a slash at the end or without."""
    folders = {Path(m): name for m, name in zip(models, named) if isinstance(m, str | Path)}
    return base if base in named else folders.get(Path(base), str(Path(base)))


@dataclass
class _Counted:
    """Workers whose tasks are counted."""

    run: Callable[..., list[Any]]
    watch: Callable[[int, int], None] | None
    done: int = 0
    total: int = 0

    def __call__(self, tasks: Sequence[Any]) -> list[Any]:
        self.total += len(tasks)
        return self.run(tasks, self._one_more) if tasks else []

    def attempts(self, tasks: Sequence[Any]) -> list[Any]:
        """The same for comparisons: one that can not be made has the result `Failed`, and the others go on."""
        return self([Attempt(task) for task in tasks])

    def _one_more(self) -> None:
        self.done += 1
        if self.watch:
            self.watch(self.done, self.total)


# -- families of models in one basis ----------------------------------------------------------------------------------


@dataclass
class _Family:
    """Models of one depth that are related, with their numbers in one basis. `moved_by`: how a model that is stored in
    another one came there."""

    members: list[int]
    numbers: dict[int, Numbers]
    moved_by: dict[int, Transform | None]


@dataclass(frozen=True)
class _Shortened:
    """Numbers of a model with fewer layers in the basis of a deeper family, and the layers that it has."""

    model: int
    numbers: Numbers
    layers: tuple[int, ...]
    moved: bool


@dataclass
class _Search:
    """One run: what is known of the models, and the edges found so far."""

    sources: tuple[ModelSource, ...]
    names: tuple[str, ...]
    base: str | None
    run: _Counted
    edges: list[Edge] = field(default_factory=list)
    similarity: dict[tuple[int, int], float] = field(default_factory=dict)
    distance: dict[tuple[int, int], float] = field(default_factory=dict)
    failed: dict[tuple[int, int], str] = field(default_factory=dict)  # by pair, why it could not be compared

    @cached_property
    def weights(self) -> list[Weights]:
        return [load(source) for source in self.sources]

    @cached_property
    def sketches(self) -> list[Sketch]:
        return self.run([SketchOf(source) for source in self.sources])

    def arch(self, i: int) -> Architecture:
        return self.weights[i].arch

    def found(self) -> Lineage:
        # A model that can not be read is reported before any is compared.
        assert len(self.weights) == len(self.sketches)
        families = [family for group in self._groups for family in self._families(group)]
        for family in families:
            try:
                self._read_off(family)
            except NOT_COMPARABLE as error:
                for i, j in combinations(family.members, 2):
                    self._note_failed(i, j, reason_of(error))
        self._compare_depths(families)
        trees = self._connect()
        models = [
            LineageModel(
                name=self.names[i],
                source=str(source) if isinstance(source, str | Path) else "memory",
                family=self.arch(i).family,
                n_layers=self.arch(i).sizes.n_layers,
                n_params=self.weights[i].n_params,
                dtype=self.sketches[i].dtype,
                fingerprint=str(self.sketches[i].fingerprint),
                family_tree=trees[i],
            )
            for i, source in enumerate(self.sources)
        ]
        self._complete_copies()
        similarity, distance = self._table(self.similarity, 1.0), self._table(self.distance, 0.0)
        return Lineage(tuple(models), tuple(self.edges), similarity, distance, self.base)

    def _complete_copies(self) -> None:
        """What was not measured for a copy was measured for its original."""
        originals = {self.names.index(e.child): self.names.index(e.parents[0]) for e in self.edges_of("copy", "cast")}
        every = range(len(self.names))
        for values in (self.similarity, self.distance):
            for i, j in combinations(every, 2):
                a, b = sorted((originals.get(i, i), originals.get(j, j)))
                if (i, j) not in values and (a, b) in values:
                    values[i, j] = values[a, b]

    def _table(self, values: Mapping[tuple[int, int], float], same: float) -> Table:
        every = range(len(self.sources))
        return tuple(tuple(same if i == j else values.get((min(i, j), max(i, j))) for j in every) for i in every)

    def _note(self, i: int, j: int, similarity: float, distance: float | None = None) -> None:
        key = min(i, j), max(i, j)
        self.similarity[key] = max(similarity, self.similarity.get(key, -1.0))
        if distance is not None:
            self.distance[key] = min(distance, self.distance.get(key, float("inf")))

    def _note_failed(self, i: int, j: int, reason: str) -> None:
        self.failed[min(i, j), max(i, j)] = reason

    def _noted(self, result: Any, *models: int) -> bool:
        """Whether a comparison of the first of these models with the others could not be made; the reason is kept."""
        if not isinstance(result, Failed):
            return False
        for other in models[1:]:
            self._note_failed(models[0], other, result.reason)
        return True

    def _add(self, kind: Kind, parents: Sequence[int], child: int, distance: float, evidence: str, **more: Any) -> None:
        names = tuple(self.names[p] for p in parents)
        more = {"directed": kind not in ("copy", "relative", "undecided")} | more
        self.edges.append(Edge(kind, names, self.names[child], distance=distance, evidence=evidence, **more))

    # -- which models can be compared -------------------------------------------------------------------------------

    @cached_property
    def _groups(self) -> list[list[int]]:
        """Models of one depth and one shape, up to heads and rows of the vocabulary."""
        return _connected(range(len(self.sources)), self._alike)

    def _alike(self, i: int, j: int) -> bool:
        i, j = min(i, j), max(i, j)
        a, b = self.weights[i], self.weights[j]
        if a.arch.family != b.arch.family or a.arch.sizes.n_layers != b.arch.sizes.n_layers:
            return False
        try:
            trunk_pair(*with_heads_alike(a, b), largest_group=True)
        except ArchitectureError as error:
            if a.arch.shapes == b.arch.shapes:  # a setting differs
                self._note_failed(i, j, reason_of(error))
            return False
        except NOT_COMPARABLE as error:
            self._note_failed(i, j, reason_of(error))
            return False
        return True

    # -- families ---------------------------------------------------------------------------------------------------

    def _families(self, group: Sequence[int]) -> list[_Family]:
        """The related models of a group, each family in one basis."""
        clusters = sorted(_connected(group, self._stored_alike), key=len, reverse=True)
        if self.base in self.names:
            clusters.sort(key=lambda cluster: self.names.index(str(self.base)) not in cluster)
        families: list[_Family] = []
        tried: dict[tuple[int, int], float] = {}  # by cluster and family, how alike the models were that were aligned
        waiting = list(range(len(clusters)))
        while waiting:
            ready = [c for k, c in enumerate(waiting) if not self._has_copy(clusters, c, waiting[:k])]
            tasks = [(c, *link) for c in ready for link in [self._next_link(clusters, c, families, tried)] if link]
            if not tasks:
                families.append(self._seed(clusters[waiting.pop(0)]))
                continue
            moved = self.run.attempts([self._move(clusters[c], y, x, families[f]) for c, f, y, x, _ in tasks])
            for (c, f, y, x, alike), result in zip(tasks, moved, strict=True):
                tried[c, f] = alike
                if isinstance(result, Failed):
                    self._note_failed(x, y, result.reason)
                elif c in waiting and result is not None and self._joins(families[f], clusters[c], y, x, result):
                    waiting.remove(c)
        return families

    def _has_copy(self, clusters: Sequence[Sequence[int]], c: int, others: Sequence[int]) -> bool:
        """Whether these clusters, which are not in a family yet, have a model with the fingerprint of one of these."""
        return any(self._alikeness(i, j) > 1 for o in others for j in clusters[o] for i in clusters[c])

    def _stored_alike(self, i: int, j: int) -> bool:
        """Whether two models are stored in one basis: no tensor of one is turned against that of the other."""
        a, b = self.sketches[i].numbers, self.sketches[j].numbers
        return agreement(a, b) >= RELATED and agreement(a, b, min) >= ONE_BASIS

    def _seed(self, cluster: Sequence[int]) -> _Family:
        return _Family(list(cluster), {i: self.sketches[i].numbers for i in cluster}, dict.fromkeys(cluster))

    def _next_link(
        self,
        clusters: Sequence[Sequence[int]],
        c: int,
        families: Sequence[_Family],
        tried: Mapping[tuple[int, int], float],
    ) -> tuple[int, int, int, float] | None:
        """The family that a cluster is next compared with, and the two models to be aligned: those most alike."""
        found = []
        for f, family in enumerate(families):
            pairs = [(self._alikeness(y, x), y, x) for y in clusters[c] for x in family.members]
            alike, y, x = max(pairs)
            if alike >= GRAM_LEAST and alike > tried.get((c, f), -1.0) + ANOTHER_TRY:
                found.append((alike, f, y, x))
        if not found:
            return None
        alike, f, y, x = max(found)
        return f, y, x, alike

    def _alikeness(self, i: int, j: int) -> float:
        """Above 1 for equal fingerprints, the more the finer the types; otherwise the correlation of embeddings and
        heads."""
        a, b = self.sketches[i], self.sketches[j]
        return 2.0 - b.unit if a.fingerprint.matches(b.fingerprint) else gram_similarity(a, b)

    def _move(self, cluster: Sequence[int], y: int, x: int, family: _Family) -> MoveTo:
        members = (self.sources[y], *(self.sources[i] for i in cluster if i != y))
        same = self.sketches[y].fingerprint.matches(self.sketches[x].fingerprint)
        return MoveTo(members, self.sources[x], family.moved_by[x], always=same)

    def _joins(self, family: _Family, cluster: Sequence[int], y: int, x: int, moved: Moved) -> bool:
        """Add a cluster to a family if it is related to it; a pair that is neither clearly related nor unrelated is
        noted."""
        similar = agreement(family.numbers[x], moved.numbers[0])
        self._note(x, y, similar)
        if similar < RELATED:
            return False
        order = [y, *(i for i in cluster if i != y)]
        family.members += order
        family.numbers |= dict(zip(order, moved.numbers, strict=True))
        family.moved_by |= dict.fromkeys(order, moved.transform)
        return True

    # -- what a family says -----------------------------------------------------------------------------------------

    def _read_off(self, family: _Family) -> None:
        """The edges inside a family, from its numbers in one basis."""
        order = sorted(family.members, key=lambda i: (self.names[i] != self.base, self.sketches[i].unit, i))
        basis = Basis(tuple(family.numbers[i] for i in order))
        for a, b in combinations(range(len(order)), 2):
            similar = agreement(family.numbers[order[a]], family.numbers[order[b]])
            self._note(order[a], order[b], similar, float(basis.distances[a, b]))
        kept = self._copies(basis, order, family)
        pruned = self._pruned(basis, order, kept, family)
        self._averages(basis, order, [k for k in kept if k not in pruned], family)

    def _rounding(self, *models: int) -> float:
        return max(SAME_LEAST, *(self.sketches[i].unit for i in models))

    def _copies(self, basis: Basis, order: Sequence[int], family: _Family) -> list[int]:
        """Add the edges of copies; what is left, one model for each set of copies, by its place in the order."""
        kept: list[int] = []
        for k, i in enumerate(order):
            one_basis = {o: _one_basis(family, i, order[o]) for o in kept}
            near = sorted(
                (float(basis.distances[k, o]), o)
                for o in kept
                if (self._rounded_alike(i, order[o]) if one_basis[o] else self._may_be_same(basis, order, k, o))
            )
            # Sampled numbers can agree with those of several models in one basis: all numbers decide.
            near = [(d, o) for d, o in near if not one_basis[o] or self._is_copy(i, order[o], family)]
            clear = near and not (len(near) > 1 and near[0][0] > CLEAR * near[1][0])
            if not clear or not (one_basis[near[0][1]] or self._is_copy(i, order[near[0][1]], family)):
                if not self._is_turned_copy(basis, order, k, kept):
                    kept.append(k)
                continue
            distance, o = near[0]
            if one_basis[o] and distance > 0:
                sketch = self.sketches[i]
                rest = "" if sketch.dtype == sketch.narrowest else f", or as it was in {sketch.dtype}"
                self._add("cast", [order[o]], i, distance, f"every number is rounded to {sketch.narrowest}{rest}")
            else:
                close = SAME_MODEL if self._same(basis, order, k, o) else SAME_FUNCTION
                self._add("copy", [order[o]], i, distance, SAME_NUMBERS if one_basis[o] else close)
        return kept

    def _is_copy(self, i: int, j: int, family: _Family) -> bool:
        """Whether a model is a copy of another one, or a cast of it in one basis, by all of their numbers."""
        check: CastCheck | CopyCheck
        if _one_basis(family, i, j):
            check = CastCheck(self.sources[i], self.sources[j], getattr(torch, self.sketches[i].narrowest))
        else:
            moved = family.moved_by[i], family.moved_by[j]
            check = CopyCheck(self.sources[i], self.sources[j], moved, self._rounding(i, j))
        return self._confirmed(check, i, j)

    def _is_turned_copy(self, basis: Basis, order: Sequence[int], k: int, kept: Sequence[int]) -> bool:
        """Add the edge of a model that is a copy of one of these, though not in the basis of the family: both were
        moved next to a third model, or by symmetries so little that they seem to be in one basis."""
        i = order[k]
        for o in kept:
            j, rounding = order[o], self._rounding(i, order[o])
            a, b = self.sketches[i], self.sketches[j]
            if basis.distances[k, o] <= SAME_TENSOR * rounding or not a.fingerprint.matches(b.fingerprint):
                continue
            (moved,) = self.run.attempts([MoveTo((self.sources[i],), self.sources[j], always=True)])
            if self._noted(moved, i, j) or moved is None:
                continue
            transforms = moved.transform, None
            if self._confirmed(CopyCheck(self.sources[i], self.sources[j], transforms, rounding), i, j):
                distance = float(Basis((b.numbers, moved.numbers[0])).distances[0, 1])
                self._note(i, j, agreement(b.numbers, moved.numbers[0]), distance)
                self._add("copy", [j], i, distance, SAME_MODEL)
                return True
        return False

    def _confirmed(self, check: Callable[[], bool], *models: int) -> bool:
        """The answer of a check; a check that can not be made confirms nothing."""
        (result,) = self.run.attempts([check])
        return not self._noted(result, *models) and bool(result)

    def _may_be_same(self, basis: Basis, order: Sequence[int], k: int, o: int) -> bool:
        """The same for models in different bases: up to rounding, or with shifts that hold no constants, where numbers
        do not show it."""
        a, b = (self.sketches[order[each]].fingerprint for each in (k, o))
        return self._same(basis, order, k, o) or (bool(norms_without_bias(self.arch(order[k]))) and a.matches(b))

    def _rounded_alike(self, i: int, j: int) -> bool:
        """Whether a model has exactly the numbers of another one of the same or a wider type, rounded to its own; some
        may be kept in a wider type."""
        a, b = self.sketches[i], self.sketches[j]
        dtype = getattr(torch, a.narrowest)
        pairs = [
            (x, y[n]) for xs, y in ((a.numbers, b.numbers), (a.vectors, b.vectors)) for n, x in xs.items() if n in y
        ]
        alike = all(any(torch.equal(x, y.to(t).to(x.dtype)) for t in (dtype, x.dtype)) for x, y in pairs)
        return alike and bool(a.fingerprint.steps(b.fingerprint))

    def _same(self, basis: Basis, order: Sequence[int], k: int, o: int) -> bool:
        """Whether the numbers that were compared, in one basis, are the same up to rounding."""
        i, j = order[k], order[o]
        a, b = self.sketches[i], self.sketches[j]
        rounding = self._rounding(i, j)
        if basis.distances[k, o] > rounding or basis.largest_difference(o, k) > SAME_TENSOR * rounding:
            return False
        steps = a.fingerprint.steps(b.fingerprint)
        return bool(steps) and max(steps) <= (MOST_STEPS if rounding > SAME_LEAST else 1)

    def _pruned(self, basis: Basis, order: Sequence[int], kept: Sequence[int], family: _Family) -> set[int]:
        """Add the edges of pruned models: zeros where the parent has none, and the parent's numbers elsewhere."""
        found = set()
        for k in (k for k in kept if self.sketches[order[k]].zero_share >= LEAST_ZEROS):
            parents, elsewhere = [], False
            for o in kept:
                new, old, rest = basis.new_zeros(k, o) if o != k else (0.0, 1.0, 1.0)
                if new >= LEAST_ZEROS and old == 0 and rest <= self._rounding(order[k], order[o]):
                    parents.append((new, o))
            if not parents:
                parents, elsewhere = self._pruned_elsewhere(basis, order, kept, k, family), True
            new, o = min(parents, default=(0.0, k))
            rounding = self._rounding(order[k], order[o])
            if parents and (elsewhere or self._is_sum(order[k], [order[o]], (1.0,), rounding, family, zeros=True)):
                evidence = f"{new:.0%} of its numbers are zero where the parent's are not, the others are the parent's"
                self._add("pruned", [order[o]], order[k], float(basis.distances[k, o]), evidence)
                found.add(k)
        return found

    def _pruned_elsewhere(
        self, basis: Basis, order: Sequence[int], kept: Sequence[int], k: int, family: _Family
    ) -> list[tuple[float, int]]:
        """The same where the parent is stored in another basis: it is aligned to the numbers that were kept."""
        i = order[k]
        others = [o for o in kept if o != k and family.moved_by[order[o]] is not family.moved_by[i]]
        nearest = sorted(others, key=lambda o: float(basis.distances[k, o]))[:MOST_CHECKS]
        results = self.run.attempts([PrunedCheck(self.sources[i], self.sources[order[o]]) for o in nearest])
        made = [(o, found) for o, found in zip(nearest, results, strict=True) if not self._noted(found, i, order[o])]
        return [
            (found.zeros, o)
            for o, found in made
            if found.left <= (rounding := self._rounding(i, order[o])) and found.largest <= SAME_LINE * rounding
        ]

    # -- averages ---------------------------------------------------------------------------------------------------

    def _averages(self, basis: Basis, order: Sequence[int], kept: Sequence[int], family: _Family) -> None:
        """Add the edges of weighted averages. Parents that are no averages themselves come first."""
        exact: dict[int, list[Mixture]] = {}
        close: dict[int, list[Mixture]] = {}
        for k in kept:
            among = [o for o in kept if o != k]
            for mixture in basis.mixtures(k, among, AVERAGE_SHARE):
                rounding = AVERAGE_ROUNDING * max(self.sketches[order[o]].unit for o in (k, *mixture.parents))
                if mixture.explains(max(rounding, SAME_LEAST / 10)):
                    exact.setdefault(k, []).append(mixture)
                else:
                    close.setdefault(k, []).append(mixture)
                if k in exact and len(mixture.parents) > len(exact[k][0].parents):
                    break
        checked = self._check_averages(order, exact, close, family)
        for k, mixtures in exact.items():
            least = min(mixture.residual for mixture in mixtures)
            as_good = [m for m in mixtures if m.residual <= AS_GOOD * least + SAME_LEAST / 10]
            best = min(as_good, key=partial(_order_of_average, basis=basis, averages=set(exact)))
            parents = [order[o] for o in best.parents]
            if k not in checked and not self._is_average(order[k], parents, best, family):
                continue
            evidence = f"leaves {best.residual:.1e} of it; the nearest parent is {best.nearest:.1e} away"
            if best.residual > max(SAME_LEAST, self._rounding(order[k], *parents)):
                evidence += "; a near relative of a parent would do as well"
            shown = self._shows_average(order[k], parents, best.weights, family)
            if not shown:
                evidence += f"; or {' or '.join(self.names[p] for p in parents)} is an extrapolation of the others"
            self._add("merge", parents, order[k], best.residual, evidence, weights=best.weights, directed=shown)

    def _is_average(self, child: int, parents: Sequence[int], found: Mixture, family: _Family) -> bool:
        """Whether all rows of a model are those of an average."""
        rounding = max(SAME_LEAST / 10, *(self.sketches[i].unit for i in (child, *parents)))
        return self._is_sum(child, parents, found.weights, rounding, family)

    def _is_sum(
        self,
        child: int,
        parents: Sequence[int],
        weights: Sequence[float],
        rounding: float,
        family: _Family,
        **more: Any,
    ) -> bool:
        sources = tuple(self.sources[p] for p in parents)
        moved = tuple(family.moved_by[i] for i in (child, *parents))
        check = SumCheck(self.sources[child], sources, tuple(weights), moved, rounding, **more)
        return self._confirmed(check, child, *parents)

    def _shows_average(self, child: int, parents: Sequence[int], weights: Sequence[float], family: _Family) -> bool:
        """Whether rounding shows which model was computed from the others. It does so only in the basis that they were
        computed in: where all of them, or copies of them, are stored in one."""
        copies = [self._with_copies(i) for i in (child, *parents)]
        for c in copies[0]:
            stored = [[i for i in each if _one_basis(family, c, i)] for each in copies]
            if all(stored):
                first, *others = (self.sketches[each[0]].numbers for each in stored)
                return shows_average(first, others, weights)
        return False

    def _check_averages(
        self,
        order: Sequence[int],
        exact: dict[int, list[Mixture]],
        close: Mapping[int, Sequence[Mixture]],
        family: _Family,
    ) -> set[int]:
        """Look closely at averages of models that are stored in several bases: align their parents to what they add.
        The models for which that found one."""
        checked: set[int] = set()
        tasks = [
            (k, m)
            for k, ms in close.items()
            if k not in exact and not any(_shares_most(family, order[k], order[o]) for m in ms for o in m.parents)
            for m in ms[:MOST_CHECKS]
        ]
        checks = [self._average_check(order, k, m, family) for k, m in tasks]
        for (k, mixture), check, result in zip(tasks, checks, self.run.attempts(checks), strict=True):
            if self._noted(result, *(order[o] for o in (k, *mixture.parents))):
                continue
            near = result.residual <= (AVERAGE_MOVED if check.scattered else AVERAGE_BESIDE) * mixture.nearest
            if near and result.largest_row <= LEFT_OF_ROW:
                exact.setdefault(k, []).append(replace(mixture, weights=result.weights, residual=result.residual))
                checked.add(k)
        return checked

    def _average_check(self, order: Sequence[int], k: int, mixture: Mixture, family: _Family) -> AverageCheck:
        """Of copies, those take part that are stored in one basis: best the model with one of its parents."""
        child, *parents = (self._with_copies(order[o]) for o in (k, *mixture.parents))

        def shared(c: int) -> int:
            return sum(any(_one_basis(family, c, p) for p in copies) for copies in parents)

        c = max(child, key=shared)
        chosen = [next((p for p in copies if _one_basis(family, c, p)), copies[0]) for copies in parents]
        numbers = {id(family.moved_by[i]): i for i in (c, *chosen)}
        bases = tuple(numbers[id(family.moved_by[p])] for p in chosen)
        own = numbers[id(family.moved_by[c])]
        return AverageCheck(self.sources[c], tuple(self.sources[p] for p in chosen), mixture.weights, bases, own)

    def _with_copies(self, i: int) -> list[int]:
        """A model and its copies of the same precision."""
        children = [self.names.index(e.child) for e in self.edges_of("copy") if e.parents == (self.names[i],)]
        return [i, *children]

    # -- models of several depths -----------------------------------------------------------------------------------

    def _compare_depths(self, families: Sequence[_Family]) -> None:
        """Add the edges between models that differ in their number of layers."""
        copies = {edge.child for edge in self.edges_of("copy", "cast")}
        for deep in families:
            shorter = [f for f in families if self._is_shorter(f.members[0], deep.members[0])]
            for short in shorter:
                try:
                    for found in self._in_deeper_basis(short, deep):
                        if self.names[found.model] not in copies:
                            self._layers_edge(found, deep, copies)
                except NOT_COMPARABLE as error:
                    self._note_failed(short.members[0], deep.members[0], reason_of(error))

    def edges_of(self, *kinds: Kind) -> list[Edge]:
        return [edge for edge in self.edges if edge.kind in kinds]

    def _is_shorter(self, i: int, j: int) -> bool:
        if self.arch(i).sizes.n_layers >= self.arch(j).sizes.n_layers or len(self.arch(i).streams) > 1:
            return False
        try:
            check_same_blocks(self.weights[j], self.weights[i])
        except ArchitectureError:
            return False
        return True

    def _in_deeper_basis(self, short: _Family, deep: _Family) -> Iterator[_Shortened]:
        """The models of a shorter family that correspond to layers of a deeper one, in its basis."""
        clusters: dict[int, list[int]] = {}
        for i in short.members:
            clusters.setdefault(id(short.moved_by[i]), []).append(i)
        tasks: list[tuple[list[int], int]] = []
        for cluster in clusters.values():
            stored = next((x for x in deep.members if deep.moved_by[x] is None), deep.members[0])
            found = [self._as_stored(i, stored) for i in cluster]
            if agreement(deep.numbers[stored], found[0].numbers) >= RELATED:
                yield from found
                continue
            pairs = [(gram_similarity(self.sketches[y], self.sketches[x]), y, x) for y in cluster for x in deep.members]
            alike, y, x = max(pairs)
            if alike >= GRAM_LEAST:
                tasks.append(([y, *(i for i in cluster if i != y)], x))
        moves = [MoveTo(tuple(self.sources[i] for i in c), self.sources[x], deep.moved_by[x]) for c, x in tasks]
        results = self.run.attempts(moves)
        for (cluster, x), moved in zip(tasks, results, strict=True):
            if self._noted(moved, cluster[0], x) or moved is None or moved.layers is None:
                continue
            similar = agreement(deep.numbers[x], moved.numbers[0])
            self._note(x, cluster[0], similar)
            if similar >= RELATED:
                yield from (_Shortened(i, n, moved.layers, True) for i, n in zip(cluster, moved.numbers, strict=True))

    def _as_stored(self, short: int, deep: int) -> _Shortened:
        archs = self.arch(deep), self.arch(short)
        layers = stored_layers(self.sketches[deep], self.sketches[short], archs)
        names = renamed(archs[1], archs[0], layers)
        return _Shortened(short, {names[n]: x for n, x in self.sketches[short].numbers.items()}, layers, False)

    def _layers_edge(self, found: _Shortened, deep: _Family, copies: set[str]) -> None:
        """The parent of a shortened model if its numbers are those of one, otherwise its nearest relative."""
        distances = []
        for j in deep.members:
            basis = Basis((deep.numbers[j], found.numbers))
            distance = float(basis.distances[0, 1])
            self._note(found.model, j, agreement(deep.numbers[j], found.numbers), distance)
            if self.names[j] not in copies:
                exact = basis.largest_difference(0, 1) <= SAME_TENSOR * self._rounding(j, found.model)
                distances.append((distance, j, exact))
        distance, j, exact = min(distances)
        kept = ", ".join(map(str, found.layers))
        repeated = repeats_layers(deep.numbers[j], self.arch(j), found.layers)  # then it may be made of the shorter one
        of = f"layers {kept} of {self.arch(j).sizes.n_layers}"
        equal = exact and distance <= self._rounding(j, found.model)
        if equal and not found.moved:
            check = LayersCheck(
                self.sources[found.model], self.sources[j], found.layers, self._rounding(j, found.model)
            )
            equal = self._confirmed(check, found.model, j)
        if equal and not repeated:
            evidence = f"the {'sampled ' if found.moved else ''}weights of {of}, in their order"
            self._add("layers", [j], found.model, distance, evidence, layers=found.layers)
        elif distance < 1:
            repeats = f"equal to {of}; the others repeat these: either may be made of the other"
            evidence = repeats if equal else f"like {of}, but not equal to them"
            self._add("relative", [j], found.model, distance, evidence, layers=found.layers)

    # -- the forest -------------------------------------------------------------------------------------------------

    def _connect(self) -> list[int]:
        """Add the edges of relatives: of those models that are not connected yet, the nearest ones first. The number of
        the tree of each model, the largest tree being 0."""
        number = {name: i for i, name in enumerate(self.names)}
        parts = _Parts(len(self.names))
        far = [edge for edge in self.edges if edge.kind == "relative"]
        self.edges = [edge for edge in self.edges if edge.kind != "relative"]
        for edge in self.edges:
            for parent in edge.parents:
                parts.join(number[parent], number[edge.child])
        notes = {(number[e.parents[0]], number[e.child]): e for e in far}
        copies = {number[edge.child] for edge in self.edges_of("copy", "cast")}
        for (i, j), distance in sorted(self.distance.items(), key=self._order_of_pair):
            if self.similarity[i, j] < RELATED or copies & {i, j} or not parts.join(i, j):
                continue
            known = notes.get((i, j)) or notes.get((j, i))
            if known is None:
                evidence = self._evidence_of_relatives(i, j, distance)
                more = f"; not compared further: {self.failed[i, j]}" if (i, j) in self.failed else ""
                self._add("relative", [i], j, distance, evidence + more)
            else:
                self.edges.append(known)
        self._point_away_from_base(parts, number)
        self._note_undecided(parts)
        return parts.numbers()

    def _evidence_of_relatives(self, i: int, j: int, distance: float) -> str:
        if distance > self._rounding(i, j):
            return NEAR
        if not self._has_same_tensors(i, j):
            return SAME_TRUNK
        try:
            settings = differing_settings(self.weights[i], self.weights[j])
        except NOT_COMPARABLE:
            settings = {}
        if settings:
            return f"near each other, and their settings differ: {settings_text(settings)}"
        return NEAR if distance else SAME_MATRICES

    def _has_same_tensors(self, i: int, j: int) -> bool:
        a, b = ({name: len(x) for name, x in self.sketches[k].numbers.items()} for k in (i, j))
        return a == b

    def _order_of_pair(self, pair: tuple[tuple[int, int], float]) -> tuple[bool, float]:
        """Models of one depth first: others are compared by some of their layers."""
        (i, j), distance = pair
        return self.arch(i).sizes.n_layers != self.arch(j).sizes.n_layers, distance

    def _point_away_from_base(self, parts: "_Parts", number: Mapping[str, int]) -> None:
        """Replace the edges without direction in the tree of the base: what has no parent there comes from the base."""
        if self.base is None:
            return
        root = number[self.base]
        same = {edge.child: edge.parents[0] for edge in self.edges_of("copy", "cast")}
        inside = [i for i in range(len(self.names)) if parts.find(i) == parts.find(root)]
        self.edges = [e for e in self.edges if e.kind != "relative" or number[e.child] not in inside]
        have_parents = {edge.child for edge in self.edges if edge.directed} | set(same)
        for i in inside:
            if i != root and self.names[i] not in have_parents and self.base not in (same.get(self.names[i]),):
                distance = self.distance.get((min(i, root), max(i, root)), float("nan"))
                evidence = f"a relative of {self.base}, which was named as the base; directly or through another model"
                self._add("descendant", [root], i, distance, evidence)

    def _note_undecided(self, parts: "_Parts") -> None:
        for (i, j), reason in sorted(self.failed.items()):
            if parts.find(i) != parts.find(j):
                self._add("undecided", [i], j, float("nan"), f"not compared: {reason}")
        for (i, j), similar in sorted(self.similarity.items()):
            if (i, j) not in self.failed and UNDECIDED <= similar < RELATED and parts.find(i) != parts.find(j):
                evidence = f"half alike (median cosine {similar:.2f}): more than unrelated models, less than relatives"
                self._add("undecided", [i], j, self.distance.get((i, j), 1.0), evidence)


def _one_basis(family: _Family, i: int, j: int) -> bool:
    """Whether two models are stored in one basis."""
    return family.moved_by[i] is family.moved_by[j]


def _shares_most(family: _Family, i: int, j: int) -> bool:
    """Whether two models stored in one basis have the same numbers in most tensors: then neither is an average of the
    other and models of another basis, as that would change every tensor."""
    if not _one_basis(family, i, j):
        return False
    x, y = family.numbers[i], family.numbers[j]
    return sum(torch.equal(x[name], y[name]) for name in x) > len(x) / 2


def _order_of_average(mixture: Mixture, basis: Basis, averages: set[int]) -> tuple[int, float]:
    """Parents that are no averages first; then those farthest from each other, between which all others lie."""
    spread = sum(float(basis.distances[a, b]) for a, b in combinations(mixture.parents, 2))
    return len(averages & set(mixture.parents)), -spread


def _connected(items: Sequence[int], related: Callable[[int, int], bool]) -> list[list[int]]:
    """The connected parts of a relation, in the order of their first members."""
    parts: list[list[int]] = []
    for item in items:
        near = [part for part in parts if any(related(item, other) for other in part)]
        parts = [part for part in parts if part not in near]
        parts.append([*(other for part in near for other in part), item])
    return sorted((sorted(part) for part in parts), key=lambda part: part[0])


class _Parts:
    """Disjoint sets."""

    def __init__(self, n: int) -> None:
        self._parent = list(range(n))

    def find(self, i: int) -> int:
        while self._parent[i] != i:
            i = self._parent[i]
        return i

    def join(self, i: int, j: int) -> bool:
        """Whether the two were in different sets."""
        a, b = self.find(i), self.find(j)
        self._parent[max(a, b)] = min(a, b)
        return a != b

    def numbers(self) -> list[int]:
        """A number for the set of each item, the largest set being 0."""
        roots = [self.find(i) for i in range(len(self._parent))]
        order = sorted(set(roots), key=lambda root: (-roots.count(root), root))
        return [order.index(root) for root in roots]
