"""Alignment of a pair of a study: by each matcher that a grid may name, and with given head permutations.

This is the study's own use of the functions of `isobasin.match`. It differs from `isobasin.match.align.align` in two
points: what a matcher finds is applied even if it is no closer to A, and head permutations can be prescribed.
Matching runs on the CPU in float64. Learning runs on the device of the context, in bfloat16 on CUDA.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from isobasin.action import Action
from isobasin.arch import HeadSpace
from isobasin.errors import IsobasinError
from isobasin.groups import Element, HeadsElement
from isobasin.learning.align_learned import LearnedAlignment, LearnedMatching, align_learned
from isobasin.learning.lessons import Lessons
from isobasin.learning.record import FileRecord, packed_transform
from isobasin.match.align import align
from isobasin.match.align_whole import WHOLE, judged
from isobasin.match.alignment import Alignment
from isobasin.match.assignment import GroupedAssignment
from isobasin.match.attention import AttentionMatrices, attention_matrices
from isobasin.match.canonical import STREAM, Canonical
from isobasin.match.heads import match_heads, pair_heads, permuted
from isobasin.match.linear import Method
from isobasin.match.matchers import ActivationMatching, Matcher, WeightMatching
from isobasin.match.reference import ReferenceMatching
from isobasin.match.whole import dressed, match_whole
from isobasin.moments import agreements, second_moments
from isobasin.running import Inputs
from isobasin.symmetries import Symmetry, symmetry
from isobasin.tasks import Batch, Task
from isobasin.tasks.unlabeled import MAX_IMAGES, MAX_TOKENS
from isobasin.transform import Transform
from isobasin.weights import Weights

from .augmentation import augmentation
from .config import MatcherConfig
from .datasets import Dataset
from .plan import Context

ACTIVATION_SAMPLES = 2048  # training samples for activations, at most
LEARNING_SAMPLES = 20_000  # training samples for learning, at most; a tenth of them is held out
CPU = torch.device("cpu")

HeadPermutations = Mapping[str, tuple[int, ...]]  # by attention layer: the kv head of B that takes the place of A's i
LayerPair = tuple[AttentionMatrices, AttentionMatrices]  # an attention layer of A, and of B


@dataclass(frozen=True)
class Aligner:
    """Aligns B to A by any `MatcherConfig`; each result is computed once."""

    a: Weights
    b: Weights
    settings: Mapping[str, Any]  # of the job; `scope` is one of them
    data: Dataset
    context: Context
    _cache: dict[MatcherConfig, Alignment] = field(default_factory=dict, repr=False)

    @property
    def scope(self) -> str:
        return str(self.settings["scope"])

    def align(self, config: MatcherConfig) -> Alignment:
        if config not in self._cache:
            self._cache[config] = self._learn(config) if config.matcher == "learned" else self._match(config)
        return self._cache[config]

    def _match(self, config: MatcherConfig) -> Alignment:
        """Attention scopes: the matcher's result is applied even if it is no closer, where `align` would keep B
        unchanged. Otherwise an ablation would not show what its variant does."""
        a, b, matcher = self.a, self.b, self._matcher(config)
        if self.scope in WHOLE:
            return align(b, to=a, matcher=matcher)
        part = symmetry(b.arch).scoped(self.scope)
        pairs = layer_pairs(a, b, part, {})
        layers = [heads for heads in b.arch.heads() if heads.name in pairs]
        elements = {heads.name: matcher.match(*pairs[heads.name], heads).element for heads in layers}
        dtypes = replace(b, exact=False).output_dtypes()
        transform = dressed(a, b, part, elements, CPU)
        return judged(a, b, part, transform, None, dtypes, device=CPU, verify=True, closer=False)

    def _matcher(self, config: MatcherConfig) -> Matcher:
        common: dict[str, Any] = {"scope": self.scope, "stage2": config.stage2}
        if config.head_distance:
            common["head_distance"] = config.head_distance
        if config.matcher == "reference":
            if self.scope in WHOLE:
                raise IsobasinError(f"matcher reference aligns attention only, but the scope is {self.scope}")
            return ReferenceMatching(**common)
        if config.matcher == "activations":
            inputs = list(unlabeled_inputs(self.data.task("train", samples=ACTIVATION_SAMPLES)))
            if self.scope in WHOLE:
                return ActivationMatching(agreements=agreements(self.a, self.b, inputs), **common)
            return ActivationMatching(roots=_reading_roots(self.a, self.b, inputs), **common)
        return WeightMatching(**common)

    def _learn(self, config: MatcherConfig) -> LearnedAlignment:
        """Held-out data are a part of the training data. A killed run is resumed from its scratch folder."""
        device = torch.device(self.context.device)
        start = MatcherConfig(matcher=config.start, stage2=config.stage2, head_distance=config.head_distance)
        lessons = Lessons(
            steps=config.steps,
            rate=config.rate,
            check_every=max(1, config.steps // 10),
            autocast=torch.bfloat16 if device.type == "cuda" else None,
        )
        matcher = LearnedMatching(scope=self.scope, start=self._matcher(start), lessons=lessons)
        task = self.data.task("train", samples=LEARNING_SAMPLES)
        record = FileRecord(self.context.scratch / config.label.replace("/", "-"), {"job": dict(self.settings)})
        if record.find("start") is None:  # matching was done already: `align_learned` need not repeat it
            record.keep("start", packed_transform(self.align(start).transform))
        found = align_learned(
            self.b,
            to=self.a,
            matcher=matcher,
            task=task,
            device=device,
            augment=augmentation(config.augment),
            record=record,
        )
        record.close()
        return found


def _reading_roots(a: Weights, b: Weights, inputs: Sequence[Inputs]) -> dict[str, Tensor]:
    """Σ^½ per attention layer, Σ the mean of both models' second moments of the layer's input."""
    first, second = (second_moments(model, inputs) for model in (a, b))
    roots = {}
    for name, moment in first.items():
        values, basis = torch.linalg.eigh((moment + second[name]) / 2)
        roots[name] = (basis * values.clamp_min(0).sqrt()) @ basis.mT
    return roots


def unlabeled_inputs(task: Task) -> Iterator[Inputs]:
    """The inputs of a task up to MAX_IMAGES images or MAX_TOKENS tokens. A padded text is given alone, without its
    padding, which would otherwise be part of the statistics."""
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


def layer_pairs(a: Weights, b: Weights, part: Symmetry, elements: Mapping[str, Element]) -> dict[str, LayerPair]:
    """The matrices of each attention layer of a scope in normal form. The stream of B is moved by `elements`."""
    forms = [Canonical(model, part, torch.float64, CPU) for model in (a, b)]
    action = Action(b.arch, {name: g for name, g in elements.items() if name == STREAM})
    found = {}
    for heads in b.arch.heads():
        if heads.name in part.groups:
            first, second = (form.block(heads.name) for form in forms)
            moved = {name: action.tensor(name, t) for name, t in second.items()}
            read = [attention_matrices(b.arch, heads, tensors) for tensors in (first, moved)]
            found[heads.name] = (read[0], read[1])
    return found


@dataclass(frozen=True)
class FixedHeadAligner:
    """Aligns B to A with given head permutations: finds the elements inside the heads, and keeps the stream and the
    units where matching puts them."""

    a: Weights
    b: Weights
    scope: str
    stage2: Method = "full"

    @cached_property
    def layers(self) -> tuple[HeadSpace, ...]:
        """The attention layers of the scope."""
        return tuple(heads for heads in self.b.arch.heads() if heads.name in self._part.groups)

    @cached_property
    def matched(self) -> HeadPermutations:
        """The permutation that Stage 1 of weight matching chooses, for each layer."""
        found = {name: g.kv for name, g in self._matched_elements.items() if isinstance(g, HeadsElement)}
        for heads in self.layers:
            if heads.name not in found:
                found[heads.name] = pair_heads(*self._pairs[heads.name], heads, "complete").groups
        return {heads.name: tuple(found[heads.name].tolist()) for heads in self.layers}

    def transform(self, permutations: HeadPermutations) -> Transform:
        """These permutations, the best elements inside the heads, and A's values for all free coordinates."""
        elements = {heads.name: self._element(heads, permutations[heads.name]) for heads in self.layers}
        return dressed(self.a, self.b, self._part, {**self._other_elements, **elements}, CPU)

    @cached_property
    def _part(self) -> Symmetry:
        return symmetry(self.b.arch).scoped(self.scope)

    @cached_property
    def _matched_elements(self) -> Mapping[str, Element]:
        """All elements that matching finds, for scopes beyond attention; otherwise none."""
        if self.scope not in WHOLE:
            return {}
        matcher = WeightMatching(scope=self.scope, stage2=self.stage2)
        return match_whole(self.a, self.b, matcher, device=CPU).elements

    @cached_property
    def _other_elements(self) -> Mapping[str, Element]:
        """The elements of stream and units."""
        return {name: g for name, g in self._matched_elements.items() if not isinstance(g, HeadsElement)}

    @cached_property
    def _pairs(self) -> Mapping[str, LayerPair]:
        return layer_pairs(self.a, self.b, self._part, self._other_elements)

    @cached_property
    def _elements_between_heads(self) -> Mapping[str, HeadsElement]:
        """The best element between every head of A and every head of B in one batch: head i·n + j is the pair i, j.

        The best element of a pair of heads does not depend on how the others are paired.
        """
        return {heads.name: self._between_all(heads) for heads in self.layers}

    def _between_all(self, heads: HeadSpace) -> HeadsElement:
        n = heads.n_kv_heads
        a, b = self._pairs[heads.name]
        rows, columns = torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n)
        first, second = permuted(a, _whole_groups(rows, heads)), permuted(b, _whole_groups(columns, heads))
        wide = replace(heads, n_heads=n * heads.n_heads, n_kv_heads=n * n, permutable=False)
        return match_heads(first, second, wide, stage2=self.stage2).element

    def _element(self, heads: HeadSpace, permutation: tuple[int, ...]) -> HeadsElement:
        found, kv = self._elements_between_heads[heads.name], torch.tensor(permutation)
        chosen = torch.arange(len(kv)) * len(kv) + kv
        queries = torch.arange(heads.group_size).expand(len(kv), -1).clone()
        return HeadsElement(kv, queries, found.qk.take(chosen), found.vo.take(chosen))


def _whole_groups(groups: Tensor, heads: HeadSpace) -> GroupedAssignment:
    """An assignment of whole groups, with their query heads in order."""
    queries = (groups[:, None] * heads.group_size + torch.arange(heads.group_size)).flatten()
    return GroupedAssignment(groups, queries, 0.0)
