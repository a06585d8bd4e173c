"""`align` for scopes beyond attention: the first block, or the whole model with its stream."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.action import Action
from isobasin.groups import Heads, HeadsElement
from isobasin.match.alignment import Alignment
from isobasin.match.blockprobe import BlockProbe, require_unchanged
from isobasin.match.canonical import ENDS, STREAM, blocks
from isobasin.match.matchers import Matcher
from isobasin.match.memory import give_back
from isobasin.match.sweep import Descent
from isobasin.match.whole import Found, dressed, match_whole
from isobasin.symmetries import Symmetry, symmetry
from isobasin.transform import Transform
from isobasin.views import Tensors
from isobasin.weights import Weights

WHOLE = ("first-block", "model")
CHUNK = 2**22  # numbers compared at a time
Squares = tuple[float, float, float]
_LAYER = re.compile(r"(heads|ff)(\d+)")


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
    best: Alignment | None = None
    for transform in _candidates(found, a, b, part, device):
        judgement = judged(a, b, part, transform, found.descent, dtypes, device=device, verify=verify)
        best = judgement if best is None or judgement.distance_after < best.distance_after else best
        if best.distance_after < best.distance_before and _turns(transform, b):
            break
    assert best is not None
    return best


def _candidates(found: Found, a: Weights, b: Weights, part: Symmetry, device: torch.device) -> Iterator[Transform]:
    """With A's gains and free values, and without: behind a gain of A close to zero B's weights grow large.

    A rotated stream needs its gains folded: where A's do not bring it closer, they stay so.
    """
    transform = found.transform
    yield transform
    if _turns(transform, b):
        yield dressed(a, b, part, found.elements, device, folded=True)
    elif transform.gauge:
        yield replace(transform, gauge={})


def _turns(transform: Transform, b: Weights) -> bool:
    return Action(b.arch, transform.elements).rotates(STREAM)


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
    measured = _Measured(a, b, part, transform.apply(b, device=device), dtypes)
    probe = BlockProbe.of(b, transform, device) if verify else None
    squares, exact, changes = measured.by_layer(probe)
    before, after, size = (sum(s[k] for s in squares.values()) for k in range(3))
    if closer and not after < before:
        transform, changes = Transform(b.arch.family, dict(b.arch.spaces)), dict.fromkeys(changes, 0.0)
        squares = {space: (s[0], s[0], s[2]) for space, s in squares.items()}
        after = before
    elif transform.elements or transform.gauge:
        for layer, change in exact.items():
            require_unchanged(layer, change)
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


@dataclass(frozen=True)
class _Measured:
    """B as moved, beside A and beside itself: each of its tensors is computed once, for all that is asked of it."""

    a: Weights
    b: Weights
    part: Symmetry
    moved: Weights
    dtypes: Mapping[str, torch.dtype]

    def by_layer(self, probe: BlockProbe | None) -> tuple[dict[str, Squares], dict[int, float], dict[int, float]]:
        """Squares by block; how far each layer's function moved, in float64 and as stored."""
        squares: dict[str, Squares] = {}
        exact: dict[int, float] = {}
        stored: dict[int, float] = {}
        for spaces in _together(blocks(self.b.arch)):
            layer = _layer(spaces[0])
            probed = probe if layer is not None and f"heads{layer}" in self.part.groups else None
            found, changes = self._of_layer(spaces, layer, probed)
            squares |= found
            if layer is not None and changes:
                exact[layer], stored[layer] = changes
            give_back()
        return {space: squares[space] for space in blocks(self.b.arch)}, exact, stored

    def _of_layer(
        self, spaces: tuple[str, ...], layer: int | None, probe: BlockProbe | None
    ) -> tuple[dict[str, Squares], list[float]]:
        """The same for one layer, whose moved tensors are held together and gone when this returns."""
        scope = _tensors(self.part)
        names = {space: [n for n in blocks(self.b.arch)[space] if n in scope] for space in spaces}
        moved = self.moved if layer is None else self.moved.held(n for part in names.values() for n in part)
        squares = {space: self._squares(moved, part) for space, part in names.items()}
        if probe is None or layer is None:
            return squares, []
        return squares, probe.changes(layer, moved, _Stored(moved, self.dtypes))

    def _squares(self, moved: Tensors, names: list[str]) -> Squares:
        """Squared distances from A before and after, both as stored, and A's own square."""
        sums = sum((self._of_tensor(moved, name) for name in names), torch.zeros(3, dtype=torch.float64))
        before, after, size = sums.tolist()
        return before, after, size

    def _of_tensor(self, moved: Tensors, name: str) -> Tensor:
        """The three of one tensor, a few numbers at a time: an embedding in float64 is the largest thing there is."""
        sums = torch.zeros(3, dtype=torch.float64)
        after = moved[name].to(self.dtypes[name]).cpu()
        before = self.b[name].to(self.dtypes[name]).cpu()
        for x, y, z in zip(*(_chunks(t) for t in (before, after, self.a[name].cpu())), strict=True):
            reference = z.to(torch.float64, copy=True)  # squared in place below, and A stays as it is
            for k, part in enumerate((x - reference, y - reference, reference)):
                sums[k] += part.square_().sum()
        return sums


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.reshape(-1).split(CHUNK)


def _together(spaces: Iterable[str]) -> list[tuple[str, ...]]:
    """Blocks of one layer together: what they add to the stream is verified as a sum."""
    found: dict[object, list[str]] = {}
    for space in spaces:
        layer = _layer(space)
        found.setdefault(space if layer is None else layer, []).append(space)
    return [tuple(group) for group in found.values()]


def _layer(space: str) -> int | None:
    named = _LAYER.fullmatch(space)
    return int(named[2]) if named else None


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


def _row(space: str, squares: Squares, descent: Descent | None, changes: Mapping[int, float]) -> dict[str, object]:
    named, layer = _LAYER.fullmatch(space), _layer(space)
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
