"""Where the theorem's conditions fail a larger group acts; this takes its freedom out of a model.

| fails | not seen by the function | taken out by |
|---|---|---|
| V Oᵀ = 0 | Q and O of that head, and K and V if no other reads them | zero |
| rank of V or O, of Q or K | what the other factor does not meet | projection |
| a rotary pair with q = 0 or k = 0 | the other of the two | zero |
| equal patterns of c heads | GL(c·d_h) on their V–O: only Σ V Oᵀ counts | its singular vectors, sorted over the heads |
| a unit that writes or reads nothing | the rest of the unit | zero |

All of it is done in the canonical form, where the stream moves by orthogonal maps: singular vectors move along, so two
models with the same function come out as two members of one ordinary orbit.
"""

from dataclasses import replace

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace
from isobasin.compare.conditions import equal_patterns, patterns
from isobasin.compare.rounding import unit
from isobasin.gauge.coordinate import face_columns
from isobasin.match.attention import AttentionMatrices, attention_matrices
from isobasin.match.headcost import product_squares
from isobasin.match.heads import RANK, stacked
from isobasin.normalize import normalize
from isobasin.views import Doubled, Tensors, View
from isobasin.weights import Weights


def reduced(weights: Weights) -> tuple[Weights, tuple[str, ...]]:
    """The same function in canonical form with no unseen freedom left that we know of, and what was taken out."""
    flat = normalize(weights).apply(weights)
    tensors, notes = Doubled(flat), list[str]()
    changed: dict[str, Tensor] = {}
    least = max(RANK, 4 * unit(weights.dtype))
    for heads in weights.arch.heads():
        before = attention_matrices(weights.arch, heads, tensors)
        after, said = _reduced_heads(before, heads, least)
        if said:
            changed |= _placed(weights.arch, heads, tensors, after)
            notes += [f"layer {heads.name.removeprefix('heads')}: {text}" for text in said]
    for layer in range(weights.arch.sizes.n_layers):
        quiet, count = _without_dead_units(weights.arch, f"ff{layer}", tensors)
        changed |= quiet
        notes += [f"layer {layer}: {count} units are not seen"] if count else []
    view = View(flat.tensors, {name: lambda _, t=t: t.clone() for name, t in changed.items()})  # type: ignore[misc]
    return replace(flat, tensors=view, changed=flat.changed | set(changed)), tuple(notes)


def _reduced_heads(m: AttentionMatrices, heads: HeadSpace, least: float) -> tuple[AttentionMatrices, list[str]]:
    said: list[str] = []
    for step in (_without_silent, _with_sorted_values, _with_met_values, _with_met_keys, _with_met_pairs):
        m, found = step(m, heads, least)
        said += found
    return m, said


def _without_silent(m: AttentionMatrices, heads: HeadSpace, _: float) -> tuple[AttentionMatrices, list[str]]:
    sizes = product_squares(m.v, m.o)
    silent = sizes <= RANK**2 * sizes.max()
    whole = silent.reshape(heads.n_kv_heads, -1).all(1)
    q, o = (x * ~silent[:, None, None] for x in (m.q, m.o))
    k, v = (x * ~whole[:, None, None] for x in (m.k, m.v))
    return AttentionMatrices(q, k, v, o), [f"head {h} says nothing" for h in torch.nonzero(silent).flatten().tolist()]


def _with_sorted_values(m: AttentionMatrices, heads: HeadSpace, least: float) -> tuple[AttentionMatrices, list[str]]:
    """Heads with one pattern share their values: the joint V Oᵀ by its singular vectors, largest first."""
    if not heads.permutable or heads.group_size > 1:
        return m, []
    v, o, said = m.v.clone(), m.o.clone(), []
    for family in _families(equal_patterns(*patterns(m, heads), least)):
        chosen = torch.tensor(family)
        left, right = _sorted_factors(torch.cat(list(m.v[chosen]), -1), torch.cat(list(m.o[chosen]), -1))
        v[chosen], o[chosen] = (torch.stack(x.split(heads.d_head, -1)) for x in (left, right))
        said.append(f"heads {' and '.join(map(str, family))} have one pattern and share their values")
    return AttentionMatrices(m.q, m.k, v, o), said


def _families(pairs: list[tuple[int, int]]) -> list[list[int]]:
    found: list[set[int]] = []
    for pair in pairs:
        joined = [f for f in found if f & set(pair)]
        found = [f for f in found if f not in joined] + [set(pair).union(*joined)]
    return [sorted(f) for f in found]


def _sorted_factors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """X Yᵀ = L Rᵀ with L = U √S, R = W √S, never forming the d × d product; as many columns as before."""
    basis_x, r_x = torch.linalg.qr(x)
    basis_y, r_y = torch.linalg.qr(y)
    u, s, wt = torch.linalg.svd(r_x @ r_y.mT, full_matrices=False)
    missing = (0, x.shape[-1] - len(s))
    left, right = basis_x @ u * s.sqrt(), basis_y @ wt.mT * s.sqrt()
    return torch.nn.functional.pad(left, missing), torch.nn.functional.pad(right, missing)


