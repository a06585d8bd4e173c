"""Bringing B next to A, layer by layer: match, choose, verify. A is only read, and so is B.

The result is B in A's own gauge: the elements are found between the two models with every invisible direction
removed, and then each free coordinate of the scope takes the value nearest to A's. Layers do not depend on each
other, so only one of them is in memory at a time.
"""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from isobasin.arch import HeadSpace
from isobasin.errors import IsobasinError
from isobasin.gauge import Coordinate, Stage
from isobasin.groups import HeadsElement
from isobasin.match.align_whole import WHOLE, align_whole
from isobasin.match.alignment import Alignment
from isobasin.match.attention import AttentionMatrices, attention_matrices
from isobasin.match.comparable import check_comparable
from isobasin.match.heads import HeadMatch
from isobasin.match.matchers import Matcher
from isobasin.match.verification import Probe, check_element, norm_before
from isobasin.normalize import lightest
from isobasin.symmetries import symmetry
from isobasin.transform import Transform, Value
from isobasin.views import Doubled, Tensors, View, chain
from isobasin.weights import Weights, load


@dataclass(frozen=True)
class LayerAlignment:
    """One attention layer: its part of the transform, distances (squared sums), and how much its outputs moved."""

    name: str
    transform: Transform
    element: HeadsElement
    square_before: float
    square_after: float
    square_reference: float
    converged: bool
    deficient_heads: tuple[int, ...]
    output_change: float | None  # None where it was not verified

    @property
    def facts(self) -> dict[str, object]:
        scale = max(self.square_reference, 1e-300)
        return {
            "layer": int(self.name.removeprefix("heads")),
            "space": "heads",
            "distance_before": (self.square_before / scale) ** 0.5,
            "distance_after": (self.square_after / scale) ** 0.5,
            "converged": self.converged,
            "rank_deficient_kv_heads": list(self.deficient_heads),
            "max_output_change": self.output_change,
        }


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
        every = symmetry(self.b.arch).scoped(self.scope).coordinates.values()
        mine = [c for c in every if c.touches <= inside]
        return [c for c in mine if c.usable(self.reference) and c.usable(self.moving)]

    def tensors(self, heads: HeadSpace) -> frozenset[str]:
        """The projections of this layer and their biases."""
        number = heads.name.removeprefix("heads")
        arch = self.b.arch
        names = {name for face in ("qk", "vo") for name, *_ in arch.carriers(f"{face}{number}")}
        return frozenset(names | {bias for bias in map(arch.bias_of, names) if bias})

    def held(self, heads: HeadSpace) -> "Pairing":
        """The same pair with one layer in memory: its projections and the norm in front of them."""
        norm = norm_before(self.b.arch, heads)
        names = self.tensors(heads) | ({norm.gain, norm.shift} & set(self.b.arch.tensors))
        return replace(self, a=self.a.held(names), b=self.b.held(names))

    def empty(self) -> Transform:
        return Transform(self.b.arch.family, dict(self.b.arch.spaces))


