"""What a path.json holds, checked: frozen values that figures, tables and pages are made from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METRICS = ("loss", "accuracy", "perplexity", "bits_per_byte")
PATHS = ("naive", "aligned")

Number = float | None  # None: not finite, or not there
Values = tuple[Number, ...]


@dataclass(frozen=True)
class Model:
    """One end of a path. `letter` is its place (A, B, C), `name` what its owner calls it."""

    letter: str
    name: str
    facts: Mapping[str, Any]

    @property
    def label(self) -> str:
        return self.letter if self.name == self.letter else f"{self.letter} ({self.name})"


@dataclass(frozen=True)
class Barrier:
    """How far a curve rises above the straight line between its ends (accuracy: falls below), and where."""

    height: Number
    lam: Number


@dataclass(frozen=True)
class Line:
    """One path, naive or aligned: values of each metric at each λ, and the barriers of loss and accuracy."""

    curves: Mapping[str, Values]
    barriers: Mapping[str, Barrier]

    def barrier(self, metric: str) -> Barrier:
        return self.barriers.get(metric, Barrier(None, None))

    def holes(self, lambdas: tuple[float, ...], metric: str) -> tuple[float, ...]:
        """Each λ at which the metric was not finite."""
        return tuple(lam for lam, value in zip(lambdas, self.curves.get(metric, ())) if value is None)


@dataclass(frozen=True)
class LayerChange:
    """What alignment did to one space of one layer; layer None: a space of the whole model."""

    layer: int | None
    space: str
    before: Number
    after: Number
    output_change: Number

    @property
    def gain(self) -> Number:
        """1 − after/before: the share of the distance that alignment removed; None where there was none."""
        if self.before is None or self.after is None or self.before <= 0:
            return None
        return 1 - self.after / self.before


@dataclass(frozen=True)
class Alignment:
    scope: str
    matcher: str
    stage2: str
    before: Number
    after: Number
    output_change: Number
    layers: tuple[LayerChange, ...]


@dataclass(frozen=True)
class Share:
    """How much of the barrier is gone when the outputs of a component are mixed instead of its weights."""

    name: str
    barrier: Number
    share: Number


@dataclass(frozen=True)
class Plane:
    """Loss on a plane through A, B and aligned B; one row of `loss` for each y."""

    x: tuple[float, ...]
    y: tuple[float, ...]
    loss: tuple[Values, ...]
    points: Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Pair:
    """Two models and the paths between them: λ = 0 is `a`, λ = 1 is `b`."""

    key: str
    a: Model
    b: Model
    lambdas: tuple[float, ...]
    lines: Mapping[str, Line]
    alignment: Alignment | None
    explain: Mapping[str, tuple[Share, ...]]
    plane: Plane | None

    @property
    def metrics(self) -> tuple[str, ...]:
        return tuple(m for m in METRICS if any(m in line.curves for line in self.lines.values()))


@dataclass(frozen=True)
class PathResult:
    """A whole file. `raw` is what was read, as strict JSON values."""

    models: tuple[Model, ...]
    pairs: tuple[Pair, ...]
    task: Mapping[str, Any]
    provenance: Mapping[str, Any]
    raw: Mapping[str, Any]

    def pair(self, key: str | None) -> Pair | None:
        """The pair of that name, or the first where no name is given."""
        return next((pair for pair in self.pairs if key in (None, pair.key)), None)
