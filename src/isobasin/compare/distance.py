"""Distance of two models modulo symmetry, block by block, and a score relative to unrelated models.

Both models are brought to balanced form, the stream of B is mapped to A's, and then every block of B is moved by the
element of its own group that brings it closest: closed forms throughout, one block of each model in memory.

Unrelated models come from B: the stream of every block is rotated or shuffled independently, and tokens, positions and
outputs are shuffled. Each block keeps its spectra and everything inside it, but the blocks no longer fit together, so
A shares with such a model only what any two models share.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, median

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.compare.similarity import (
    BlockDistance,
    BlockModel,
    BlockPair,
    LayerMatrix,
    Spaces,
    block_distances,
    check_same_blocks,
    layer_similarities,
    map_by_all_blocks,
    map_by_embeddings,
    pairs_by_depth,
    score,
    stream_map,
    total,
)
from isobasin.compare.stream_frame import tables
from isobasin.errors import IsobasinError
from isobasin.groups import Group, Permutation, SignedPermutation
from isobasin.symmetries import group_of
from isobasin.symmetries.action import Action
from isobasin.symmetries.normal_form import NormalForm, block_tensors
from isobasin.weights import Weights

NULL_SAMPLES = 8
QUANTILES = (0.05, 0.5, 0.95)


@dataclass(frozen=True)
class NullDistribution:
    """Scores of unrelated models: how many there are, the seed, and the scores."""

    draws: int
    seed: int
    scores: tuple[float, ...]

    @property
    def largest(self) -> float:
        return max(self.scores)

    def to_dict(self) -> dict[str, object]:
        found = torch.quantile(torch.tensor(self.scores, dtype=torch.float64), torch.tensor(QUANTILES).double())
        quantiles = {f"{q:g}": float(value) for q, value in zip(QUANTILES, found)}
        return {"draws": self.draws, "seed": self.seed, "quantiles": quantiles, "largest": self.largest}


@dataclass(frozen=True)
class DistanceResult:
    """`score`: 1 for the same orbit, about 0 for unrelated models; `null` holds the scores of unrelated models.

    `distance` is ‖A − gB‖/‖A‖ in balanced form, `naive` the same for the weights as they are stored.
    """

    score: float
    distance: float
    naive: float | None
    per_layer: tuple[Mapping[str, object], ...]
    null: NullDistribution
    layers: LayerMatrix | None = field(default=None, repr=False)

    @property
    def related(self) -> bool:
        """Whether the score exceeds the largest score of an unrelated model by more than the range of these scores.

        An unrelated model would exceed the largest of eight alone with probability 1/9. One sample decides nothing.
        """
        return self.null.draws > 1 and self.score > 2 * self.null.largest - min(self.null.scores)

    def to_dict(self) -> dict[str, object]:
        """The JSON object of `isobasin distance`."""
        matrix = self.layers.to_dict() if self.layers else {}
        return {
            "score": self.score,
            "distance": self.distance,
            "naive": self.naive,
            "related": self.related,
            "null": self.null.to_dict(),
            "per_layer": [dict(row) for row in self.per_layer],
        } | matrix

    def __str__(self) -> str:
        naive = "" if self.naive is None else f" (as stored {self.naive:.4g})"
        return (
            f"score {self.score:.4f}, unrelated models score at most {self.null.largest:.4f}; "
            f"distance {self.distance:.4g} of ‖A‖{naive}"
        )


def distance(
    a: Weights,
    b: Weights,
    *,
    layers: bool | None = None,
    draws: int = NULL_SAMPLES,
    seed: int = 0,
    device: torch.device | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> DistanceResult:
    """Distance modulo symmetry, block by block, with a score and the scores of `draws` unrelated models.

    Similarity of a block: s = 1 − ‖A − gB‖²/(‖A‖² + ‖B‖²). Its score: (s − s₀)/(1 − s₀), with s₀ the median over the
    unrelated models; the model's score is the mean over all blocks. Negative scores are reported as 0.
    Models of different depth are compared by the layer-to-layer matrix: every layer of the shallower model with the
    most similar layer of the other. `layers` asks for that matrix at equal depth too. `watch(done, of)` is called with
    the number of blocks compared, those of the unrelated models included.

    >>> print(distance(a, b))  # doctest: +SKIP
    score 0.9871, unrelated models score at most 0.0009; distance 0.02137 of ‖A‖ (as stored 1.402)
    """
    if draws < 1:
        raise IsobasinError(f"{draws} draws: expected at least 1, the scores of unrelated models come from them")
    check_same_blocks(a, b)
    place = device or torch.device("cpu")
    one, two = NormalForm.for_comparison(a, place), NormalForm.for_comparison(b, place)
    same_depth = a.arch.sizes.n_layers == b.arch.sizes.n_layers
    matrix = None
    if layers or not same_depth:
        matrix = layer_similarities(one, two, stream_map(one, two, pairs_by_depth(one, two))[0])
    pairs = [(s, s) for s in one.spaces] if same_depth or matrix is None else matrix.pairs(one, two)
    stream, by_all_blocks = stream_map(one, two, pairs)
    ends = a.arch.stream.name
    found = block_distances(one, two, [(ends, ends), *pairs], stream)

    def report(done: int) -> None:
        if watch:
            watch(len(found) + done, len(found) * (1 + draws))

    report(0)
    rotated = RotatedModel(two, seed)
    models = [UnrelatedModel(rotated, seed + k) for k in range(draws)]
    null = _null_similarities(one, models, pairs, by_all_blocks, report)
    return _result(a, b, found, null, matrix, seed)


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
        _row(a.arch.spaces[x], b.arch.spaces[y], each, s, naive.get(x))
        for ((x, y), each), s in zip(found.items(), scores)
    ]
    return DistanceResult(
        max(0.0, fmean(scores)),
        total(found.values()).distance,
        total(naive.values()).distance if naive else None,
        tuple(rows),
        NullDistribution(len(null), seed, tuple(null_scores)),
        matrix.scores(a.arch, dict(zip((x for x, _ in found), levels))) if matrix else None,
    )


def _naive(a: Weights, b: Weights, space: str) -> BlockDistance:
    """The distance of a block's tensors as they are stored."""
    square = size = 0.0
    for name in block_tensors(a.arch)[space]:
        reference = a[name].to(torch.float64)
        square += float((b[name].to(torch.float64) - reference).square().sum())
        size += float(reference.square().sum())
    return BlockDistance(square, size, 0.0)


