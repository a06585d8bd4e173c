"""The mean of several models, and their distances from it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from isobasin.views import AsFloat64, Change, View
from isobasin.weights import Weights

MAX_HELD = 2**27  # numbers of all models together, up to which moved models are held in memory (in float64)


@dataclass(frozen=True)
class Spread:
    """Squared distances of models from their mean, and the squared norm of the mean."""

    squares: tuple[float, ...]
    norm: float

    @property
    def total(self) -> float:
        return sum(self.squares)

    @property
    def distances(self) -> list[float]:
        """The distances relative to the norm of the mean."""
        return [(square / max(self.norm, 1e-300)) ** 0.5 for square in self.squares]


def mean_of(models: Sequence[Weights]) -> Weights:
    """The mean model in float64, computed when a tensor is read; buffers are those of the first model."""
    first, models = models[0], tuple(models)

    def mean(name: str) -> Change:
        return lambda _: _mean([_float64(model, name) for model in models])

    changes = {name: mean(name) for name in first if not first.arch.tensors[name].buffer}
    return replace(first, tensors=View(first, changes), checkpoint=None, changed=frozenset(changes), exact=False)


def _float64(model: Weights, name: str) -> Tensor:
    return AsFloat64(model)[name].cpu()


def _mean(tensors: Sequence[Tensor]) -> Tensor:
    return sum(tensors[1:], tensors[0]) / len(tensors)


def held_if_small(model: Weights, n_models: int) -> Weights:
    """The model with its tensors in memory, if that many models of this size fit; otherwise as it is."""
    return model.held(model) if n_models * model.n_params <= MAX_HELD else model


def spread_of(models: Sequence[Weights], names: Sequence[str]) -> Spread:
    """The spread over these tensors; one tensor of each model is in memory at a time."""
    squares, norm = [0.0] * len(models), 0.0
    for name in names:
        tensors = [_float64(model, name) for model in models]
        mean = _mean(tensors)
        squares = [s + float((t - mean).square().sum()) for s, t in zip(squares, tensors)]
        norm += float(mean.square().sum())
    return Spread(tuple(squares), norm)


def squared_distance(a: Weights, b: Weights, names: Sequence[str]) -> float:
    """‖a − b‖² over these tensors."""
    return sum(float((_float64(a, name) - _float64(b, name)).square().sum()) for name in names)
