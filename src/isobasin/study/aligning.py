"""How a pair of a study is aligned: the ways a grid may ask for, and what each of them needs to know.

Matching runs on the CPU, in float64 and the same on every machine; learning runs where the context says, in bfloat16 on
an accelerator.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.learning.align_learned import LearnedAlignment, LearnedMatching, align_learned
from isobasin.learning.lessons import Lessons
from isobasin.learning.record import FileRecord, packed_transform
from isobasin.match.align import align
from isobasin.match.align_whole import WHOLE, judged
from isobasin.match.alignment import Alignment
from isobasin.match.heads import HEAD_DISTANCES, STAGES
from isobasin.match.matchers import ActivationMatching, Matcher, WeightMatching
from isobasin.match.reference import ReferenceMatching
from isobasin.match.whole import dressed
from isobasin.moments import agreements, second_moments
from isobasin.running import Inputs
from isobasin.symmetries import symmetry
from isobasin.tasks import Batch, Task
from isobasin.tasks.unlabeled import MAX_IMAGES, MAX_TOKENS
from isobasin.weights import Weights

from .arrangements import CPU, head_matrices
from .augmentation import NAMES as AUGMENTATIONS
from .augmentation import augmentation
from .jobs import Context
from .lines import data_of

MATCHERS = ("weights", "activations", "learned", "reference")
STARTS = ("weights", "activations")
SEEN = 2048  # training samples whose activations are looked at, at most
LEARNED_FROM = 20_000  # training samples that are learned from, at most; a tenth of them decides


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to align, as a table of the grid says it; the last four are for `learned`.

    >>> Choice.of({"matcher": "weights", "stage2": "none"}).label
    'weights/none'
    """

    matcher: str = "weights"
    stage2: str = "full"
    head_distance: str | None = None
    start: str = "weights"
    steps: int = 500
    rate: float = 3e-3
    augment: str = "none"  # of pictures that are learned from

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> "Choice":
        """The table, checked: an unknown key or word is the grid's mistake."""
        known = [f.name for f in fields(cls)]
        for key in table:
            if key not in known:
                raise IsobasinError(f"matcher {dict(table)}: unknown key {key!r}, expected {', '.join(known)}")
        found = cls(**table)
        words = {"matcher": MATCHERS, "stage2": STAGES, "start": STARTS, "augment": AUGMENTATIONS}
        for key, allowed in words.items():
            if getattr(found, key) not in allowed:
                raise IsobasinError(
                    f"matcher {dict(table)}: {key} is {getattr(found, key)!r}, expected one of {', '.join(allowed)}"
                )
        if found.head_distance not in (None, *HEAD_DISTANCES):
            raise IsobasinError(
                f"matcher {dict(table)}: head_distance is {found.head_distance!r}, "
                f"expected one of {', '.join(HEAD_DISTANCES)}"
            )
        return found

    @property
    def label(self) -> str:
        """`weights`, `weights/none`, `weights/cosine`, `learned/activations`: what is usual is left out."""
        words = [
            self.stage2 if self.stage2 != "full" else "",
            self.head_distance or "",
            self.start if self.matcher == "learned" and self.start != "weights" else "",
        ]
        return "/".join([self.matcher, *filter(None, words)])


