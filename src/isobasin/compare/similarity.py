"""Similarity of two models block by block: the best group element between two blocks, and what it leaves.

The blocks of B are first moved by one map of the residual stream (`stream_map`), then each block by the element of its
own group that brings it closest. `LayerMatrix` compares every layer of A with every layer of B.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Protocol

import torch
from torch import Tensor

from isobasin.alignment.heads import match_heads
from isobasin.alignment.problem import check_comparable, overlap, rotary_settings
from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.errors import ArchitectureError
from isobasin.groups import Element, Overlap
from isobasin.symmetries import group_of, symmetry
from isobasin.symmetries.action import Action
from isobasin.symmetries.attention import attention_matrices
from isobasin.symmetries.normal_form import NormalForm, block_tensors
from isobasin.weights import Weights

STREAM_SWEEPS = 12
SAME_EMBEDDINGS_THRESHOLD = 0.5  # similarity of embeddings and head; above it their map of the stream is final
RANK_THRESHOLD = 1e-6  # smallest singular value of their overlap relative to the largest; below it layers take part

Spaces = Sequence[tuple[str, str]]
Table = tuple[tuple[float, ...], ...]


class BlockModel(Protocol):
    """A model in balanced form, or an unrelated one that was generated from it."""

    @property
    def arch(self) -> Architecture: ...

    def block(self, space: str) -> Mapping[str, Tensor]: ...


@dataclass(frozen=True)
class BlockDistance:
    """‖A − gB‖², ‖A‖² and ‖B‖² of two blocks under the best element g."""

    square: float
    size_a: float
    size_b: float

    @property
    def similarity(self) -> float:
        """1 − ‖A − gB‖² / (‖A‖² + ‖B‖²): one for equal blocks, about zero for unrelated ones."""
        return 1 - self.square / max(self.size_a + self.size_b, 1e-300)

    @property
    def distance(self) -> float:
        """‖A − gB‖ / ‖A‖."""
        return (self.square / max(self.size_a, 1e-300)) ** 0.5


def total(distances: Iterable[BlockDistance]) -> BlockDistance:
    """The distance of several blocks taken together."""
    return BlockDistance(*map(sum, zip(*((d.square, d.size_a, d.size_b) for d in distances))))


@dataclass(frozen=True)
class BlockPair:
    """One block of each model under A's tensor names, B's with its stream moved to A's."""

    arch: Architecture
    space: str
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]

    @staticmethod
    def of(a: BlockModel, b: BlockModel, space_a: str, space_b: str, stream: Element) -> "BlockPair":
        """Names of a layer correspond in their order, so that layer 3 can be compared with layer 6."""
        tensors_b, tensors_a = b.block(space_b), a.block(space_a)
        action = Action(a.arch, {a.arch.stream.name: stream})
        moved = {name: action.tensor(name, t) for name, t in zip(tensors_a, tensors_b.values(), strict=True)}
        folded = {name for norm in a.arch.norms.values() for name in (norm.gain, norm.shift)}
        # Folded gains are all ones in both models: they would make unrelated models similar.
        kept = [n for n in moved if n not in folded or not (_is_constant(tensors_a[n]) and _is_constant(moved[n]))]
        return BlockPair(a.arch, space_a, {n: tensors_a[n] for n in kept}, {n: moved[n] for n in kept})

    def element(self) -> Element | None:
        """The element of this space that brings B's block closest to A's; None for the stream, which is moved already,
        and where the space has no group."""
        group = symmetry(self.arch).groups.get(self.space)
        place = self.arch.spaces[self.space]
        if group is None or place.role == "stream":
            return None
        found: Element
        if isinstance(place, HeadSpace):
            a, b = (
                attention_matrices(self.arch, place, {n: t.to(torch.float64) for n, t in x.items()})
                for x in (self.a, self.b)
            )
            found = match_heads(a, b, place, stage2="orthogonal").element
        else:
            found = group.nearest(overlap(self.arch, self.space, self.a, self.b, self.a, group.identity()))
        return min((group.identity(), found), key=self.square)

    def square(self, element: Element | None) -> float:
        moved = self._moved(element)
        return float(sum((t - moved[name]).square().sum(dtype=torch.float64) for name, t in self.a.items()))

    def _moved(self, element: Element | None) -> Mapping[str, Tensor]:
        """B's block with its own space moved as well."""
        if element is None:
            return self.b
        action = Action(self.arch, {self.space: element})
        return {name: action.tensor(name, t) for name, t in self.b.items()}

    def distance(self) -> BlockDistance:
        sizes = [float(sum(t.square().sum(dtype=torch.float64) for t in x.values())) for x in (self.a, self.b)]
        return BlockDistance(self.square(self.element()), *sizes)

    def stream_overlap(self, stream: Element) -> Overlap:
        """The overlap on the stream under the best element of B's own space; `stream` has already acted on b."""
        inverse = Action(self.arch, {self.arch.stream.name: stream.inverse()})
        b = {name: inverse.tensor(name, t) for name, t in self._moved(self.element()).items()}
        return overlap(self.arch, self.arch.stream.name, self.a, b, b, stream, double=True)


