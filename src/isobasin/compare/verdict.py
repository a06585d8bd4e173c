"""The verdict of `equivalent`: the answer, the evidence and the reason in words."""

from dataclasses import dataclass
from typing import Literal

from isobasin.compare.degenerate import FailedCondition, failed_conditions
from isobasin.compare.outputs import WITNESS_THRESHOLD, ComparedInput, find_witness, worst_input
from isobasin.compare.residual import RESIDUAL_THRESHOLD, Residual, sufficient_precision
from isobasin.symmetries.transform import Transform
from isobasin.weights import Weights

Answer = Literal["same", "different", "undecided"]
Kind = Literal["identity", "group", "larger group", "none"]


@dataclass(frozen=True)
class OutputEvidence:
    """The largest difference of outputs over all inputs, and the noise floor and the label of that input."""

    difference: float
    rounding: float
    kind: str
    n_inputs: int

    def to_dict(self) -> dict[str, object]:
        return {
            "difference": self.difference,
            "rounding": self.rounding,
            "ratio": self.difference / max(self.rounding, 1e-30),
            "allowed_ratio": WITNESS_THRESHOLD,
            "kind": self.kind,
            "inputs": self.n_inputs,
        }


@dataclass(frozen=True)
class TransformEvidence:
    """The transform that leads from B to A and the residuals it leaves, or the reason why there is none.

    `kind`: `identity` (the weights as stored), `group`, or `larger group` (after `steps` removed from both models what
    their functions ignore; the transform then leads from one normal form to the other).
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
        return self.worst is not None and self.worst.ratio <= RESIDUAL_THRESHOLD

    @property
    def differing_tokens(self) -> tuple[int, ...]:
        """The rows of embeddings that differ most, of spaces whose residual is above the threshold."""
        lines = [rows for r in self.residuals if r.ratio > RESIDUAL_THRESHOLD for rows in r.lines.values()]
        return tuple(dict.fromkeys(row for rows in lines for row in rows))


@dataclass(frozen=True)
class Verdict:
    """`same`, `different` or `undecided`, with the reason and the evidence; prints as one sentence."""

    answer: Answer
    reason: str
    precision: str
    element: TransformEvidence
    outputs: OutputEvidence
    witness: ComparedInput | None = None
    conditions: tuple[FailedCondition, ...] = ()
    near: str | None = None

    @property
    def transform(self) -> Transform | None:
        """The transform that brings B to A, where there is one."""
        return self.element.transform if self.element.fits else None

    @property
    def parting(self) -> Residual | None:
        """The space with the largest residual, where the models do not agree."""
        return None if self.element.fits else self.element.worst

    @property
    def first_parting(self) -> Residual | None:
        """The first space, from the inputs on, whose residual is above the noise floor."""
        return next((r for r in self.element.residuals if r.ratio > RESIDUAL_THRESHOLD), None)

    def to_dict(self) -> dict[str, object]:
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
                "allowed_ratio": RESIDUAL_THRESHOLD,
                "residuals": [r.to_dict() for r in self.element.residuals],
                "outputs": self.outputs.to_dict(),
                "witness": self.witness.to_dict() if self.witness else None,
                "parts_at": parting.to_dict() if parting else None,
                "parts_first_at": first.to_dict() if first else None,
                "conditions": [c.to_dict() for c in self.conditions],
                "near": self.near,
            },
        }

    def __str__(self) -> str:
        return f"{self.answer}: {self.reason}"


def decide(
    a: Weights, b: Weights, element: TransformEvidence, compared: list[ComparedInput], precision: str
) -> Verdict:
    """`same` if the transform fits and there is no witness, `different` if it does not fit and there is one."""
    worst, witness = worst_input(compared), find_witness(compared)
    outputs = OutputEvidence(worst.difference, worst.rounding, worst.probe.label, len(compared))
    if element.fits and witness is None:
        return Verdict("same", _reason_same(element, outputs, precision), precision, element, outputs)
    near = sufficient_precision(element.worst.ratio, precision) if element.worst and not element.fits else None
    check = witness is None or a.arch.sizes.n_heads != b.arch.sizes.n_heads
    failed = (*failed_conditions(a, "A"), *failed_conditions(b, "B")) if check else ()
    if witness is not None and not element.fits:
        reason = _reason_different(a, b, element, witness, failed, near)
        return Verdict("different", reason, precision, element, outputs, witness, failed, near)
    reason = _reason_undecided(element, outputs, witness, failed)
    return Verdict("undecided", reason, precision, element, outputs, witness, failed, near)


def _reason_same(element: TransformEvidence, outputs: OutputEvidence, precision: str) -> str:
    worst = element.worst
    assert worst is not None
    if element.kind == "identity" and all(r.distance == 0 for r in element.residuals):
        return "the weights are the same numbers"
    how = {"identity": "the weights as they are", "group": "an element of the group"}.get(
        element.kind, "an element of a larger group"
    )
    return (
        f"up to rounding of {precision}: {how} brings B to A within {worst.ratio:.2g} × rounding (allowed "
        f"{RESIDUAL_THRESHOLD:g}), and outputs differ by at most {outputs.difference:.1e} on {outputs.n_inputs} inputs "
        f"(rounding alone: {outputs.rounding:.1e})"
    )


def _reason_different(
    a: Weights,
    b: Weights,
    element: TransformEvidence,
    witness: ComparedInput,
    failed: tuple[FailedCondition, ...],
    near: str | None,
) -> str:
    text = (
        f"outputs differ by {witness.difference:.1e} on an input ({witness.probe.label}), where rounding makes "
        f"{witness.rounding:.1e}"
    )
    worst = element.worst
    if worst is not None:
        where = f"layer {worst.layer}, {worst.kind}" if worst.layer is not None else worst.kind
        text += f"; they part at {where} ({worst.tensor}: {worst.ratio:.1e} × rounding)"
        text += f", {element.obstacle}" if element.obstacle else ""
    else:
        text += f"; {element.obstacle}"
    n_a, n_b = a.arch.sizes.n_heads, b.arch.sizes.n_heads
    if n_a != n_b and not failed:
        text += f"; {n_a} and {n_b} heads of full rank with distinct patterns are never the same function"
    return text + (f"; all of it within {RESIDUAL_THRESHOLD:g} × the rounding of {near}" if near else "")


def _reason_undecided(
    element: TransformEvidence,
    outputs: OutputEvidence,
    witness: ComparedInput | None,
    failed: tuple[FailedCondition, ...],
) -> str:
    if witness is not None:
        return (
            f"tolerance: an element fits, but outputs differ by {outputs.difference:.1e} on an input "
            f"({outputs.kind}), where rounding makes {outputs.rounding:.1e}"
        )
    worst = element.worst
    obstacle = element.obstacle or (
        f"no element found (closest: {worst.tensor}, {worst.ratio:.1e} × rounding)" if worst else "no element found"
    )
    text = f"outputs agree on {outputs.n_inputs} inputs, but {obstacle}"
    if failed:
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        return f"{text}; the theorem does not apply: {failed[0]}{more}"
    if element.obstacle:
        return f"{text}; the theorem speaks of models of one shape"
    return f"{text}; tolerance: the residual is above rounding, the outputs do not show it"