@dataclass(frozen=True)
class Aligner:
    """B to A, with whatever a matcher needs to know; what was found once is not looked for again."""

    a: Weights
    b: Weights
    settings: Mapping[str, Any]
    context: Context
    _found: dict[Choice, Alignment] = field(default_factory=dict, repr=False)

    @property
    def scope(self) -> str:
        return str(self.settings["scope"])

    def align(self, choice: Choice) -> Alignment:
        if choice not in self._found:
            learns = choice.matcher == "learned"
            self._found[choice] = self._learned(choice) if learns else self._matched(choice)
        return self._found[choice]

    def _matched(self, choice: Choice) -> Alignment:
        """What the matcher found, applied even where it is no closer: an ablation that `align` would replace by B as
        it is would say nothing."""
        a, b, matcher = self.a, self.b, self._matcher(choice)
        if self.scope in WHOLE:
            return align(b, to=a, matcher=matcher)
        part = symmetry(b.arch).scoped(self.scope)
        sides = head_matrices(a, b, part, {})
        layers = [heads for heads in b.arch.heads() if heads.name in sides]
        elements = {heads.name: matcher.match(*sides[heads.name], heads).element for heads in layers}
        dtypes = replace(b, exact=False).output_dtypes()
        transform = dressed(a, b, part, elements, CPU)
        return judged(a, b, part, transform, None, dtypes, device=CPU, verify=True, closer=False)

    def _matcher(self, choice: Choice) -> Matcher:
        common: dict[str, Any] = {"scope": self.scope, "stage2": choice.stage2}
        if choice.head_distance:
            common["head_distance"] = choice.head_distance
        if choice.matcher == "reference":
            if self.scope in WHOLE:
                raise IsobasinError(f"matcher reference aligns attention only, but the scope is {self.scope}")
            return ReferenceMatching(**common)
        if choice.matcher == "activations":
            seen = list(unlabeled_inputs(self._training_data(SEEN)))
            if self.scope in WHOLE:
                return ActivationMatching(agreements=agreements(self.a, self.b, seen), **common)
            return ActivationMatching(roots=reading_roots(self.a, self.b, seen), **common)
        return WeightMatching(**common)

    def _training_data(self, samples: int) -> Task:
        return data_of(self.settings, self.a, self.context).task("train", samples=samples)

    def _learned(self, choice: Choice) -> LearnedAlignment:
        """Held-out data are a part of the training data; a killed run goes on from its scratch folder."""
        device = torch.device(self.context.device)
        first = Choice(matcher=choice.start, stage2=choice.stage2, head_distance=choice.head_distance)
        lessons = Lessons(
            steps=choice.steps,
            rate=choice.rate,
            check_every=max(1, choice.steps // 10),
            autocast=torch.bfloat16 if device.type == "cuda" else None,
        )
        matcher = LearnedMatching(scope=self.scope, start=self._matcher(first), lessons=lessons)
        task = self._training_data(LEARNED_FROM)
        record = FileRecord(self.context.scratch / choice.label.replace("/", "-"), {"job": dict(self.settings)})
        if record.find("start") is None:  # the start is known: matching a whole model twice would be a waste
            record.keep("start", packed_transform(self.align(first).transform))
        found = align_learned(
            self.b,
            to=self.a,
            matcher=matcher,
            task=task,
            device=device,
            augment=augmentation(choice.augment),
            record=record,
        )
        record.close()
        return found


def reading_roots(a: Weights, b: Weights, inputs: Sequence[Inputs]) -> dict[str, Tensor]:
    """Σ^½ per attention layer, Σ the mean of both models' second moments of what it reads."""
    first, second = (second_moments(model, inputs) for model in (a, b))
    roots = {}
    for name, moment in first.items():
        values, basis = torch.linalg.eigh((moment + second[name]) / 2)
        roots[name] = (basis * values.clamp_min(0).sqrt()) @ basis.mT
    return roots


def unlabeled_inputs(task: Task) -> Iterator[Inputs]:
    """The inputs of a task up to MAX_IMAGES pictures or MAX_TOKENS tokens; a padded text comes alone, without its
    padding, which would be counted otherwise."""
    images, tokens = 0, 0
    for batch in task:
        for one in _unpadded(batch):
            if images >= MAX_IMAGES or tokens >= MAX_TOKENS:
                return
            yield one
            images += len(one["pixel_values"]) if "pixel_values" in one else 0
            tokens += one["input_ids"].numel() if "input_ids" in one else 0


def _unpadded(batch: Batch) -> Iterator[Inputs]:
    mask = batch.inputs.get("attention_mask")
    if mask is None:
        yield dict(batch.inputs)
        return
    for row, real in zip(batch.inputs["input_ids"], mask.bool()):
        yield {"input_ids": row[real][None]}
