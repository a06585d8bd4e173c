"""A sketch of a model: enough of its numbers to compare it with many others, without reading it again.

It holds the fingerprint, sampled numbers of every tensor, and Gram matrices of rows of the embeddings and the head,
which no rotation of the stream changes. Models whose numbers are in one basis (as they are stored, or after one is
moved to another) are compared by the sampled numbers: distances, mixtures and zeros are then linear algebra.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from isobasin.alignment.descent import embedding_distance
from isobasin.alignment.experts import solve_with_experts
from isobasin.alignment.gauge import with_reference_gauge
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.problem import AlignmentProblem
from isobasin.alignment.trunk import trunk_pair
from isobasin.arch import Architecture
from isobasin.checkpoint import dtype_name
from isobasin.compare.distance import check_same_blocks, layer_similarities, pairs_by_depth, stream_maps
from isobasin.compare.fingerprint import Fingerprint, fingerprint
from isobasin.compare.stream_frame import fixed_bits, stream_rows
from isobasin.errors import ArchitectureError, IsobasinError, TransformError, is_memory_problem, one_line
from isobasin.rounding import rounding_unit
from isobasin.symmetries import symmetry
from isobasin.symmetries.normal_form import NormalForm
from isobasin.symmetries.transform import Transform
from isobasin.weights import ModelSource, Weights, is_tied, load, read_part, untied

SAMPLED = 2**20  # numbers of a model, in all
MOST, LEAST = 2**14, 2**8  # numbers of one tensor
ROWS = 512  # of a table, in its Gram matrix
FEWEST_ROWS = 8
SAME_LAYER = 1 - 1e-4  # cosine of two tensors of copied layers
EMBEDDINGS_THRESHOLD = 0.35  # similarity of embeddings and head, below which two models are not aligned

Numbers = Mapping[str, Tensor]  # sampled, by tensor
NOT_COMPARABLE = (IsobasinError, KeyError, ValueError, RuntimeError)  # errors of torch are RuntimeErrors
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sketch:
    """What tells a model from others; `narrowest` is the coarsest of its types, `unit` its rounding, `dtype` the widest
    type."""

    numbers: Numbers
    vectors: Numbers  # biases and gains, of the tensors with one axis
    fingerprint: Fingerprint
    grams: tuple[Tensor, ...]
    unit: float
    dtype: str
    narrowest: str

    @property
    def zero_share(self) -> float:
        """The share of exact zeros in its matrices."""
        matrices = list(self.numbers.values())
        return sum(int((x == 0).sum()) for x in matrices) / max(1, sum(len(x) for x in matrices))


@dataclass(frozen=True)
class SketchOf:
    """A task: the sketch of a model."""

    source: ModelSource

    def __call__(self) -> Sketch:
        weights = load(self.source).resident(CPU)
        part = read_part(weights)
        types = [dtype for name, dtype in part.dtypes.items() if not part.arch.tensors[name].buffer]
        widest, narrowest = (dtype_name(each) for each in (weights.dtype, max(types, key=rounding_unit)))
        unit = max(map(rounding_unit, types))
        return Sketch(sampled(part), vectors(part), fingerprint(weights), table_grams(part), unit, widest, narrowest)


@dataclass(frozen=True)
class Moved:
    """What an alignment found: the transform of the moving models, their numbers in the basis of the other model (under
    its tensor names), and the layers of it that theirs correspond to."""

    transform: Transform
    numbers: tuple[Numbers, ...]
    layers: tuple[int, ...] | None


@dataclass(frozen=True)
class MoveTo:
    """A task: align a model to another one, and move it and the models that are stored in its basis.

    `transform` moves the other model first. Of a deeper model those layers take part that correspond to the moving
    one's. Without `always` the result is None where embeddings and heads have too little in common.
    """

    members: tuple[ModelSource, ...]  # the first is aligned
    to: ModelSource
    transform: Transform | None = None
    always: bool = False

    def __call__(self) -> Moved | None:
        to, first = load(self.to).resident(CPU), load(self.members[0]).resident(CPU)
        to = to if self.transform is None else applied(self.transform, to)
        to, first = with_heads_alike(to, first)
        layers, names = None, {name: name for name in first.arch.tensors}
        if to.arch.sizes.n_layers != first.arch.sizes.n_layers:
            layers = kept_layers(to, first)
            if layers is None:
                return None
            names = renamed(first.arch, to.arch, layers)
            to = with_layers(first, to, names)
        if not self.always and 1 - table_distance(to, first) < EMBEDDINGS_THRESHOLD:
            return None
        found = transform_to(first, to)
        moved = (
            moved_numbers(found, with_heads_alike(load(each).resident(CPU), first)[0], first) for each in self.members
        )
        return Moved(found, tuple({names.get(n, n): x for n, x in each.items()} for each in moved), layers)


def with_heads_alike(a: Weights, b: Weights) -> tuple[Weights, Weights]:
    """Both with a head of their own, where only one of them has its head tied to the embedding."""
    return (
        (a, b)
        if is_tied(a) == is_tied(b) or a.family.class_of(a.config) != b.family.class_of(b.config)
        else (untied(a), untied(b))
    )


def transform_to(b: Weights, a: Weights) -> Transform:
    """What brings B next to A, in A's gauge: as `align` finds it, but without a measurement of the result."""
    pair = trunk_pair(a, b)
    one, two = (a, b) if pair is None else (pair.a, pair.b)
    problem = AlignmentProblem(one, two, symmetry(two.arch), WeightMatching(), CPU)
    elements = {name: g for part in problem.independent_parts() for name, g in solve_with_experts(part)[1].items()}
    found = with_reference_gauge(one, two, problem.part, elements, CPU)
    return found if pair is None else pair.of_whole(found, b)