def align_layer(
    pairing: Pairing, heads: HeadSpace, matcher: Matcher, dtypes: Mapping[str, torch.dtype], *, verify: bool = True
) -> LayerAlignment:
    """Match one layer and keep the best of: element and gauge, element alone, nothing at all."""
    pairing = pairing.held(heads)
    coordinates = pairing.coordinates(heads)
    a, b = (_bare(model, heads, coordinates, pairing.device) for model in (pairing.a, pairing.b))
    found = matcher.match(a, b, heads)
    check_element(pairing.b, heads, found.element)
    names = sorted(pairing.tensors(heads))
    reference = {name: pairing.reference[name] for name in names}
    original = {name: pairing.b[name].to(dtypes[name]) for name in names}
    best, exact, written = pairing.empty(), original, original
    before = least = _square(reference, original)
    for transform in _candidates(pairing, heads, found, coordinates):
        moved = transform.apply(pairing.b, device=pairing.device)
        tensors = {name: moved[name] for name in names}
        stored = {name: t.to(dtypes[name]) if name in moved.changed else original[name] for name, t in tensors.items()}
        square = _square(reference, stored)
        if square < least:
            best, exact, written, least = transform, tensors, stored, square
    change = None
    if verify:
        probe = Probe.of(pairing.b, heads, pairing.device)
        if best.elements:
            probe.require_unchanged(exact)
        change = probe.change(written)
    element = best.elements.get(heads.name, symmetry(pairing.b.arch).groups[heads.name].identity())
    assert isinstance(element, HeadsElement)
    return LayerAlignment(
        heads.name,
        best,
        element,
        before,
        least,
        float(sum(t.square().sum() for t in reference.values())),
        bool(found.converged.all()),
        tuple(torch.nonzero(found.deficient).flatten().tolist()),
        change,
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
    changes = [layer.output_change for layer in layers]
    return Alignment(
        transform,
        tuple(layer.facts for layer in layers),
        (sum(layer.square_before for layer in layers) / scale) ** 0.5,
        (sum(layer.square_after for layer in layers) / scale) ** 0.5,
        tuple(tuple(layer.element.head_permutation.tolist()) for layer in layers),
        tuple(tuple(layer.element.kv.tolist()) for layer in layers),
        None if None in changes else max((c for c in changes if c is not None), default=0.0),
    )


def align(
    b: Weights,
    *,
    to: Weights,
    matcher: Matcher,
    dtype: str = "auto",
    device: torch.device | None = None,
    workers: int = 1,
    verify: bool = True,
    watch: Callable[[int, int], None] | None = None,
) -> Alignment:
    """Find the element of B's symmetry that brings it closest to A, one layer in memory at a time.

    `dtype` is the type the result will be stored in: distances are those of the stored weights. `workers`
    processes share the layers (both models must then be folders); `watch(done, of)` is told of each layer.

    >>> found = align(b, to=a, matcher=WeightMatching())  # doctest: +SKIP
    >>> moved = found.transform.apply(b)  # doctest: +SKIP
    """
    pairing = Pairing(to, b, matcher.scope, device or torch.device("cpu"))
    dtypes = replace(b, exact=False).output_dtypes(dtype)
    if matcher.scope in WHOLE:
        return align_whole(b, to, matcher, dtypes, device=pairing.device, verify=verify, watch=watch)
    if workers > 1:
        results = aligned_in_processes(pairing, matcher, dtypes, workers=workers, verify=verify)
    else:
        results = (align_layer(pairing, heads, matcher, dtypes, verify=verify) for heads in pairing.layers)
    layers = []
    for result in results:
        layers.append(result)
        if watch:
            watch(len(layers), len(pairing.layers))
    return collect(pairing, layers)


def aligned_in_processes(
    pairing: Pairing, matcher: Matcher, dtypes: Mapping[str, torch.dtype], *, workers: int, verify: bool
) -> Iterator[LayerAlignment]:
    """The same layers, spread over processes that each open the two folders for themselves."""
    if pairing.a.path is None or pairing.b.path is None:
        raise IsobasinError("workers need both models as folders on disk; save them first, or use one worker")
    threads = max(1, torch.get_num_threads() // workers)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, torch.set_num_threads, (threads,)) as pool:
        tasks = [
            pool.submit(
                _align_in_process,
                pairing.a.path,
                pairing.b.path,
                heads.name,
                matcher,
                dict(dtypes),
                pairing.device,
                verify,
            )
            for heads in pairing.layers
        ]
        try:
            for task in tasks:
                yield task.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _align_in_process(
    a: Path,
    b: Path,
    name: str,
    matcher: Matcher,
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
    verify: bool,
) -> LayerAlignment:
    pairing = Pairing(load(a), load(b), matcher.scope, device)
    heads = next(h for h in pairing.layers if h.name == name)
    return align_layer(pairing, heads, matcher, dtypes, verify=verify)


def _bare(model: Weights, heads: HeadSpace, coordinates: list[Coordinate], device: torch.device) -> AttentionMatrices:
    """The layer's matrices with every direction removed that its function does not see."""
    flat = lightest(model, {c.name: c for c in coordinates}).apply(model, device=device)
    return attention_matrices(model.arch, heads, Doubled(flat, device))


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
