"""The arithmetic of a merge, on numbers in a row: linear, and along the great circle (slerp).

Sums are formed in float32 (float64 for float64 inputs) in the order of the models, by the operations that mergekit
uses, and rounded to the type of the output: bit for bit the same result. Everything elementwise goes in chunks
of `CHUNK` numbers: they stay in the processor's cache, and torch starts no threads of its own for so few, which leaves
the cores to a pool of blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

CHUNK = 2**15
PART = 2**20  # the parts in which slerp adds up norms and products: their number is seen in the last bit
COLLINEAR = 0.9995  # beyond this cosine, in either direction, slerp is a straight line
TINY = 1e-8  # a norm below it counts as one

Read = Callable[[int, int], Sequence[Tensor]]  # the numbers start:stop of every model


class Mixture(Protocol):
    """A merge of one tensor whose coefficients are known."""

    def chunk(self, parts: Sequence[Tensor], spare: Tensor) -> Tensor:
        """The mixture of a few numbers of every model, given in the working type; `spare` may be written to."""
        ...


class Method(Protocol):
    """A way to merge: `prepared` looks at a whole tensor where it has to."""

    @property
    def name(self) -> str: ...

    def prepared(self, read: Read, size: int, via: torch.dtype) -> Mixture: ...


@dataclass(frozen=True)
class Linear:
    """Σ wᵢ xᵢ, divided by Σ wᵢ where it is normalised."""

    weights: tuple[float, ...]
    normalize: bool = True
    name: str = "linear"

    def prepared(self, read: Read, size: int, via: torch.dtype) -> Mixture:
        weights = torch.tensor([self.weights], dtype=working(via))
        return _Sum(weights.unbind(1), weights.sum(dim=1) if self.normalize else None)


@dataclass(frozen=True)
class _Sum:
    weights: tuple[Tensor, ...]
    total: Tensor | None

    def chunk(self, parts: Sequence[Tensor], spare: Tensor) -> Tensor:
        spare.zero_()
        for part, weight in zip(parts, self.weights):
            spare.addcmul_(part, weight)
        return spare if self.total is None else spare.div_(self.total)


@dataclass(frozen=True)
class Slerp:
    """sin((1−t)θ)/sin θ · x + sin(tθ)/sin θ · y, θ the angle between two whole tensors; x is that of model `base`."""

    t: float
    base: int = 0
    name: str = "slerp"

    def prepared(self, read: Read, size: int, via: torch.dtype) -> Mixture:
        work = working(via)
        t = torch.tensor([[self.t]], dtype=work)
        if not size:
            return _Arc((1 - t, t), self.base)
        cosine = _cosine(read, size, via)
        straight = cosine.abs() > COLLINEAR
        angle = torch.acos(torch.where(straight, 0, cosine))  # a right angle where it is not used: no division by 0
        near = torch.where(straight, 1 - t, torch.sin((1 - t) * angle) / torch.sin(angle))
        far = torch.where(straight, t, torch.sin(t * angle) / torch.sin(angle))
        return _Arc((near, far), self.base)


@dataclass(frozen=True)
class _Arc:
    coefficients: tuple[Tensor, Tensor]
    base: int

    def chunk(self, parts: Sequence[Tensor], spare: Tensor) -> Tensor:
        near, far = (c.reshape(1) for c in self.coefficients)
        torch.mul(parts[self.base], near, out=spare)
        return spare.add_(parts[1 - self.base] * far)


def _cosine(read: Read, size: int, via: torch.dtype) -> Tensor:
    """⟨x, y⟩ / ‖x‖‖y‖ of two tensors, (1, 1), a part of each in memory at a time."""

    def parts() -> "Sequence[range]":
        return [range(start, min(start + PART, size)) for start in range(0, size, PART)]

    def pair(part: range) -> tuple[Tensor, Tensor]:
        x, y = (each.to(via).to(working(via)).reshape(1, -1) for each in read(part.start, part.stop))
        return x, y

    norms = [[torch.linalg.vector_norm(x, dim=1, keepdim=True) for x in pair(part)] for part in parts()]
    lengths = [torch.linalg.vector_norm(torch.stack(each), dim=0) for each in zip(*norms)]
    a, b = (torch.where(length > TINY, length, 1) for length in lengths)
    # Divided before they are multiplied: the product of large numbers does not overflow.
    products = [((x / a) * (y / b)).sum(dim=1, keepdim=True) for x, y in map(pair, parts())]
    return torch.stack(products).sum(dim=0).clamp(-1, 1)


def working(via: torch.dtype) -> torch.dtype:
    """The type sums are formed in."""
    return torch.float64 if via == torch.float64 else torch.float32


def mixed(mixture: Mixture, parts: Sequence[Tensor], via: torch.dtype, out: torch.dtype) -> tuple[Tensor, bool]:
    """A mixture of flat tensors as type `out`, and whether all of it is finite; each part is first rounded to `via`."""
    work, size = working(via), parts[0].numel()
    result = torch.empty(size, dtype=out)
    spare, held = torch.empty(min(CHUNK, size), dtype=work), [torch.empty(min(CHUNK, size), dtype=work) for _ in parts]
    extremes = []
    for target, *pieces in zip(result.split(CHUNK), *(part.split(CHUNK) for part in parts)):
        n = target.numel()
        wide = [room[:n].copy_(piece.to(via)) for room, piece in zip(held, pieces)]
        target.copy_(mixture.chunk(wide, spare[:n]))
        if n:
            extremes += target.aminmax()  # both carry NaN along
    return result, not extremes or bool(torch.stack(extremes).isfinite().all())
