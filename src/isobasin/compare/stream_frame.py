"""The canonical frame of a stream: the rotation, permutation or signs that all members of an orbit agree on.

A rotation is determined by vectors that rotate with the stream: the rows of the tables whose other axis nothing moves
(tokens, positions, classes), and where these do not span the stream, their images under the layers. Of several streams
each has its frame in turn, and a tensor from an earlier one, in its frame, is a table of the later one.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.compare.uncertainty import (
    LIMIT,
    Doubt,
    large_doubts,
    noise_of,
    rotation_uncertainty,
    swap_uncertainty,
    ties,
)
from isobasin.groups import Element, Monomial
from isobasin.shapes import Float
from isobasin.symmetries import group_of
from isobasin.symmetries.action import Action
from isobasin.symmetries.attention import attention_matrices
from isobasin.symmetries.normal_form import NormalForm, constant_axis, holding_constants, unit_rows

TABLE_ROWS = 4096  # rows of a table that are processed at once
RANK_THRESHOLD = 1e-8  # smallest eigenvalue of XᵀX relative to the largest, below which layers contribute to the frame
NEW = 1e-4  # of the largest: singular values of an image that count as a new direction
EMPTY = 1e-10  # of its factors: an image of this size is rounding


@dataclass(frozen=True)
class Frame:
    """The element of the stream, how much it may differ between copies, and why."""

    element: Element
    uncertainty: float = 0.0
    doubts: tuple[Doubt, ...] = ()


def in_frame(model: NormalForm, frame: Action, name: str, tensor: Tensor) -> Tensor:
    """A tensor moved by the elements of streams; constants along the all-ones vector keep their sign."""
    moved = frame.tensor(name, tensor)
    if name not in holding_constants(model.arch):
        return moved
    axis, stream = constant_axis(model.arch, name)
    return moved if frame.ones_factor(stream) > 0 else moved - 2 * moved.mean(axis, keepdim=True)


def fixed_numbers(label: str, *shape: int) -> Tensor:
    """Numbers of mean zero and variance one that depend on the label and the shape alone.

    They are the directions that canonical points and fingerprints refer to. They come from the raw bits of PCG64, which
    numpy guarantees not to change; torch generators give no such guarantee.
    """
    uniform = (fixed_bits(label, shape) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy((2 * uniform - 1) * 3**0.5).reshape(shape)


def fixed_signs(label: str, *shape: int) -> Tensor:
    """The signs of `fixed_numbers`, as small integers and in a third of the time."""
    return torch.from_numpy((fixed_bits(label, shape) >> np.uint64(63)).astype(np.int8)).mul_(2).sub_(1).reshape(shape)


def fixed_bits(label: str, shape: tuple[int, ...]) -> NDArray[np.uint64]:
    count = int(np.prod(shape)) if shape else 1
    return np.asarray(np.random.PCG64(crc32(label.encode())).random_raw(count), dtype=np.uint64)


def stream_frames(model: NormalForm) -> dict[str, Frame]:
    """The elements that bring the streams to their canonical frames, by rotation, permutation or signs as their groups
    allow.

    A rotation brings whitened rows X closest to fixed numbers. Unlike eigenvectors it needs no choice of signs, and
    equal eigenvalues do not matter.
    """
    found: dict[str, Frame] = {}
    for name, space in model.arch.streams.items():
        known = Action(model.arch, {earlier: frame.element for earlier, frame in found.items()})
        if space.kind == "fixed":
            found[name] = Frame(group_of(space).identity())
        else:
            found[name] = (_rotation if space.rotates else _coordinate_order)(model, space, known)
        earlier = max((f.uncertainty for f in found.values() if f.uncertainty <= LIMIT), default=0.0)
        found[name] = replace(found[name], uncertainty=max(found[name].uncertainty, earlier))
    return found


def tables(
    arch: Architecture, names: tuple[str, ...], stream: str, known: Collection[str] = ()
) -> Iterator[tuple[str, int, bool]]:
    """Tensors with one axis on the stream and nothing that moves on the others, but for streams that are known: name,
    axis, and whether it is a gain (which has no sign)."""
    for name in names:
        axes = [(axis, words.terms) for axis, words in enumerate(arch.tensors[name].roles[0].axes) if words.terms]
        spaces = [[arch.space_of(term).name for term in terms] for _, terms in axes]
        on_stream = [axis for axis, each in zip(axes, spaces) if each == [stream]]
        others = [each for each in spaces if each != [stream]]
        if len(on_stream) == 1 and all(set(each) <= set(known) for each in others):
            ((axis, (term,)),) = on_stream
            yield name, axis, term.permutation_part


def joint_blocks(model: NormalForm) -> list[tuple[str, ...]]:
    """The blocks of the model one by one, but experts together, behind their router: their order may not count."""
    experts = model.arch.expert_spaces
    members = {member for space in experts.values() for member in space.members}
    return [(name, *(experts[name].members if name in experts else ())) for name in model.spaces if name not in members]


def stream_rows(
    model: NormalForm, stream: str, spaces: Iterable[str], known: Action | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The rows on a stream of the tables in these blocks that are not gains, in float64; other streams as known."""
    frame = Action(model.arch, {}) if known is None else known
    for space in spaces:
        for name, axis, gain in tables(model.arch, model.blocks[space], stream, frame.elements):
            if not gain:
                tensor = in_frame(model, frame, name, model.read(name).to(torch.float64))
                yield model.arch.without_expert(name), tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis])


