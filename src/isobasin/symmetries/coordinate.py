"""Gauge coordinates: numbers of a checkpoint that its function does not see.

A coordinate can be read, and set to any value by changes of the weights that leave the function as it is.
With the group elements they are all the symmetries of a model; a `Transform` holds both.
"""

from abc import ABC, abstractmethod
from enum import IntEnum

import torch
from torch import Tensor

from isobasin.arch import Architecture, Axis, HeadSpace
from isobasin.symmetries.action import Action
from isobasin.views import Change, Tensors

SMALLEST_MEAN = 0.1
"""β/γ must have a mean of at least this share of its size to stand for the bias that a reader lacks: what a reader
carries there comes back with its rounding divided by this share, and float32 files must come back to 1e-6."""

SMALLEST_SUM = 0.1
"""The sum of β/γ, relative to its norm, below which it can not stand for such a bias at all: what a reader carries may
grow to ten times the size of its weights there."""

SMALL = 1e-6  # of the largest gain: nothing that is seen is divided by a smaller one
CONSTANT = 1e-3  # of the largest number of a tensor: lines with a smaller spread are next to constant
NEGLIGIBLE = 1e-20  # of the largest gain: a smaller one is treated as zero


class Stage(IntEnum):
    """The order in which coordinates are set: none disturbs the value of one that was set before it."""

    HEAD_MEAN = 0
    HEAD_CONSTANT = 1
    READER_MEAN = 2
    NORM = 3
    HIDDEN = 4
    KEY = 5
    VALUE = 6
    SUM = 7
    WRITER_MEAN = 8


class Coordinate(ABC):
    """One free coordinate of an architecture: a vector, or a few, that can be chosen at will."""

    stage: Stage
    name: str
    folds = False  # a factor that is taken out before group elements act, and put back afterwards
    smallest_sample = 0.05  # size of a random value where the present one is smaller

    @property
    @abstractmethod
    def dim(self) -> int:
        """How many directions of the weights it makes free, beside those of the coordinates before it."""

    @property
    @abstractmethod
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes that a value of it may have."""

    @property
    @abstractmethod
    def touches(self) -> frozenset[str]:
        """The tensors that setting it may change."""

    @abstractmethod
    def read(self, tensors: Tensors) -> Tensor:
        """Its value in a model."""

    @abstractmethod
    def set(self, value: Tensor) -> dict[str, Change]:
        """The changes that give it this value."""

    @abstractmethod
    def transported(self, value: Tensor, action: Action) -> Tensor:
        """Its value after group elements have acted on a model in which it had this value."""

    def sample(self, value: Tensor, rng: torch.Generator) -> Tensor:
        """A random value of the size of the present one, far from it, and harmless to precision."""
        size = value.square().mean().sqrt().clamp(min=self.smallest_sample)
        return size * torch.randn(value.shape, generator=rng, dtype=torch.float64) * self.mask(value)

    def limit(self, tensors: Tensors) -> Tensor | None:
        """The largest random value: a mean that is far larger than the numbers it is added to would cost their
        precision; None where it can not."""
        return None

    def still(self, tensors: Tensors) -> Tensor | None:
        """Where a random value would cost precision, and the present one stays; None: nowhere."""
        return None

    def canonical(self, value: Tensor) -> Tensor:
        """What a factor is while it is taken out."""
        return torch.ones_like(value)

    def mask(self, like: Tensor) -> Tensor:
        """One where the value may be chosen, zero where it is not free."""
        return torch.ones_like(like)

    def nearest(self, tensors: Tensors, target: Tensors) -> Tensor:
        """The value that brings this model closest to another one; in general simply the other one's value."""
        return self.read(target)

    def least(self, tensors: Tensors) -> Tensor:
        """The value at which the tensors it touches are least; in general simply zero."""
        return torch.zeros(self.shapes[0], dtype=torch.float64)

    def usable(self, tensors: Tensors) -> bool:
        """False for the rare models in which it is not free (such as one with a gain of zero)."""
        return True


