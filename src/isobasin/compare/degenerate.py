"""Degenerate models: where the conditions of the theorem fail, and removal of the freedom that the function ignores.

Two attention layers whose matrices have full column rank and whose patterns QKᵀ (under rotary positions the families
Q R_n Kᵀ) are pairwise distinct and not zero compute the same function only if a group element maps one to the other.
Where a condition fails, a larger group may act, and the absence of a group element proves nothing.

| fails | ignored by the function | removed by |
|---|---|---|
| V Oᵀ = 0 | Q and O of that head, and K and V if no other head reads them | zero |
| rank of V or O, of Q or K | the part of one factor that the other maps to zero | projection |
| a rotary pair with q = 0 or k = 0 | the other of the two | zero |
| equal patterns of c heads | GL(c·d_h) on their V–O: only Σ V Oᵀ counts | its singular vectors, sorted over the heads |
| a unit that writes or reads nothing | the rest of the unit | zero |

The removal takes place in the normal form, where the stream moves by orthogonal maps. Singular vectors move along, so
two models with the same function become two members of one ordinary orbit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isobasin.alignment.head_cost import product_squares
from isobasin.alignment.heads import RANK, query_key_cost
from isobasin.arch import Architecture, HeadSpace
from isobasin.rounding import rounding_unit
from isobasin.symmetries.attention import (
    AttentionMatrices,
    attention_matrices,
    rotary_columns,
    stacked,
    stored_matrices,
)
from isobasin.symmetries.normal_form import normalize, unit_rows
from isobasin.views import AsFloat64, Tensors, View
from isobasin.weights import Weights

EMPTY = 1e-12  # relative to the largest: smaller norms count as zero


@dataclass(frozen=True)
class FailedCondition:
    """A condition of the theorem that does not hold, and where."""

    model: str
    layer: int
    heads: tuple[int, ...]
    condition: str

    def to_dict(self) -> dict[str, object]:
        return {"model": self.model, "layer": self.layer, "heads": list(self.heads), "condition": self.condition}

    def __str__(self) -> str:
        heads = " and ".join(map(str, self.heads))
        return f"{self.model}, layer {self.layer}, head {heads}: {self.condition}"


def failed_conditions(weights: Weights, model: str) -> tuple[FailedCondition, ...]:
    """Every condition that fails in this model at its stored precision; one layer in memory at a time."""
    folded, least = AsFloat64(normalize(weights).apply(weights)), _least(weights)
    return tuple(
        FailedCondition(model, layer, where, what)
        for layer, heads in enumerate(weights.arch.heads())
        for where, what in _failures(attention_matrices(weights.arch, heads, folded), heads, least)
    )


def _least(weights: Weights) -> float:
    """The relative size below which a singular value counts as zero in a file of this type."""
    return max(RANK, 4 * rounding_unit(weights.dtype))


def _failures(m: AttentionMatrices, heads: HeadSpace, least: float) -> Iterator[tuple[tuple[int, ...], str]]:
    for name, x in (("Q", m.q), ("K", m.k), ("V", m.v), ("O", m.o)):
        values = torch.linalg.svdvals(x)
        full = x.shape[-1] - (heads.layer_norm and name in "QK")  # a LayerNorm's columns sum to zero
        ranks = (values > least * values[..., :1].clamp(min=1e-300)).sum(-1)
        for head, rank in enumerate(ranks.tolist()):
            if rank < full:
                yield (head,), f"{name} has rank {rank} of {full}"
    sizes, cost = _patterns(m, heads)
    for head in torch.nonzero(sizes <= least**2 * sizes.max()).flatten().tolist():
        yield (head,), "its pattern is zero"
    if heads.permutable and not heads.sinks:  # heads with other slopes or sinks differ even if their patterns agree
        for pair in _equal_patterns(sizes, cost, least):
            yield pair, "equal patterns"


def _patterns(m: AttentionMatrices, heads: HeadSpace) -> tuple[Tensor, Tensor]:
    """The squared norm of each query head's pattern, and the squared distances between them."""
    zero = AttentionMatrices(*(torch.zeros_like(x) for x in (m.q, m.k, m.v, m.o)))
    return query_key_cost(m, zero, heads, "complete")[:, 0], query_key_cost(m, m, heads, "complete")


def _equal_patterns(sizes: Tensor, cost: Tensor, least: float) -> list[tuple[int, int]]:
    """Pairs of heads with equal patterns that are not zero."""
    seen = sizes > least**2 * sizes.max()
    near = cost <= least**2 * (sizes[:, None] + sizes)
    both = torch.triu(near & seen[:, None] & seen, diagonal=1)
    return [(i, j) for i, j in torch.nonzero(both).tolist()]


