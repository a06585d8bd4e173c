"""Limits of residuals: how large a residual may be, as a multiple of its noise floor, if rounding alone causes it.

Rounding errors are independent and bounded, and the transform that leads from B to A mixes them. The squared norm of a
line (a row, a column, an entry or a whole tensor) with covariance Σ then exceeds tr Σ + 2 √(tr Σ² x) + 2 ‖Σ‖ x with a
probability of at most e⁻ˣ (Hsu, Kakade and Zhang 2012, for errors that are uniform or Gaussian). So a line of many
independent errors has a limit near its noise floor, and one that is a single error seen through the transform a limit
of several times that. x follows from `FALSE_ALARMS`, divided among all lines. Where the variance is estimated from a
few perturbed copies, the limit also covers the error of the estimate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp, log

import torch
from scipy.special import gammaincinv
from torch import Tensor

from isobasin.shapes import Float

FALSE_ALARMS = 1e-4  # the probability that some line of a copy exceeds its limit by chance
ROUNDINGS = 4  # how often the weights of a copy may have been rounded
BOUND = 6.0  # the square of the sum of two rounding errors, in units of its variance, is never larger


def log_odds(n_weights: int) -> float:
    """x for a model of this size: the number of its lines is about that of its weights."""
    return log(n_weights / FALSE_ALARMS)


@dataclass(frozen=True)
class Judged:
    """Per line: the residual in multiples of the noise floor, and how large that may be. `certain`: how large for
    weights that were rounded once, with a noise floor taken as it is estimated; below it more draws change nothing."""

    ratio: Tensor
    allowed: Tensor
    certain: Tensor

    @property
    def excess(self) -> Tensor:
        return self.ratio / self.allowed

    @property
    def worst(self) -> tuple[float, float]:
        at = int(self.excess.argmax())
        return float(self.ratio[at]), float(self.allowed[at])

    @property
    def is_certain(self) -> bool:
        return bool((self.ratio <= self.certain).all())

    def worst_of_rows(self) -> "Judged":
        """Per row, the entry that is worst relative to its limit; certain as the worst relative to what is certain."""
        at, least = self.excess.argmax(1, keepdim=True), (self.ratio / self.certain).amax(1)
        ratio, allowed = (x.gather(1, at)[:, 0] for x in (self.ratio, self.allowed))
        return Judged(ratio, allowed, ratio / least.clamp(min=1e-300))

    @staticmethod
    def joined(parts: "Sequence[Judged]") -> "Judged":
        """All of these lines."""
        return Judged(*(torch.cat([getattr(p, key) for p in parts]) for key in ("ratio", "allowed", "certain")))


@dataclass(frozen=True)
class Entries:
    """Entries of a tensor as (row, column, others): the squared residual, the variance of the noise that is known, and
    draws of the rest. Without draws nothing was mixed, and all of the noise is known."""

    residual: Float[Tensor, "rows columns others"]
    known: Float[Tensor, "rows columns others"]
    draws: Float[Tensor, "draws rows columns others"]

    def judged(self, x: float) -> Judged:
        """The worst entry of each row. A few draws of one entry may all be small by chance, in one of millions: its
        variance is taken as at least what its row and its column have."""
        moved = self._moved()
        if len(self.draws):
            rows, columns = moved.mean((1, 2), keepdim=True), moved.mean(0, keepdim=True)
            moved = torch.maximum(moved, rows * columns / moved.mean().clamp(min=1e-300))
        noise = (self.known + moved).clamp(min=1e-300)
        one = noise.new_ones(())
        n_draws = len(self.draws)
        doubt = torch.minimum(_doubt(n_draws * one, x), noise / self.known) if n_draws else one
        limits = (each.expand_as(noise).flatten(1) for each in _limits(one, one, doubt, x, exact=not n_draws))
        return Judged(_ratio(self.residual, noise).flatten(1), *limits).worst_of_rows()

    def lines(self, axis: int) -> "Lines":
        """Sums over the rows (axis 0) or the columns (axis 1)."""
        others = tuple(k for k in range(3) if k != axis)
        moved = self._moved()
        each = (self.residual, self.known + moved, self.known, self.known * (self.known + 2 * moved))
        length = self.residual.numel() // self.residual.shape[axis]
        return Lines(torch.stack([x.sum(others) for x in each]), self._products[axis], self.known.amax(others), length)

    @cached_property
    def _products(self) -> tuple[Tensor, Tensor]:
        """The products of the draws with each other, summed over rows and over columns."""
        n = len(self.draws)
        found = [self.draws.new_empty(size, n, n) for size in self.known.shape[:2]]
        for k in range(n):
            products = self.draws[k] * self.draws[k:]
            for axis, sums in enumerate(found):
                sums[:, k, k:] = sums[:, k:, k] = products.sum((2 - axis, 3)).mT
        return found[0], found[1]

    def _moved(self) -> Tensor:
        return self.draws.square().mean(0) if len(self.draws) else torch.zeros_like(self.known)


@dataclass(frozen=True)
class Lines:
    """Sums over the entries of each line: of the squared residual, the variance of the noise, its known part, and the
    part of tr Σ² that needs no draws; the products of the draws with each other give the rest."""

    sums: Float[Tensor, "4 lines"]
    products: Float[Tensor, "lines draws draws"]
    largest: Float[Tensor, " lines"]  # known variance of an entry
    length: int

    @staticmethod
    def joined(parts: "Sequence[Lines]") -> "Lines":
        """All of these lines."""
        products, largest = (torch.cat([getattr(p, key) for p in parts]) for key in ("products", "largest"))
        return Lines(torch.cat([p.sums for p in parts], 1), products, largest, parts[0].length)

    def extended_by(self, other: "Lines") -> "Lines":
        """The same lines with more entries."""
        largest, length = torch.maximum(self.largest, other.largest), self.length + other.length
        return Lines(self.sums + other.sums, self.products + other.products, largest, length)

    def total(self) -> "Lines":
        """One line of all entries."""
        sums, products = self.sums.sum(1, keepdim=True), self.products.sum(0, keepdim=True)
        return Lines(sums, products, self.largest.max()[None], self.length * len(self.largest))

    def judged(self, x: float) -> Judged:
        _, noise, known, squares = self.sums.clamp(min=1e-300)
        n_draws, spread = self.products.shape[-1], squares + _mean_square_product(self.products)
        # One over the number of independent errors. An estimate from draws gets a margin of 2.
        share = (spread / noise.square() * (2 if n_draws else 1)).clamp(1 / self.length, 1)
        largest = share.sqrt() if n_draws else (self.largest / noise).clamp(max=1)
        doubt = torch.minimum(_doubt(n_draws / share, x), noise / known) if n_draws else torch.ones(())
        return Judged(_ratio(self.sums[0], noise), *_limits(share, largest, doubt, x, exact=not n_draws))


def _ratio(residual: Tensor, noise: Tensor) -> Tensor:
    return (residual / noise).sqrt()


def _limits(share: Tensor, largest: Tensor, doubt: Tensor, x: float, *, exact: bool) -> tuple[Tensor, Tensor]:
    """The limit of a ratio, for weights that were rounded several times, and for those rounded once with a noise floor
    beyond doubt; where nothing was mixed, at most the bound."""
    tail = 1 + 2 * (x * share).sqrt() + 2 * x * largest
    tail = tail.clamp(max=BOUND) if exact else tail
    return (ROUNDINGS * tail * doubt).sqrt(), tail.sqrt()


def _doubt(degrees: Tensor, x: float) -> Tensor:
    """How much larger a variance may be than its estimate from draws with this many degrees of freedom."""
    return degrees / (2 * torch.as_tensor(gammaincinv(degrees.cpu().numpy() / 2, exp(-x))).to(degrees.device))


def _mean_square_product(products: Float[Tensor, "lines draws draws"]) -> Tensor:
    """The mean of (n_k · n_l)² over pairs of draws k ≠ l, an estimate of tr Σ²; 0 without draws."""
    n = products.shape[-1]
    every = products.square().sum((1, 2)) - products.diagonal(dim1=1, dim2=2).square().sum(1)
    return every / max(1, n * (n - 1))
