"""Distance of two models modulo symmetry, block by block, and a score relative to unrelated models.

Both models are brought to balanced form, the stream of B is mapped to A's (`stream_maps`), and then every block of B is
moved by the element of its own group that brings it closest: closed forms throughout, one block of each model in
memory. `LayerMatrix` compares every layer of A with every layer of B.

Unrelated models are made from B's blocks, moved so that they no longer fit together (`UnrelatedModel`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean, median
from typing import Literal, Protocol

import torch
from torch import Tensor

from isobasin.alignment.comparable import check_comparable
from isobasin.alignment.experts import best_order
from isobasin.alignment.heads import match_heads
from isobasin.alignment.problem import overlap
from isobasin.alignment.result import LeftOut
from isobasin.alignment.trunk import TrunkPair, trunk_pair
from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.compare.stream_frame import tables
from isobasin.display import Shown, Summary, notebook_progress
from isobasin.errors import ArchitectureError, IsobasinError
from isobasin.groups import Element, Group, Overlap, Permutation, SignedPermutation
from isobasin.rounding import rounding_unit
from isobasin.symmetries import group_of, symmetry
from isobasin.symmetries.action import Action
from isobasin.symmetries.attention import attention_matrices
from isobasin.symmetries.normal_form import NormalForm, block_tensors
from isobasin.symmetries.transform import Transform
from isobasin.weights import ModelSource, Weights, load, read_part

NULL_SAMPLES = 8
AT_ONCE = 8  # unrelated models that are compared at the same time on an accelerator
LARGE = 2**20  # weights of models whose unrelated models are compared in float32
# Distances of copies, measured: 0.4 (0.6 if both are rounded) of the relative rounding of their types, and 2e-8 without
# rounding; 10 small steps of fine-tuning: 0.01.
SAME_ROUNDING = 1.0
SAME_LEAST = 1e-5
CLOSE_SCORE = 0.9  # measured: fine-tunes 0.998 and more, models of two seeds trained on the same digits 0.32
QUANTILES = (0.05, 0.5, 0.95)
STREAM_SWEEPS = 12
SAME_EMBEDDINGS_THRESHOLD = 0.5  # similarity of embeddings and head; above it their map of the stream is final
RANK_THRESHOLD = 1e-6  # smallest singular value of their overlap relative to the largest; below it layers take part

Elements = Mapping[str, Element]
Spaces = Sequence[tuple[str, str]]
Table = tuple[tuple[float, ...], ...]
Relation = Literal["same", "related", "unrelated", "undecided"]


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
    """One block of each model under A's tensor names, B's with its streams moved to A's."""

    arch: Architecture
    space: str
    a: Mapping[str, Tensor]
    b: Mapping[str, Tensor]

    @staticmethod
    def of(a: BlockModel, b: BlockModel, space_a: str, space_b: str, streams: Elements) -> "BlockPair":
        """Names of a layer correspond in their order, so that layer 3 can be compared with layer 6."""
        tensors_b, tensors_a = b.block(space_b), a.block(space_a)
        action = Action(a.arch, streams)
        moved = {name: action.tensor(name, t) for name, t in zip(tensors_a, tensors_b.values(), strict=True)}
        folded = {name for norm in a.arch.norms.values() for name in (norm.gain, norm.shift)} | set(a.arch.scales)
        # Folded gains are all ones in both models: they would make unrelated models similar.
        kept = [n for n in moved if n not in folded or not (_is_constant(tensors_a[n]) and _is_constant(moved[n]))]
        return BlockPair(a.arch, space_a, {n: tensors_a[n] for n in kept}, {n: moved[n] for n in kept})

    def element(self) -> Element | None:
        """The element of this space that brings B's block closest to A's; None for the stream and for experts, which
        are moved already, and where the space has no group."""
        group = symmetry(self.arch).groups.get(self.space)
        place = self.arch.spaces[self.space]
        if group is None or place.role in ("stream", "experts"):
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

    def stream_overlap(self, stream: str, element: Element) -> Overlap:
        """The overlap on a stream under the best element of B's own space; `element` has already acted on b."""
        inverse = Action(self.arch, {stream: element.inverse()})
        moved = self._moved(self.element()).items()
        b = {name: inverse.tensor(name, t) for name, t in moved if stream in self.arch.spaces_of(name)}
        if not b:
            return Overlap.empty(element.n, next(iter(self.a.values())))
        return overlap(self.arch, stream, self.a, b, b, element, double=True)