def remove_degeneracies(weights: Weights) -> tuple[Weights, tuple[str, ...]]:
    """The same function in normal form without the freedom in the table above, and notes on what was removed."""
    folded = normalize(weights).apply(weights)
    tensors, notes, least = AsFloat64(folded), list[str](), _least(weights)
    changed: dict[str, Tensor] = {}
    for layer, heads in enumerate(weights.arch.heads()):
        after, found = _reduced_heads(attention_matrices(weights.arch, heads, tensors), heads, least)
        if found:
            changed |= stored_matrices(weights.arch, heads, tensors, after)
            notes += [f"layer {layer}: {note}" for note in found]
    for space in weights.arch.spaces.values():
        if space.role == "units" and space.layer is not None:
            emptied, count = _without_dead_units(weights.arch, space.name, tensors)
            changed |= emptied
            notes += [f"layer {space.layer}: {count} units are not seen"] if count else []
    view = View(folded.tensors, {name: lambda _, t=t: t.clone() for name, t in changed.items()})  # type: ignore[misc]
    return replace(folded, tensors=view, changed=folded.changed | set(changed)), tuple(notes)


def _reduced_heads(m: AttentionMatrices, heads: HeadSpace, least: float) -> tuple[AttentionMatrices, list[str]]:
    m, notes = _without_silent_heads(m, heads)
    m, shared = _with_sorted_values(m, heads, least)
    m, deficient = _with_full_rank(m, heads)
    m, empty = _with_reduced_pairs(m, heads)
    return m, [*notes, *shared, *deficient, *empty]


def _without_silent_heads(m: AttentionMatrices, heads: HeadSpace) -> tuple[AttentionMatrices, list[str]]:
    """Heads with V Oᵀ = 0 set to zero; K and V only where all queries of the kv head are silent. Zero is meant relative
    to V and O of the head itself: a head that writes little is not silent."""
    v, o = (x.square().sum((1, 2)) for x in (m.v, m.o))
    silent = product_squares(m.v, m.o) <= RANK**2 * v.repeat_interleave(heads.group_size) * o
    whole = silent.reshape(heads.n_kv_heads, -1).all(1)
    q, o = (x * ~silent[:, None, None] for x in (m.q, m.o))
    k, v = (x * ~whole[:, None, None] for x in (m.k, m.v))
    if heads.shared_rotary and not bool(whole.all()):
        k = torch.cat([m.k[..., : heads.rotary], k[..., heads.rotary :]], -1)
    return AttentionMatrices(q, k, v, o), [f"head {h} says nothing" for h in torch.nonzero(silent).flatten().tolist()]


def _with_sorted_values(m: AttentionMatrices, heads: HeadSpace, least: float) -> tuple[AttentionMatrices, list[str]]:
    """Heads with equal patterns: their joint V Oᵀ by its singular vectors, largest first."""
    if not heads.permutable or heads.group_size > 1 or heads.qk_norm or heads.sinks:
        return m, []
    v, o, notes = m.v.clone(), m.o.clone(), []
    for family in _connected(_equal_patterns(*_patterns(m, heads), least)):
        chosen = torch.tensor(family)
        left, right = _sorted_factors(torch.cat(list(m.v[chosen]), -1), torch.cat(list(m.o[chosen]), -1))
        v[chosen], o[chosen] = (torch.stack(x.split(heads.value_size, -1)) for x in (left, right))
        notes.append(f"heads {' and '.join(map(str, family))} have one pattern and share their values")
    return AttentionMatrices(m.q, m.k, v, o), notes


def _connected(pairs: list[tuple[int, int]]) -> list[list[int]]:
    """The connected components of a graph given by its edges."""
    found: list[set[int]] = []
    for pair in pairs:
        joined = [f for f in found if f & set(pair)]
        found = [f for f in found if f not in joined] + [set(pair).union(*joined)]
    return [sorted(f) for f in found]


def _sorted_factors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """X Yᵀ = L Rᵀ with L = U √S, R = W √S, without forming the d × d product; as many columns as before."""
    basis_x, r_x = torch.linalg.qr(x)
    basis_y, r_y = torch.linalg.qr(y)
    u, s, wt = torch.linalg.svd(r_x @ r_y.mT, full_matrices=False)
    missing = (0, x.shape[-1] - len(s))
    left, right = basis_x @ u * s.sqrt(), basis_y @ wt.mT * s.sqrt()
    return torch.nn.functional.pad(left, missing), torch.nn.functional.pad(right, missing)


