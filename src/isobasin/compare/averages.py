"""Averages and pruned models whose parents are stored in another basis than they are.

What a parent adds to an average is known once the others are: the model less the others. The parent is aligned to
that, and in turn each other one; the same for the numbers that a pruned model has kept.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.compare.confirmation import largest_line
from isobasin.compare.derivation import Basis
from isobasin.compare.sketch import CPU, matrix_names, sampled, transform_to
from isobasin.weights import ModelSource, Weights, load

SWEEPS = 6
SETTLED = 0.9  # of what was left before: less of a gain ends the descent


@dataclass(frozen=True)
class Average:
    """The weights of an average, what it leaves of the sampled numbers of the model, relative, and of all rows the most
    that it leaves, relative to the distance to the nearest parent (of this row, or the usual one)."""

    weights: tuple[float, ...]
    residual: float
    largest_row: float = float("inf")


@dataclass(frozen=True)
class _Aligned:
    """A model and the parents of an average in one basis, the weights, and what the average leaves."""

    child: Weights
    parents: list[Weights]
    weights: tuple[float, ...]
    residual: float

    def measured(self) -> Average:
        names = [n for n in matrix_names(self.child.arch) if all(n in p for p in self.parents)]
        largest = max(map(self._largest_row, names), default=0.0)
        return Average(self.weights, self.residual, largest)

    def _largest_row(self, name: str) -> float:
        x, *others = (m[name].to(torch.float64).flatten(1) for m in (self.child, *self.parents))
        if any(y.shape != x.shape for y in others):
            return 0.0
        left = (x - sum(w * y for w, y in zip(self.weights, others))).norm(dim=1)
        nearest = torch.stack([(x - y).norm(dim=1) for y in others]).amin(0)
        usual = float(nearest.square().mean().sqrt().clamp(min=1e-300))
        return float((left / nearest.clamp(min=usual)).max())


@dataclass(frozen=True)
class AverageCheck:
    """A task: an average modulo symmetry.

    `bases` number the bases that the parents are stored in, `own` is that of the model. Parents in it stay; where that
    is all of them, each in turn is the one that stays.
    """

    child: ModelSource
    parents: tuple[ModelSource, ...]
    weights: tuple[float, ...]
    bases: tuple[int, ...]
    own: int

    @property
    def scattered(self) -> bool:
        """Whether no parent is stored in the model's basis."""
        return self.own not in self.bases

    def __call__(self) -> Average:
        child = load(self.child).resident(CPU)
        parents = [load(each).resident(CPU) for each in self.parents]
        inside = [k for k, basis in enumerate(self.bases) if basis == self.own]
        staying = [inside] if len(inside) < len(parents) else [[k] for k in inside]
        found = [self._moved_parents(child, parents, stay) for stay in staying]
        if len(set(self.bases)) == 1 and not inside:
            found.append(self._moved_child(child, parents))
        return min(found, key=lambda each: each.residual).measured()

    def _moved_child(self, child: Weights, parents: list[Weights]) -> _Aligned:
        """Of parents in one basis: move the model to their average, solve for the weights there, and again."""
        best = _Aligned(child, parents, self.weights, float("inf"))
        for _ in range(SWEEPS):
            moved = aligned(child, combined(parents[0], parents, best.weights, 1.0))
            found, residual = self._solved(moved, parents)
            if not residual < SETTLED * best.residual:
                break
            best = _Aligned(moved, parents, found, residual)
        return best

    def _moved_parents(self, child: Weights, parents: list[Weights], stay: Sequence[int]) -> _Aligned:
        """Move each parent, but those that stay, to what it adds to the model."""
        moved = list(parents)
        for basis in sorted(set(self.bases) - {self.own}):
            self._move_together(basis, child, parents, moved)
        best = _Aligned(child, list(moved), *self._solved(child, moved))
        for _ in range(SWEEPS):
            for k, parent in enumerate(parents):
                if k in stay:
                    continue
                others = [o for o in range(len(parents)) if o != k]
                signed = [1, *(-best.weights[o] for o in others)]
                target = combined(child, [child, *(moved[o] for o in others)], signed, best.weights[k])
                moved[k] = aligned(parent, target)
            found, residual = self._solved(child, moved)
            if not residual < best.residual:
                break
            settled, best = residual > SETTLED * best.residual, _Aligned(child, list(moved), found, residual)
            if settled:
                break
        return best

    def _move_together(self, basis: int, child: Weights, parents: list[Weights], moved: list[Weights]) -> None:
        """Move the parents of one basis so that their average comes next to the model."""
        members = [k for k, b in enumerate(self.bases) if b == basis]
        weights = [self.weights[k] for k in members]
        middle = combined(parents[members[0]], [parents[k] for k in members], weights, sum(weights))
        transform = transform_to(middle, child)
        for k in members:
            moved[k] = held(transform.apply(parents[k]))

    def _solved(self, child: Weights, moved: list[Weights]) -> tuple[tuple[float, ...], float]:
        basis = Basis((sampled(child), *map(sampled, moved)))
        found = basis.mixture(0, range(1, len(moved) + 1))
        return (self.weights, float("inf")) if found is None else (found.weights, found.residual)


