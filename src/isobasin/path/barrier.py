"""Metrics along a straight path, the barrier of a path, and when two models count as connected.

This module imports no torch, so that result files can be read without it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isobasin.display import Shown, Summary
from isobasin.errors import IsobasinError

RISING = ("accuracy",)  # metrics of which more is better
# Two models are linearly connected if the loss barrier is at most so many nats, or such a share of the naive barrier.
CONNECTED_NATS = 0.02
CONNECTED_SHARE = 0.05


def grid(n_points: int) -> tuple[float, ...]:
    """Equally spaced points of [0, 1], including both ends."""
    if n_points < 2:
        raise IsobasinError(f"{n_points} points make no line, expected 2 or more")
    return tuple(i / (n_points - 1) for i in range(n_points))


def midpoint(lambdas: Sequence[float]) -> int:
    """The index of λ = ½, or of the λ nearest to it; of two that are equally near, the lower one."""
    return min(range(len(lambdas)), key=lambda i: round(abs(lambdas[i] - 0.5), 12))


def finite_or_none(value: float) -> float | None:
    """The number as JSON holds it: NaN and infinity are null."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class Barrier:
    """The largest rise over the straight line between the end values, and its λ; NaN if a point is not finite."""

    height: float
    lam: float

    def __str__(self) -> str:
        if math.isnan(self.height):
            return f"not finite at λ = {self.lam:.3g}"
        return f"{self.height:.4g} at λ = {self.lam:.3g}" if self.height > 0 else "0"


def barrier(lambdas: Sequence[float], values: Sequence[float], *, rising: bool = False) -> Barrier:
    """max over λ of L(λ) − ((1−λ) L(0) + λ L(1)), at least 0; the sign is reversed for a rising metric."""
    sign = -1.0 if rising else 1.0
    for lam, value in zip(lambdas, values):
        if not math.isfinite(value):
            return Barrier(math.nan, lam)
    rises = [sign * (v - ((1 - lam) * values[0] + lam * values[-1])) for lam, v in zip(lambdas, values)]
    highest = max(range(len(rises)), key=rises.__getitem__)
    return Barrier(rises[highest], lambdas[highest]) if rises[highest] > 0 else Barrier(0.0, 0.0)


def is_connected(height: float | None, naive: float | None) -> bool | None:
    """Whether a loss barrier of this height means connected, given the naive barrier; None if it was not measured."""
    if height is None:
        return None
    return height <= CONNECTED_NATS or (naive is not None and height <= CONNECTED_SHARE * naive)


@dataclass(frozen=True, repr=False)
class Curve(Shown):
    """Every metric at every λ, 0 at A and 1 at B."""

    lambdas: tuple[float, ...]
    metrics: Mapping[str, tuple[float, ...]]

    @property
    def barrier(self) -> Barrier:
        """The barrier of the loss."""
        return self.barriers["loss"]

    @property
    def barriers(self) -> dict[str, Barrier]:
        """The barrier of every metric."""
        return {name: barrier(self.lambdas, v, rising=name in RISING) for name, v in self.metrics.items()}

    @property
    def not_finite(self) -> list[tuple[str, float]]:
        """(metric, λ) of every value that is not finite."""
        return [
            (name, lam)
            for name, values in self.metrics.items()
            for lam, value in zip(self.lambdas, values)
            if not math.isfinite(value)
        ]

    def summary(self) -> Summary:
        """Ends, midpoint and barrier of every metric."""
        middle = midpoint(self.lambdas)
        rows = [
            (name, *(f"{values[k]:.4g}" for k in (0, middle, -1)), str(self.barriers[name]))
            for name, values in self.metrics.items()
        ]
        title = f"straight line from A to B, {len(self.lambdas)} points"
        return Summary(title, {}, ("metric", "A", "midpoint", "B", "barrier"), rows)

    def at(self, lambdas: Sequence[float]) -> "Curve":
        """The curve at some of its points only."""
        kept = [self.lambdas.index(lam) for lam in lambdas]
        return Curve(tuple(lambdas), {name: tuple(v[k] for k in kept) for name, v in self.metrics.items()})

    def numbers(self) -> dict[str, list[float | None]]:
        """The metrics as a result file holds them."""
        return {name: [finite_or_none(v) for v in values] for name, values in self.metrics.items()}

    def to_dict(self) -> dict[str, Any]:
        """The curve alone as a result file, for figures and pages."""
        curves = {"A-B": {"naive": self.numbers()}}
        return {"kind": "isobasin.path", "schema": 1, "lambdas": list(self.lambdas), "curves": curves}

    def __str__(self) -> str:
        loss = self.metrics["loss"]
        middle = loss[midpoint(self.lambdas)]
        return f"loss {loss[0]:.4g} at A, {loss[-1]:.4g} at B, {middle:.4g} at the midpoint; barrier {self.barrier}"