# -- small linear algebra on an axis -------------------------------------------------------------------------------


def along(vector: Tensor, weight: Tensor, axis: int) -> Tensor:
    """The vector, shaped to multiply this axis of the weight."""
    return vector.reshape([-1 if k == axis % weight.dim() else 1 for k in range(weight.dim())])


def contract(weight: Tensor, axis: int, vector: Tensor) -> Tensor:
    """The weight applied to a vector on this axis, flat."""
    return (weight.movedim(axis, -1) @ vector).flatten()


def add_outer(weight: Tensor, axis: int, rows: Tensor, vector: Tensor) -> Tensor:
    """weight + rows ⊗ vector, with the vector on this axis and one number of `rows` for all others."""
    moved = weight.movedim(axis, -1)
    return (moved + rows.reshape(moved.shape[:-1])[..., None] * vector).movedim(-1, axis)


def face_columns(arch: Architecture, axis: Axis, face: str, *, dual: bool | None = None) -> list[int]:
    """The places on an axis that belong to a face, head by head (blocks may be fused, or fused inside heads)."""
    sizes = [arch.term_size(term) for term in axis.terms]
    wanted = [t.name == face and (dual is None or t.dual == dual) for t in axis.terms]
    space = arch.space_of(axis.terms[0]) if axis.terms else None
    repeat = space.n_kv_heads if axis.per_head and isinstance(space, HeadSpace) else 1
    columns, start = [], 0
    for _ in range(repeat):
        for size, take in zip(sizes, wanted, strict=True):
            stop = start + size // repeat
            columns += list(range(start, stop)) if take else []
            start = stop
    return columns


def constant_lines(tensor: Tensor, axis: int) -> Tensor:
    """Where a tensor is the same number along an axis: behind a LayerNorm that is zero, which nothing but rounding
    changes, and a small eps makes rounding large."""
    centred = tensor - tensor.mean(axis, keepdim=True)
    if tensor.shape[axis] == 1:  # of width 1 a LayerNorm leaves zeros, whatever it reads
        return torch.zeros_like(centred.amax(axis), dtype=torch.bool)
    return centred.abs().amax(axis) <= CONSTANT * tensor.abs().max().clamp(min=1e-300)


def negligible(gain: Tensor) -> Tensor:
    """Where a gain is zero, or so far below the others that nothing can be divided by it."""
    return gain.abs() <= NEGLIGIBLE * gain.abs().max()


def carries_constant(gain: Tensor, shift: Tensor) -> bool:
    """Whether a reader behind this norm holds its constant Wβ on its own, as a bias would: s = β/γ reaches far enough
    along the all-ones vector, or a gain of zero leaves a column that sees the shift alone, or a gain is so small that
    its shift can not move with it."""
    small = gain.abs() <= SMALL * gain.abs().max()
    if bool((shift[small] != 0).any()):
        return True
    return not bool(negligible(gain).any()) and has_mean(gain, shift)


def has_mean(gain: Tensor, shift: Tensor) -> bool:
    """Whether s = β/γ reaches far enough along the all-ones vector to carry a constant without losing digits."""
    s = shift / gain
    return bool(s.mean().abs() > SMALLEST_MEAN * s.square().mean().sqrt())


def has_sum(gain: Tensor, shift: Tensor) -> bool:
    """Whether s = β/γ reaches along the all-ones vector at all, so that a constant can be moved there."""
    s = shift / gain
    return bool(s.sum().abs() > SMALLEST_SUM * s.norm())


LARGEST_MEAN = 30.0  # of random values, relative to the numbers they are added to: some two digits of precision


def mean_limit(numbers: Tensor, axis: int) -> Tensor:
    """The limit of a random value that is added along an axis; none where all numbers are zero."""
    size = numbers.square().mean(axis).sqrt()
    return torch.where(size > 0, LARGEST_MEAN * size, torch.inf)