def applied(transform: Transform, model: Weights) -> Weights:
    """The moved model. Its head may be another one than that of the model that the transform was made for: what
    concerns only that one is left out."""
    arch, free = model.arch, symmetry(model.arch).coordinates
    elements = {name: g for name, g in transform.elements.items() if name in arch.spaces}
    gauge = {name: value for name, value in transform.gauge.items() if name in free}
    return replace(transform, spaces=dict(arch.spaces), elements=elements, gauge=gauge).apply(model)


def moved_numbers(transform: Transform, model: Weights, first: Weights) -> Numbers:
    """The sampled numbers of a model that is moved by a transform for another one; of their trunk alone, where the
    head of the model has a smaller group."""
    try:
        return sampled(read_part(applied(transform, model)))
    except TransformError:
        pair = trunk_pair(model, first)
        if pair is None:
            raise
        numbers = sampled(replace(transform, spaces=dict(pair.a.arch.spaces)).apply(pair.a))
        return {name: x for name, x in numbers.items() if name in pair.shared and name not in pair.rows}


def table_distance(a: Weights, b: Weights) -> float:
    """What the best map of the stream leaves of embeddings and head; of those that both have, where heads differ."""
    pair = trunk_pair(a, b)
    one, two = (a, b) if pair is None else (pair.a, pair.b)
    return embedding_distance(one, two, device=CPU)


# -- samples ----------------------------------------------------------------------------------------------------------


