"""How far two models are apart once every symmetry is taken away, part by part, and what that says.

Both models are brought to balanced form, the stream of B is mapped to A's, and then every part of B is moved by the
element of its own group that brings it closest: closed forms throughout, one part of each model in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

import torch

from isobasin.compare.layers import LayerMatrix, check_alike, layer_pairs, layer_spaces, similarities
from isobasin.compare.normal_form import Form
from isobasin.compare.null import Null, Turned, Unrelated
from isobasin.compare.similarity import Meeting, Pair, Parted
from isobasin.compare.streams import Spaces, StreamMap, map_by_all, map_by_ends, stream_map
from isobasin.errors import IsobasinError
from isobasin.match.canonical import ENDS, STREAM, stream_of
from isobasin.symmetries import group_of
from isobasin.weights import Weights

DRAWS = 8


@dataclass(frozen=True)
class Likeness:
    """`score`: 1 for the same orbit, about 0 for unrelated models; `null` says what unrelated ones score.

    `distance` is ‖A − gB‖/‖A‖ over balanced forms, `naive` the same for the weights as they are stored.
    """

    score: float
    distance: float
    naive: float | None
    per_layer: tuple[Mapping[str, object], ...]
    null: Null
    layers: LayerMatrix | None = field(default=None, repr=False)

    @property
    def related(self) -> bool:
        """Whether the score is above those of all unrelated models drawn, by more than they differ themselves.

        Above the largest of eight an unrelated model would be once in nine times. A single one says nothing.
        """
        return self.null.draws > 1 and self.score > 2 * self.null.largest - min(self.null.scores)

    @property
    def facts(self) -> dict[str, object]:
        """As `isobasin distance --json` prints it."""
        matrix = self.layers.facts if self.layers else {}
        return {
            "score": self.score,
            "distance": self.distance,
            "naive": self.naive,
            "related": self.related,
            "null": self.null.facts,
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
    draws: int = DRAWS,
    seed: int = 0,
    device: torch.device | None = None,
    watch: Callable[[int, int], None] | None = None,
) -> Likeness:
    """Distance modulo symmetry, part by part, with a score and the scores of `draws` unrelated models.

    Similarity of a part: s = 1 − ‖A − gB‖²/(‖A‖² + ‖B‖²). Its score: (s − s₀)/(1 − s₀), with s₀ the median over the
    unrelated models; the model's score is the mean over all parts, and both are shown as 0 where they are less.
    Models of different depth are compared by the layer-to-layer matrix: every layer of the shallower one beside the
    layer that it is most like. `layers` asks for that matrix at equal depth too. `watch(done, of)` is told of the
    parts that were compared, those of the unrelated models included.

    >>> print(distance(a, b))  # doctest: +SKIP
    score 0.9871, unrelated models score at most 0.0009; distance 0.02137 of ‖A‖ (as stored 1.402)
    """
    if draws < 1:
        raise IsobasinError(f"{draws} draws: expected at least 1, the scores of unrelated models come from them")
    check_alike(a, b)
    place = device or torch.device("cpu")
    one, two = Form(a, place), Form(b, place)
    deep = a.arch.sizes.n_layers != b.arch.sizes.n_layers
    table = None
    if deep or layers:
        table = similarities(one, two, stream_map(one, two, layer_pairs(one, two)).element)
    pairs = table.pairs(one, two) if table and deep else [(s, s) for s in one.spaces]
    stream = stream_map(one, two, pairs)
    found = _measured(one, two, pairs, stream)

    def tell(done: int) -> None:
        if watch:
            watch(len(found) + done, len(found) * (1 + draws))

    tell(0)
    frame = Turned(two, seed)
    models = [Unrelated(frame, seed + k) for k in range(draws)]
    by_chance = _swept_by_chance if stream.swept else _by_chance
    chance = by_chance(one, models, pairs, tell)
    return _likeness(a, b, found, chance, table, seed)


def _measured(a: Parted, b: Parted, pairs: Spaces, stream: StreamMap) -> dict[tuple[str, str], Pair]:
    """Every part with its distance, the ends first."""
    places = [(ENDS, ENDS), *pairs]
    return {(x, y): stream.known.get((x, y)) or Meeting.of(a, b, x, y, stream.element).pair() for x, y in places}


def _by_chance(a: Parted, models: Sequence[Parted], pairs: Spaces, tell: Callable[[int], None]) -> list[list[float]]:
    """Similarities of all parts, a row for each unrelated model.

    Parts that were turned by themselves have no common stream, so each is compared as it is, and read once for all
    models; only the ends are mapped, as a map is made from them.
    """
    still = group_of(stream_of(a.arch)).identity()
    rows: list[list[float]] = [[] for _ in models]
    for x, y in [(ENDS, ENDS), *pairs]:
        for row, model in zip(rows, models):
            stream = map_by_ends(a, model) if x == ENDS else still
            row.append(Meeting.of(a, model, x, y, stream).pair().similarity)
        tell(sum(map(len, rows)))
    return rows


def _swept_by_chance(
    a: Parted, models: Sequence[Parted], pairs: Spaces, tell: Callable[[int], None]
) -> list[list[float]]:
    """The same where layers took part in the map between A and B: they find something to turn to in any model, so they
    take part in these as well, and models are measured one by one."""
    rows: list[list[float]] = []
    for model in models:
        found = _measured(a, model, pairs, StreamMap(map_by_all(a, model, pairs), {}))
        rows.append([pair.similarity for pair in found.values()])
        tell(sum(map(len, rows)))
    return rows


def _likeness(
    a: Weights,
    b: Weights,
    found: Mapping[tuple[str, str], Pair],
    chance: Sequence[Sequence[float]],
    table: LayerMatrix | None,
    seed: int,
) -> Likeness:
    middle = [median(column) for column in zip(*chance)]
    scores = [_above(pair.similarity, m) for pair, m in zip(found.values(), middle)]
    null = [fmean(_above(s, m) for s, m in zip(row, middle)) for row in chance]
    naive = {space: _naive(a, b, space) for space, other in found if space == other} if _same_depth(a, b) else {}
    rows = [_row(x, y, pair, s, naive.get(x)) for ((x, y), pair), s in zip(found.items(), scores)]
    square, size = (sum(getattr(p, key) for p in found.values()) for key in ("square", "size_a"))
    whole = [sum(n[k] for n in naive.values()) for k in range(2)]
    level = dict(zip((x for x, _ in found), middle))
    return Likeness(
        max(0.0, fmean(scores)),
        (square / max(size, 1e-300)) ** 0.5,
        (whole[0] / max(whole[1], 1e-300)) ** 0.5 if naive else None,
        tuple(rows),
        Null(len(chance), seed, tuple(null)),
        table.above(level) if table else None,
    )


def _above(similarity: float, middle: float) -> float:
    return (similarity - middle) / max(1 - middle, 1e-300)


def _same_depth(a: Weights, b: Weights) -> bool:
    return a.arch.sizes.n_layers == b.arch.sizes.n_layers


def _naive(a: Weights, b: Weights, space: str) -> tuple[float, float]:
    """Squared distance and size of a part's tensors as they are stored."""
    square = size = 0.0
    for name in Form(a).parts[space]:
        reference = a[name].to(torch.float64)
        square += float((b[name].to(torch.float64) - reference).square().sum())
        size += float(reference.square().sum())
    return square, size


def _row(x: str, y: str, pair: Pair, score: float, naive: tuple[float, float] | None) -> dict[str, object]:
    kind, layer = layer_spaces(x)
    return {
        "layer": layer,
        "other_layer": layer_spaces(y)[1],
        "space": STREAM if x == ENDS else kind,
        "naive": (naive[0] / max(naive[1], 1e-300)) ** 0.5 if naive else None,
        "distance": pair.distance,
        "similarity": pair.similarity,
        "score": max(0.0, score),
    }
