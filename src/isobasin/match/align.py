"""Bringing B next to A, layer by layer: match, choose, verify. A is only read, and so is B.

The result is B in A's own gauge: the elements are found between the two models with every invisible direction
removed, and then each free coordinate of the scope takes the value nearest to A's. Layers do not depend on each
other, so only one of them is in memory at a time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from isobasin.arch import HeadSpace
from isobasin.errors import VerificationError
from isobasin.gauge import Coordinate, Stage
from isobasin.groups import HeadsElement
from isobasin.match.attention import AttentionMatrices, attend, attention_matrices
from isobasin.match.comparable import check_comparable
from isobasin.match.heads import HeadMatch
from isobasin.match.matchers import Matcher
from isobasin.symmetries import symmetry
from isobasin.transform import Transform, Value
from isobasin.views import Doubled, Tensors, View, chain
from isobasin.weights import Weights

EXACT = 1e-6  # the largest relative change of a layer's outputs, in float64, that counts as rounding


@dataclass(frozen=True)
class LayerAlignment:
    """One attention layer: its part of the transform, distances (squared sums), and how much its outputs moved."""

    name: str
    transform: Transform
    element: HeadsElement
    tensors: Mapping[str, Tensor]  # what is written, in the output's type; empty where nothing changed
    square_before: float
    square_after: float
    square_reference: float
    converged: bool
    deficient_heads: tuple[int, ...]
    output_change: float

    @property
    def facts(self) -> dict[str, object]:
        scale = max(self.square_reference, 1e-300)
        return {
            "layer": int(self.name.removeprefix("heads")),
            "distance_before": (self.square_before / scale) ** 0.5,
            "distance_after": (self.square_after / scale) ** 0.5,
            "converged": self.converged,
            "rank_deficient_kv_heads": list(self.deficient_heads),
            "max_output_change": self.output_change,
        }


@dataclass(frozen=True)
class Alignment:
    """What was found: a transform for B, and what it does to the distance from A."""

    transform: Transform
    per_layer: tuple[dict[str, object], ...]
    distance_before: float
    distance_after: float
    head_permutation: tuple[tuple[int, ...], ...]
    kv_head_permutation: tuple[tuple[int, ...], ...]
    max_output_change: float

    def __str__(self) -> str:
        return (
            f"distance {self.distance_before:.4g} → {self.distance_after:.4g} of ‖A‖ over {len(self.per_layer)} "
            f"attention layers; outputs moved by at most {self.max_output_change:.1e}"
        )


@dataclass(frozen=True)
class Pairing:
    """Two models that can be aligned, and the part of their symmetry that a scope may use."""

    a: Weights
    b: Weights
    scope: str
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        check_comparable(self.a, self.b)

    @cached_property
    def layers(self) -> tuple[HeadSpace, ...]:
        part = symmetry(self.b.arch).scoped(self.scope)
        return tuple(h for h in self.b.arch.heads() if h.name in part.groups)

    @cached_property
    def reference(self) -> Tensors:
        return Doubled(self.a, self.device)

    @cached_property
    def moving(self) -> Tensors:
        return Doubled(self.b, self.device)

    def coordinates(self, heads: HeadSpace) -> list[Coordinate]:
        """The free coordinates of this layer's attention, in the order in which they are set."""
        inside = self.tensors(heads)
        every = symmetry(self.b.arch).coordinates.values()
        mine = [c for c in every if c.touches <= inside]
        return [c for c in mine if c.usable(self.reference) and c.usable(self.moving)]

    def tensors(self, heads: HeadSpace) -> frozenset[str]:
        """The projections of this layer and their biases."""
        number = heads.name.removeprefix("heads")
        arch = self.b.arch
        names = {name for face in ("qk", "vo") for name, *_ in arch.carriers(f"{face}{number}")}
        return frozenset(names | {bias for bias in map(arch.bias_of, names) if bias})

    def empty(self) -> Transform:
        return Transform(self.b.arch.family, dict(self.b.arch.spaces))


def aligned_layers(pairing: Pairing, matcher: Matcher, dtypes: Mapping[str, torch.dtype]) -> Iterator[LayerAlignment]:
    """Align one layer after the other; `dtypes` is what the result will be stored in."""
    for heads in pairing.layers:
        yield align_layer(pairing, heads, matcher, dtypes)


