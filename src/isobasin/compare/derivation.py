"""What models in one basis say about their history: weighted averages, zeros, and their distances.

Every tensor counts alike: its sampled numbers are divided by its mean size over the models. A distance of 0.01 is then
one per cent of the weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import torch
from torch import Tensor

from isobasin.compare.sketch import Numbers

LEAST_WEIGHT = 0.02  # of a parent in an average
EXACT_SHARE = 0.1  # of the distance to the nearest parent: an average leaves no more than this
EQUAL = 1e-7  # distance of two models that are equal but for the rounding of float32
COMPUTED = 0.95  # share of the numbers of a model that was computed from others, which rounding gives
MOST_COMPUTED, LEAST_COMPUTED = 2**15, 2**6  # numbers of a model, and of a tensor, that are computed again
MOST_PARENTS = 4
MOST_MIXTURES = 12  # of one size that are looked at
LEAST_ZEROS = 0.05  # share of exact zeros that only a pruned model has


@dataclass(frozen=True)
class Mixture:
    """A weighted average: its parents, their weights, what it leaves of the model, and the distance of the nearest
    parent."""

    parents: tuple[int, ...]
    weights: tuple[float, ...]
    residual: float
    nearest: float

    def explains(self, rounding: float) -> bool:
        """Whether nothing is left beyond rounding, and rounding is small beside the distance of the parents."""
        return self.residual <= min(rounding, EXACT_SHARE * self.nearest)


@dataclass(frozen=True)
class Basis:
    """The sampled numbers of models in one basis."""

    numbers: tuple[Numbers, ...]

    @cached_property
    def tensors(self) -> list[str]:
        """The tensors that all of them have."""
        first, *others = self.numbers
        return [n for n, x in first.items() if all(n in y and y[n].shape == x.shape for y in others) and bool(x.any())]

    @cached_property
    def scales(self) -> dict[str, float]:
        """By tensor, the size that its numbers are divided by."""
        squares = {n: sum(float(x[n].square().sum()) for x in self.numbers) / len(self.numbers) for n in self.tensors}
        return {n: max(s * len(self.tensors), 1e-300) ** 0.5 for n, s in squares.items()}

    def row(self, numbers: Numbers) -> Tensor:
        return torch.cat([numbers[n] / self.scales[n] for n in self.tensors])

    @cached_property
    def rows(self) -> Tensor:
        """One row for each model, of length about one."""
        return torch.stack([self.row(numbers) for numbers in self.numbers])

    @cached_property
    def gram(self) -> Tensor:
        """Products of the rows, less their mean."""
        centred = self.rows - self.rows.mean(0)
        return centred @ centred.mT

    @cached_property
    def distances(self) -> Tensor:
        diagonal = self.gram.diagonal()
        found = (diagonal[:, None] + diagonal - 2 * self.gram).clamp_min(0).sqrt()
        close = torch.nonzero((found < 1e-5).triu(1)).tolist()  # where products lose their last digits
        for i, j in close:
            found[i, j] = found[j, i] = (self.rows[i] - self.rows[j]).norm()
        return found

    def largest_difference(self, i: int, j: int) -> float:
        """The relative distance of the tensor in which two models differ most."""
        a, b = self.numbers[i], self.numbers[j]
        return max(float((a[n] - b[n]).norm() / a[n].norm().clamp_min(1e-300)) for n in self.tensors)

    # -- averages ------------------------------------------------------------------------------------------------

    def mixture(self, child: int, parents: Sequence[int]) -> Mixture | None:
        """The average of these parents nearest to a model: least squares with weights that add up to one."""
        difference = self.rows[list(parents)] - self.rows[child]
        size = len(parents)
        system = torch.ones(size + 1, size + 1, dtype=torch.float64)
        system[:size, :size] = difference @ difference.mT
        system[size, size] = 0
        scale = float(system[:size, :size].diagonal().max()) or 1.0
        system[:size, :size] /= scale
        wanted = torch.zeros(size + 1, dtype=torch.float64)
        wanted[size] = 1
        weights = torch.linalg.lstsq(system, wanted[:, None], driver="gelsd").solution[:size, 0]
        if not bool((weights >= LEAST_WEIGHT).all()):
            return None
        residual = float((weights @ difference).norm())
        return Mixture(tuple(parents), tuple(weights.tolist()), residual, float(difference.norm(dim=1).min()))

    def residuals(self, child: int, parents: Tensor) -> Tensor:
        """What the best average of each set of parents leaves, from products of rows: a set in each row."""
        ids = parents.flatten().unique()
        at = torch.zeros(len(self.gram), dtype=torch.long)
        at[ids] = torch.arange(len(ids))
        g, c = self.gram, child
        inner = g[ids][:, ids] - g[ids, c][:, None] - g[ids, c] + g[c, c]
        blocks = inner[at[parents][:, :, None], at[parents][:, None, :]]
        size = parents.shape[1]
        scale = blocks.diagonal(dim1=1, dim2=2).amax(1).clamp_min(1e-300)
        system = blocks / scale[:, None, None] + 1e-12 * torch.eye(size, dtype=torch.float64)
        ones = torch.ones(len(parents), size, 1, dtype=torch.float64)
        solved, singular = torch.linalg.solve_ex(system, ones)
        solution = solved[..., 0]
        total = solution.sum(1)
        weights = solution / total[:, None]
        left = (scale / total).clamp_min(0).sqrt()
        return torch.where((singular == 0) & (weights >= LEAST_WEIGHT / 2).all(1), left, torch.inf)

    def mixtures(self, child: int, among: Sequence[int], share: float) -> Iterator[Mixture]:
        """Averages that leave at most this share of the distance to the nearest parent: those of few parents first,
        among them those that leave least."""
        among = self._different(child, among)
        for size in range(2, min(MOST_PARENTS, len(among)) + 1):
            sets = torch.tensor(list(combinations(among, size)))
            left = self.residuals(child, sets) / self.distances[child][sets].amin(1).clamp_min(1e-300)
            order = torch.argsort(left)[: int((left <= share).sum())][:MOST_MIXTURES]
            found = (self.mixture(child, each) for each in sets[order].tolist())
            yield from (m for m in found if m is not None and m.residual <= share * m.nearest)

    def _different(self, child: int, among: Sequence[int]) -> list[int]:
        """Those that are equal neither to the model nor to another of them: weights of equal parents mean nothing."""
        found: list[int] = []
        for other in among:
            if all(float(self.distances[other, o]) > EQUAL for o in (child, *found)):
                found.append(other)
        return found

    # -- zeros ---------------------------------------------------------------------------------------------------

    def new_zeros(self, child: int, parent: int) -> tuple[float, float, float]:
        """The share of numbers that are exactly zero in a model and not in the other, the reverse, and the distance
        of the two on the other numbers."""
        new = old = count = 0
        square = 0.0
        for n in self.tensors:
            x, y = self.numbers[child][n], self.numbers[parent][n]
            new += int(((x == 0) & (y != 0)).sum())
            old += int(((x != 0) & (y == 0)).sum())
            count += len(x)
            square += float((x - y)[x != 0].square().sum()) / self.scales[n] ** 2
        return new / count, old / count, square**0.5


# -- which of several models on a line was computed -------------------------------------------------------------------


def shows_average(child: Numbers, parents: Sequence[Numbers], weights: Sequence[float]) -> bool:
    """Whether the stored numbers show that a model was averaged from the others, and none of them from it.

    M = Σ wᵢ Pᵢ up to rounding also reads Pⱼ = (M − Σ wᵢ Pᵢ) / wⱼ, an extrapolation. Only a model that was computed from
    the others has the numbers that rounding gives. A parent of a rounded average has them in about wⱼ of its
    places, as its own rounding is not the one that the extrapolation would have.
    """
    if computed_share(child, parents, weights) < COMPUTED:
        return False
    for j, parent in enumerate(parents):
        signed = [1 / weights[j], *(-w / weights[j] for i, w in enumerate(weights) if i != j)]
        others = [child, *(p for i, p in enumerate(parents) if i != j)]
        if computed_share(parent, others, signed) >= (1 + weights[j]) / 2:
            return False
    return True


def computed_share(target: Numbers, parts: Sequence[Numbers], weights: Sequence[float]) -> float:
    """The share of a model's numbers that are a weighted sum of others rounded to its type, in the best of several
    orders and types of the computation. Numbers that all models share do not count."""
    names = [n for n, x in target.items() if all(n in p and p[n].shape == x.shape for p in parts)]
    most = max(LEAST_COMPUTED, MOST_COMPUTED // max(1, len(names)))
    equal: dict[int, int] = {}  # by way of the computation
    count = 0
    for name in names:
        x, others = target[name], [p[name] for p in parts]
        differs = torch.stack([y != x for y in others]).any(0).nonzero()[:most, 0]
        x, others, dtype = x[differs], [y[differs] for y in others], _narrowest(x)
        count += len(x)
        for way, found in enumerate(_sums(others, weights, dtype)):
            equal[way] = equal.get(way, 0) + int((found.to(dtype).to(x.dtype) == x).sum())
    return max(equal.values(), default=0) / max(1, count)


def _sums(parts: Sequence[Tensor], weights: Sequence[float], dtype: torch.dtype) -> Iterator[Tensor]:
    """A weighted sum as programs compute it: in the stored type, float32 or float64; as a sum of all, or from one model
    by its differences to the others; with the weights as measured, or with round ones."""
    for used in (weights, [round(w, 3) for w in weights]):
        for computed in (dtype, torch.float32, torch.float64):
            xs = [x.to(computed) for x in parts]
            ws = [torch.tensor(w, dtype=computed) for w in used]
            yield sum((w * x for w, x in zip(ws, xs)), torch.zeros((), dtype=computed))
            for start in xs:
                yield sum((w * (x - start) for w, x in zip(ws, xs) if x is not start), start)


def _narrowest(x: Tensor) -> torch.dtype:
    """The narrowest type that holds these numbers exactly."""
    types = (torch.bfloat16, torch.float16, torch.float32)
    return next((dtype for dtype in types if torch.equal(x.to(dtype).to(x.dtype), x)), torch.float64)