# -- rotations ------------------------------------------------------------------------------------------------------


class _Rows:
    """Vectors that rotate with the stream, as their Gram matrix XᵀX and their product FᵀX with fixed numbers F."""

    def __init__(self, space: Space) -> None:
        self.gram = torch.zeros(space.size, space.size, dtype=torch.float64)
        self.product = self.gram.clone()
        self.free = space.size - (space.kind == "orthogonal1")
        self.centre = torch.eye(space.size, dtype=torch.float64)
        if space.kind == "orthogonal1":
            self.centre -= 1 / space.size

    def add(self, label: str, rows: Tensor) -> None:
        self.gram = self.gram + rows.mT @ rows
        self.product = self.product + fixed_numbers(label, *rows.shape).mT @ rows

    def add_image(self, label: str, rows: Tensor) -> Tensor:
        """Add the image of earlier rows, at their size; what was added."""
        rows = rows * (self.gram.trace().sqrt() / torch.linalg.matrix_norm(rows).clamp_min(1e-300))
        self.add(label, rows)
        return rows

    def eigen(self) -> tuple[Tensor, Tensor]:
        values, basis = torch.linalg.eigh(self.centre @ self.gram @ self.centre)
        return values, basis

    @property
    def spanning(self) -> bool:
        values = self.eigen()[0]
        return bool(values[-self.free] > RANK_THRESHOLD * values[-1])


def _rotation(model: NormalForm, space: Space, known: Action) -> Frame:
    """The projection of Fᵀ X (XᵀX)^-½ onto the group."""
    found, noise = _Rows(space), noise_of(model.weights)
    for name, table in stream_rows(model, space.name, (space.name, *model.spaces), known):
        for start in range(0, len(table), TABLE_ROWS):
            found.add(f"{name}:{start}", table[start : start + TABLE_ROWS])
    missing = 0
    if not found.spanning:
        _add_linear_responses(model, space, found)
        missing = 0 if found.spanning else _add_gram_responses(model, space, found)
    values, basis = found.eigen()
    kept = values > max(1e-14, min(noise**2, RANK_THRESHOLD / 100)) * values[-1]
    roots = torch.where(kept, values.clamp_min(1e-300).rsqrt(), 0)
    product = found.product @ ((basis * roots) @ basis.mT)
    element = group_of(space).project(product)
    if missing:
        reason = f"{missing} of {space.size} directions can not be told apart by embeddings, head and layers"
        return Frame(element, 1.0, (Doubt(space.name, reason, 1.0),))
    spread = float((values[-1] / values[kept][0]).sqrt()) if bool(kept.any()) else 1.0
    change = rotation_uncertainty(found.centre @ product @ basis[:, kept], noise * spread)
    reason = f"rotation: its tables differ in size by {spread:.0e} between directions"
    return Frame(element, change, tuple(large_doubts(space.name, reason, change)))