def align_layer(
    pairing: Pairing, heads: HeadSpace, matcher: Matcher, dtypes: Mapping[str, torch.dtype]
) -> LayerAlignment:
    """Match one layer and keep the best of: element and gauge, element alone, nothing at all."""
    coordinates = pairing.coordinates(heads)
    bare_a = _bare(pairing.reference, pairing, heads, coordinates)
    found = matcher.match(bare_a, _bare(pairing.moving, pairing, heads, coordinates), heads)
    names = sorted(pairing.tensors(heads))
    reference = {name: pairing.reference[name] for name in names}
    original = {name: pairing.b[name] for name in names}
    best, tensors = pairing.empty(), dict[str, Tensor]()
    before = least = _square(reference, original)
    for transform in _candidates(pairing, heads, found, coordinates):
        moved = transform.apply(pairing.b, device=pairing.device)
        written = {name: moved[name].to(dtypes[name]) for name in names if name in moved.changed}
        square = _square(reference, original | written)
        if square < least:
            best, tensors, least = transform, written, square
    _verify(pairing, heads, best)
    element = best.elements.get(heads.name, symmetry(pairing.b.arch).groups[heads.name].identity())
    assert isinstance(element, HeadsElement)
    return LayerAlignment(
        heads.name,
        best,
        element,
        tensors,
        before,
        least,
        float(sum(t.square().sum() for t in reference.values())),
        bool(found.converged.all()),
        tuple(torch.nonzero(found.deficient).flatten().tolist()),
        _output_change(pairing, heads, {**original, **tensors}),
    )


def collect(pairing: Pairing, layers: list[LayerAlignment]) -> Alignment:
    """All layers as one transform; layers that stayed as they were are not in it."""
    transform = Transform(
        pairing.b.arch.family,
        dict(pairing.b.arch.spaces),
        {name: g for layer in layers for name, g in layer.transform.elements.items()},
        {name: v for layer in layers for name, v in layer.transform.gauge.items()},
    )
    scale = max(sum(layer.square_reference for layer in layers), 1e-300)
    return Alignment(
        transform,
        tuple(layer.facts for layer in layers),
        (sum(layer.square_before for layer in layers) / scale) ** 0.5,
        (sum(layer.square_after for layer in layers) / scale) ** 0.5,
        tuple(tuple(layer.element.head_permutation.tolist()) for layer in layers),
        tuple(tuple(layer.element.kv.tolist()) for layer in layers),
        max((layer.output_change for layer in layers), default=0.0),
    )


def align(b: Weights, *, to: Weights, matcher: Matcher, device: torch.device | None = None) -> Alignment:
    """Find the element of B's attention symmetry that brings it closest to A.

    >>> found = align(b, to=a, matcher=WeightMatching())  # doctest: +SKIP
    >>> moved = found.transform.apply(b)  # doctest: +SKIP
    """
    pairing = Pairing(to, b, matcher.scope, device or torch.device("cpu"))
    return collect(pairing, list(aligned_layers(pairing, matcher, b.dtypes)))


