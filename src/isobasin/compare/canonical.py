"""The canonical point of a model: one representative of its orbit, the same for every member up to rounding.

The stream is brought to its canonical frame (`stream_frames`). In that frame the order of experts, heads and units,
their signs and the factor inside each head are chosen by comparison with fixed numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from isobasin.alignment.experts import signatures
from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.compare.stream_frame import fixed_numbers, fixed_signs, in_frame, stream_frames
from isobasin.compare.uncertainty import (
    LIMIT,
    Doubt,
    large_doubts,
    noise_of,
    rotation_uncertainty,
    swap_uncertainty,
    ties,
)
from isobasin.groups import Element, HeadsElement, Matrix, Monomial, Phases
from isobasin.groups.group import polar
from isobasin.shapes import Float
from isobasin.symmetries import group_of, symmetry
from isobasin.symmetries.action import Action
from isobasin.symmetries.attention import (
    AttentionMatrices,
    attention_matrices,
    rotary_columns,
    rotary_pairs,
    stacked,
)
from isobasin.symmetries.head_balance import query_key_element
from isobasin.symmetries.mean_coordinates import ReaderMean, WriterMean
from isobasin.symmetries.normal_form import MOVES, NormalForm, unit_rows
from isobasin.symmetries.symmetry import norm_group
from isobasin.symmetries.transform import Transform
from isobasin.views import AsFloat64, Tensors
from isobasin.weights import ModelSource, Weights, load, read_part

MUCH_LARGER = 10.0  # a mean beside the matrix it is added to; in ordinary models it is of the same size
SWAMPED = "a copy may add means that the function does not see, whose rounding is not small beside its weights"


@dataclass(frozen=True)
class CanonicalPoint:
    """The transform to the canonical point, and the spaces in which copies of the model may reach another one."""

    transform: Transform
    doubts: tuple[Doubt, ...]

    @property
    def unique(self) -> bool:
        return not self.doubts


def canonical(model: ModelSource) -> Transform:
    """The transform that brings a model to the canonical point of its orbit; one block in memory at a time.

    `canonical_point` also says where the point is not unique.
    """
    return canonical_point(model).transform


def canonical_point(source: ModelSource) -> CanonicalPoint:
    """The canonical point of the orbit of a model, and where it is not determined to the precision of the file.

    That happens to units or heads with equal sort keys that are not equal, to heads whose rank is not certain, and to a
    stream that tables and layers do not span.
    """
    whole = load(source)
    weights = read_part(whole)
    model, groups = NormalForm.for_comparison(weights), symmetry(weights.arch).groups
    frames = stream_frames(model)
    elements: dict[str, Element] = {name: found.element for name, found in frames.items()}
    frame, doubts = Action(weights.arch, dict(elements)), [doubt for found in frames.values() for doubt in found.doubts]
    # A stream in doubt leaves nothing certain in the layers: it alone is reported.
    known = (found.uncertainty for found in frames.values() if found.uncertainty <= LIMIT)
    error = noise_of(weights) + max(known, default=0.0)
    orders, more = _expert_orders(model, frame, error)
    if orders:
        elements, doubts = {**elements, **orders}, [*doubts, *more]
        ordered = Transform(weights.arch.family, dict(weights.arch.spaces), orders).apply(weights)
        model = NormalForm.for_comparison(ordered)
    sizes: dict[str, float] = {}
    means = _mean_sizes(model.weights)
    for space in model.blocks:
        swamped = _swamped_share(model, space, means) * noise_of(weights)
        doubts += large_doubts(space, SWAMPED, min(1.0, swamped))
        if space in model.spaces and space in groups and space not in orders:
            # Keys of units that only change places are sums, in which a small matrix counts little.
            place = weights.arch.spaces[space]
            more_error = 0.0 if isinstance(place, Space) and place.kind == "permutation" else swamped
            elements[space], more, sizes[space] = _block_element(model, space, frame, error + more_error)
            doubts += more
    for space, size in sizes.items():
        if size <= noise_of(weights) * max(sizes.values()):
            reason = "one of its heads, or all its units, do nothing but rounding: their weights are not determined"
            doubts.append(Doubt(space, reason, 1.0))
    gauge = {**NormalForm.for_comparison(whole).transform.gauge, **model.transform.gauge}
    transform = Transform(weights.arch.family, dict(weights.arch.spaces), elements, gauge)
    return CanonicalPoint(transform, tuple(doubts))


def _mean_sizes(weights: Weights) -> dict[str, float]:
    """The matrices with a mean that the function does not see, and how large a copy may have it."""
    tensors, found = AsFloat64(weights), dict[str, float]()
    for c in symmetry(weights.arch).coordinates.values():
        if isinstance(c, ReaderMean | WriterMean) and c.usable(tensors):
            name, value = c.reader.weight if isinstance(c, ReaderMean) else c.tensor, c.read(tensors)
            if value.numel() and len(weights.arch.shapes[name]) > 1:
                found[name] = max(found.get(name, 0.0), float(value.square().mean().sqrt()), c.smallest_sample)
    return found


def _swamped_share(model: NormalForm, space: str, means: Mapping[str, float]) -> float:
    """How much larger such a mean may be than the matrix without it, balanced; 0 where it is not much larger."""
    if not any(name in means for name in model.blocks[space]):
        return 0.0
    balance, tensors = model.balanced(space)
    action = Action(model.arch, {space: balance} if balance else {})
    largest = 0.0
    for name in tensors.keys() & means.keys():
        size = float(tensors[name].norm())
        signs = fixed_signs(f"means {name}", *tensors[name].shape).to(tensors[name])
        ratio = means[name] * float(action.tensor(name, signs).norm()) / size if size else 0.0
        largest = max(largest, ratio if ratio > MUCH_LARGER else 0.0)
    return largest


def _block_element(model: NormalForm, space: str, frame: Action, error: float) -> tuple[Element, list[Doubt], float]:
    """The element of one space: first balance the block, then order it and fix signs and rotations.

    And the size of the smallest product VOᵀ of its heads, or of all its units together.
    """
    balance, tensors = model.balanced(space)
    moved = {name: in_frame(model, frame, name, t.to("cpu", torch.float64)) for name, t in tensors.items()}
    place = model.arch.spaces[space]
    assert balance is not None
    if isinstance(place, HeadSpace):
        m = attention_matrices(model.arch, place, moved)
        heads, doubts = _canonical_heads(m, place, model.least, error)
        outputs = m.v.repeat_interleave(place.group_size, 0) @ m.o.mT
        return heads @ cast(HeadsElement, balance), doubts, float(outputs.norm(dim=(1, 2)).min())
    size = float(torch.stack([t.norm() for t in moved.values()]).max())
    if place.kind == "fixed":
        return balance, [], size
    units, doubts = _canonical_units(model.arch, place, moved, error)
    return units @ cast(Monomial, balance), doubts, size


def _expert_orders(model: NormalForm, frame: Action, error: float) -> tuple[dict[str, Element], list[Doubt]]:
    """The experts of each layer sorted by the products of their rows of the router with fixed numbers."""
    found: dict[str, Element] = {}
    doubts: list[Doubt] = []
    for space in model.arch.expert_spaces:
        parts = signatures(model, space, frame)
        rows = parts[0]
        keys = rows @ fixed_numbers("experts", rows.shape[1])
        found[space] = group_of(model.arch.spaces[space]).sorting(keys)
        pairs = ties(keys, error * rows.norm(dim=1), torch.argsort(keys))
        reason = f"{len(pairs)} pairs of experts have sort keys that agree up to rounding"
        whole = torch.cat([part / part.norm().clamp_min(1e-300) for part in parts], 1)
        doubts += large_doubts(space, reason, swap_uncertainty(whole, pairs))
    return found, doubts


# -- heads ----------------------------------------------------------------------------------------------------------


def _canonical_heads(
    m: AttentionMatrices, heads: HeadSpace, least: float, error: float
) -> tuple[HeadsElement, list[Doubt]]:
    """Sort the heads by their keys, then rotate each to its canonical form. They are balanced and in the frame."""
    kv, queries = torch.arange(heads.n_kv_heads), torch.arange(heads.group_size).expand(heads.n_kv_heads, -1).clone()
    doubts: list[Doubt] = []
    if heads.permutable:
        keys, errors = (x.reshape(heads.n_kv_heads, -1) for x in _head_keys(m, heads, error))
        kv = torch.argsort(keys.sum(1))
        queries = torch.argsort(keys[kv], dim=1)
        doubts += _head_ties(m, heads, keys, errors)
    every = (kv[:, None] * heads.group_size + queries).flatten()
    m = AttentionMatrices(m.q[every], m.k[kv], m.v[kv], m.o[every])
    (query_key, shared), first = _query_key(m, heads, least, error)
    value_output, second = _canonical_rotation(stacked(m.o, heads), m.v, least, error)
    for side, change in (("query and key", first), ("value and output", second)):
        reason = f"{side} factors of its heads are badly conditioned or of uncertain rank"
        doubts += large_doubts(heads.name, reason, change)
    return HeadsElement(kv, queries, query_key, Matrix(value_output), shared), doubts


def _head_keys(m: AttentionMatrices, heads: HeadSpace, error: float) -> tuple[Tensor, Tensor]:
    """The sort key of every query head, invariant under the factors inside it: s(QKᵀ)t + s(VOᵀ)t, s and t fixed; and
    its error."""
    q, v = (fixed_numbers("key s", x.shape[1]) @ x for x in (m.q, m.v))
    k, o_t = (fixed_numbers("key t", x.shape[1]) @ x for x in (m.k, m.o))
    k, v_s, r = k.repeat_interleave(heads.group_size, 0), v.repeat_interleave(heads.group_size, 0), heads.rotary
    scores = (q[..., r:] * k[..., r:]).sum(-1)
    if r:
        product = rotary_pairs(q[..., :r], heads) * rotary_pairs(k[..., :r], heads).conj()
        scores = scores + (product * pair_weights(r // 2)).sum(-1).real
    sizes = v_s.norm(dim=-1) * o_t.norm(dim=-1) + q.norm(dim=-1) * k.norm(dim=-1)
    return (v_s * o_t).sum(-1) + scores, 2 * error * sizes


def _head_ties(m: AttentionMatrices, heads: HeadSpace, keys: Tensor, errors: Tensor) -> list[Doubt]:
    """Heads with equal keys are in doubt unless they are equal."""
    total = keys.sum(1)
    groups = ties(total, errors.sum(1), torch.argsort(total))
    inner = [
        (g * heads.group_size + i, g * heads.group_size + j)
        for g in range(heads.n_kv_heads)
        for i, j in ties(keys[g], errors[g], torch.argsort(keys[g]))
    ]
    if not groups and not inner:
        return []
    k, v = (x.repeat_interleave(heads.group_size, 0) for x in (m.k, m.v))
    products = torch.cat([(m.q @ k.mT).flatten(1), (v @ m.o.mT).flatten(1)], 1)
    change = max(swap_uncertainty(products, inner), swap_uncertainty(products.reshape(heads.n_kv_heads, -1), groups))
    reason = f"{len(groups) + len(inner)} pairs of heads have sort keys that agree up to rounding"
    return large_doubts(heads.name, reason, change)


def pair_weights(n: int) -> Tensor:
    """A fixed complex number of modulus one for every rotary pair, so that not only the plain product QKᵀ counts."""
    return torch.polar(torch.ones(n, dtype=torch.float64), fixed_numbers("pair", n))


def _query_key(
    m: AttentionMatrices, heads: HeadSpace, least: float, error: float
) -> tuple[tuple[Element, Element | None], float]:
    """The phase of every rotary pair, the rotation of the other columns; and how much they may change."""
    q, k, r = stacked(m.q, heads), m.k, heads.d_head if heads.qk_norm else heads.rotary
    parts: list[Element] = []
    change = 0.0
    if r:
        pairs = [rotary_pairs(x, heads) for x in rotary_columns(m, heads)]
        found = sum(fixed_numbers(f"phase {n}", x.shape[-2]).to(x) @ x for n, x in zip("qk", pairs, strict=True))
        assert isinstance(found, Tensor)
        sizes = torch.stack([x.abs().square().sum(-2) for x in pairs]).sum(0).sqrt()
        if heads.layer_norm:  # one sign for all columns
            found, sizes = found.real.sum(-1, keepdim=True), sizes.norm(dim=-1, keepdim=True)
            found, sizes = found.expand(-1, r // 2), sizes.expand(-1, r // 2)
        full = sizes > least * sizes.amax()
        if heads.qk_norm:
            parts.append(norm_group(heads).nearest_signs(found.real))
            found = found.real
        else:
            phase = torch.where(full & (found != 0), found.conj() / torch.where(found == 0, 1, found.abs()), 1)
            parts.append(Phases(phase.resolve_conj(), heads.interleaved))
        weak = torch.where(full, error * sizes / found.abs().clamp_min(1e-300), 0)
        change = min(1.0, float(weak.max()))
    if r < heads.d_head:
        rotation, more = _canonical_rotation(q[..., r:], k[..., r:], least, error)
        parts.append(Matrix(rotation))
        change = max(change, more)
    return query_key_element(parts, heads), change


def _canonical_rotation(
    x: Float[Tensor, "b rows_x n"], y: Float[Tensor, "b rows_y n"], least: float, error: float
) -> tuple[Float[Tensor, "b n n"], float]:
    """The rotation g for which whitened x gᵀ and y gᵀ come closest to fixed numbers; x and y are balanced.

    And how much it may change: whitening divides errors by the smallest singular values of x and y.
    """
    product, smallest = torch.zeros(len(x), *x.shape[-1:] * 2, dtype=x.dtype), torch.ones(len(x), dtype=x.dtype)
    rows = torch.zeros_like(product)
    for name, m in (("x", x), ("y", y)):
        u, s, vt = torch.linalg.svd(m, full_matrices=False)
        kept = s > least**0.5 * s[..., :1]
        product = product + fixed_numbers(f"turn {name}", *m.shape[-2:]).mT @ ((u * kept[..., None, :]) @ vt)
        rows = rows + (vt.mT * kept[..., None, :]) @ vt
        smallest = torch.minimum(smallest, torch.where(kept & (s > 0), s / s[..., :1], 1).amin(-1))
    change = 0.0
    for p, r, least_kept in zip(product, rows, smallest.tolist(), strict=True):
        values, basis = torch.linalg.eigh(r)
        inside = basis[:, values > 0.5]  # columns that are zero in x and in y have no rotation
        if inside.shape[1]:
            change = max(change, rotation_uncertainty(p @ inside, error / least_kept))
    return polar(product), change


# -- units ----------------------------------------------------------------------------------------------------------


def _canonical_units(arch: Architecture, space: Space, tensors: Tensors, error: float) -> tuple[Monomial, list[Doubt]]:
    """Sort the units by the products of their rows with fixed numbers; choose the sign where it is free."""
    sums = {move: torch.zeros(space.size, dtype=torch.float64) for move in MOVES}
    sizes = {move: torch.zeros(space.size, dtype=torch.float64) for move in MOVES}
    columns = []
    for name, rows, move in unit_rows(arch, space.name, tensors):
        sums[move] += rows @ fixed_numbers(f"unit {name.rpartition('.')[0]}", rows.shape[1])
        sizes[move] += rows.norm(dim=1)
        columns.append(rows)
    if space.kind == "permutation":
        keys, errors = sum(sums.values()), sum(sizes.values())
    else:
        keys = sums["primal"] * sums["dual"] + sums["permuted"]
        errors = sizes["primal"] * sums["dual"].abs() + sizes["dual"] * sums["primal"].abs() + sizes["permuted"]
    assert isinstance(keys, Tensor)
    assert isinstance(errors, Tensor)
    index = torch.argsort(keys, stable=True)
    pairs = ties(keys, error * errors, index)
    reason = f"{len(pairs)} pairs of units have sort keys that agree up to rounding"
    doubts = large_doubts(space.name, reason, swap_uncertainty(torch.cat(columns, 1), pairs)) if pairs else []
    sign = torch.ones_like(keys)
    if space.signs:
        total, size = sums["primal"] + sums["dual"], sizes["primal"] + sizes["dual"]
        sign = torch.where(total < 0, -1.0, 1.0).to(torch.float64)
        weak = int(((total.abs() <= error * size) & (size > 0)).sum())
        doubts += large_doubts(
            space.name, f"{weak} signs are those of sums that vanish up to rounding", float(weak > 0)
        )
    return Monomial(index, sign[index]), doubts