def _add_linear_responses(model: NormalForm, stream: Space, found: _Rows) -> None:
    """Add the images of the tables under one layer after the other until they span the stream."""
    rows = found.centre @ found.product @ found.centre
    for first, *experts in joint_blocks(model):
        spaces = [name for name in experts or [first] if _is_between(model, name, stream)]
        images = [image for name in spaces if (image := _linear_response(model, name, rows)) is not None]
        if not images:
            continue
        rows = found.add_image(f"through {first}", torch.stack(images).sum(0) @ found.centre)
        if found.spanning:
            break


def _is_between(model: NormalForm, name: str, stream: Space) -> bool:
    """Whether a layer reads from a stream and writes to it, and to no other."""
    place, arch = model.arch.spaces[name], model.arch
    if isinstance(place, HeadSpace):
        return {on for streams in arch.head_streams(place) for on in streams} == {stream}
    return {arch.stream_of(tensor) for tensor in model.blocks[name] if len(arch.shapes[tensor]) > 1} <= {stream, None}


def _linear_response(model: NormalForm, space: str, rows: Tensor) -> Tensor | None:
    """The output of a layer for rows of the stream if it were linear: Σ_h x V_h O_hᵀ, or x up down; None for zero.

    It rotates with the stream, and no element of the layer's own space changes it.
    """
    place, tensors = model.arch.spaces[space], model.block(space)
    if isinstance(place, HeadSpace):
        m = attention_matrices(model.arch, place, {n: t.to("cpu", torch.float64) for n, t in tensors.items()})
        values = (rows @ m.v[:, : rows.shape[1]]).repeat_interleave(place.group_size, 0)
        image = (values @ m.o.mT).sum(0)
        return _unless_empty(image, rows, m.v, m.o)
    found: dict[str, Tensor] = {}
    for name, rows_of_units, move in unit_rows(model.arch, space, tensors):
        terms = [axis.terms for axis in model.arch.tensors[name].roles[0].axes]
        if list(map(len, terms)) == [1, 1] and not any(term.permutation_part for (term,) in terms):
            found.setdefault(move, rows_of_units.to("cpu", torch.float64))
    if len(found) < 2:
        return rows
    return _unless_empty(rows @ found["primal"].mT @ found["dual"], rows, found["primal"], found["dual"])


def _unless_empty(image: Tensor, *factors: Tensor) -> Tensor | None:
    size = np.prod([float(factor.norm()) for factor in factors])
    return image if float(image.norm()) > EMPTY * size else None


def _add_gram_responses(model: NormalForm, stream: Space, found: _Rows) -> int:
    """Add images under XᵀX for every balanced matrix X on the stream, until nothing new appears.

    The number of directions that are still missing and that some layer reads or writes.
    """
    rows, known, grew = found.centre @ found.product @ found.centre, _span(found), True
    while grew:
        grew = False
        for label, x in _on_stream(model, stream):
            image = (rows @ x.mT @ x) @ found.centre
            new = image - image @ known @ known.mT
            if float(new.norm()) > NEW * float(image.norm()):
                rows = rows + found.add_image(label, new)
                known, grew = _span(found), True
            if known.shape[1] == found.free:
                return 0
    outside = found.centre - known @ known.mT
    sizes = [(float((x @ outside).square().sum()), float(x.square().sum())) for _, x in _on_stream(model, stream)]
    seen, whole = map(sum, zip(*sizes, strict=True))
    return found.free - known.shape[1] if seen > EMPTY * whole else 0


def _span(found: _Rows) -> Float[Tensor, "d k"]:
    values, basis = found.eigen()
    return basis[:, values > RANK_THRESHOLD * values[-1]]


def _on_stream(model: NormalForm, stream: Space) -> Iterator[tuple[str, Float[Tensor, "m d"]]]:
    """The balanced matrices of all blocks with an axis on the stream, one row for every column of a head and every
    unit; without means where the stream has a sign of its own, since means hold constants there."""
    for first, *experts in joint_blocks(model):
        blocks = [_block_on_stream(model, name, stream) for name in experts] or [iter(())]
        parts = [*_block_on_stream(model, first, stream), *(torch.cat(each) for each in zip(*blocks, strict=True))]
        for index, x in enumerate(parts):
            centred = x - x.mean(1, keepdim=True) if stream.kind == "permutation±" else x
            yield f"through {first} {index}", centred