def _is_constant(vector: Tensor) -> bool:
    return bool((vector == vector[0]).all())


def block_distances(
    a: BlockModel, b: BlockModel, pairs: Spaces, stream: Element
) -> dict[tuple[str, str], BlockDistance]:
    return {(x, y): BlockPair.of(a, b, x, y, stream).distance() for x, y in pairs}


def stream_map(a: BlockModel, b: BlockModel, pairs: Spaces) -> tuple[Element, bool]:
    """The map of B's stream to A's, and whether layers took part in it; `pairs` are the corresponding blocks.

    Layers take part where embeddings and head do not determine a rotation. Otherwise embeddings and head alone
    decide if they are similar; if not, their map competes with the identity (embeddings may be new while layers are
    shared), measured on embeddings, head and all attention heads.
    """
    space = a.arch.stream
    identity = group_of(space).identity()
    if space.kind == "fixed":
        return identity, False
    on_embeddings = _embedding_overlap(a, b)
    found = group_of(space).nearest(on_embeddings)
    if _is_rank_deficient(space, on_embeddings):
        return map_by_all_blocks(a, b, pairs), True
    if BlockPair.of(a, b, space.name, space.name, found).distance().similarity > SAME_EMBEDDINGS_THRESHOLD:
        return found, False
    measured = [(space.name, space.name), *((x, y) for x, y in pairs if a.arch.spaces[x].role == "heads")]
    sums = [sum(d.similarity for d in block_distances(a, b, measured, g).values()) for g in (found, identity)]
    return identity if sums[1] > sums[0] else found, False


def map_by_embeddings(a: BlockModel, b: BlockModel) -> Element:
    """The map of the stream from embeddings, positions and head alone."""
    space = a.arch.stream
    return group_of(space).identity() if space.kind == "fixed" else group_of(space).nearest(_embedding_overlap(a, b))


def map_by_all_blocks(a: BlockModel, b: BlockModel, pairs: Spaces) -> Element:
    """The map of the stream from embeddings, head and all layers.

    Alternates: every layer is matched under the current map of the stream, then the stream given all layers.
    """
    space, on_embeddings = a.arch.stream, _embedding_overlap(a, b)
    best = current = group_of(space).nearest(on_embeddings)
    least = float("inf")
    for _ in range(STREAM_SWEEPS):
        joint, square = on_embeddings, BlockPair.of(a, b, space.name, space.name, current).square(None)
        for x, y in pairs:
            pair = BlockPair.of(a, b, x, y, current)
            square += pair.distance().square
            joint = joint + pair.stream_overlap(current)
        if not square < least * (1 - 1e-6):
            break
        best, least = current, square
        current = group_of(space).nearest(joint)
    return best


def _embedding_overlap(a: BlockModel, b: BlockModel) -> Overlap:
    space = a.arch.stream
    identity = group_of(space).identity()
    return BlockPair.of(a, b, space.name, space.name, identity).stream_overlap(identity)


def _is_rank_deficient(space: Space, on_embeddings: Overlap) -> bool:
    if not space.rotates:
        return False
    values = torch.linalg.svdvals(on_embeddings.self_dual.to(torch.float64))
    last = len(values) - 1 - (space.kind == "orthogonal1")
    return bool(values[last] <= RANK_THRESHOLD * values[0])


