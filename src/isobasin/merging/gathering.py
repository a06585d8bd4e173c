"""The mean of several models, how far they are spread around it, and the tensors that a scope may change."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from isobasin.symmetries import symmetry
from isobasin.views import Doubled
from isobasin.weights import Weights

HELD = 2**27  # numbers, of all models together, up to which moved models are held in memory (in float64)


@dataclass(frozen=True)
class Spread:
    """Squared distances of models from their mean, and the square of its norm."""

    squares: tuple[float, ...]
    norm: float

    @property
    def total(self) -> float:
        return sum(self.squares)

    @property
    def distances(self) -> list[float]:
        return [(square / max(self.norm, 1e-300)) ** 0.5 for square in self.squares]


class Mean(Mapping[str, Tensor]):
    """The mean of several models, tensor by tensor, in float64; buffers are the first model's."""

    def __init__(self, models: tuple[Weights, ...]) -> None:
        self._models = models

    def __getitem__(self, name: str) -> Tensor:
        first = self._models[0]
        if first.arch.tensors[name].buffer:
            return first[name]
        return sum((Doubled(m)[name].cpu() for m in self._models[1:]), Doubled(first)[name].cpu()) / len(self._models)

    def __iter__(self) -> Iterator[str]:
        return iter(self._models[0])

    def __len__(self) -> int:
        return len(self._models[0])


def mean_of(models: Sequence[Weights]) -> Weights:
    """Their mean as a model of its own, computed where it is read."""
    first = models[0]
    changed = frozenset(name for name in first if not first.arch.tensors[name].buffer)
    return replace(first, tensors=Mean(tuple(models)), checkpoint=None, changed=changed, exact=False)


def at_hand(model: Weights, among: int) -> Weights:
    """The same model, in memory if so many of them fit: what is computed where it is read costs its price each time."""
    return model.held(model) if among * model.n_params <= HELD else model


def spread_of(models: Sequence[Weights], names: Sequence[str]) -> Spread:
    """Over these tensors, one of each model in memory at a time."""
    squares, norm = [0.0] * len(models), 0.0
    for name in names:
        tensors = [Doubled(model)[name].cpu() for model in models]
        mean = sum(tensors[1:], tensors[0]) / len(tensors)
        squares = [s + float((t - mean).square().sum()) for s, t in zip(squares, tensors)]
        norm += float(mean.square().sum())
    return Spread(tuple(squares), norm)


def square_between(a: Weights, b: Weights, names: Sequence[str]) -> float:
    """‖a − b‖² over these tensors."""
    return sum(float((Doubled(a)[name].cpu() - Doubled(b)[name].cpu()).square().sum()) for name in names)


def scope_tensors(model: Weights, scope: str) -> tuple[str, ...]:
    """The weights that a scope's symmetry may change."""
    part, arch = symmetry(model.arch).scoped(scope), model.arch
    free = {name for coordinate in part.coordinates.values() for name in coordinate.touches}
    return tuple(
        name
        for name, pattern in arch.tensors.items()
        if not pattern.buffer
        and (
            name in free
            or any(
                arch.space_of(term).name in part.groups
                for role in pattern.roles
                for axis in role.axes
                for term in axis.terms
            )
        )
    )
