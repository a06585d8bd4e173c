"""How to learn: frozen numbers, and everything random in them as a function of the seed and the step alone."""

import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import torch

from isobasin.errors import IsobasinError

Permutations = Literal["fixed", "free"]
PERMUTATIONS = ("fixed", "free")


@dataclass(frozen=True, kw_only=True)
class Lessons:
    """Adam on the group element, with warm-up and a cosine to zero; the path is measured every `check_every` steps.

    A step takes `accumulate` batches, each at its own point of the path: `lambdas` is cut into as many parts, and one
    point is drawn from each. `permutations="free"` lets units change places at checks.
    """

    steps: int = 500
    rate: float = 3e-3
    warmup: float = 0.05  # share of the steps in which the rate rises
    lambdas: tuple[float, float] = (0.4, 0.6)  # of several ranges the best on text and on digits
    accumulate: int = 1
    clip: float = 1.0  # largest norm of the whole gradient
    check_every: int = 100
    check_points: int = 7
    permutations: Permutations = "fixed"
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        low, high = self.lambdas
        _require(self.steps >= 0, "steps", self.steps, "0 or more")
        _require(self.rate > 0, "rate", self.rate, "more than 0")
        _require(0 <= self.warmup <= 1, "warmup", self.warmup, "a share from 0 to 1")
        _require(0 <= low <= high <= 1, "lambdas", self.lambdas, "two points of the path, 0 ≤ low ≤ high ≤ 1")
        _require(self.accumulate >= 1, "accumulate", self.accumulate, "1 or more")
        _require(self.clip > 0, "clip", self.clip, "more than 0")
        _require(self.check_every >= 1, "check_every", self.check_every, "1 or more")
        _require(self.check_points >= 3, "check_points", self.check_points, "3 or more: both ends and one between")
        _require(self.permutations in PERMUTATIONS, "permutations", self.permutations, " or ".join(PERMUTATIONS))

    def rate_at(self, step: int) -> float:
        """The rate of step 0 … steps − 1: up in a line, then down a cosine to zero.

        >>> [round(Lessons(steps=10, rate=1.0, warmup=0.2).rate_at(step), 2) for step in (0, 1, 5, 9)]
        [0.5, 1.0, 0.5, 0.0]
        """
        rising = max(1.0, self.warmup * self.steps)
        if step + 1 <= rising:
            return self.rate * (step + 1) / rising
        falling = (step + 1 - rising) / max(1.0, self.steps - rising)
        return self.rate * (1 + math.cos(math.pi * falling)) / 2

    def points(self, step: int, n: int, seed: int) -> list[float]:
        """n points of the path for this step, one from each n-th of `lambdas`, in a random order."""
        rng = generator(seed, "points", step)
        low, high = self.lambdas
        shares = (torch.randperm(n, generator=rng) + torch.rand(n, generator=rng)) / n
        return (low + (high - low) * shares).tolist()

    def is_check(self, step: int) -> bool:
        """Whether the path is measured after this step."""
        return (step + 1) % self.check_every == 0 or step + 1 == self.steps


def generator(seed: int, *words: object) -> torch.Generator:
    """A generator for one purpose at one step. A run that goes on needs no state of the generators it had before."""
    digest = hashlib.sha256(repr((seed, *words)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _require(good: bool, name: str, found: object, expected: str) -> None:
    if not good:
        raise IsobasinError(f"learning: {name} is {found}, expected {expected}")