@dataclass(frozen=True)
class LayerMatrix:
    """`heads[i][j]` and `units[i][j]`: layer i of A and layer j of B, as similarities or (`scores`) as scores."""

    heads: Table
    units: Table

    @property
    def matrix(self) -> Table:
        """The mean of heads and units."""
        return tuple(tuple((h + u) / 2 for h, u in zip(*rows)) for rows in zip(self.heads, self.units))

    @property
    def best_in_a(self) -> tuple[int, ...]:
        """For every layer of B the most similar layer of A."""
        return tuple(column.index(max(column)) for column in zip(*self.matrix))

    @property
    def best_in_b(self) -> tuple[int, ...]:
        """For every layer of A the most similar layer of B."""
        return tuple(row.index(max(row)) for row in self.matrix)

    def to_dict(self) -> dict[str, object]:
        return {
            "layers": [list(row) for row in self.matrix],
            "best_in_a": list(self.best_in_a),
            "best_in_b": list(self.best_in_b),
        }

    def pairs(self, a: NormalForm, b: NormalForm) -> list[tuple[str, str]]:
        """Each layer of the shallower model with the most similar layer of the other, then the remaining blocks."""
        if len(self.heads) >= len(self.heads[0]):
            return _block_pairs(a, b, [(i, j) for j, i in enumerate(self.best_in_a)])
        return _block_pairs(a, b, list(enumerate(self.best_in_b)))

    def scores(self, arch: Architecture, level: Mapping[str, float]) -> "LayerMatrix":
        """Similarity above that of unrelated models (their mean over the blocks of a role), never below 0."""

        def scored(table: Table, role: str) -> Table:
            mean = fmean(level[space.name] for space in _layered(arch, role) if space.name in level)
            return tuple(tuple(max(0.0, score(s, mean)) for s in row) for row in table)

        return LayerMatrix(scored(self.heads, "heads"), scored(self.units, "units"))


def score(similarity: float, unrelated: float) -> float:
    """1 for equal blocks, 0 at the similarity of unrelated ones."""
    return (similarity - unrelated) / max(1 - unrelated, 1e-300)


def layer_similarities(a: NormalForm, b: NormalForm, stream: Element) -> LayerMatrix:
    """All pairs of layers, given the map between the streams."""

    def table(role: str) -> Table:
        layers_a, layers_b = ([space.name for space in _layered(model.arch, role)] for model in (a, b))
        found = block_distances(a, b, [(x, y) for x in layers_a for y in layers_b], stream)
        return tuple(tuple(found[x, y].similarity for y in layers_b) for x in layers_a)

    return LayerMatrix(table("heads"), table("units"))


def pairs_by_depth(a: NormalForm, b: NormalForm) -> list[tuple[str, str]]:
    """A first guess: layers at the same relative depth, then the remaining blocks."""
    n, m = (len(_layered(model.arch, "heads")) for model in (a, b))
    fewer = min(n, m)
    return _block_pairs(a, b, [(k * n // fewer, k * m // fewer) for k in range(fewer)])


def _layered(arch: Architecture, role: str) -> list[Space | HeadSpace]:
    """The spaces of this role that belong to a layer, in the order of the layers."""
    return [space for space in arch.spaces.values() if space.layer is not None and space.role == role]


def _block_pairs(a: NormalForm, b: NormalForm, layers: Sequence[tuple[int, int]]) -> list[tuple[str, str]]:
    roles = [[_layered(model.arch, role) for role in ("heads", "units")] for model in (a, b)]
    found = [(x[i].name, y[j].name) for i, j in layers for x, y in zip(*roles)]
    others = ([s for s in model.spaces if model.arch.spaces[s].layer is None] for model in (a, b))
    return [*found, *zip(*others, strict=True)]


def check_same_blocks(a: Weights, b: Weights) -> None:
    """Raise unless both models have the same architecture up to the number of layers."""
    if a.arch.sizes.n_layers == b.arch.sizes.n_layers:
        check_comparable(a, b)
        return
    remedy = "only models of one architecture, of any depth, can be compared"
    require_equal("family", a.arch.family, b.arch.family, remedy=remedy)
    for key, value in vars(replace(a.arch.sizes, n_layers=b.arch.sizes.n_layers)).items():
        require_equal(key, value, vars(b.arch.sizes)[key], remedy=remedy)
    require_equal("rotary positions", rotary_settings(a.config), rotary_settings(b.config), remedy=remedy)
    for space in [a.arch.stream, *(_layered(a.arch, role)[0] for role in ("heads", "units"))]:
        shapes = [[m.arch.shapes[n] for n in block_tensors(m.arch)[space.name]] for m in (a, b)]
        what = "embeddings and head" if space.role == "stream" else space.name
        require_equal(f"tensors of {what}", *shapes, remedy=remedy)


def require_equal(what: str, a: object, b: object, *, remedy: str) -> None:
    """Raise unless A and B agree in this."""
    if a != b:
        raise ArchitectureError(f"{what}: A has {a}, B has {b}; {remedy}")
