"""Numbers along a line, and the barrier between its ends."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RISING = ("accuracy",)  # metrics of which more is better


def grid(n_points: int) -> tuple[float, ...]:
    """Equally spaced points of [0, 1], both ends among them."""
    if n_points < 2:
        raise ValueError(f"{n_points} points make no line, expected 2 or more")
    return tuple(i / (n_points - 1) for i in range(n_points))


@dataclass(frozen=True)
class Barrier:
    """The largest rise over the straight line between the ends, and where it is; NaN if a point is not finite."""

    height: float
    lam: float

    def __str__(self) -> str:
        if math.isnan(self.height):
            return f"not finite at λ = {self.lam:.3g}"
        return f"{self.height:.4g} at λ = {self.lam:.3g}" if self.height > 0 else "0"


def barrier(lambdas: Sequence[float], values: Sequence[float], *, rising: bool = False) -> Barrier:
    """max over λ of L(λ) − ((1−λ) L(0) + λ L(1)), never below 0; with the sign turned for a rising metric.

    >>> barrier([0, 0.5, 1], [1.0, 3.0, 2.0])
    Barrier(height=1.5, lam=0.5)
    """
    sign = -1.0 if rising else 1.0
    for lam, value in zip(lambdas, values):
        if not math.isfinite(value):
            return Barrier(math.nan, lam)
    rises = [sign * (v - ((1 - lam) * values[0] + lam * values[-1])) for lam, v in zip(lambdas, values)]
    highest = max(range(len(rises)), key=rises.__getitem__)
    return Barrier(rises[highest], lambdas[highest]) if rises[highest] > 0 else Barrier(0.0, 0.0)


@dataclass(frozen=True)
class Curve:
    """Every metric at every λ, 0 at A and 1 at B."""

    lambdas: tuple[float, ...]
    metrics: Mapping[str, tuple[float, ...]]

    @property
    def barrier(self) -> Barrier:
        """That of the loss."""
        return self.barriers["loss"]

    @property
    def barriers(self) -> dict[str, Barrier]:
        return {name: barrier(self.lambdas, v, rising=name in RISING) for name, v in self.metrics.items()}

    @property
    def not_finite(self) -> list[tuple[str, float]]:
        """(metric, λ) of every number that is none."""
        return [
            (name, lam)
            for name, values in self.metrics.items()
            for lam, value in zip(self.lambdas, values)
            if not math.isfinite(value)
        ]

    def as_result(self) -> dict[str, Any]:
        """The curve as a result file holds it, for figures and pages."""
        numbers = {name: [v if math.isfinite(v) else None for v in values] for name, values in self.metrics.items()}
        curves = {"A-B": {"naive": numbers}}
        return {"kind": "isobasin.path", "schema": 1, "lambdas": list(self.lambdas), "curves": curves}

    def __str__(self) -> str:
        loss = self.metrics["loss"]
        middle = loss[len(loss) // 2]
        return f"loss {loss[0]:.4g} at A, {loss[-1]:.4g} at B, {middle:.4g} half-way; barrier {self.barrier}"
