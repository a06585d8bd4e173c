"""The canonical frame of the residual stream, and the fixed numbers that canonical points and fingerprints refer to."""

from collections.abc import Iterator
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.groups import Element, Monomial
from isobasin.symmetries import group_of
from isobasin.symmetries.attention import attention_matrices
from isobasin.symmetries.normal_form import NormalForm, unit_rows

TABLE_ROWS = 4096  # rows of a table that are processed at once
RANK_THRESHOLD = 1e-8  # smallest eigenvalue of XᵀX relative to the largest, below which layers contribute to the frame


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
            yield name, found[0][0], found[0][1][0].magnitude


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
    return product @ _inverse_root(centre @ gram @ centre)


def _inverse_root(gram: Tensor) -> Tensor:
    values, basis = torch.linalg.eigh(gram)
    kept = values > 1e-14 * values[-1]
    return (basis * torch.where(kept, values.clamp_min(1e-300).rsqrt(), 0)) @ basis.mT


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
        if list(map(len, terms)) == [1, 1] and not any(term.magnitude for (term,) in terms):
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
