"""The canonical point of a model: one representative of its orbit, the same for every member up to rounding.

The stream is brought to its canonical frame (`stream_frame`). In that frame the order of heads and units,
their signs and the factor inside each head are chosen by comparison with fixed numbers.
"""

from collections.abc import Iterator
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.groups import Blocks, Element, HeadsElement, Matrix, Monomial, Phases
from isobasin.groups.group import polar
from isobasin.shapes import Float
from isobasin.symmetries import group_of, symmetry
from isobasin.symmetries.action import Action
from isobasin.symmetries.attention import AttentionMatrices, attention_matrices, rotary_pairs, stacked
from isobasin.symmetries.normal_form import EMPTY, MOVES, NormalForm, unit_rows
from isobasin.symmetries.transform import Transform
from isobasin.views import Tensors
from isobasin.weights import Weights

TABLE_ROWS = 4096  # rows of a table that are processed at once
RANK_THRESHOLD = 1e-8  # smallest eigenvalue of XᵀX relative to the largest, below which layers contribute to the frame


def canonical(weights: Weights) -> Transform:
    """The transform that brings a model to the canonical point of its orbit; one block in memory at a time.

    The point is not unique where a model has more symmetry than its architecture: equal heads or units, heads of
    deficient rank, a stream that tables and layers do not span. Two units whose sort keys differ by less than the
    rounding of the file may change places.
    """
    model, groups = NormalForm.for_comparison(weights), symmetry(weights.arch).groups
    elements: dict[str, Element] = {weights.arch.stream.name: stream_frame(model)}
    frame = Action(weights.arch, dict(elements))
    for space in model.spaces:
        if space in groups:
            elements[space] = _block_element(model, space, frame)
    return Transform(weights.arch.family, dict(weights.arch.spaces), elements, model.transform.gauge)


def _block_element(model: NormalForm, space: str, frame: Action) -> Element:
    """The element of one space: first balance the block, then order it and fix signs and rotations."""
    balance, tensors = model.balanced(space)
    moved = {name: frame.tensor(name, t.to("cpu", torch.float64)) for name, t in tensors.items()}
    place = model.arch.spaces[space]
    assert balance is not None
    if isinstance(place, HeadSpace):
        return _canonical_heads(model.arch, place, moved) @ balance  # type: ignore[operator]
    return balance if place.kind == "fixed" else _canonical_units(model.arch, place, moved) @ balance  # type: ignore[operator]


def _canonical_heads(arch: Architecture, heads: HeadSpace, tensors: Tensors) -> HeadsElement:
    """Sort the heads by their keys, then rotate each to its canonical form. `tensors` are balanced and in the frame."""
    m = attention_matrices(arch, heads, tensors)
    kv, queries = torch.arange(heads.n_kv_heads), torch.arange(heads.group_size).expand(heads.n_kv_heads, -1).clone()
    if heads.permutable:
        keys = _head_keys(m, heads).reshape(heads.n_kv_heads, -1)
        kv = torch.argsort(keys.sum(1))
        queries = torch.argsort(keys[kv], dim=1)
    every = (kv[:, None] * heads.group_size + queries).flatten()
    m = AttentionMatrices(m.q[every], m.k[kv], m.v[kv], m.o[every])
    return HeadsElement(kv, queries, _query_key(m, heads), Matrix(_canonical_rotation(stacked(m.o, heads), m.v)))