def _is_constant(vector: Tensor) -> bool:
    return bool((vector == vector[0]).all())


def block_distances(
    a: BlockModel, b: BlockModel, pairs: Spaces, streams: Elements
) -> dict[tuple[str, str], BlockDistance]:
    return {(x, y): BlockPair.of(a, b, x, y, streams).distance() for x, y in pairs}


def stream_maps(a: BlockModel, b: BlockModel, pairs: Spaces) -> tuple[Elements, frozenset[str]]:
    """The map of each stream of B to A's, one after the other, and those in which layers took part."""
    maps = {name: group_of(space).identity() for name, space in a.arch.streams.items()}
    by_all_blocks = set()
    for name, space in a.arch.streams.items():
        maps[name], layers = _stream_map(a, b, pairs, space, maps)
        by_all_blocks |= {name} if layers else set()
    return maps, frozenset(by_all_blocks)


def _stream_map(a: BlockModel, b: BlockModel, pairs: Spaces, space: Space, maps: Elements) -> tuple[Element, bool]:
    """The map of a stream of B to A's, and whether layers took part in it; `pairs` are the corresponding blocks, and
    `maps` those of the other streams.

    Layers take part where embeddings and head do not determine a rotation. Otherwise embeddings and head alone
    decide if they are similar; if not, their map competes with the identity (embeddings may be new while layers are
    shared), measured on embeddings, head and all attention heads.
    """
    identity = group_of(space).identity()
    if space.kind == "fixed":
        return identity, False
    on_embeddings = _embedding_overlap(a, b, space, maps)
    found = group_of(space).nearest(on_embeddings)
    if space.rotates:
        values = torch.linalg.svdvals(on_embeddings.self_dual.to(torch.float64))
        last = len(values) - 1 - (space.kind == "orthogonal1")
        if values[last] <= RANK_THRESHOLD * values[0]:
            return map_by_all_blocks(a, b, pairs, space, maps), True
    here = {**maps, space.name: found}
    if BlockPair.of(a, b, space.name, space.name, here).distance().similarity > SAME_EMBEDDINGS_THRESHOLD:
        return found, False
    heads = [(x, y) for x, y in _touching(a.arch, pairs, space) if a.arch.spaces[x].role == "heads"]
    starts = ({**maps, space.name: g} for g in (found, identity))
    blocks = [(space.name, space.name), *heads]
    sums = [sum(d.similarity for d in block_distances(a, b, blocks, each).values()) for each in starts]
    return identity if sums[1] > sums[0] else found, False


def _touching(arch: Architecture, pairs: Spaces, stream: Space) -> list[tuple[str, str]]:
    """The pairs of blocks that read or write a stream."""
    return [pair for pair in pairs if any(stream.name in arch.spaces_of(n) for n in arch.blocks[pair[0]])]


def map_by_all_blocks(a: BlockModel, b: BlockModel, pairs: Spaces, space: Space, maps: Elements) -> Element:
    """The map of a stream from embeddings, head and all layers; `maps` are those of the other streams.

    Alternates: every layer is matched under the current map of the stream, then the stream given all layers.
    """
    name, on_embeddings, pairs = space.name, _embedding_overlap(a, b, space, maps), _touching(a.arch, pairs, space)
    best = current = group_of(space).nearest(on_embeddings)
    least = float("inf")
    for _ in range(STREAM_SWEEPS):
        here = {**maps, name: current}
        joint, square = on_embeddings, BlockPair.of(a, b, name, name, here).square(None)
        for x, y in pairs:
            pair = BlockPair.of(a, b, x, y, here)
            square += pair.distance().square
            joint = joint + pair.stream_overlap(name, current)
        if not square < least * (1 - 1e-6):
            break
        best, least = current, square
        current = group_of(space).nearest(joint)
    return best


def _embedding_overlap(a: BlockModel, b: BlockModel, space: Space, maps: Elements) -> Overlap:
    identity = group_of(space).identity()
    here = {**maps, space.name: identity}
    return BlockPair.of(a, b, space.name, space.name, here).stream_overlap(space.name, identity)


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