def _block_on_stream(model: NormalForm, space: str, stream: Space) -> Iterator[Float[Tensor, "m d"]]:
    place, width = model.arch.spaces[space], stream.size
    tensors = {name: t.to("cpu", torch.float64) for name, t in model.block(space).items()}
    if isinstance(place, HeadSpace):
        m = attention_matrices(model.arch, place, tensors)
        for x, streams in zip((m.q, m.k, m.v, m.o), model.arch.head_streams(place)):
            parts = x[:, : sum(on.size for on in streams)].split([on.size for on in streams], 1)
            yield from (part.mT.flatten(0, 1) for part, on in zip(parts, streams) if on == stream)
    else:
        for name, rows, _ in unit_rows(model.arch, space, tensors):
            if rows.shape[1] == width and model.arch.stream_of(name) in (stream, None):
                yield rows


# -- permutations and signs -----------------------------------------------------------------------------------------


def _coordinate_order(model: NormalForm, space: Space, known: Action) -> Frame:
    """Coordinates sorted by the products of their columns with fixed numbers; signs where the stream has them.

    Where only the common sign is free, the mean is subtracted first: it holds a constant (see `with_unit_shift`) that
    does not change with the sign of the stream. Where two coordinates have the same product, the layers are added.
    """
    noise, (signed, unsigned, columns) = noise_of(model.weights), _coordinate_keys(model, space, known)
    element, pairs, weak = _sorted(space, signed, unsigned, noise * columns.norm(dim=1))
    if pairs or weak:
        response, used = _coordinate_response(model, space, signed)
        signed = signed / signed.norm().clamp_min(1e-300) + response / response.norm().clamp_min(1e-300)
        element, pairs, weak = _sorted(space, signed, unsigned, noise * (used > 0))
        columns = torch.cat([columns, used[:, None]], 1)
    reason = f"{len(pairs)} pairs of coordinates have sort keys that agree up to rounding"
    doubts = large_doubts(space.name, reason, swap_uncertainty(columns, pairs))
    doubts += large_doubts(space.name, f"{weak} signs are those of sums that vanish up to rounding", float(weak > 0))
    return Frame(element, noise, tuple(doubts))


def _coordinate_keys(model: NormalForm, space: Space, known: Action) -> tuple[Tensor, Tensor, Tensor]:
    """Sums of tables and of gains with fixed numbers, and the columns of all tables, one row for each coordinate."""
    signed, unsigned = (torch.zeros(space.size, dtype=torch.float64) for _ in range(2))
    columns = []
    for name, rows in stream_rows(model, space.name, (space.name, *model.spaces), known):
        signed += fixed_numbers(name, len(rows)) @ rows / len(rows) ** 0.5
        columns.append(rows.mT / len(rows) ** 0.5)
    for name, _, gain in tables(model.arch, model.blocks[space.name], space.name):
        unsigned += fixed_numbers(name, 1) * model.read(name).to("cpu", torch.float64) if gain else 0
    return signed, unsigned, torch.cat([*columns, unsigned[:, None]], 1)


def _coordinate_response(model: NormalForm, stream: Space, vector: Tensor) -> tuple[Tensor, Tensor]:
    """The vector times XᵀX, for every balanced matrix X on the stream, in fixed proportions; and the size of all X."""
    total, used = torch.zeros_like(vector), torch.zeros_like(vector)
    for label, x in _on_stream(model, stream):
        total += fixed_numbers(label, 1) * (vector @ x.mT @ x)
        used += x.square().sum(0)
    return total, used


def _sorted(
    space: Space, signed: Tensor, unsigned: Tensor, errors: Tensor
) -> tuple[Monomial, list[tuple[int, int]], int]:
    """The order and the signs, pairs of coordinates too close to be told apart, and the number of weak signs."""
    sign, weak = torch.ones_like(signed), 0
    if space.kind == "signed":
        sign = torch.where(signed < 0, -1.0, 1.0).to(torch.float64)
        weak = int(((signed.abs() <= errors) & (errors > 0)).sum())
    elif space.kind == "permutation±":
        signed = signed - signed.mean()
        cubes = float(signed.pow(3).sum())
        sign = sign if cubes >= 0 else -sign
        weak = int(abs(cubes) <= float((3 * signed.square() * errors).sum()))
    keys = sign * signed + unsigned
    index = torch.argsort(keys, stable=True)
    return Monomial(index, sign[index]), ties(keys, errors, index), weak
