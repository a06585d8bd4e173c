"""`equivalent`: do two models compute the same function? The answer, the evidence and the reason in words.

The evidence is a transform that brings B to A within rounding, outputs that agree, or an input on which they differ.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isfinite
from typing import Any, Literal

import torch
from torch import Tensor

from isobasin.alignment.candidates import rotates_stream, transforms_by_descent
from isobasin.alignment.comparable import check_comparable
from isobasin.alignment.descent import descend, embedding_distance
from isobasin.alignment.gauge import with_reference_gauge
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.problem import AlignmentProblem
from isobasin.alignment.result import LeftOut
from isobasin.alignment.trunk import TrunkPair, is_fixed, lost_gain, trunk_pair
from isobasin.checkpoint import dtype_name
from isobasin.compare.degenerate import FailedCondition, failed_conditions, remove_degeneracies
from isobasin.compare.distance import require_equal
from isobasin.compare.outputs import (
    CERTAIN_THRESHOLD,
    MAX_ROUNDING,
    SAME_THRESHOLD,
    WITNESS_THRESHOLD,
    ComparedInput,
    OutputComparison,
    find_witness,
    probes,
    worst_input,
)
from isobasin.compare.residual import (
    Residual,
    coarsest_precision,
    precision_as_run,
    residuals,
    sufficient_precision,
)
from isobasin.config_keys import differing_settings
from isobasin.display import Shown, Summary, notebook_steps
from isobasin.errors import ArchitectureError, TransformError, VerificationError
from isobasin.groups import Element
from isobasin.rounding import dtype_named, perturbed, rounding_units
from isobasin.runtime import image_shape, vocabulary_size
from isobasin.symmetries import symmetry
from isobasin.symmetries.attention import attention_matrices
from isobasin.symmetries.check import tied_experts
from isobasin.symmetries.head_balance import balance_heads, smallest_singular_value
from isobasin.symmetries.normal_form import unheld_norms, with_unit_shift
from isobasin.symmetries.transform import Transform
from isobasin.views import AsFloat64
from isobasin.weights import ModelSource, Weights, is_tied, load, read_part, untied

# Relative distance of a layer as stored, and share of embeddings and head that no map of the stream explains; measured:
# 0 between copies, about 1 between unrelated models.
NOTICEABLE = 3.0  # multiples of the noise floor of a weight: below it there is no change that outputs could miss
UNRELATED_THRESHOLD = 0.5
REFINING_SWEEPS = 10
MAX_IMBALANCE = 100.0  # between the factors of a head
FIRST_REFITS, REFITS = 2, 8  # transforms of perturbed models, for the uncertainty of the transform
HOPELESS = 100.0  # excess of a residual over its limit that a better estimate of the noise does not change
UNRELATED = "as they are: no layer is near its place, nor embeddings and head under any map of the stream"
Answer = Literal["same", "different", "undecided"]
Kind = Literal["identity", "group", "larger group", "none"]


@dataclass(frozen=True)
class TransformEvidence:
    """The transform that leads from B to A and the residuals it leaves, or the reason why there is none.

    `kind`: `identity` (the weights as stored), `group`, or `larger group` (after `steps` removed from both models what
    their functions ignore). With `steps` the transform leads from one changed form to the other.
    """

    kind: Kind
    transform: Transform | None = None
    residuals: tuple[Residual, ...] = ()
    steps: tuple[str, ...] = ()
    obstacle: str = ""
    settings: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # config keys that differ, with both values
    as_stored: tuple[Residual, ...] = ()  # without a transform

    @property
    def worst(self) -> Residual | None:
        return max(self.residuals, key=lambda r: r.excess, default=None)

    @property
    def first(self) -> Residual | None:
        """The first space, in the order of the model, whose residual rounding does not explain: as stored where fewer
        differ so, because a transform that does not fit spreads a difference over all spaces."""
        as_stored, moved = ([r for r in rows if r.excess > 1] for rows in (self.as_stored, self.residuals))
        found = as_stored if 0 < len(as_stored) < len(moved) else moved
        return min(found, key=lambda r: -1 if r.layer is None else r.layer, default=self.worst)

    @property
    def fits(self) -> bool:
        return self.worst is not None and self.worst.excess <= 1

    @property
    def differing_rows(self) -> dict[str, tuple[int, ...]]:
        """By tensor, the rows of tokens and positions that differ most, where the residual is above its limit."""
        return {name: rows for r in self.residuals for name, rows in r.lines.items()}


@dataclass(frozen=True, repr=False)
class Verdict(Shown):
    """`same`, `different` or `undecided`, with the reason and the evidence; prints as one sentence."""

    answer: Answer
    reason: str
    precision: str
    evidence: TransformEvidence
    outputs: ComparedInput  # the input with the largest difference relative to the noise floor
    n_inputs: int
    witness: ComparedInput | None = None
    conditions: tuple[FailedCondition, ...] = ()
    sufficient_precision: str | None = None
    left_out: LeftOut = field(default=LeftOut(), repr=False)  # not empty: the answer is about the rest
    moves_b: bool = True  # False: the transform is one of another form of B: with other heads, rows or shifts

    @property
    def transform(self) -> Transform | None:
        """The transform that brings B to A, where there is one."""
        return self.evidence.transform if self.evidence.fits and self.moves_b else None

    @property
    def largest_residual(self) -> Residual | None:
        """The space with the largest residual, where the models do not agree."""
        return None if self.evidence.fits else self.evidence.worst

    def summary(self) -> Summary:
        """The answer, its reason, and the parts with the largest residuals."""
        worst = sorted(self.evidence.residuals, key=lambda r: -r.excess)
        rows = [
            ("" if r.layer is None else r.layer, r.kind, r.tensor, f"{r.ratio:.2g}", f"{r.allowed:.2g}") for r in worst
        ]
        facts: dict[str, object] = {"reason": self.reason, "precision": self.precision, "inputs": self.n_inputs}
        columns = ("layer", "part", "worst tensor", "residual / rounding", "allowed")
        return Summary(self.answer, facts, columns, rows)

    def to_dict(self) -> dict[str, object]:
        """The JSON object of `isobasin equal`."""
        largest = self.largest_residual
        first = next((r for r in self.evidence.residuals if r.excess > 1), None)
        place = None if self.evidence.fits else self.evidence.first
        return {
            "verdict": self.answer,
            "reason": self.reason,
            "precision": self.precision,
            "evidence": {
                "element": self.evidence.kind,
                "steps": list(self.evidence.steps),
                "obstacle": self.evidence.obstacle or None,
                "settings": {key: list(values) for key, values in self.evidence.settings.items()},
                "allowed_ratio": self.evidence.worst.allowed if self.evidence.worst else None,
                "residuals": [r.to_dict() for r in self.evidence.residuals],
                "outputs": {
                    "difference": self.outputs.difference,
                    "rounding": self.outputs.rounding,
                    "ratio": self.outputs.ratio,
                    "allowed_ratio": WITNESS_THRESHOLD,
                    "kind": self.outputs.probe.label,
                    "inputs": self.n_inputs,
                },
                "witness": self.witness.to_dict() if self.witness else None,
                "parts_at": largest.to_dict() if largest else None,
                "parts_first_at": first.to_dict() if first else None,
                "first_place": place.to_dict() if place else None,
                "conditions": [c.to_dict() for c in self.conditions],
                "near": self.sufficient_precision,
            },
            **self.left_out.to_dict(),
        }

    def __str__(self) -> str:
        return f"{self.answer}: {self.reason}"


def equivalent(
    a: ModelSource,
    b: ModelSource,
    *,
    precision: str = "stored",
    seed: int = 0,
    device: torch.device | str | None = None,
    watch: Callable[[str], None] | None = None,
) -> Verdict:
    """Whether two models of one family compute the same function, up to the rounding of their stored types.

    `same` requires a symmetry transform that brings B to A within rounding, and outputs that agree; `different` an
    input on which the outputs differ by far more than rounding explains. Everything else is `undecided`, with the
    reason. `precision` may name a type coarser than the stored ones; `watch` is called with the name of each step.

    Models that differ only in their heads, or in rows of the vocabulary, are compared on what they share: the trunk is
    the same if a transform brings that of B to that of A, and inner products of the hidden states agree. `left_out` of
    the verdict names the rest.
    """
    with notebook_steps(watch) as shown:
        report = shown or (lambda text: None)
        return _equivalent(load(a), load(b), precision, seed, torch.device(device or "cpu"), report)


def _equivalent(
    a: Weights, b: Weights, precision: str, seed: int, device: torch.device, report: Callable[[str], None]
) -> Verdict:
    if precision != "stored":
        dtype_named(precision)
    a, b = a.resident(device), b.resident(device)
    whole, (a, b) = (a, b), (read_part(a), read_part(b))
    trunk = _trunk(a, b)
    if trunk is not None and not trunk.heads:
        found = _equivalent(trunk.a, trunk.b, precision, seed, device, report)
        return about_shared(found, trunk)
    if trunk is None:
        _check_same_task(a, b)
    measure = partial(residuals, precision=precision, seed=seed, device=device)
    outputs = OutputComparison(*whole, precision, seed, device=device)
    if trunk is not None and trunk.hidden is not None:
        width = 0 if is_fixed(trunk.b) else trunk.b.arch.sizes.d_model
        outputs = OutputComparison(*trunk.hidden, precision, seed, products_of=width, device=device)
        a, b = trunk.a, trunk.b
    pair = _ModelPair(*with_same_tying(a, b), precision, seed, device, measure)
    report("comparing the weights as stored")
    settings = differing_settings(outputs.a, outputs.b)
    element = replace(pair.as_stored(), settings=settings)
    obstacle = settings_text(settings) if settings else _lost_gain_text(trunk)
    if obstacle:
        element = replace(element, kind="none", transform=None, residuals=(), obstacle=obstacle)
    stored = element.residuals
    report("running both models")
    inputs = probes(outputs.a, outputs.b, seed=seed, brief=outputs.streamed)
    compared = outputs.compare(inputs)
    if settings and not a.family.own:
        compared += outputs.compare_as_generated(inputs)
    if not element.fits and element.transform is not None:
        report("aligning")
        # Where the outputs are decisive, an alignment only locates the difference. Unrelated models have none.
        certain = worst_input(compared).ratio > CERTAIN_THRESHOLD
        unrelated = certain and pair.is_unrelated(element)
        element = replace(element, obstacle=UNRELATED) if unrelated else pair.attempt(pair.align_stored, element)
    steps: tuple[str, ...] = ()
    if not element.fits and element.transform is not None and find_witness(compared) is None:
        stored_b, (pair, steps) = pair.b, pair.with_unit_shifts()
        element = pair.attempt(partial(pair.align_stored, stored_b=stored_b), element) if steps else element
    if not element.fits and find_witness(compared) is None:
        # A transform that does not fit spreads the difference of one row over all.
        in_place = any(r.excess <= 1 for r in stored)
        for rows in (
            {n: rows for r in stored for n, rows in r.lines.items()} if in_place else {},
            element.differing_rows,
        ):
            compared = outputs.with_row_probes(compared, rows)
    if not element.fits and find_witness(compared) is None:
        element = pair.attempt(pair.align_balanced, element)
    if not element.fits and find_witness(compared) is None:
        report("refining the transform and estimating its uncertainty")
        element = pair.attempt(pair.refined, element)
    if not element.fits and find_witness(compared) is None:
        report("removing degeneracies")
        element = pair.attempt(pair.without_degeneracies, element)
    element = replace(element, as_stored=stored, steps=steps + element.steps)
    if not element.fits and find_witness(compared) is None:
        report("searching for an input on which the outputs differ")
        compared = outputs.with_search(compared)
    if element.fits and max((r.ratio for r in element.residuals), default=0.0) > NOTICEABLE:
        report("running both models on the whole vocabulary")
        compared = outputs.with_vocabulary(compared)
    if element.fits and find_witness(compared) is None and not _is_surely_identical(element, outputs.a, outputs.b):
        compared = outputs.as_named(compared)
    ties = _moved_ties(element, a) if element.fits else ""
    verdict = decide(a, b, element, compared, coarsest_precision(a, b, precision=precision), ties)
    found = replace(verdict, moves_b=not steps)
    return found if trunk is None else about_shared(found, trunk)


def _moved_ties(element: TransformEvidence, a: Weights) -> str:
    """Experts of A with equal rows of their router whose order the transform changes, in words: their order decides
    which of them transformers takes."""
    elements = {} if element.transform is None else element.transform.elements
    moved = [space for space in a.arch.expert_spaces if space in elements and not elements[space].is_identity]
    ties = tied_experts(a) if moved else {}
    return next((text for space, text in ties.items() if space in moved), "")


def _trunk(a: Weights, b: Weights) -> TrunkPair | None:
    """What both models share, if they differ in heads or rows of the vocabulary; None for all others."""
    try:
        return trunk_pair(a, b, largest_group=True)
    except ArchitectureError:
        return None


def about_shared(verdict: Verdict, trunk: TrunkPair) -> Verdict:
    """The same verdict, which says that it is about a part of the models only."""
    part = "the trunk (outputs: its hidden states)" if trunk.heads else "the shared rows of the vocabulary"
    reason = f"about {part} only: {verdict.reason}; left out: {trunk.left_out.brief}"
    evidence, transform = verdict.evidence, verdict.evidence.transform
    if trunk.heads and transform is not None:
        evidence = replace(evidence, transform=trunk.of_whole(transform, trunk.b))
    applies = verdict.moves_b and trunk.owner == 1 and not any("[" in name for name in trunk.left_out.b)
    return replace(verdict, reason=reason, evidence=evidence, left_out=trunk.left_out, moves_b=applies)


@dataclass(frozen=True)
class _ModelPair:
    """Two models, both tied or both untied, and the settings of the comparison."""

    a: Weights
    b: Weights
    precision: str
    seed: int
    device: torch.device
    residuals: Callable[..., tuple[Residual, ...]]

    def as_stored(self) -> TransformEvidence:
        """A and B compared without an alignment."""
        try:
            check_comparable(self.a, self.b)
        except ArchitectureError as error:
            return TransformEvidence("none", obstacle=str(error).partition(";")[0])
        identity = Transform(self.b.arch.family, dict(self.b.arch.spaces))
        return TransformEvidence("identity", identity, self.residuals(self.a, self.b, identity))

    def with_unit_shifts(self) -> tuple["_ModelPair", tuple[str, ...]]:
        """Both models with a shift of one where the readers of a norm, without biases, do not hold constants on their
        own in both: a shift without a mean is one of many, and other ones do not lead there. And notes on it."""
        norms = unheld_norms(self.a, self.b, by_both=True)
        a, b = (with_unit_shift(w, norms) for w in (self.a, self.b))
        return replace(self, a=a, b=b), tuple(f"{c.norm.shift}: one in both" for c in norms.values())

    def is_unrelated(self, found: TransformEvidence) -> bool:
        """Whether no layer is close as stored, and no map of the stream brings embeddings and head close."""
        layers = [r.distance for r in found.residuals if r.layer is not None]
        apart = min(layers, default=0.0) > UNRELATED_THRESHOLD
        return apart and embedding_distance(self.a, self.b, device=self.device) > UNRELATED_THRESHOLD

    def attempt(
        self, step: Callable[[TransformEvidence], TransformEvidence], found: TransformEvidence
    ) -> TransformEvidence:
        """What a step finds; unchanged where the weights are too extreme: a decomposition does not converge, or the
        transform is too badly conditioned."""
        try:
            return step(found)
        except (torch.linalg.LinAlgError, TransformError, VerificationError):  # type: ignore[attr-defined]
            return found

    def align_stored(self, found: TransformEvidence, stored_b: Weights | None = None) -> TransformEvidence:
        """A transform from B to A as they are stored. `stored_b`: what B was before it got its present form, for the
        rounding of its numbers; the transform sets all that was changed."""
        return self.aligned("group", self.a, self.b, stored_b, before=_square_distance(found.residuals))

    def refined(self, found: TransformEvidence) -> TransformEvidence:
        """The transform after more sweeps; if it still does not fit, with a noise floor that includes the uncertainty
        of the transform: heads of bad condition have a large rounding error, which affects the map of the stream and so
        every other tensor."""
        if found.transform is None:
            return found
        transform = refine_transform(self.a, self.b, found.transform, self.device)
        better = replace(found, transform=transform, residuals=self.residuals(self.a, self.b, transform))
        if better.fits:
            return better
        tolerant = self._with_refits(better, self.a, self.b, partial(self._refit, transform))
        return tolerant if tolerant.fits else found

    def _with_refits(
        self, found: TransformEvidence, a: Weights, b: Weights, refit: Callable[[int], tuple[Weights, Transform]]
    ) -> TransformEvidence:
        """The residuals relative to a noise floor that includes the uncertainty of the transform; from few refits where
        these already show that it explains nothing."""
        assert found.transform is not None
        refits: list[tuple[Weights, Transform]] = []
        for n in (FIRST_REFITS, REFITS):
            refits += [refit(draw) for draw in range(len(refits), n)]
            found = replace(found, residuals=self.residuals(a, b, found.transform, refits=refits))
            if found.worst is not None and found.worst.excess > HOPELESS:
                break
        return found

    def _refit(
        self, transform: Transform, draw: int, prepare: Callable[[Weights], Weights] = lambda weights: weights
    ) -> tuple[Weights, Transform]:
        """B perturbed by its rounding and prepared, and the transform that is found for it and a perturbed A."""
        seeds = self.seed + 2 * draw, self.seed + 2 * draw + 1
        a, b = (
            prepare(perturbed(w, rounding_units(w, self.precision), seed=s, zeros=False))
            for w, s in zip((self.a, self.b), seeds)
        )
        # Every sweep reads the copies, and noise is drawn for each reading: what fits in memory is kept meanwhile.
        kept = a.resident(self.device), b.resident(self.device)
        return b, refine_transform(*kept, transform, self.device)

    def without_degeneracies(self, found: TransformEvidence) -> TransformEvidence:
        """A transform between the two models after the freedom of larger groups was removed from both."""
        if not found.residuals:
            return found
        (a, notes_a), (b, notes_b) = remove_degeneracies(self.a), remove_degeneracies(self.b)
        if not notes_a and not notes_b:
            return found
        steps = (*(f"A, {note}" for note in notes_a), *(f"B, {note}" for note in notes_b))
        reduced = replace(self.aligned("larger group", a, b), steps=steps)
        if not reduced.fits and reduced.transform is not None:  # what removes the freedom amplifies rounding, too
            refit = partial(self._refit, reduced.transform, prepare=lambda w: remove_degeneracies(w)[0])
            reduced = self._with_refits(reduced, a, b, refit)
        return reduced if reduced.fits else found

    def align_balanced(self, found: TransformEvidence) -> TransformEvidence:
        """A transform found between the two models with balanced heads, where those of one are far from it."""
        if found.transform is None:
            return found
        balance_a, balance_b = _head_balance(self.a), _head_balance(self.b)
        if not balance_a.elements and not balance_b.elements:
            return found
        between = self.aligned("group", balance_a.apply(self.a), balance_b.apply(self.b)).transform
        assert between is not None
        transform = balance_a.inverse().compose(between.compose(balance_b, self.b.arch), self.b.arch)
        better = replace(found, transform=transform, residuals=self.residuals(self.a, self.b, transform))
        return better if better.fits else found

    def aligned(
        self, kind: Kind, a: Weights, b: Weights, stored_b: Weights | None = None, before: float = 0.0
    ) -> TransformEvidence:
        """The best of the transforms that an alignment proposes, by the residuals that it leaves. Where the stream is
        rotated, a second one is tried only if the first leaves no less than `before`; elsewhere most that do not fit
        are given up early, and measured only if no other fits."""
        found: list[TransformEvidence] = []
        given_up: list[Transform] = []
        measured = partial(self.residuals, a, b if stored_b is None else stored_b)
        for transform in transforms_by_descent(b, a, WeightMatching(), self.device):
            rotates = rotates_stream(transform, b.arch)
            left = measured(transform, most=inf if rotates else HOPELESS)
            if not left:
                given_up.append(transform)
                continue
            found.append(TransformEvidence(kind, transform, left))
            if found[-1].fits or (rotates and _square_distance(left) < before):
                return min(found, key=lambda each: _square_distance(each.residuals))
        found += [TransformEvidence(kind, each, measured(each)) for each in given_up]
        return min(found, key=lambda each: _square_distance(each.residuals))


def _square_distance(residuals: tuple[Residual, ...]) -> float:
    """The sum over the spaces of ‖A − aligned B‖² / ‖A‖²."""
    return sum(r.distance**2 for r in residuals)


def _lost_gain_text(trunk: TrunkPair | None) -> str:
    gain = lost_gain(trunk) if trunk is not None and trunk.heads else None
    return f"{gain} is zero in other places of A than of B, which no head can undo" if gain else ""


def settings_text(settings: Mapping[str, tuple[Any, Any]]) -> str:
    """The first of the keys that differ, with both values, and how many more there are."""
    (key, (x, y)), more = next(iter(settings.items())), len(settings) - 1
    others = f" ({more} more keys differ)" if more else ""
    name = key if " " in key else f"config.json: {key}"
    return f"{name}: A has {x!s:.200}, B has {y!s:.200}{others}"


def _head_balance(weights: Weights) -> Transform:
    """The transform that balances the layers with a head of very different queries and keys, or values and outputs: an
    alignment weighs the tensors as they are, and would see only the large ones."""
    arch, tensors, elements = weights.arch, AsFloat64(weights), dict[str, Element]()
    for heads in arch.heads():
        m = attention_matrices(arch, heads, tensors)
        if max(_imbalance(m.q, m.k), _imbalance(m.v, m.o)) > MAX_IMBALANCE:
            elements[heads.name] = balance_heads(m, heads, smallest_singular_value(weights.dtype))
    return Transform(arch.family, dict(arch.spaces), elements)


def _imbalance(x: Tensor, y: Tensor) -> float:
    """The largest ratio, over the heads, between the sizes of two factors; 1 for heads of zeros."""
    x, y = (torch.linalg.vector_norm(each, dim=(1, 2)) for each in (x, y))
    x, y = (each.repeat_interleave(max(len(x), len(y)) // len(each)) for each in (x, y))
    ratios = torch.where((x > 0) & (y > 0), x / y, 1)
    return float(torch.maximum(ratios, 1 / ratios).max())


def _check_same_task(a: Weights, b: Weights) -> None:
    """Raise unless both models map the same inputs to the same kind of output."""
    remedy = "only models that map the same inputs to the same outputs can be compared"
    require_equal("family", a.arch.family, b.arch.family, remedy=remedy)
    require_equal("image size", *(_image_text(w) for w in (a, b)), remedy=remedy)
    require_equal("vocabulary", *(vocabulary_size(w) for w in (a, b)), remedy=remedy)
    require_equal("class", _output_class(a), _output_class(b), remedy=remedy)
    if _output_class(a) in a.family.optional_pooler:
        pooler = [any("pooler" in name for name in w) for w in (a, b)]
        require_equal("pooler", *("one" if each else "none" for each in pooler), remedy=remedy)
    for name in a.arch.tensors:
        sizes = [_open_sizes(w, name) for w in (a, b)]
        if None not in sizes:
            require_equal(f"tensor {name}: open axes", *sizes, remedy=remedy)


def _image_text(weights: Weights) -> str:
    """Channels, height and width of the images that the model reads; empty for a model of tokens."""
    return "×".join(map(str, image_shape(weights) or ()))


def _output_class(weights: Weights) -> str:
    """The class that runs the model; for our own model, what its head is for."""
    if weights.family.own:
        return "classifier" if weights.config.get("n_classes") else "language model"
    return weights.family.class_of(weights.config)


def _open_sizes(weights: Weights, name: str) -> tuple[int, ...] | None:
    """The lengths of the axes that belong to no space: tokens, labels, positions, pixels."""
    pattern = weights.arch.tensors.get(name)
    if pattern is None or pattern.buffer:
        return None
    return tuple(n for n, axis in zip(weights.arch.shapes[name], pattern.roles[0].axes) if not axis.terms)


def with_same_tying(a: Weights, b: Weights) -> tuple[Weights, Weights]:
    """The same two functions; where only one model ties its head to the embedding, that one is untied."""
    if is_tied(a) == is_tied(b):
        return a, b
    return (untied(a), b) if is_tied(a) else (a, untied(b))


def refine_transform(a: Weights, b: Weights, transform: Transform, device: torch.device) -> Transform:
    """A few more sweeps of weight matching in float64, starting from a transform that brings B to A.

    `align` sweeps wide models in float32 and only a few times. The sweeps take place between the normal forms of
    alignment; the result is mapped back to A's own gauge.
    """
    whole = symmetry(b.arch)
    order = {name: g for name, g in transform.elements.items() if name in b.arch.expert_spaces}
    problem = AlignmentProblem(a, b, whole, WeightMatching(scope="model"), device, exact=True).with_expert_order(order)
    groups = problem.part.groups
    scales = {name: (problem.form_a.balance(name), problem.form_b.balance(name)) for name in groups}
    start = {
        name: scales[name][0] @ transform.elements.get(name, each.identity()) @ scales[name][1].inverse()
        for name, each in groups.items()
    }
    found = descend(problem, start, most=REFINING_SWEEPS).elements
    elements = order | {name: scales[name][0].inverse() @ g @ scales[name][1] for name, g in found.items()}
    return with_reference_gauge(a, b, whole, elements, device)


# -- the verdict ----------------------------------------------------------------------------------------------------


def decide(
    a: Weights,
    b: Weights,
    evidence: TransformEvidence,
    compared: list[ComparedInput],
    precision: str,
    ties: str = "",
) -> Verdict:
    """`same` if the transform fits and there is no witness, `different` if it does not fit and there is one. `ties` are
    experts that the transform moves though their scores are equal, in words."""
    worst, witness = worst_input(compared), find_witness(compared)
    lost = max(compared, key=lambda c: c.difference)
    overflow = next((c for c in compared if c.overflow), None)
    confirmed = worst.ratio <= SAME_THRESHOLD and lost.difference <= MAX_ROUNDING
    agree = witness is None and overflow is None and (confirmed or _is_identical(evidence))
    if evidence.fits and agree and not ties:
        reason = _reason_same(evidence, compared, precision) + _types_text(a, b, evidence, precision)
        claimed = precision if _is_surely_identical(evidence, a, b) else precision_as_run(a, b, precision=precision)
        return Verdict("same", reason, claimed, evidence, worst, len(compared))
    near = sufficient_precision(evidence.worst.excess, precision) if evidence.worst and not evidence.fits else None
    check = witness is None or a.arch.sizes.n_heads != b.arch.sizes.n_heads
    failed = (*failed_conditions(a, "A"), *failed_conditions(b, "B")) if check else ()
    answer: Answer = "undecided" if witness is None or evidence.fits else "different"
    if witness is None and evidence.fits and overflow is not None:
        reason = f"an element fits, but {_overflow_text(overflow)}"
    elif evidence.fits and agree:
        reason = (
            f"an element fits, and outputs agree on {len(compared)} inputs, but it changes the order of experts whose "
            f"scores are equal ({ties}), which decides which of them are taken"
        )
    elif witness is None and evidence.fits and lost.difference <= MAX_ROUNDING:
        reason = (
            f"tolerance: an element fits, but outputs differ by {worst.difference:.1e} on an input "
            f"({worst.probe.label}), where rounding makes {worst.rounding:.1e}: that neither confirms nor refutes it"
        )
    elif witness is None and evidence.fits:
        reason = (
            f"an element fits, but outputs differ by {lost.difference:.1e} on an input ({lost.probe.label}): rounding "
            f"of {precision} alone makes {lost.rounding:.1e}, so that nothing is left to compare"
        )
    elif witness is None:
        reason = _reason_unproven(evidence, compared, failed)
    elif evidence.fits:
        reason = (
            f"tolerance: an element fits, but outputs differ by {witness.difference:.1e} on an input "
            f"({witness.probe.label}), where rounding makes {witness.rounding:.1e}"
        )
    else:
        reason = _reason_different(a, b, evidence, witness, failed, near)
    return Verdict(answer, reason, precision, evidence, worst, len(compared), witness, failed, near)


def _is_identical(evidence: TransformEvidence) -> bool:
    """The same numbers under the same config: no output can differ."""
    return evidence.kind == "identity" and all(r.distance == 0 for r in evidence.residuals)


def _is_surely_identical(evidence: TransformEvidence, a: Weights, b: Weights) -> bool:
    """The same numbers, run in the same type."""
    return _is_identical(evidence) and a.dtype_run == b.dtype_run


def _types_text(a: Weights, b: Weights, evidence: TransformEvidence, precision: str) -> str:
    """Where a type that config.json names is coarser than the comparison, or tells two equal files apart."""
    as_run = precision_as_run(a, b, precision=precision)
    if _is_surely_identical(evidence, a, b) or (as_run == precision and not _is_identical(evidence)):
        return ""
    named = f"{dtype_name(a.dtype_run)} for A and {dtype_name(b.dtype_run)} for B"
    return f"; as transformers runs them ({named}) the same up to rounding of {as_run}"


def _overflow_text(overflow: ComparedInput) -> str:
    agree = "" if not isfinite(overflow.difference) else ": as stored they agree, and numbers inside overflow"
    return f"{overflow.overflow}, on an input ({overflow.probe.label}){agree}"


def _reason_same(evidence: TransformEvidence, compared: list[ComparedInput], precision: str) -> str:
    assert evidence.worst is not None
    if _is_identical(evidence):
        return "the weights are the same numbers"
    outputs, n_inputs = worst_input(compared), len(compared)
    exact = sum(each.dtype == "float64" for each in compared)
    float64 = f"; on {exact} of them in float64, as numbers inside overflow float32" if exact else ""
    how = {"identity": "the weights as they are", "group": "an element of the group"}.get(
        evidence.kind, "an element of a larger group"
    )
    return (
        f"up to rounding of {precision}: {how} brings B to A within {evidence.worst.ratio:.2g} × rounding (allowed "
        f"{evidence.worst.allowed:.2g}), and outputs differ by at most {outputs.difference:.1e} on {n_inputs} inputs "
        f"(rounding alone: {outputs.rounding:.1e}){float64}"
    )


def _reason_different(
    a: Weights,
    b: Weights,
    evidence: TransformEvidence,
    witness: ComparedInput,
    failed: tuple[FailedCondition, ...],
    near: str | None,
) -> str:
    text = (
        f"outputs differ by {witness.difference:.1e} on an input ({witness.probe.label}), where rounding makes "
        f"{witness.rounding:.1e}"
    )
    worst, first = evidence.worst, evidence.first
    if worst is not None and first is not None:
        most = f", and most at {_place(worst)}" if _is_elsewhere(first, worst) else ""
        text += f"; they part first at {_place(first)}{most}"
        text += f", {evidence.obstacle}" if evidence.obstacle else ""
    else:
        text += f"; {evidence.obstacle}"
    n_a, n_b = a.arch.sizes.n_heads, b.arch.sizes.n_heads
    if n_a != n_b and not failed:
        text += f"; {n_a} and {n_b} heads of full rank with distinct patterns are never the same function"
    return text + (f"; all of it within the rounding of {near}" if near else "")


def _is_elsewhere(one: Residual, other: Residual) -> bool:
    return (one.layer, one.kind) != (other.layer, other.kind)


def _place(residual: Residual) -> str:
    """Where a residual is: layer, part and tensor, and how large it is."""
    where = f"layer {residual.layer}, {residual.kind}" if residual.layer is not None else residual.kind
    return f"{where} ({residual.tensor}: {residual.ratio:.1e} × rounding)"


def _agreement_text(compared: list[ComparedInput]) -> str:
    """That outputs agree, or that rounding is so large on some input that they say nothing there."""
    lost = max(compared, key=lambda c: c.lost)
    if lost.lost <= MAX_ROUNDING:
        return f"outputs agree on {len(compared)} inputs"
    return (
        f"outputs differ by {lost.difference:.1e} on an input ({lost.probe.label}), where rounding makes "
        f"{lost.rounding:.1e}, so that they decide nothing"
    )


def _reason_unproven(
    evidence: TransformEvidence, compared: list[ComparedInput], failed: tuple[FailedCondition, ...]
) -> str:
    worst, overflow = evidence.worst, next((c for c in compared if c.overflow), None)
    obstacle = evidence.obstacle or (
        f"no element found (closest: {worst.tensor}, {worst.ratio:.1e} × rounding)" if worst else "no element found"
    )
    text = f"{_agreement_text(compared)}, but {obstacle}"
    if overflow is not None:
        return f"{obstacle}, and {_overflow_text(overflow)}; it can be the overflow of a re-scaled copy"
    if failed:
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        return f"{text}; the theorem does not apply: {failed[0]}{more}"
    if evidence.obstacle:
        return f"{text}; the theorem speaks of models of one shape"
    return f"{text}; tolerance: the residual is above rounding, the outputs do not show it"