@dataclass(frozen=True)
class Pruned:
    """The share of numbers that are zero in a model alone, the distance to its parent on the others, and that of the
    row or column that differs most."""

    zeros: float
    left: float
    largest: float = float("inf")


@dataclass(frozen=True)
class PrunedCheck:
    """A task: how well a parent that is stored in another basis agrees with the numbers that a model has kept."""

    child: ModelSource
    parent: ModelSource

    def __call__(self) -> Pruned:
        child, parent = load(self.child).resident(CPU), load(self.parent).resident(CPU)
        target, best = child, Pruned(0.0, float("inf"))
        for _ in range(SWEEPS):
            moved = aligned(parent, target)
            new, _, left = Basis((sampled(child), sampled(moved))).new_zeros(0, 1)
            if not left < best.left:
                break
            settled, best = left > SETTLED * best.left, Pruned(new, left, _largest_difference(child, moved))
            if settled:
                break
            target = _filled(child, moved)
        return best


def _largest_difference(child: Weights, parent: Weights) -> float:
    """Of all matrices, the row or column in which a model differs most from its parent where it is not zero."""

    def difference(name: str) -> float:
        x, y = child[name], parent[name]
        return largest_line(x, torch.where(x == 0, 0, y)) if x.shape == y.shape else 0.0

    return max(difference(n) for n in matrix_names(child.arch) if n in parent)


def _filled(child: Weights, parent: Weights) -> Weights:
    """A model with the parent's numbers where its own are zero."""

    def numbers(name: str) -> Tensor:
        own = child[name].to(torch.float64)
        return torch.where(own == 0, parent[name].to(torch.float64), own)

    return changed(child, numbers)


def aligned(model: Weights, to: Weights) -> Weights:
    """A model moved next to another one, in memory."""
    return held(transform_to(model, to).apply(model))


def combined(like: Weights, models: Sequence[Weights], weights: Sequence[float], share: float) -> Weights:
    """Σ wᵢ Mᵢ / share, with the architecture and the buffers of a model."""

    def numbers(name: str) -> Tensor:
        return sum((w * m[name].to(torch.float64) for w, m in zip(weights, models)), torch.zeros(())) / share

    return changed(like, numbers)


def held(model: Weights) -> Weights:
    """The same model with its tensors in memory."""
    return replace(model, tensors={name: model[name] for name in model})


def changed(model: Weights, numbers: Callable[[str], Tensor]) -> Weights:
    """A model with other numbers in all tensors but buffers."""
    names = [name for name, pattern in model.arch.tensors.items() if not pattern.buffer]
    tensors: Mapping[str, Tensor] = {name: numbers(name) if name in names else model[name] for name in model}
    dtypes = {name: torch.float32 if name in names else dtype for name, dtype in model.dtypes.items()}
    return replace(model, tensors=tensors, dtypes=dtypes, checkpoint=None, changed=frozenset(names))