def sampled(model: Weights) -> dict[str, Tensor]:
    """Numbers of every tensor with two axes or more, at fixed places that depend on its size alone."""
    names = matrix_names(model.arch)
    each = min(MOST, max(LEAST, SAMPLED // max(1, len(names))))
    return {name: _at_fixed_places(model[name], each) for name in names}


def vectors(model: Weights) -> dict[str, Tensor]:
    names = [n for n, pattern in model.arch.tensors.items() if not pattern.buffer and len(model.arch.shapes[n]) == 1]
    return {name: _at_fixed_places(model[name], MOST) for name in names}


def matrix_names(arch: Architecture) -> list[str]:
    return [n for n, pattern in arch.tensors.items() if not pattern.buffer and len(arch.shapes[n]) > 1]


def _at_fixed_places(tensor: Tensor, most: int) -> Tensor:
    flat = tensor.reshape(-1)
    if len(flat) > most:
        bits = torch.from_numpy((fixed_bits(f"sample {len(flat)}", (most,)) >> 1).astype("int64"))
        flat = flat[bits % len(flat)]
    return flat.to("cpu", torch.float64)


def table_grams(model: Weights) -> tuple[Tensor, ...]:
    """For embeddings and heads, the products of rows with each other, less their mean: no rotation changes them."""
    form, found = NormalForm.for_comparison(model), []
    for stream in model.arch.streams:
        for _, rows in stream_rows(form, stream, [stream]):
            if len(rows) >= FEWEST_ROWS:
                some = rows[torch.linspace(0, len(rows) - 1, min(len(rows), ROWS)).long()].to("cpu", torch.float64)
                some = some - some.mean(0)
                gram = some @ some.mT
                found.append(gram[tuple(torch.triu_indices(len(gram), len(gram), 1))].to(torch.float32))
    return tuple(found)


def gram_similarity(a: Sketch, b: Sketch) -> float:
    """The smallest correlation of the Gram matrices of two models; 1 where there are none to compare."""
    pairs = [(x, y) for x, y in zip(a.grams, b.grams) if x.shape == y.shape]
    return min((cosine(x, y) for x, y in pairs), default=1.0)


def cosine(x: Tensor, y: Tensor) -> float:
    return float(x @ y / (x.norm() * y.norm()).clamp_min(1e-300))


def agreement(a: Numbers, b: Numbers, of: Callable[[list[float]], float] = median) -> float:
    """The median (or what is given) over the tensors that both have of the cosine between them."""
    found = [cosine(x, b[name]) for name, x in a.items() if name in b and x.shape == b[name].shape]
    return of(found) if found else 0.0


# -- layers -----------------------------------------------------------------------------------------------------------


def repeats_layers(model: Numbers, arch: Architecture, kept: Sequence[int]) -> bool:
    """Whether every other layer is a copy of one of these."""
    layers = layer_names(arch)

    def same(i: int, j: int) -> bool:
        return all(cosine(model[a], model[b]) > SAME_LAYER for a, b in zip(layers[i], layers[j], strict=True))

    return all(any(same(i, j) for j in kept) for i in range(len(layers)) if i not in kept)


def layer_names(arch: Architecture) -> list[list[str]]:
    """The names of each layer's matrices, in the order of the architecture; names of two layers correspond."""
    found: list[list[str]] = [[] for _ in range(arch.sizes.n_layers)]
    for space, names in arch.blocks.items():
        layer = arch.spaces[space].layer
        if layer is not None:
            found[layer] += [name for name in names if len(arch.shapes[name]) > 1]
    return found


def renamed(short: Architecture, deep: Architecture, layers: Sequence[int]) -> dict[str, str]:
    """The tensors of the deeper model that those of the other one correspond to, by their number in the name."""
    found = {}
    for name in short.tensors:
        parts = name.split(".")
        k = next((k for k, part in enumerate(parts) if part.isdigit() and int(part) < len(layers)), None)
        other = name if k is None else ".".join([*parts[:k], str(layers[int(parts[k])]), *parts[k + 1 :]])
        found[name] = other if short.shapes[name] == deep.shapes.get(other) else name
    return found


def with_layers(short: Weights, deep: Weights, names: Mapping[str, str]) -> Weights:
    """The deeper model with only the layers that correspond to the other one's, in its architecture."""
    tensors = {name: deep[names[name]] for name in short.arch.tensors}
    dtypes = {name: deep.dtypes[names[name]] for name in short.arch.tensors}
    return replace(short, tensors=tensors, dtypes=dtypes, checkpoint=None, changed=frozenset(short.arch.tensors))


def kept_layers(deep: Weights, short: Weights) -> tuple[int, ...] | None:
    """The layers of the deeper model most similar to those of the other one modulo symmetry, in ascending order."""
    try:
        check_same_blocks(deep, short)
    except ArchitectureError:
        return None
    one, two = NormalForm.for_comparison(read_part(deep)), NormalForm.for_comparison(read_part(short))
    maps, _ = stream_maps(one, two, pairs_by_depth(one, two))
    return in_order(layer_similarities(one, two, maps).matrix)


def stored_layers(deep: Sketch, short: Sketch, archs: tuple[Architecture, Architecture]) -> tuple[int, ...]:
    """The same for two models in one basis, by their numbers."""
    of_deep, of_short = (layer_names(arch) for arch in archs)

    def similar(x: Sequence[str], y: Sequence[str]) -> float:
        return median(cosine(deep.numbers[a], short.numbers[b]) for a, b in zip(x, y, strict=True))

    return in_order([[similar(x, y) for y in of_short] for x in of_deep])


def in_order(similarities: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """For every column another row, in ascending order, such that the sum of similarities is largest.

    >>> in_order([[0.9, 0.1], [0.2, 0.3], [0.8, 0.7]])
    (0, 2)
    """
    nothing: tuple[float, tuple[int, ...]] = float("-inf"), ()
    best = [(0.0, nothing[1]), *[nothing] * len(similarities[0])]
    for row, values in enumerate(similarities):
        for column in range(len(values), 0, -1):
            total, rows = best[column - 1]
            best[column] = max(best[column], (total + values[column - 1], (*rows, row)))
    return best[-1][1]


@dataclass(frozen=True)
class Failed:
    """Why a comparison could not be made."""

    reason: str


@dataclass(frozen=True)
class Attempt:
    """A task that compares models. Its result is `Failed` if they can not be compared: heads or tensors that do not
    fit, or a singular system."""

    task: Callable[[], Any]

    def __call__(self) -> Any:
        try:
            return self.task()
        except NOT_COMPARABLE as error:
            if is_memory_problem(error):
                raise
            return Failed(reason_of(error))


def reason_of(error: Exception) -> str:
    """An error in one line, with its type if it is none of ours."""
    words = str(error) if isinstance(error, IsobasinError) else f"{type(error).__name__}: {error}"
    return one_line(words)


def do(task: Any) -> Any:
    """Do a task, in whatever process."""
    return task()
