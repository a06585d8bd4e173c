"""Alignment of a pair of a study: by each matcher that a grid may name, and with given head permutations.

Pairs are aligned by `isobasin.align`. In attention scopes what a matcher finds is applied even if it is no closer to A.
`FixedHeadAligner` prescribes head permutations, to measure all of them. Matching runs on the CPU in float64. Learning
runs on the device of the context, in bfloat16 on CUDA.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from isobasin.alignment.align import Matcher, align
from isobasin.alignment.descent import nearest_elements
from isobasin.alignment.gauge import with_reference_gauge
from isobasin.alignment.heads import match_heads, permuted
from isobasin.alignment.linear import Method
from isobasin.alignment.matchers import ActivationMatching, WeightMatching
from isobasin.alignment.problem import AlignmentProblem
from isobasin.alignment.reference import ReferenceMatching
from isobasin.alignment.result import Alignment
from isobasin.arch import HeadSpace
from isobasin.files import ResumeFile
from isobasin.groups import Element, HeadsElement
from isobasin.groups.assignment import GroupedAssignment
from isobasin.learn.matching import LearnedAlignment, LearnedMatching
from isobasin.runtime import Inputs
from isobasin.study.config import MatcherConfig
from isobasin.study.plan import Context
from isobasin.symmetries import ATTENTION_SCOPES, Symmetry, symmetry
from isobasin.symmetries.action import Action
from isobasin.symmetries.attention import AttentionMatrices, attention_matrices
from isobasin.symmetries.transform import Transform, pack_transform
from isobasin.tasks import Batch, Task
from isobasin.tasks.datasets import Dataset, augmentation
from isobasin.tasks.loader import MAX_IMAGES, MAX_TOKENS
from isobasin.weights import Weights

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
        """Attention scopes: the matcher's result is applied even if it is no closer. Otherwise an ablation would not
        show what its variant does."""
        keep = self.scope in ATTENTION_SCOPES
        return align(self.b, to=self.a, matcher=self._matcher(config), only_if_closer=not keep)

    def _matcher(self, config: MatcherConfig) -> Matcher:
        common: dict[str, Any] = {"scope": self.scope, "stage2": config.stage2}
        if config.head_distance:
            common["head_distance"] = config.head_distance
        if config.matcher == "reference":
            return ReferenceMatching(**common)
        if config.matcher == "activations":
            inputs = list(unlabeled_inputs(self.data.task("train", samples=ACTIVATION_SAMPLES)))
            return ActivationMatching(inputs, **common)
        return WeightMatching(**common)

    def _learn(self, config: MatcherConfig) -> LearnedAlignment:
        """Held-out data are a part of the training data. A killed run is resumed from its scratch folder."""
        device = torch.device(self.context.device)
        start = MatcherConfig(matcher=config.start, stage2=config.stage2, head_distance=config.head_distance)
        scratch = self.context.scratch / config.label.replace("/", "-")
        resume = ResumeFile(scratch, "learning", {"job": dict(self.settings)}, tensors=True)
        if resume.find("start") is None:  # matching was done already, and need not be repeated
            resume.keep("start", pack_transform(self.align(start).transform))
        matcher = LearnedMatching(
            self.data.task("train", samples=LEARNING_SAMPLES),
            scope=self.scope,
            init=self._matcher(start),
            steps=config.steps,
            lr=config.rate,
            check_every=max(1, config.steps // 10),
            autocast=torch.bfloat16 if device.type == "cuda" else None,
            augment=augmentation(config.augment),
            resume=resume,
        )
        found = align(self.b, to=self.a, matcher=matcher, device=device)
        resume.close()
        assert isinstance(found, LearnedAlignment)
        return found


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
        found = self._matched_elements
        return {heads.name: _kv_permutation(found[heads.name]) for heads in self.layers}

    def transform(self, permutations: HeadPermutations) -> Transform:
        """These permutations, the best elements inside the heads, and A's values for all free coordinates."""
        elements = {heads.name: self._element(heads, permutations[heads.name]) for heads in self.layers}
        return with_reference_gauge(self.a, self.b, self._part, {**self._other_elements, **elements}, CPU)

    @cached_property
    def _part(self) -> Symmetry:
        return symmetry(self.b.arch).scoped(self.scope)

    @cached_property
    def _matched_elements(self) -> Mapping[str, Element]:
        """All elements that weight matching finds."""
        matcher = WeightMatching(scope=self.scope, stage2=self.stage2)
        return nearest_elements(self.a, self.b, self.scope, matcher, CPU)

    @cached_property
    def _other_elements(self) -> Mapping[str, Element]:
        """The elements of stream and units."""
        spaces = self.b.arch.spaces
        return {name: g for name, g in self._matched_elements.items() if spaces[name].role != "heads"}

    @cached_property
    def _pairs(self) -> Mapping[str, LayerPair]:
        """The matrices of each attention layer in normal form, the stream of B moved to A's."""
        problem = AlignmentProblem(self.a, self.b, self._part, WeightMatching(), CPU)
        stream = self.b.arch.stream.name
        action = Action(self.b.arch, {name: g for name, g in self._other_elements.items() if name == stream})
        found = {}
        for heads in self.layers:
            first, second = (form.block(heads.name) for form in (problem.form_a, problem.form_b))
            moved = {name: action.tensor(name, t) for name, t in second.items()}
            read = [attention_matrices(self.b.arch, heads, tensors) for tensors in (first, moved)]
            found[heads.name] = (read[0], read[1])
        return found

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


def _kv_permutation(element: Element) -> tuple[int, ...]:
    return tuple(element.face("vo").tensors()["index"].tolist())


def _whole_groups(groups: Tensor, heads: HeadSpace) -> GroupedAssignment:
    """An assignment of whole groups, with their query heads in order."""
    queries = (groups[:, None] * heads.group_size + torch.arange(heads.group_size)).flatten()
    return GroupedAssignment(groups, queries, 0.0)
