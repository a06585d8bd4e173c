"""`equivalent`: an element that fits, outputs that agree, or an input that tells the two apart."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from isobasin.compare.conditions import Failure, failures
from isobasin.compare.degenerate import reduced
from isobasin.compare.forms import check_same_task, one_form
from isobasin.compare.outputs import Bench, Comparison
from isobasin.compare.polishing import polished
from isobasin.compare.probes import probes
from isobasin.compare.residual import TOLERANCE, Residual, residuals
from isobasin.compare.rounding import PRECISIONS, coarsest, disturbed, dtype_named, unit, units
from isobasin.compare.verdict import Element, Kind, Outputs, Verdict
from isobasin.compare.witness import Witness, beyond_doubt, found_witness, searched, with_words
from isobasin.errors import ArchitectureError
from isobasin.match.align import align
from isobasin.match.comparable import check_comparable
from isobasin.match.matchers import WeightMatching
from isobasin.match.whole import ends_left
from isobasin.transform import Transform
from isobasin.weights import Weights

APART = 0.5  # between copies 0, between strangers next to 1 or above
STRANGERS = "as they are: no layer is near its place, nor embeddings and head under any map of the stream"


def equivalent(
    a: Weights,
    b: Weights,
    *,
    precision: str = "stored",
    seed: int = 0,
    device: torch.device | None = None,
    watch: Callable[[str], None] | None = None,
) -> Verdict:
    """Whether two models of one family compute the same function, up to the rounding of their stored types.

    `same` needs an element of the symmetry that brings B to A within rounding, and outputs that agree; `different` an
    input on which the outputs differ by far more than rounding explains. All else is `undecided`, with the reason.
    `precision` may name a type coarser than the stored ones; `watch` is told what is being done.

    >>> print(equivalent(a, scramble(a, seed=1).apply(a)))  # doctest: +SKIP
    same: up to rounding of float32: …
    """
    say = watch or (lambda text: None)
    if precision != "stored":
        dtype_named(precision)
    check_same_task(a, b)
    pair = _Pair(*one_form(a, b), precision, seed, device or torch.device("cpu"))
    # Made anew whenever it is needed: it holds small models, and an alignment wants the memory.
    bench = partial(Bench.of, a, b, precision=precision, seed=seed)
    say("comparing the weights as they are")
    element = pair.as_they_are()
    say("running both models")
    streams = bench().streams
    compared = bench().compare(probes(a, b, seed=seed, brief=streams))
    if not element.fits and element.transform is not None:
        say("aligning")
        # Where outputs have decided, an alignment only says where the two part: of large strangers it is not worth it.
        strangers = streams and beyond_doubt(compared) and pair.are_strangers(element)
        element = replace(element, obstacle=STRANGERS) if strangers else pair.aligned()
    if not element.fits and found_witness(compared) is None:
        compared = with_words(bench(), compared, _suspects(element), seed=seed)
    if not element.fits and found_witness(compared) is None:
        say("polishing the element, to see how certain it is")
        element = pair.refined(element)
    if not element.fits and found_witness(compared) is None:
        say("looking for larger groups")
        element = pair.larger(element)
    if not element.fits and found_witness(compared) is None:
        say("searching for an input that tells them apart")
        compared = searched(bench(), compared, seed=seed)
    return _judged(a, b, element, compared, coarsest(a, b, precision=precision))


@dataclass(frozen=True)
class _Pair:
    """Two models in one form, and how they are compared."""

    a: Weights
    b: Weights
    precision: str
    seed: int
    device: torch.device

    def as_they_are(self) -> Element:
        """B beside A, without an alignment."""
        try:
            check_comparable(self.a, self.b)
        except ArchitectureError as error:
            return Element("none", obstacle=str(error).partition(";")[0])
        nothing = Transform(self.b.arch.family, dict(self.b.arch.spaces))
        return Element("identity", nothing, self._residuals(self.a, self.b, nothing))

    def are_strangers(self, found: Element) -> bool:
        """Whether no layer of one is near its place in the other, and no map of the stream brings their ends near."""
        layers = [r.distance for r in found.residuals if r.layer is not None]
        return min(layers, default=0.0) > APART and ends_left(self.a, self.b, device=self.device) > APART

    def aligned(self) -> Element:
        return self._aligned("group", self.a, self.b)

    def refined(self, found: Element) -> Element:
        """The element brought to its end; then with a floor that holds its own uncertainty: badly conditioned heads
        with their large rounding pull at the stream, and so at every other tensor."""
        if found.transform is None:
            return found
        transform = polished(self.a, self.b, found.transform, self.device)
        better = replace(found, transform=transform, residuals=self._residuals(self.a, self.b, transform))
        if better.fits:
            return better
        shaken = disturbed(self.b, units(self.b, self.precision), seed=self.seed)
        again = polished(self.a, shaken, transform, self.device)
        loose = replace(better, residuals=self._residuals(self.a, self.b, transform, again))
        return loose if loose.fits else found

    def larger(self, found: Element) -> Element:
        """An element between the two models with the freedom of larger groups taken out of both."""
        if not found.residuals:
            return found
        (a, notes_a), (b, notes_b) = reduced(self.a), reduced(self.b)
        if not notes_a and not notes_b:
            return found
        steps = (*(f"A, {note}" for note in notes_a), *(f"B, {note}" for note in notes_b))
        lean = replace(self._aligned("larger group", a, b), steps=steps)
        return lean if lean.fits else found

    def _aligned(self, kind: Kind, a: Weights, b: Weights) -> Element:
        matcher = WeightMatching(scope="model")
        found = align(b, to=a, matcher=matcher, dtype="float32", device=self.device, verify=False)
        return Element(kind, found.transform, self._residuals(a, b, found.transform))

    def _residuals(
        self, a: Weights, b: Weights, transform: Transform, again: Transform | None = None
    ) -> tuple[Residual, ...]:
        return residuals(a, b, transform, precision=self.precision, seed=self.seed, device=self.device, again=again)


def _suspects(element: Element) -> tuple[int, ...]:
    """Words whose rows differ most, for inputs that use them."""
    lines = [rows for r in element.residuals if r.ratio > TOLERANCE for rows in r.lines.values()]
    return tuple(dict.fromkeys(row for rows in lines for row in rows))


def _judged(a: Weights, b: Weights, element: Element, compared: list[Comparison], precision: str) -> Verdict:
    worst = max(compared, key=lambda c: c.ratio)
    outputs = Outputs(worst.difference, worst.rounding, worst.probe.label, len(compared))
    witness = found_witness(compared)
    if element.fits and witness is None:
        return Verdict("same", _why_same(element, outputs, precision), precision, element, outputs)
    near = None if element.fits else _near(element, precision)
    heads = a.arch.sizes.n_heads != b.arch.sizes.n_heads
    failing = (*failures(a, "A"), *failures(b, "B")) if witness is None or heads else ()
    if witness is not None and not element.fits:
        reason = _why_different(a, b, element, witness, failing, near)
        return Verdict("different", reason, precision, element, outputs, witness, failing, near)
    reason = _why_undecided(element, outputs, witness, failing)
    return Verdict("undecided", reason, precision, element, outputs, witness, failing, near)


def _near(element: Element, precision: str) -> str | None:
    """A coarser type whose rounding would explain the residual."""
    worst, here = element.worst, unit(PRECISIONS[precision])
    coarser = {name: here / unit(dtype) for name, dtype in PRECISIONS.items() if unit(dtype) > here}
    return next((n for n, share in coarser.items() if worst is not None and worst.ratio * share <= TOLERANCE), None)


def _why_same(element: Element, outputs: Outputs, precision: str) -> str:
    worst = element.worst
    assert worst is not None
    if element.kind == "identity" and worst.distance == 0 and all(r.distance == 0 for r in element.residuals):
        return "the weights are the same numbers"
    how = {"identity": "the weights as they are", "group": "an element of the group"}.get(
        element.kind, "an element of a larger group"
    )
    return (
        f"up to rounding of {precision}: {how} brings B to A within {worst.ratio:.2g} × rounding (allowed "
        f"{TOLERANCE:g}), and outputs differ by at most {outputs.difference:.1e} on {outputs.n_inputs} inputs "
        f"(rounding alone: {outputs.rounding:.1e})"
    )


def _why_different(
    a: Weights, b: Weights, element: Element, witness: Witness, failing: tuple[Failure, ...], near: str | None
) -> str:
    said = (
        f"outputs differ by {witness.difference:.1e} on an input ({witness.label}), where rounding makes "
        f"{witness.rounding:.1e}"
    )
    worst = element.worst
    if worst is not None:
        where = f"layer {worst.layer}, {worst.kind}" if worst.layer is not None else worst.kind
        said += f"; they part at {where} ({worst.tensor}: {worst.ratio:.1e} × rounding)"
        said += f", {element.obstacle}" if element.obstacle else ""
    else:
        said += f"; {element.obstacle}"
    n_a, n_b = a.arch.sizes.n_heads, b.arch.sizes.n_heads
    if n_a != n_b and not failing:
        said += f"; {n_a} and {n_b} heads of full rank with distinct patterns are never the same function"
    return said + (f"; all of it within {TOLERANCE:g} × the rounding of {near}" if near else "")


def _why_undecided(element: Element, outputs: Outputs, witness: Witness | None, failing: tuple[Failure, ...]) -> str:
    if witness is not None:
        return (
            f"tolerance: an element fits, but outputs differ by {outputs.difference:.1e} on an input "
            f"({outputs.kind}), where rounding makes {outputs.rounding:.1e}"
        )
    worst = element.worst
    left = element.obstacle or (
        f"no element found (closest: {worst.tensor}, {worst.ratio:.1e} × rounding)" if worst else "no element found"
    )
    said = f"outputs agree on {outputs.n_inputs} inputs, but {left}"
    if failing:
        more = f" and {len(failing) - 1} more" if len(failing) > 1 else ""
        return f"{said}; the theorem does not apply: {failing[0]}{more}"
    if element.obstacle:
        return f"{said}; the theorem speaks of models of one shape"
    return f"{said}; tolerance: the residual is above rounding, the outputs do not show it"