class _Zeros(Mapping[str, Tensor]):
    """A model of nothing but zeros: the value nearest to it is the least one."""

    def __init__(self, like: Tensors) -> None:
        self._like = like

    def __getitem__(self, name: str) -> Tensor:
        return torch.zeros_like(self._like[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._like)

    def __len__(self) -> int:
        return len(self._like)


def _bare(tensors: Tensors, pairing: Pairing, heads: HeadSpace, coordinates: list[Coordinate]) -> AttentionMatrices:
    """The layer's matrices with every direction removed that its function does not see."""
    view = tensors
    for stage in Stage:
        chosen = [c for c in coordinates if c.stage == stage]
        view = View(view, chain(*(c.set(c.nearest(view, _Zeros(view))) for c in chosen))) if chosen else view
    return attention_matrices(pairing.b.arch, heads, view)


def _candidates(
    pairing: Pairing, heads: HeadSpace, found: HeadMatch, coordinates: list[Coordinate]
) -> Iterator[Transform]:
    empty = pairing.empty()
    alone = Transform(empty.family, empty.spaces, {heads.name: found.element})
    yield alone
    if coordinates:
        view: Tensors = Doubled(alone.apply(pairing.b, device=pairing.device), pairing.device)
        gauge: dict[str, Value] = {}
        for stage in Stage:
            chosen = [c for c in coordinates if c.stage == stage]
            after = {c.name: c.nearest(view, pairing.reference) for c in chosen}
            gauge |= {c.name: Value(c.read(pairing.moving).cpu(), after[c.name].cpu()) for c in chosen}
            view = View(view, chain(*(c.set(after[c.name]) for c in chosen))) if chosen else view
        yield Transform(empty.family, empty.spaces, {heads.name: found.element}, gauge)


def _square(reference: Tensors, tensors: Tensors) -> float:
    return float(sum((tensors[name].to(t) - t).square().sum() for name, t in reference.items()))


def _verify(pairing: Pairing, heads: HeadSpace, transform: Transform) -> None:
    """Refuse an alignment that would change the layer's function by more than rounding, before it is stored."""
    if not transform.elements and not transform.gauge:
        return
    moved = transform.apply(pairing.b, device=pairing.device)
    change = _output_change(pairing, heads, moved)
    if not change <= EXACT:
        raise VerificationError(
            f"{heads.name}: the alignment found would change the outputs of this layer by {change:.1e} (allowed "
            f"{EXACT:.0e}); nothing was written: try --stage2 orthogonal, and please report the models"
        )


def _output_change(pairing: Pairing, heads: HeadSpace, tensors: Tensors) -> float:
    """How much the attention outputs move on random inputs behind the layer's own norm, relative to the largest."""
    arch = pairing.b.arch
    before = attention_matrices(arch, heads, pairing.moving)
    after = attention_matrices(arch, heads, Doubled(tensors, pairing.device))
    inputs = _inputs(pairing, heads, before.q.shape[-2])
    outputs = [
        attend(m, inputs, heads) + _output_bias(pairing, heads, t)
        for m, t in ((before, pairing.moving), (after, Doubled(tensors, pairing.device)))
    ]
    scale = outputs[0].abs().max().clamp(min=1e-300)
    change = (outputs[1] - outputs[0]).abs()
    if _is_centred(pairing, heads):
        difference = outputs[1] - outputs[0]
        change = (difference - difference.mean(-1, keepdim=True)).abs()
    return float(change.max() / scale)


def _norm_name(pairing: Pairing, heads: HeadSpace) -> str:
    arch = pairing.b.arch
    number = heads.name.removeprefix("heads")
    words = (axis.name for name, *_ in arch.carriers(f"qk{number}") for axis in arch.tensors[name].roles[0].axes)
    return next(word for word in words if word is not None and word in arch.norms)


def _is_centred(pairing: Pairing, heads: HeadSpace) -> bool:
    """Behind LayerNorms only, what is written along the all-ones vector is not seen."""
    return all(norm.kind == "layer" for norm in pairing.b.arch.norms.values() if norm.space == "resid")


def _inputs(pairing: Pairing, heads: HeadSpace, rows: int, length: int = 24) -> Tensor:
    """What the layer may read: normalised noise through the norm in front of it, and a one for the biases."""
    norm = pairing.b.arch.norms[_norm_name(pairing, heads)]
    gain = pairing.moving[norm.gain]
    noise = torch.randn(length, len(gain), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = noise.to(gain.device)
    if norm.kind == "layer":
        z = z - z.mean(-1, keepdim=True)
    z = z / z.square().mean(-1, keepdim=True).sqrt() * gain
    if norm.shift in pairing.b.arch.tensors:
        z = z + pairing.moving[norm.shift]
    ones = torch.ones(length, rows - z.shape[-1], dtype=z.dtype, device=z.device)
    return torch.cat([z, ones], -1)


def _output_bias(pairing: Pairing, heads: HeadSpace, tensors: Tensors) -> Tensor:
    from isobasin.gauge.means import output_projection

    output = output_projection(pairing.b.arch, heads)
    return tensors[output[2]] if output else torch.zeros((), dtype=torch.float64)