def _with_met_values(m: AttentionMatrices, heads: HeadSpace, _: float) -> tuple[AttentionMatrices, list[str]]:
    v, o, deficient = _met(m.v, stacked(m.o, heads))
    said = [f"V–O of kv head {h} is not of full rank" for h in deficient]
    return AttentionMatrices(m.q, m.k, v, o.reshape(m.o.shape)), said


def _with_met_keys(m: AttentionMatrices, heads: HeadSpace, _: float) -> tuple[AttentionMatrices, list[str]]:
    r = heads.rotary
    if r == heads.d_head:
        return m, []
    q, k, deficient = _met(stacked(m.q, heads)[..., r:], m.k[..., r:])
    q = torch.cat([m.q[..., :r], q.reshape(*m.q.shape[:-1], -1)], -1)
    said = [f"Q–K of kv head {h} is not of full rank" for h in deficient]
    return AttentionMatrices(q, torch.cat([m.k[..., :r], k], -1), m.v, m.o), said


def _with_met_pairs(m: AttentionMatrices, heads: HeadSpace, _: float) -> tuple[AttentionMatrices, list[str]]:
    r = heads.rotary
    if not r:
        return m, []
    first = torch.arange(0, r, 2) if heads.interleaved else torch.arange(r // 2)
    second = first + (1 if heads.interleaved else r // 2)
    q = stacked(m.q, heads)
    sizes = [x[..., first].square().sum(-2) + x[..., second].square().sum(-2) for x in (q, m.k)]
    product = sizes[0] * sizes[1]
    empty = product <= RANK**2 * product.amax(-1, keepdim=True)
    keep = torch.ones(heads.n_kv_heads, heads.d_head, dtype=q.dtype)
    keep[:, first], keep[:, second] = (~empty).to(q.dtype), (~empty).to(q.dtype)
    met = AttentionMatrices((q * keep[:, None]).reshape(m.q.shape), m.k * keep[:, None], m.v, m.o)
    return met, [f"kv head {h} has rotary pairs that meet nothing" for h in _rows(empty & (sizes[0] + sizes[1] > 0))]


def _met(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """X and Y with what the other does not meet taken out: X Π_Y, then Y Π_X; the product X Yᵀ stays."""
    deficient = _deficient(x) | _deficient(y)
    if not bool(deficient.any()):
        return x, y, []
    met_x = torch.where(deficient[:, None, None], x @ _support(y), x)
    met_y = torch.where(deficient[:, None, None], y @ _support(met_x), y)
    return met_x, met_y, torch.nonzero(deficient).flatten().tolist()


def _deficient(x: Tensor) -> Tensor:
    """Heads that are neither of full rank nor empty."""
    values = torch.linalg.eigvalsh(x.mT @ x)
    return (values[:, 0] <= RANK**2 * values[:, -1]) & (values[:, -1] > 0)


def _support(x: Tensor) -> Tensor:
    values, basis = torch.linalg.eigh(x.mT @ x)
    kept = basis * (values > RANK**2 * values[..., -1:]).to(x.dtype).unsqueeze(-2)
    return kept @ kept.mT


def _rows(flags: Tensor) -> list[int]:
    return torch.nonzero(flags.any(-1)).flatten().tolist()


def _placed(arch: Architecture, heads: HeadSpace, tensors: Tensors, m: AttentionMatrices) -> dict[str, Tensor]:
    """The matrices back in the layout in which the checkpoint stores them."""
    number, found = heads.name.removeprefix("heads"), dict[str, Tensor]()
    for face, dual, x in (("qk", True, m.q), ("qk", False, m.k), ("vo", False, m.v), ("vo", True, m.o)):
        for name, axis, words, term in arch.carriers(f"{face}{number}"):
            if term.dual != dual:
                continue
            whole = found.setdefault(name, tensors[name].clone()).movedim(axis, 0)
            rows = torch.tensor(face_columns(arch, words, f"{face}{number}", dual=dual))
            if whole.dim() == 1:
                whole[rows] = x[:, -1].flatten()
            else:
                whole[rows] = x[:, : whole.shape[1]].mT.flatten(0, 1)
    return found


def _without_dead_units(arch: Architecture, space: str, tensors: Tensors) -> tuple[dict[str, Tensor], int]:
    """Units whose up · down (or gate) is nothing, set to zero throughout."""
    held = {name: (axis, term) for name, axis, _, term in arch.carriers(space)}
    squares: dict[str, Tensor] = {}
    for name, (axis, term) in held.items():
        role = "down" if term.dual else "gate" if term.magnitude else "up"
        square = tensors[name].movedim(axis, 0).flatten(1).square().sum(1) if tensors[name].dim() > 1 else None
        square = tensors[name].square() if square is None else square
        squares[role] = squares.get(role, torch.zeros_like(square)) + square
    product = squares["up"] * squares["down"]
    dead = product <= RANK**2 * product.max()
    if "gate" in squares:
        dead |= squares["gate"] <= RANK**2 * squares["gate"].max()
    left = sum(square * dead for square in squares.values())
    if not bool((torch.as_tensor(left) > 0).any()):  # none, or already empty
        return {}, 0
    quiet = {}
    for name, (axis, _) in held.items():
        whole = tensors[name].clone()
        whole.movedim(axis, 0)[dead] = 0
        quiet[name] = whole
    return quiet, int(dead.sum())
