"""How a model is trained: a frozen set of numbers, and the schedule that follows from them. No torch here."""

import math
from dataclasses import dataclass

from isobasin.errors import IsobasinError


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """AdamW with linear warm-up and a cosine down to zero; give either `steps` or `epochs`.

    >>> Recipe(epochs=2, batch_size=100).n_steps(n_examples=8000)
    160
    """

    steps: int | None = None
    epochs: float | None = None
    batch_size: int = 128
    peak_lr: float = 1e-3
    warmup: float = 0.1  # share of the steps in which the rate rises
    weight_decay: float = 0.05  # of matrices; gains and biases are never decayed
    betas: tuple[float, float] = (0.9, 0.98)
    label_smoothing: float = 0.0
    grad_clip: float | None = 1.0  # largest norm of the whole gradient

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise IsobasinError(f"recipe: steps={self.steps} and epochs={self.epochs}, expected exactly one of them")
        length = self.steps if self.steps is not None else self.epochs
        assert length is not None
        _require(length >= 0, "steps or epochs", length, "0 or more")
        _require(self.batch_size >= 1, "batch_size", self.batch_size, "1 or more")
        _require(self.peak_lr > 0, "peak_lr", self.peak_lr, "more than 0")
        _require(0 <= self.warmup <= 1, "warmup", self.warmup, "a share from 0 to 1")
        _require(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        _require(all(0 <= beta < 1 for beta in self.betas), "betas", self.betas, "two numbers from 0 to below 1")
        _require(0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "from 0 to below 1")
        _require(self.grad_clip is None or self.grad_clip > 0, "grad_clip", self.grad_clip, "more than 0, or None")

    def n_steps(self, n_examples: int) -> int:
        """Steps in all: as given, or enough batches for the epochs."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return math.ceil(self.epochs * n_examples / self.batch_size)

    def rate(self, step: int, of: int) -> float:
        """Learning rate of step 0 … of − 1.

        With w = warmup · of: peak · (step + 1) / w while that is below the peak, then
        peak · (1 + cos(π (step + 1 − w) / (of − w))) / 2, which reaches zero with the last step.

            >>> recipe = Recipe(steps=10, peak_lr=1.0, warmup=0.2)
            >>> [round(recipe.rate(step, 10), 2) for step in (0, 1, 5, 9)]
            [0.5, 1.0, 0.5, 0.0]
        """
        rising = self.warmup * of
        if step + 1 <= rising:
            return self.peak_lr * (step + 1) / rising
        falling = (step + 1 - rising) / (of - rising)
        return self.peak_lr * (1 + math.cos(math.pi * falling)) / 2


def _require(good: bool, name: str, found: object, expected: str) -> None:
    if not good:
        raise IsobasinError(f"recipe: {name} is {found}, expected {expected}")
