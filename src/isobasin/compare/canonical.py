"""The canonical point of a model: one representative of its orbit, the same for every member up to rounding.

The stream is brought to its canonical frame (`stream_frame`). In that frame the order of heads and units,
their signs and the factor inside each head are chosen by comparison with fixed numbers.
"""

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.compare.stream_frame import fixed_numbers, stream_frame
from isobasin.groups import Blocks, Element, HeadsElement, Matrix, Monomial, Phases
from isobasin.groups.group import polar
from isobasin.shapes import Float
from isobasin.symmetries import symmetry
from isobasin.symmetries.action import Action
from isobasin.symmetries.attention import AttentionMatrices, attention_matrices, rotary_pairs, stacked
from isobasin.symmetries.normal_form import EMPTY, MOVES, NormalForm, unit_rows
from isobasin.symmetries.transform import Transform
from isobasin.views import Tensors
from isobasin.weights import Weights


def canonical(weights: Weights) -> Transform:
    """The transform that brings a model to the canonical point of its orbit; one block in memory at a time.

    Gains one, shifts folded, means and unseen biases zero; the stream in its canonical frame; Q and K, V and O, up
    and down balanced; heads and units in order, signs and rotations fixed. The function does not change.

    The point is not unique where a model has more symmetry than its architecture: equal heads or units, heads of
    deficient rank, a stream that tables and layers do not span. Two units whose sort keys differ by less than the
    rounding of the file may change places.

    >>> point = canonical(model).apply(model)  # doctest: +SKIP
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
    products = [fixed_numbers(f"turn {name}", *m.shape[-2:]).mT @ _whitened(m) for name, m in (("x", x), ("y", y))]
    return polar(products[0] + products[1])


def _whitened(x: Tensor) -> Tensor:
    """x (xᵀx)^-½ on the row space of x."""
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    return u * (s > 1e-7 * s[..., :1])[..., None, :] @ vt


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