def layer_similarities(a: NormalForm, b: NormalForm, streams: Elements) -> LayerMatrix:
    """All pairs of layers, given the map between the streams."""

    def table(role: str) -> Table:
        layers_a, layers_b = ([space.name for space in _layered(model.arch, role)] for model in (a, b))
        found = block_distances(a, b, [(x, y) for x in layers_a for y in layers_b], streams)
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
    require_equal("rotary positions", a.arch.rotary, b.arch.rotary, remedy=remedy)
    for key, value in a.settings.items():
        require_equal(f"config.json: {key}", value, b.settings.get(key), remedy=remedy)
    for space in [*a.arch.streams.values(), *(_layered(a.arch, role)[0] for role in ("heads", "units"))]:
        shapes = [[m.arch.shapes[n] for n in block_tensors(m.arch)[space.name]] for m in (a, b)]
        what = "embeddings and head" if space.role == "stream" else space.name
        require_equal(f"tensors of {what}", *shapes, remedy=remedy)


def require_equal(what: str, a: object, b: object, *, remedy: str) -> None:
    """Raise unless A and B agree in this."""
    if a != b:
        raise ArchitectureError(f"{what}: A has {a}, B has {b}; {remedy}")


# -- the distance ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NullDistribution:
    """The scores of unrelated models, and the seed they come from."""

    seed: int
    scores: tuple[float, ...]

    @property
    def largest(self) -> float:
        return max(self.scores)

    def to_dict(self) -> dict[str, object]:
        found = torch.quantile(torch.tensor(self.scores, dtype=torch.float64), torch.tensor(QUANTILES).double())
        quantiles = {f"{q:g}": float(value) for q, value in zip(QUANTILES, found)}
        return {"draws": len(self.scores), "seed": self.seed, "quantiles": quantiles, "largest": self.largest}


@dataclass(frozen=True, repr=False)
class DistanceResult(Shown):
    """`score`: 1 for the same orbit, about 0 for unrelated models; `null` holds the scores of unrelated models.

    `distance` is ‖A − gB‖/‖A‖ in balanced form, `naive` the same for the weights as they are stored.
    """

    score: float
    distance: float
    naive: float | None
    per_layer: tuple[Mapping[str, object], ...]
    null: NullDistribution
    layers: LayerMatrix | None = field(default=None, repr=False)
    left_out: LeftOut = field(default=LeftOut(), repr=False)
    rounding: float = 0.0  # relative, of the coarser of the stored types

    @property
    def verdict(self) -> Relation:
        """In a word: within rounding the same, above all unrelated models a relative, among them unrelated."""
        if self.distance <= max(SAME_ROUNDING * self.rounding, SAME_LEAST):
            return "same"
        if self.related:
            return "related"
        return "unrelated" if len(self.null.scores) > 1 else "undecided"

    @property
    def verdict_text(self) -> str:
        """The verdict in a sentence."""
        n, largest = len(self.null.scores), f"{self.null.largest:.4f}"
        others = f"{n} unrelated models score at most {largest}"
        texts = {
            "same": "the same model, up to the rounding of the stored types; `isobasin equal` decides",
            "related": f"a fine-tune or another close relative: {others}"
            if self.score >= CLOSE_SCORE
            else f"a distant relative: {others}, fine-tunes {CLOSE_SCORE} and more; long training from one start, an "
            "average, or the same data give such scores",
            "unrelated": f"unrelated: not clearly above the scores of {n} unrelated models (at most {largest})",
            "undecided": "undecided: one unrelated model is too few to compare with; use --null-samples 8",
        }
        return texts[self.verdict]

    @property
    def explanation(self) -> str:
        """Why the distance modulo symmetry is the larger of the two, where it is; otherwise empty."""
        if self.naive is None or self.distance <= max(self.naive, SAME_LEAST):
            return ""
        return (
            "modulo symmetry exceeds as stored: it is measured between balanced forms (gains folded, the factors of "
            "heads and units of one size), in which the parts that differ here weigh more; compare it with other "
            "distances modulo symmetry"
        )

    @property
    def related(self) -> bool:
        """Whether the score exceeds the largest score of an unrelated model by more than the range of these scores.

        An unrelated model would exceed the largest of eight alone with probability 1/9. One sample decides nothing.
        """
        return len(self.null.scores) > 1 and self.score > 2 * self.null.largest - min(self.null.scores)

    def summary(self) -> Summary:
        """The distances and scores of all parts."""
        rows = [
            (
                row["space"],
                "" if row["layer"] is None else row["layer"],
                "–" if row["naive"] is None else f"{row['naive']:.4g}",
                f"{row['distance']:.4g}",
                f"{row['score']:.4f}",
            )
            for row in self.per_layer
        ]
        facts = {"verdict": self.verdict_text} | ({"note": self.explanation} if self.explanation else {})
        return Summary(str(self), facts, ("part", "layer", "as stored", "distance", "score"), rows)

    def to_dict(self) -> dict[str, object]:
        """The JSON object of `isobasin distance`."""
        matrix = self.layers.to_dict() if self.layers else {}
        return {
            "score": self.score,
            "distance": self.distance,
            "naive": self.naive,
            "related": self.related,
            "verdict": self.verdict,
            "null": self.null.to_dict(),
            "per_layer": [dict(row) for row in self.per_layer],
            **self.left_out.to_dict(),
        } | matrix

    def __str__(self) -> str:
        naive = "" if self.naive is None else f" (as stored {self.naive:.4g})"
        return (
            f"{self.verdict}: score {self.score:.4f}, unrelated models score at most {self.null.largest:.4f}; "
            f"distance {self.distance:.4g} of ‖A‖{naive}"
        )


