"""Overlaps of two models on one of their spaces, read off the patterns.

For a space S and a tensor with an axis in S, overlap[i, j] is the product of A's slice i and B's slice j, summed over
all other axes; ‖A − g B‖² depends on g through these sums alone, whatever the tensor was.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.arch import Architecture, Term
from isobasin.groups import Element
from isobasin.match.acting import Acting
from isobasin.shapes import Float
from isobasin.views import Tensors

CHUNK = 2**21  # numbers of each side that are in float64 at once


@dataclass(frozen=True)
class Overlap:
    """Sums over axes that move by g, by its dual g⁻ᵀ, and by its permutation alone; and the sizes of B's slices.

    `signed` moves by the permutation and the signs of g, or by a rotation as a whole: what activations add.
    """

    primal: Float[Tensor, "n n"]
    dual: Float[Tensor, "n n"]
    magnitude: Float[Tensor, "n n"]
    signed: Float[Tensor, "n n"]
    primal_size: Float[Tensor, " n"]
    dual_size: Float[Tensor, " n"]

    def __add__(self, other: "Overlap") -> "Overlap":
        return Overlap(*(_sum(x, y) for x, y in zip(vars(self).values(), vars(other).values())))

    @property
    def turning(self) -> Tensor:
        """All that moves with a self-dual element."""
        return _sum(_sum(self.primal, self.dual), self.signed)

    def joined(self, benefit: Tensor | None) -> "Overlap":
        """With a table of benefits that depend on the permutation and the signs alone."""
        return self if benefit is None else replace(self, signed=self.signed + benefit)


def overlap(
    arch: Architecture,
    space: str,
    a: Tensors,
    b: Tensors,
    names: Iterable[str],
    element: Element,
    *,
    double: bool = False,
) -> Overlap:
    """Summed over the tensors named; `b` is B where its other spaces have moved it already.

    A tensor with two axes in this space is linearised: on each axis in turn, with `element` acting on the other.
    `double` sums in float64 whatever the tensors are: in trained models a few directions hold most of the stream, and
    once it is rotated the rounding of their sums, on every axis then, is larger than what the weak directions hold.
    """
    action = Acting(arch, {space: element})
    total = empty(element.n, next(iter(b.values())))
    for name in names:
        words = arch.tensors[name].roles[0].axes  # a tied tensor counts once: its roles agree
        axes = [k for k, w in enumerate(words) if len(w.terms) == 1 and arch.space_of(w.terms[0]).name == space]
        for axis in axes:
            moved = b[name]
            for other in axes:
                moved = moved if other == axis else action.act(moved, other, words[other])
            total = total + _of_axis(a[name], moved, axis, words[axis].terms[0], total, double)
    return total


def empty(size: int, like: Tensor) -> Overlap:
    """Two models that have nothing in common on a space of this size."""
    square = torch.zeros((), dtype=like.dtype, device=like.device).expand(size, size)  # takes no memory
    return Overlap(square, square, square, square, square[:, 0], square[:, 0])


def _sum(x: Tensor, y: Tensor) -> Tensor:
    """x + y; tables of a wide layer are large, and most of them are the empty one."""
    if not any(x.stride()):
        return y
    return x if not any(y.stride()) else x + y


def _of_axis(a: Tensor, b: Tensor, axis: int, term: Term, like: Overlap, double: bool) -> Overlap:
    rows_a, rows_b = (x.movedim(axis, 0).reshape(x.shape[axis], -1) for x in (a, b))
    kind = "magnitude" if term.magnitude else "dual" if term.dual else "primal"
    fields = vars(empty(len(rows_a), like.primal)) | {kind: _product(rows_a, rows_b, double)}
    if kind != "magnitude":
        fields[f"{kind}_size"] = rows_b.square().sum(1)
    return Overlap(**fields)


def _product(x: Float[Tensor, "n k"], y: Float[Tensor, "n k"], double: bool) -> Float[Tensor, "n n"]:
    """X Yᵀ, if asked in float64 and then a few columns at a time."""
    if not double or x.dtype == torch.float64:
        return x @ y.mT
    step = max(1, CHUNK // max(1, len(x)))
    total = torch.zeros(len(x), len(y), dtype=torch.float64, device=x.device)
    for some_x, some_y in zip(x.split(step, dim=1), y.split(step, dim=1)):
        total.addmm_(some_x.to(torch.float64), some_y.to(torch.float64).mT)
    return total