def _with_full_rank(m: AttentionMatrices, heads: HeadSpace) -> tuple[AttentionMatrices, list[str]]:
    v, o, deficient = _reduced_factors(m.v, stacked(m.o, heads))
    notes = [f"V–O of kv head {h} is not of full rank" for h in deficient]
    q, k, r = m.q, m.k, heads.rotary
    if r < heads.d_head and not heads.qk_norm:
        unrotated, k, deficient = _reduced_factors(stacked(q, heads)[..., r:], k[..., r:])
        q = torch.cat([q[..., :r], unrotated.reshape(*q.shape[:-1], -1)], -1)
        k = torch.cat([m.k[..., :r], k], -1)
        notes += [f"Q–K of kv head {h} is not of full rank" for h in deficient]
    return AttentionMatrices(q, k, v, o.reshape(m.o.shape)), notes


def _with_reduced_pairs(m: AttentionMatrices, heads: HeadSpace) -> tuple[AttentionMatrices, list[str]]:
    """Rotary pairs with q = 0 or k = 0 set to zero in both."""
    r = heads.rotary
    if not r or heads.qk_norm:  # behind a norm every column counts
        return m, []
    first = torch.arange(0, r, 2) if heads.interleaved else torch.arange(r // 2)
    second = first + (1 if heads.interleaved else r // 2)
    columns = rotary_columns(m, heads)
    sizes = [x[..., first].square().sum(-2) + x[..., second].square().sum(-2) for x in columns]
    product = sizes[0] * sizes[1]
    empty = product <= EMPTY**2 * product.amax(-1, keepdim=True)
    keep = torch.ones(heads.n_kv_heads, heads.d_head, dtype=m.q.dtype)
    keep[:, first], keep[:, second] = (~empty).to(keep), (~empty).to(keep)
    q = stacked(m.q, heads) * keep[:, None]
    reduced = AttentionMatrices(q.reshape(m.q.shape), m.k * keep[:, None], m.v, m.o)
    touched = torch.nonzero((empty & (sizes[0] + sizes[1] > 0)).any(-1)).flatten().tolist()
    return reduced, [f"kv head {h} has rotary pairs that meet nothing" for h in touched]


def _reduced_factors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """X and Y without the part that the product X Yᵀ ignores: X Π_Y, then Y Π_X; and the heads that were changed."""
    deficient = _is_deficient(x) | _is_deficient(y)
    if not bool(deficient.any()):
        return x, y, []
    reduced_x = torch.where(deficient[:, None, None], x @ _row_space_projection(y), x)
    reduced_y = torch.where(deficient[:, None, None], y @ _row_space_projection(reduced_x), y)
    return reduced_x, reduced_y, torch.nonzero(deficient).flatten().tolist()


def _is_deficient(x: Tensor) -> Tensor:
    """Heads that are neither of full rank nor zero."""
    values = torch.linalg.eigvalsh(x.mT @ x)
    return (values[:, 0] <= RANK**2 * values[:, -1]) & (values[:, -1] > 0)


def _row_space_projection(x: Tensor) -> Tensor:
    values, basis = torch.linalg.eigh(x.mT @ x)
    kept = basis * (values > RANK**2 * values[..., -1:]).to(x.dtype).unsqueeze(-2)
    return kept @ kept.mT


def _without_dead_units(arch: Architecture, space: str, tensors: Tensors) -> tuple[dict[str, Tensor], int]:
    """Units whose up · down (or gate) is zero, set to zero in every tensor; and how many they are.

    Where a gated unit has no scale, what is multiplied with its gate is more than up: a unit without up still counts.
    """
    emptied = {name: tensors[name].clone() for name, *_ in arch.carriers(space)}
    squares: dict[str, Tensor] = {}
    for _, rows, move in unit_rows(arch, space, emptied):
        squares[move] = squares.get(move, torch.zeros(len(rows), dtype=rows.dtype)) + rows.square().sum(1)
    scaled = "permuted" not in squares or arch.spaces[space].scales
    product = squares["dual"] * (squares["primal"] if scaled else 1)
    dead = product <= EMPTY**2 * product.max()
    if "permuted" in squares:
        dead |= squares["permuted"] <= EMPTY**2 * squares["permuted"].max()
    if not bool((torch.stack([s * dead for s in squares.values()]).sum(0) > 0).any()):  # none, or already all zero
        return {}, 0
    for name, tensor in emptied.items():
        for place in arch.placements(name, space):
            tensor.narrow(place.axis, place.start, place.size).movedim(place.axis, 0)[dead] = 0
    return emptied, int(dead.sum())