def distance(
    a: ModelSource,
    b: ModelSource,
    *,
    layers: bool | None = None,
    null_samples: int = NULL_SAMPLES,
    seed: int = 0,
    device: torch.device | str | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> DistanceResult:
    """Distance modulo symmetry, block by block, with a score and the scores of `null_samples` unrelated models.

    Similarity of a block: s = 1 − ‖A − gB‖²/(‖A‖² + ‖B‖²). Its score: (s − s₀)/(1 − s₀), with s₀ the median over the
    unrelated models; the model's score is the mean over all blocks. Negative scores are reported as 0.
    Models of different depth are compared by the layer-to-layer matrix: every layer of the shallower model with the
    most similar layer of the other. `layers` asks for that matrix at equal depth too. `watch(done, of)` is called with
    the number of blocks compared, those of the unrelated models included. Models that differ only in their heads, or in
    rows of the vocabulary, are compared on what they share; `left_out` of the result names the rest.
    """
    if null_samples < 1:
        raise IsobasinError(
            f"{null_samples} null samples: expected at least 1, the scores of unrelated models come from them"
        )
    place = torch.device(device or "cpu")
    with notebook_progress("comparing", watch) as shown:
        return _distance(load(a).resident(place), load(b).resident(place), layers, null_samples, seed, place, shown)


def _distance(
    a: Weights,
    b: Weights,
    layers: bool | None,
    null_samples: int,
    seed: int,
    place: torch.device,
    watch: Callable[[int, int], None] | None,
) -> DistanceResult:
    a, b = read_part(a), read_part(b)
    same_depth = a.arch.sizes.n_layers == b.arch.sizes.n_layers
    trunk = _trunk(a, b, same_depth=same_depth)
    same_depth = same_depth or trunk is not None
    if trunk is None:
        check_same_blocks(a, b)
    else:
        a, b = trunk.a, trunk.b
    one, two = NormalForm.for_comparison(a, place), NormalForm.for_comparison(b, place)
    two = _with_paired_experts(one, two) if same_depth else two
    matrix = None
    if layers or not same_depth:
        _require_equal_layers(a.arch)
        matrix = layer_similarities(one, two, stream_maps(one, two, pairs_by_depth(one, two))[0])
    pairs = [(s, s) for s in one.spaces] if same_depth or matrix is None else matrix.pairs(one, two)
    if trunk is not None:
        pairs = [pair for pair in pairs if trunk.shared & set(a.arch.blocks[pair[0]])]
    streams, by_all_blocks = stream_maps(one, two, pairs)
    held = set(a) if trunk is None else trunk.shared
    ends = [(name, name) for name in streams if held & set(one.blocks[name])]  # some have no embeddings or head
    found = block_distances(one, two, [*ends, *pairs], streams)

    def report(done: int) -> None:
        if watch:
            watch(len(found) + done, len(found) * (1 + null_samples))

    report(0)
    dtype = torch.float32 if a.n_params > LARGE else one.dtype
    rotated = RotatedModel(two, seed, dtype)
    models = [UnrelatedModel(rotated, seed + k) for k in range(null_samples)]
    null = _null_similarities(InType(one, dtype), models, ends, pairs, by_all_blocks, report)
    return replace(_result(a, b, found, null, matrix, seed), left_out=trunk.left_out if trunk else LeftOut())


def _trunk(a: Weights, b: Weights, *, same_depth: bool) -> TrunkPair | None:
    """What both share where only heads differ, or one is the encoder of a model like the other; models of other depths
    may be compared layer by layer."""
    try:
        return trunk_pair(a, b, largest_group=True)
    except ArchitectureError:
        if same_depth:
            raise
        return None


def _with_paired_experts(a: NormalForm, b: NormalForm) -> NormalForm:
    """B with its experts in the order in which they come closest to A's, given a map of the streams or none."""
    spaces = tuple(b.arch.expert_spaces)
    if not spaces:
        return b
    found = stream_maps(a, b, [(s, s) for s in a.spaces])[0]
    orders = (best_order(a, b, Action(b.arch, maps), spaces) for maps in (found, dict[str, Element]()))
    order, _ = min(orders, key=lambda each: each[1])
    moved = Transform(b.arch.family, dict(b.arch.spaces), order).apply(b.weights)
    return NormalForm.for_comparison(moved, b.device)


def _require_equal_layers(arch: Architecture) -> None:
    """Refuse a model whose layers have different parts, or different streams."""
    if len(_layered(arch, "heads")) != len(_layered(arch, "units")) or len(arch.streams) > 1:
        raise ArchitectureError(
            f"layers of a {arch.family} model have different parts (an encoder and a decoder, or experts), so they can "
            "not be compared with each other; compare models of the same depth, without --layers"
        )


def _result(
    a: Weights,
    b: Weights,
    found: Mapping[tuple[str, str], BlockDistance],
    null: Sequence[Sequence[float]],
    matrix: LayerMatrix | None,
    seed: int,
) -> DistanceResult:
    levels = [median(column) for column in zip(*null)]
    scores = [score(each.similarity, level) for each, level in zip(found.values(), levels)]
    null_scores = [fmean(score(s, level) for s, level in zip(row, levels)) for row in null]
    same_depth = a.arch.sizes.n_layers == b.arch.sizes.n_layers
    naive = {space: _naive(a, b, space) for space, other in found if space == other} if same_depth else {}
    rows = [
        {
            "layer": a.arch.spaces[x].layer,
            "other_layer": b.arch.spaces[y].layer,
            "space": a.arch.spaces[x].label,
            "naive": naive[x].distance if x in naive else None,
            "distance": each.distance,
            "similarity": each.similarity,
            "score": max(0.0, s),
        }
        for ((x, y), each), s in zip(found.items(), scores)
    ]
    return DistanceResult(
        max(0.0, fmean(scores)),
        total(found.values()).distance,
        total(naive.values()).distance if naive else None,
        tuple(rows),
        NullDistribution(seed, tuple(null_scores)),
        matrix.scores(a.arch, dict(zip((x for x, _ in found), levels))) if matrix else None,
        rounding=max(rounding_unit(dtype) for model in (a, b) for dtype in _weight_dtypes(model)),
    )


def _weight_dtypes(model: Weights) -> set[torch.dtype]:
    return {dtype for name, dtype in model.dtypes.items() if not model.arch.tensors[name].buffer}


def _naive(a: Weights, b: Weights, space: str) -> BlockDistance:
    """The distance of a block's tensors as they are stored."""
    square = size = 0.0
    for name in block_tensors(a.arch)[space]:
        reference = a[name].to(torch.float64)
        square += float((b[name].to(torch.float64) - reference).square().sum())
        size += float(reference.square().sum())
    return BlockDistance(square, size, 0.0)


# -- unrelated models -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InType:
    """A model in another type; the block read last is kept."""

    model: BlockModel
    dtype: torch.dtype
    _last: dict[str, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def arch(self) -> Architecture:
        return self.model.arch

    def block(self, space: str) -> Mapping[str, Tensor]:
        if space not in self._last:
            self._last.clear()
            self._last[space] = {name: t.to(self.dtype) for name, t in self.model.block(space).items()}
        return self._last[space]


@dataclass(frozen=True)
class RotatedModel:
    """A model in a random frame of each stream, in which no coordinate is special; the block read last is kept.

    A rotation is expensive, so all unrelated models share one. Embeddings and head are not rotated: the map of the
    stream would undo it. Unrelated models are compared in `dtype`: their similarities are sums over many numbers.
    """

    model: BlockModel
    seed: int
    dtype: torch.dtype = torch.float64
    _last: dict[str, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def arch(self) -> Architecture:
        return self.model.arch

    @cached_property
    def _action(self) -> Action:
        rotating = {name: space for name, space in self.arch.streams.items() if space.rotates}
        return Action(self.arch, {name: group_of(space).sample(seed=self.seed) for name, space in rotating.items()})

    def block(self, space: str) -> Mapping[str, Tensor]:
        if space not in self._last:
            self._last.clear()
            moves = space not in self.arch.streams and bool(self._action.elements)
            found = {n: self._action.tensor(n, t) if moves else t for n, t in self.model.block(space).items()}
            self._last[space] = {name: t.to(self.dtype) for name, t in found.items()}
        return self._last[space]


@dataclass(frozen=True)
class UnrelatedModel:
    """The same blocks as a model in a random frame, with the stream of each block shuffled independently.

    In a random frame a signed permutation serves as well as another rotation: the overlap of rows of A and B is again a
    sum of many small numbers with random signs. Tokens, positions and outputs are shuffled, too.
    """

    model: BlockModel
    seed: int

    @property
    def arch(self) -> Architecture:
        return self.model.arch

    def block(self, space: str) -> Mapping[str, Tensor]:
        """Shuffled by an element that depends on the seed and the block."""
        seed = (1_000_003 * self.seed + list(block_tensors(self.arch)).index(space)) % 2**63
        streams = self.arch.streams.items()
        action = Action(self.arch, {name: _shuffles(stream).sample(seed=seed) for name, stream in streams})
        tensors = {name: action.tensor(name, t) for name, t in self.model.block(space).items()}
        if space in self.arch.streams:
            rng = torch.Generator().manual_seed(seed)
            for name, axis, _ in tables(self.arch, tuple(tensors), space):
                rows = tensors[name].movedim(axis, -1)
                flat = rows.reshape(-1, rows.shape[-1])
                mixed = flat[torch.randperm(len(flat), generator=rng)].reshape(rows.shape)
                tensors[name] = mixed.movedim(-1, axis)
        return tensors


def _shuffles(stream: Space) -> Group:
    """The permutations, with signs where possible, that an unrelated model is drawn from."""
    if stream.kind in ("orthogonal", "fixed"):
        return SignedPermutation(stream.size)
    return Permutation(stream.size) if stream.kind == "orthogonal1" else group_of(stream)


def _null_similarities(
    a: BlockModel,
    models: Sequence[BlockModel],
    ends: Spaces,
    pairs: Spaces,
    by_all_blocks: frozenset[str],
    report: Callable[[int], None],
) -> list[list[float]]:
    """Similarities of all blocks, one row per unrelated model.

    Blocks that were shuffled independently have no common stream, so each is compared without a map. Only embeddings
    and head are mapped, because the map is made from them. Where layers took part in the map of a stream between A and
    B (`by_all_blocks`) they take part here as well: such a map finds some overlap in any model.
    """
    spaces = a.arch.streams
    identity = {name: group_of(space).identity() for name, space in spaces.items()}
    maps = [
        {**identity, **{name: map_by_all_blocks(a, model, pairs, spaces[name], identity) for name in by_all_blocks}}
        for model in models
    ]

    def similarity(x: str, y: str, model: BlockModel, here: Elements) -> float:
        if x in spaces and spaces[x].kind != "fixed" and x not in by_all_blocks:
            here = {**here, x: group_of(spaces[x]).nearest(_embedding_overlap(a, model, spaces[x], here))}
        return BlockPair.of(a, model, x, y, here).distance().similarity

    rows: list[list[float]] = [[] for _ in models]
    for x, y in [*ends, *pairs]:
        on_cuda = next(iter(a.block(x).values())).device.type == "cuda"
        models[0].block(y)  # what all unrelated models share is read before threads ask for it
        with ThreadPoolExecutor(AT_ONCE) as pool:  # the host solves the assignments of several meanwhile
            run = pool.map if on_cuda else map
            for row, each in zip(rows, run(partial(similarity, x, y), models, maps)):
                row.append(each)
        report(sum(map(len, rows)))
    return rows
