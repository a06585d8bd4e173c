"""Head permutations, each with the best element inside the heads it pairs: what Stage 1 chose among."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations

import torch
from torch import Tensor

from isobasin.action import Action
from isobasin.arch import HeadSpace
from isobasin.groups import Element, HeadsElement
from isobasin.match.align_whole import WHOLE
from isobasin.match.assignment import GroupedAssignment
from isobasin.match.attention import AttentionMatrices, attention_matrices
from isobasin.match.canonical import STREAM, Canonical
from isobasin.match.heads import match_heads, pair_heads, permuted
from isobasin.match.linear import Method
from isobasin.match.matchers import WeightMatching
from isobasin.match.whole import dressed, match_whole
from isobasin.symmetries import Symmetry, symmetry
from isobasin.transform import Transform
from isobasin.weights import Weights

MOST = 24  # arrangements that are measured: all permutations of four heads
CPU = torch.device("cpu")

Places = tuple[int, ...]  # B's kv head that lands on A's head i
Arrangement = Mapping[str, Places]  # by attention layer
Sides = tuple[AttentionMatrices, AttentionMatrices]  # a layer of A, and of B


def head_matrices(a: Weights, b: Weights, part: Symmetry, around: Mapping[str, Element]) -> dict[str, Sides]:
    """Each attention layer of a scope, free directions removed, B's stream moved as `around` says."""
    sides = [Canonical(model, part, torch.float64, CPU) for model in (a, b)]
    action = Action(b.arch, {name: g for name, g in around.items() if name == STREAM})
    found = {}
    for heads in b.arch.heads():
        if heads.name in part.groups:
            first, second = (side.block(heads.name) for side in sides)
            moved = {name: action.tensor(name, t) for name, t in second.items()}
            read = [attention_matrices(b.arch, heads, tensors) for tensors in (first, moved)]
            found[heads.name] = (read[0], read[1])
    return found


@dataclass(frozen=True)
class Arranger:
    """Moves B's heads to given places, and finds the element inside them; all else stays as matching found it."""

    a: Weights
    b: Weights
    scope: str
    stage2: Method = "full"

    @cached_property
    def part(self) -> Symmetry:
        return symmetry(self.b.arch).scoped(self.scope)

    @cached_property
    def layers(self) -> tuple[HeadSpace, ...]:
        return tuple(heads for heads in self.b.arch.heads() if heads.name in self.part.groups)

    @cached_property
    def matched(self) -> Mapping[str, Element]:
        """Where matching puts stream, units and heads of a scope with more than attention; else nothing."""
        if self.scope not in WHOLE:
            return {}
        matcher = WeightMatching(scope=self.scope, stage2=self.stage2)
        return match_whole(self.a, self.b, matcher, device=CPU).elements

    @cached_property
    def around(self) -> Mapping[str, Element]:
        """Stream and units alone."""
        return {name: g for name, g in self.matched.items() if not isinstance(g, HeadsElement)}

    @cached_property
    def matrices(self) -> Mapping[str, Sides]:
        return head_matrices(self.a, self.b, self.part, self.around)

    @cached_property
    def chosen(self) -> Arrangement:
        """What Stage 1 takes, layer by layer."""
        found = {name: g.kv for name, g in self.matched.items() if isinstance(g, HeadsElement)}
        for heads in self.layers:
            if heads.name not in found:
                found[heads.name] = pair_heads(*self.matrices[heads.name], heads, "complete").groups
        return {heads.name: tuple(found[heads.name].tolist()) for heads in self.layers}

    @cached_property
    def inside(self) -> Mapping[str, HeadsElement]:
        """The best element between every head of A and every head of B, in one batch: head i·n + j is the pair i, j.

        What is best inside a pair does not depend on how the others are paired.
        """
        return {heads.name: self._between_all(heads) for heads in self.layers}

    def _between_all(self, heads: HeadSpace) -> HeadsElement:
        n = heads.n_kv_heads
        a, b = self.matrices[heads.name]
        rows, columns = torch.arange(n).repeat_interleave(n), torch.arange(n).repeat(n)
        first, second = permuted(a, _spread(rows, heads)), permuted(b, _spread(columns, heads))
        wide = replace(heads, n_heads=n * heads.n_heads, n_kv_heads=n * n, permutable=False)
        return match_heads(first, second, wide, stage2=self.stage2).element

    def transform(self, arrangement: Arrangement) -> Transform:
        """These places, the best elements inside the heads, and A's own values wherever the function is blind."""
        elements = {heads.name: self._element(heads, arrangement[heads.name]) for heads in self.layers}
        return dressed(self.a, self.b, self.part, {**self.around, **elements}, CPU)

    def _element(self, heads: HeadSpace, places: Places) -> HeadsElement:
        found, kv = self.inside[heads.name], torch.tensor(places)
        chosen = torch.arange(len(kv)) * len(kv) + kv
        queries = torch.arange(heads.group_size).expand(len(kv), -1).clone()
        return HeadsElement(kv, queries, found.qk.take(chosen), found.vo.take(chosen))


def _spread(groups: Tensor, heads: HeadSpace) -> GroupedAssignment:
    """Whole groups, their query heads in order."""
    queries = (groups[:, None] * heads.group_size + torch.arange(heads.group_size)).flatten()
    return GroupedAssignment(groups, queries, 0.0)


def arrangements(layers: Sequence[HeadSpace], chosen: Arrangement, *, seed: int) -> list[Arrangement]:
    """Every permutation where one layer has at most MOST of them; else the chosen one and MOST − 1 random ones."""
    if len(layers) == 1 and math.factorial(layers[0].n_kv_heads) <= MOST:
        return [{layers[0].name: places} for places in permutations(range(layers[0].n_kv_heads))]
    return [chosen, *_drawn(layers, chosen, seed)]


def _drawn(layers: Sequence[HeadSpace], chosen: Arrangement, seed: int) -> Iterator[Arrangement]:
    rng, seen = torch.Generator().manual_seed(seed), {tuple(chosen.values())}
    most = min(MOST, math.prod(math.factorial(heads.n_kv_heads) for heads in layers))
    while len(seen) < most:
        drawn = {h.name: tuple(torch.randperm(h.n_kv_heads, generator=rng).tolist()) for h in layers}
        if tuple(drawn.values()) not in seen:
            seen.add(tuple(drawn.values()))
            yield drawn