def _row(
    x: Space | HeadSpace, y: Space | HeadSpace, found: BlockDistance, score: float, naive: BlockDistance | None
) -> dict[str, object]:
    return {
        "layer": x.layer,
        "other_layer": y.layer,
        "space": x.label,
        "naive": naive.distance if naive else None,
        "distance": found.distance,
        "similarity": found.similarity,
        "score": max(0.0, score),
    }


@dataclass(frozen=True)
class RotatedModel:
    """A model in a random frame of its stream, in which no coordinate is special.

    A random rotation is expensive, so all unrelated models and all blocks share one. Embeddings and head are not
    rotated: the map of the stream would undo it. Streams that can not be rotated are left unchanged. The block that was
    read last is kept.
    """

    model: BlockModel
    seed: int
    _last: dict[str, Mapping[str, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def arch(self) -> Architecture:
        return self.model.arch

    @cached_property
    def _action(self) -> Action:
        return Action(self.arch, {self.arch.stream.name: group_of(self.arch.stream).sample(seed=self.seed)})

    def block(self, space: str) -> Mapping[str, Tensor]:
        if space == self.arch.stream.name or not self.arch.stream.rotates:
            return self.model.block(space)
        if space not in self._last:
            self._last.clear()
            self._last[space] = {name: self._action.tensor(name, t) for name, t in self.model.block(space).items()}
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

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {space: number for number, space in enumerate(block_tensors(self.arch))}

    def block(self, space: str) -> Mapping[str, Tensor]:
        """Shuffled by an element that depends on the seed and the block."""
        seed = 1_000_003 * self.seed + self._numbers[space]
        action = Action(self.arch, {self.arch.stream.name: _shuffles(self.arch.stream).sample(seed=seed)})
        tensors = {name: action.tensor(name, t) for name, t in self.model.block(space).items()}
        if space == self.arch.stream.name:
            rng = torch.Generator().manual_seed(seed)
            for name, axis, _ in tables(self.arch, tuple(tensors)):
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
    a: BlockModel, models: Sequence[BlockModel], pairs: Spaces, by_all_blocks: bool, report: Callable[[int], None]
) -> list[list[float]]:
    """Similarities of all blocks, one row per unrelated model.

    Blocks that were shuffled independently have no common stream, so each is compared without a map. Only embeddings
    and head are mapped, because the map is made from them. Where layers took part in the map between A and B
    (`by_all_blocks`) they take part here as well: such a map finds some overlap in any model.
    """
    identity = group_of(a.arch.stream).identity()
    maps = [map_by_all_blocks(a, model, pairs) for model in models] if by_all_blocks else []
    rows: list[list[float]] = [[] for _ in models]
    ends = a.arch.stream.name
    for x, y in [(ends, ends), *pairs]:
        for k, model in enumerate(models):
            stream = maps[k] if by_all_blocks else map_by_embeddings(a, model) if x == ends else identity
            rows[k].append(BlockPair.of(a, model, x, y, stream).distance().similarity)
        report(sum(map(len, rows)))
    return rows
