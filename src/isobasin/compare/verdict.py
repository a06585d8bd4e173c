"""The answer to "the same function?", with everything that led to it."""

from dataclasses import dataclass
from typing import Literal

from isobasin.compare.conditions import Failure
from isobasin.compare.residual import TOLERANCE, Residual
from isobasin.compare.witness import CLEAR, Witness
from isobasin.transform import Transform

Answer = Literal["same", "different", "undecided"]
Kind = Literal["identity", "group", "larger group", "none"]


@dataclass(frozen=True)
class Outputs:
    """The largest difference of outputs over all inputs that were tried, where, and what rounding does there."""

    difference: float
    rounding: float
    kind: str
    n_inputs: int

    @property
    def facts(self) -> dict[str, object]:
        ratio = self.difference / max(self.rounding, 1e-30)
        return {
            "difference": self.difference,
            "rounding": self.rounding,
            "ratio": ratio,
            "allowed_ratio": CLEAR,
            "kind": self.kind,
            "inputs": self.n_inputs,
        }


@dataclass(frozen=True)
class Element:
    """What leads from B to A: a transform and what it leaves, or why there is none.

    `kind`: `identity` (the weights as they are), `group`, or `larger group` (after `steps` took out of both models
    what their functions do not see; the transform then leads from one canonical form to the other).
    """

    kind: Kind
    transform: Transform | None = None
    residuals: tuple[Residual, ...] = ()
    steps: tuple[str, ...] = ()
    obstacle: str = ""

    @property
    def worst(self) -> Residual | None:
        return max(self.residuals, key=lambda r: r.ratio, default=None)

    @property
    def fits(self) -> bool:
        return self.worst is not None and self.worst.ratio <= TOLERANCE


@dataclass(frozen=True)
class Verdict:
    """`same`, `different` or `undecided`; prints as a person would say it."""

    answer: Answer
    reason: str
    precision: str
    element: Element
    outputs: Outputs
    witness: Witness | None = None
    conditions: tuple[Failure, ...] = ()
    near: str | None = None

    @property
    def transform(self) -> Transform | None:
        """The element that brings B to A, where there is one."""
        return self.element.transform if self.element.fits else None

    @property
    def parting(self) -> Residual | None:
        """The space in which they part: the one with the largest residual."""
        worst = self.element.worst
        return worst if worst is not None and not self.element.fits else None

    @property
    def first_parting(self) -> Residual | None:
        """The first space, from the inputs on, whose residual is above rounding."""
        return next((r for r in self.element.residuals if r.ratio > TOLERANCE), None)

    @property
    def facts(self) -> dict[str, object]:
        """The JSON object of `isobasin equal`."""
        parting, first = self.parting, self.first_parting
        return {
            "verdict": self.answer,
            "reason": self.reason,
            "precision": self.precision,
            "evidence": {
                "element": self.element.kind,
                "steps": list(self.element.steps),
                "obstacle": self.element.obstacle or None,
                "allowed_ratio": TOLERANCE,
                "residuals": [r.facts for r in self.element.residuals],
                "outputs": self.outputs.facts,
                "witness": self.witness.facts if self.witness else None,
                "parts_at": parting.facts if parting else None,
                "parts_first_at": first.facts if first else None,
                "conditions": [c.facts for c in self.conditions],
                "near": self.near,
            },
        }

    def __str__(self) -> str:
        return f"{self.answer}: {self.reason}"