def _head_keys(m: AttentionMatrices, heads: HeadSpace) -> Float[Tensor, " h"]:
    """The sort key of every query head, invariant under the factors inside it: s(QKᵀ)t + s(VOᵀ)t, s and t fixed."""
    s, t = fixed_numbers("key s", m.q.shape[1]), fixed_numbers("key t", m.q.shape[1])
    o_t = t[: m.o.shape[1]] @ m.o
    values = ((s @ m.v).repeat_interleave(heads.group_size, 0) * o_t).sum(-1)
    q, k, r = s @ m.q, (t @ m.k).repeat_interleave(heads.group_size, 0), heads.rotary
    scores = (q[..., r:] * k[..., r:]).sum(-1)
    if r:
        product = rotary_pairs(q[..., :r], heads) * rotary_pairs(k[..., :r], heads).conj()
        scores = scores + (product * pair_weights(r // 2)).sum(-1).real
    return values + scores


def pair_weights(n: int) -> Tensor:
    """A fixed complex number of modulus one for every rotary pair, so that not only the plain product QKᵀ counts."""
    return torch.polar(torch.ones(n, dtype=torch.float64), fixed_numbers("pair", n))


def _query_key(m: AttentionMatrices, heads: HeadSpace) -> Element:
    q, k, r = stacked(m.q, heads), m.k, heads.rotary
    parts: list[Element] = []
    if r:
        found = sum(
            (fixed_numbers(f"phase {side}", x.shape[-2]).to(torch.complex128) @ rotary_pairs(x[..., :r], heads))
            for side, x in (("q", q), ("k", k))
        )
        assert isinstance(found, Tensor)
        full = found.abs() > EMPTY
        phase = torch.where(full, found.conj() / torch.where(full, found.abs(), 1), 1)
        parts.append(Phases(phase.resolve_conj(), heads.interleaved))
    if r < heads.d_head:
        parts.append(Matrix(_canonical_rotation(q[..., r:], k[..., r:])))
    return parts[0] if len(parts) == 1 else Blocks(tuple(parts))


def _canonical_rotation(x: Float[Tensor, "b rows_x n"], y: Float[Tensor, "b rows_y n"]) -> Float[Tensor, "b n n"]:
    """The rotation g for which whitened x gᵀ and y gᵀ come closest to fixed numbers; x and y are balanced."""
    products = []
    for name, m in (("x", x), ("y", y)):
        u, s, vt = torch.linalg.svd(m, full_matrices=False)
        whitened = u * (s > 1e-7 * s[..., :1])[..., None, :] @ vt  # m (mᵀm)^-½ on the row space of m
        products.append(fixed_numbers(f"turn {name}", *m.shape[-2:]).mT @ whitened)
    return polar(products[0] + products[1])


def _canonical_units(arch: Architecture, space: Space, tensors: Tensors) -> Monomial:
    """Sort the units by the products of their rows with fixed numbers; choose the sign where it is free."""
    sums = {move: torch.zeros(space.size, dtype=torch.float64) for move in MOVES}
    for name, rows, move in unit_rows(arch, space.name, tensors):
        sums[move] += rows @ fixed_numbers(f"unit {name.rpartition('.')[0]}", rows.shape[1])
    if space.kind == "permutation":
        index = torch.argsort(sums["primal"] + sums["dual"] + sums["permuted"], stable=True)
        return Monomial(index, torch.ones_like(sums["dual"]))
    index = torch.argsort(sums["primal"] * sums["dual"] + sums["permuted"], stable=True)
    sign = torch.ones_like(sums["dual"])
    if space.signs:
        sign = torch.where(sums["primal"] + sums["dual"] < 0, -1.0, 1.0).to(torch.float64)
    return Monomial(index, sign[index])


# -- fixed numbers and the frame of the stream ----------------------------------------------------------------------


def fixed_numbers(label: str, *shape: int) -> Tensor:
    """Numbers of mean zero and variance one that depend on the label and the shape alone.

    They are the directions that canonical points and fingerprints refer to. They come from the raw bits of PCG64, which
    numpy guarantees not to change; torch generators give no such guarantee.
    """
    count = int(np.prod(shape)) if shape else 1
    raw = np.random.PCG64(crc32(label.encode())).random_raw(count)
    uniform = (np.asarray(raw, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy((2 * uniform - 1) * 3**0.5).reshape(shape)


def stream_frame(model: NormalForm) -> Element:
    """The element that brings the stream to its canonical frame, by rotation, permutation or signs as its group allows.

    A rotation is determined by the rows X of the tables whose other axis nothing moves (tokens, positions, classes): it
    brings whitened X closest to fixed numbers. Unlike eigenvectors it needs no choice of signs, and equal eigenvalues
    do not matter.
    """
    space = model.arch.stream
    if space.rotates:
        return group_of(space).project(_rotation(model, space))
    if space.kind == "fixed":
        return group_of(space).identity()
    return _coordinate_order(model, space)


def tables(arch: Architecture, names: tuple[str, ...]) -> Iterator[tuple[str, int, bool]]:
    """Tensors with one axis on the stream and nothing that moves on the others: name, axis, and whether it is a gain
    (which has no sign)."""
    for name in names:
        found = [(axis, words.terms) for axis, words in enumerate(arch.tensors[name].roles[0].axes) if words.terms]
        if len(found) == 1 and [arch.space_of(term).name for term in found[0][1]] == [arch.stream.name]:
            yield name, found[0][0], found[0][1][0].permutation_part


def stream_rows(model: NormalForm, *spaces: str) -> Iterator[tuple[str, Tensor]]:
    """The rows on the stream of the tables in these blocks that are not gains, in float64."""
    for space in spaces:
        for name, axis, gain in tables(model.arch, model.blocks[space]):
            if not gain:
                tensor = model.read(name)
                yield name, tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis]).to("cpu", torch.float64)


def _rotation(model: NormalForm, space: Space) -> Tensor:
    """Fᵀ X (XᵀX)^-½ with fixed numbers F: its projection onto the group is the frame."""
    gram = torch.zeros(space.size, space.size, dtype=torch.float64)
    product = gram.clone()
    for name, table in stream_rows(model, model.arch.stream.name, *model.spaces):
        for start in range(0, len(table), TABLE_ROWS):
            part = table[start : start + TABLE_ROWS]
            gram += part.mT @ part
            product += fixed_numbers(f"{name}:{start}", *part.shape).mT @ part
    free = space.size - (space.kind == "orthogonal1")
    mean = torch.full_like(gram, 1 / space.size) if space.kind == "orthogonal1" else torch.zeros_like(gram)
    centre = torch.eye(space.size, dtype=torch.float64) - mean
    rows = centre @ product @ centre
    for name in model.spaces:
        values = torch.linalg.eigvalsh(centre @ gram @ centre)
        if values[-free] > RANK_THRESHOLD * values[-1]:
            break
        rows = _linear_response(model, name, rows) @ centre
        rows = rows * (gram.trace().sqrt() / torch.linalg.matrix_norm(rows).clamp_min(1e-300))
        gram = gram + rows.mT @ rows
        product = product + fixed_numbers(f"through {name}", *rows.shape).mT @ rows
    values, basis = torch.linalg.eigh(centre @ gram @ centre)
    roots = torch.where(values > 1e-14 * values[-1], values.clamp_min(1e-300).rsqrt(), 0)
    return product @ ((basis * roots) @ basis.mT)


def _linear_response(model: NormalForm, space: str, rows: Tensor) -> Tensor:
    """The output of a layer for rows of the stream if it were linear: Σ_h x V_h O_hᵀ, or x up down.

    It rotates with the stream, and no element of the layer's own space changes it.
    """
    place, tensors = model.arch.spaces[space], model.block(space)
    if isinstance(place, HeadSpace):
        m = attention_matrices(model.arch, place, {n: t.to("cpu", torch.float64) for n, t in tensors.items()})
        values = (rows @ m.v[:, : rows.shape[1]]).repeat_interleave(place.group_size, 0)
        return (values @ m.o.mT).sum(0)
    found: dict[str, Tensor] = {}
    for name, rows_of_units, move in unit_rows(model.arch, space, tensors):
        terms = [axis.terms for axis in model.arch.tensors[name].roles[0].axes]
        if list(map(len, terms)) == [1, 1] and not any(term.permutation_part for (term,) in terms):
            found.setdefault(move, rows_of_units.to("cpu", torch.float64))
    return rows @ found["primal"].mT @ found["dual"] if len(found) == 2 else rows


def _coordinate_order(model: NormalForm, space: Space) -> Monomial:
    """Coordinates sorted by the products of their columns with fixed numbers; signs where the stream has them.

    Where only the common sign is free, the mean is subtracted first: it holds a constant (see `with_unit_shift`) that
    does not change with the sign of the stream.
    """
    signed, unsigned = (torch.zeros(space.size, dtype=torch.float64) for _ in range(2))
    for name, rows in stream_rows(model, model.arch.stream.name, *model.spaces):
        signed += fixed_numbers(name, len(rows)) @ rows / len(rows) ** 0.5
    for name, _, gain in tables(model.arch, model.blocks[model.arch.stream.name]):
        unsigned += fixed_numbers(name, 1) * model.read(name).to("cpu", torch.float64) if gain else 0
    sign = torch.ones_like(signed)
    if space.kind == "signed":
        sign = torch.where(signed < 0, -1.0, 1.0).to(torch.float64)
    elif space.kind == "permutation±":
        signed -= signed.mean()
        sign = sign if float(signed.pow(3).sum()) >= 0 else -sign
    index = torch.argsort(sign * signed + unsigned, stable=True)
    return Monomial(index, sign[index])
