"""Whether what sampled numbers say of models holds for all of their numbers: copies, casts, averages, pruned models.

A sketch holds a million numbers of a model, so a row that was replaced in a large table may not be among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isobasin.compare.equivalence import equivalent
from isobasin.compare.sketch import CPU, applied, renamed, with_heads_alike
from isobasin.errors import TransformError
from isobasin.symmetries.normal_form import unheld_norms
from isobasin.symmetries.transform import Transform
from isobasin.weights import ModelSource, Weights, load, read_part, untied

SAME_LINE = (
    16.0  # times the rounding: one row or column of a copy, relative to the larger of its size and the usual one
)
SAME_SUM = 4.0  # times the rounding: one row of an average or a pruned model, as it is stored
LEFT = 0.1  # of the distance to the nearest parent: one row of an average leaves no more than this


@dataclass(frozen=True)
class CastCheck:
    """A task: whether every number of a model is that of another one, rounded to this type or to that of its tensor."""

    child: ModelSource
    parent: ModelSource
    dtype: torch.dtype

    def __call__(self) -> bool:
        a, b = map(read_part, with_heads_alike(_resident(self.child), _resident(self.parent)))
        return _names(a) == _names(b) and all(self._is_cast(a[n], b[n]) for n in _names(a))

    def _is_cast(self, x: Tensor, y: Tensor) -> bool:
        rounded = (y.to(dtype).to(torch.float64) for dtype in (x.dtype, self.dtype))
        return x.shape == y.shape and any(torch.equal(each, x.to(torch.float64)) for each in rounded)


@dataclass(frozen=True)
class SumCheck:
    """A task: whether a model is a weighted sum of others, row by row, each moved by a transform to one basis; with
    `zeros` but for numbers that are zero in the model alone."""

    child: ModelSource
    parents: tuple[ModelSource, ...]
    weights: tuple[float, ...]
    transforms: tuple[Transform | None, ...]  # of the child, then of the parents
    rounding: float
    zeros: bool = False

    def __call__(self) -> bool:
        models = (_resident(each) for each in (self.child, *self.parents))
        moved = (_moved(transform, model) for transform, model in zip(self.transforms, models, strict=True))
        child, *parents = map(read_part, moved)
        shared = [name for name in _names(child) if all(name in p for p in parents)]
        return all(self._holds(child[n], [p[n] for p in parents]) for n in shared)

    def _holds(self, x: Tensor, others: Sequence[Tensor]) -> bool:
        if any(y.shape != x.shape for y in others):
            return True  # rows of the vocabulary that one of them lacks are not compared
        x, *others = (_rows(y) for y in (x, *others))
        if self.zeros:
            others = [torch.where(x == 0, 0, y) for y in others]
        left = (x - sum(w * y for w, y in zip(self.weights, others))).norm(dim=1)
        nearest = torch.stack([(x - y).norm(dim=1) for y in others]).amin(0)
        size = torch.stack([y.norm(dim=1) for y in (x, *others)]).amax(0)
        rounding = self.rounding * (SAME_SUM if len(set(map(id, self.transforms))) == 1 else SAME_LINE)
        share = 0.0 if self.zeros else LEFT
        return bool((left <= rounding * size + share * nearest).all())


@dataclass(frozen=True)
class LayersCheck:
    """A task: whether all numbers of a model are those of these layers of a deeper one, in one basis."""

    short: ModelSource
    deep: ModelSource
    layers: tuple[int, ...]
    rounding: float

    def __call__(self) -> bool:
        short, deep = (read_part(_resident(each)) for each in (self.short, self.deep))
        names = renamed(short.arch, deep.arch, self.layers)
        pairs = ((short[n], deep[names[n]]) for n in _names(short) if names[n] in deep)
        return all(x.shape == y.shape and largest_line(x, y) <= SAME_SUM * self.rounding for x, y in pairs)


@dataclass(frozen=True)
class CopyCheck:
    """A task: whether a model that is stored in another basis is a copy of another one, each moved by a transform to a
    basis of both. Where vectors, or shifts that hold no constants, leave doubt, the answer is that of `equivalent`."""

    child: ModelSource
    parent: ModelSource
    transforms: tuple[Transform | None, Transform | None]
    rounding: float

    def __call__(self) -> bool:
        a, b = with_heads_alike(_resident(self.child), _resident(self.parent))
        shown = self._lines_agree(a, b)
        if shown is None or (not shown and unheld_norms(a, b, by_both=True)):
            return equivalent(self.child, self.parent).answer == "same"
        return shown

    def _lines_agree(self, a: Weights, b: Weights) -> bool | None:
        """Whether all lines of all tensors agree; None: those of matrices do, vectors do not."""
        try:
            a, b = (read_part(_moved(*each)) for each in zip(self.transforms, (a, b), strict=True))
        except (TransformError, KeyError):
            return None
        if _names(a) != _names(b):
            return False
        vectors, matrices = ([n for n in _names(a) if (len(a.arch.shapes[n]) > 1) is many] for many in (False, True))
        if any(largest_line(a[n], b[n]) > SAME_LINE * self.rounding for n in matrices):
            return False
        return True if all(largest_line(a[n], b[n]) <= SAME_LINE * self.rounding for n in vectors) else None


def largest_line(x: Tensor, y: Tensor) -> float:
    """The distance of the rows or columns of two tensors that differ most, relative to their size or the usual one."""
    x, y = _rows(x), _rows(y)
    return max(_largest(x, y, axis) for axis in range(1 + (len(x) > 1)))


def _largest(x: Tensor, y: Tensor, axis: int) -> float:
    size = torch.maximum(x.norm(dim=1 - axis), y.norm(dim=1 - axis))
    usual = size.square().mean().sqrt().clamp(min=1e-300)
    return float(((x - y).norm(dim=1 - axis) / size.clamp(min=float(usual))).max())


def _moved(transform: Transform | None, model: Weights) -> Weights:
    if transform is None:
        return model
    try:
        return applied(transform, model)
    except TransformError:  # one that was made for models with a head of their own
        return applied(transform, untied(model))


def _resident(source: ModelSource) -> Weights:
    return load(source).resident(CPU)


def _names(model: Weights) -> list[str]:
    return [name for name, pattern in model.arch.tensors.items() if not pattern.buffer]


def _rows(x: Tensor) -> Tensor:
    """In float64, a vector as one row."""
    x = x.to("cpu", torch.float64)
    return x[None] if x.dim() < 2 else x.flatten(1)
