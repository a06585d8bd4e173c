"""`align` for scopes beyond attention: the first block, or the whole model with its stream."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from isobasin.action import Action
from isobasin.groups import Heads, HeadsElement
from isobasin.match.alignment import Alignment
from isobasin.match.blockprobe import BlockProbe
from isobasin.match.canonical import ENDS, STREAM, blocks
from isobasin.match.matchers import Matcher
from isobasin.match.sweep import Descent
from isobasin.match.whole import match_whole
from isobasin.symmetries import Symmetry, symmetry
from isobasin.transform import Transform
from isobasin.views import Tensors
from isobasin.weights import Weights

WHOLE = ("first-block", "model")


def align_whole(
    b: Weights,
    a: Weights,
    matcher: Matcher,
    dtypes: Mapping[str, torch.dtype],
    *,
    device: torch.device,
    verify: bool,
    watch: Callable[[int, int], None] | None,
) -> Alignment:
    """Match by sweeps, verify layer by layer, and keep B as it is if nothing came closer."""
    part = symmetry(b.arch).scoped(matcher.scope)
    found = match_whole(a, b, matcher, device=device, watch=(lambda done, _: watch(done, done)) if watch else None)
    candidates = [
        judged(a, b, part, transform, found.descent, dtypes, device=device, verify=verify)
        for transform in _candidates(found.transform, b)
    ]
    return min(candidates, key=lambda c: c.distance_after)


def _candidates(transform: Transform, b: Weights) -> Iterator[Transform]:
    """With A's gains and free values, and without: behind a gain of A close to zero B's weights grow large. A rotated
    stream has no choice, as its gains were folded."""
    yield transform
    if transform.gauge and not Action(b.arch, transform.elements).rotates(STREAM):
        yield replace(transform, gauge={})


def judged(
    a: Weights,
    b: Weights,
    part: Symmetry,
    transform: Transform,
    descent: Descent | None,
    dtypes: Mapping[str, torch.dtype],
    *,
    device: torch.device,
    verify: bool,
    closer: bool = True,
) -> Alignment:
    """A transform of a scope with its distances as stored, verified; the identity if it brought nothing closer.

    Without `closer` something else has decided for it, and it stays whatever the distance.
    """
    moved = transform.apply(b, device=device)
    scope = _tensors(part)
    squares = {
        space: _squares(a, b, moved, [name for name in names if name in scope], dtypes)
        for space, names in blocks(b.arch).items()
    }
    before, after, size = (sum(s[k] for s in squares.values()) for k in range(3))
    if closer and not after < before:
        transform, moved = Transform(b.arch.family, dict(b.arch.spaces)), b
        squares = {space: (s[0], s[0], s[2]) for space, s in squares.items()}
        after = before
    changes = _verified(b, transform, moved, dtypes, part, device) if verify else {}
    heads = [transform.elements.get(n, g.identity()) for n, g in part.groups.items() if isinstance(g, Heads)]
    rows = [_row(space, s, descent, changes) for space, s in squares.items() if s[2] > 0]
    scale = max(size, 1e-300)
    return Alignment(
        transform,
        tuple(rows),
        (before / scale) ** 0.5,
        (after / scale) ** 0.5,
        tuple(tuple(g.head_permutation.tolist()) for g in heads if isinstance(g, HeadsElement)),
        tuple(tuple(g.kv.tolist()) for g in heads if isinstance(g, HeadsElement)),
        max(changes.values(), default=0.0) if verify else None,
        descent.history if descent else (),
    )


def _tensors(part: Symmetry) -> frozenset[str]:
    """Every tensor that the scope may change."""
    arch = part.arch
    touched = {
        name
        for name, pattern in arch.tensors.items()
        for role in pattern.roles
        for axis in role.axes
        for term in axis.terms
        if arch.space_of(term).name in part.groups
    }
    return frozenset(touched.union(*(c.touches for c in part.coordinates.values())) if part.coordinates else touched)


def _squares(
    a: Weights, b: Weights, moved: Weights, names: list[str], dtypes: Mapping[str, torch.dtype]
) -> tuple[float, float, float]:
    """Squared distances from A before and after, both as stored, and A's own square."""
    before = after = size = 0.0
    for name in names:
        reference = a[name].to(torch.float64)
        before += float((b[name].to(dtypes[name]).to(torch.float64) - reference).square().sum())
        after += float((moved[name].to(dtypes[name]).to("cpu", torch.float64) - reference).square().sum())
        size += float(reference.square().sum())
    return before, after, size


def _verified(
    b: Weights,
    transform: Transform,
    moved: Weights,
    dtypes: Mapping[str, torch.dtype],
    part: Symmetry,
    device: torch.device,
) -> dict[int, float]:
    """How far each layer's contribution moves as stored; an error if the alignment itself would move one."""
    probe = BlockProbe.of(b, transform, device)
    changes = {}
    for layer in (i for i in range(b.arch.sizes.n_layers) if f"heads{i}" in part.groups):
        if transform.elements or transform.gauge:
            probe.require_unchanged(layer)
        changes[layer] = probe.change(layer, _Stored(moved, dtypes))
    return changes


class _Stored(Mapping[str, Tensor]):
    """A model as it will be on disk."""

    def __init__(self, tensors: Tensors, dtypes: Mapping[str, torch.dtype]) -> None:
        self._tensors, self._dtypes = tensors, dtypes

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name].to(self._dtypes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _row(
    space: str, squares: tuple[float, float, float], descent: Descent | None, changes: Mapping[int, float]
) -> dict[str, object]:
    named = re.fullmatch(r"(heads|ff)(\d+)", space)
    layer = int(named[2]) if named else None
    scale = max(squares[2], 1e-300)
    head = descent.heads.get(space) if descent else None
    return {
        "layer": layer,
        "space": named[1] if named else STREAM if space == ENDS else space,
        "distance_before": (squares[0] / scale) ** 0.5,
        "distance_after": (squares[1] / scale) ** 0.5,
        "converged": bool(head.converged.all()) if head else descent is None or descent.converged,
        "rank_deficient_kv_heads": torch.nonzero(head.deficient).flatten().tolist() if head else [],
        "max_output_change": changes.get(layer) if layer is not None else None,
    }
