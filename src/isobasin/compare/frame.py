"""A canonical frame of the stream: where it may rotate, permute, or change signs, one choice among all.

Rotations are fixed by what has an axis that nothing moves (tokens, positions, classes): with X all those rows, the
frame is the rotation that brings whitened X closest to numbers that are the same for every model. Unlike
eigenvectors it has no signs to choose and does not care about equal eigenvalues.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from isobasin.arch import Architecture, HeadSpace, Space
from isobasin.arch.architecture import ROTATED
from isobasin.compare.fixed import fixed
from isobasin.compare.normal_form import Form
from isobasin.groups import Element, Monomial
from isobasin.match.attention import attention_matrices
from isobasin.match.canonical import ENDS, STREAM, stream_of
from isobasin.symmetries import group_of

ROWS = 4096  # of a table at a time
THIN = 1e-8  # smallest eigenvalue of XᵀX, of the largest, below which layers must help


def frame(form: Form) -> Element:
    """The element that brings the stream to its canonical frame."""
    space = stream_of(form.arch)
    if space.kind in ROTATED:
        return group_of(space).project(_turn(form, space))
    if space.kind == "fixed":
        return group_of(space).identity()
    return _order(form, space)


def tables(arch: Architecture, names: tuple[str, ...]) -> Iterator[tuple[str, int, bool]]:
    """Of the ends, each tensor with one axis on the stream and nothing that moves on the others: name, axis, and
    whether it is a gain (which carries no sign)."""
    for name in names:
        words = arch.tensors[name].roles[0].axes
        axes = [k for k, word in enumerate(words) if word.terms]
        if len(axes) == 1 and len(words[axes[0]].terms) == 1:
            yield name, axes[0], words[axes[0]].terms[0].magnitude


def _vectors(form: Form) -> Iterator[tuple[str, Tensor]]:
    """Rows of the stream that nothing else moves, from the ends and then from the layers, tensor by tensor."""
    for space in (ENDS, *form.spaces):
        names = form.parts[space] if space == ENDS else tuple(n for n in form.parts[space] if _alone(form.arch, n))
        for name, axis, gain in tables(form.arch, names):
            if not gain:
                tensor = form.read(name)
                yield name, tensor.movedim(axis, -1).reshape(-1, tensor.shape[axis]).to(torch.float64)


def _alone(arch: Architecture, name: str) -> bool:
    """Whether a tensor touches no space but the stream."""
    axes = (axis for role in arch.tensors[name].roles for axis in role.axes)
    return {arch.space_of(term).name for axis in axes for term in axis.terms} == {STREAM}


def _turn(form: Form, space: Space) -> Tensor:
    """T Xᵀ-like product of fixed rows and whitened rows: what `project` turns into the frame."""
    gram = torch.zeros(space.size, space.size, dtype=torch.float64)
    seen = gram.clone()
    for name, rows in _vectors(form):
        for start in range(0, len(rows), ROWS):
            block = rows[start : start + ROWS].cpu()
            gram += block.mT @ block
            seen += fixed(f"{name}:{start}", *block.shape).mT @ block
    free = space.size - (space.kind == "orthogonal1")
    mean = torch.full_like(gram, 1 / space.size) if space.kind == "orthogonal1" else torch.zeros_like(gram)
    centre = torch.eye(space.size, dtype=torch.float64) - mean
    rows = centre @ seen @ centre
    for space_name in form.spaces:
        values = torch.linalg.eigvalsh(centre @ gram @ centre)
        if values[-free] > THIN * values[-1]:
            break
        rows = _through(form, space_name, rows) @ centre
        rows = rows * (gram.trace().sqrt() / torch.linalg.matrix_norm(rows).clamp_min(1e-300))
        gram = gram + rows.mT @ rows
        seen = seen + fixed(f"through {space_name}", *rows.shape).mT @ rows
    return seen @ _inverse_root(centre @ gram @ centre)


def _inverse_root(gram: Tensor) -> Tensor:
    values, basis = torch.linalg.eigh(gram)
    kept = values > 1e-14 * values[-1]
    return (basis * torch.where(kept, values.clamp_min(1e-300).rsqrt(), 0)) @ basis.mT


def _through(form: Form, space: str, rows: Tensor) -> Tensor:
    """What a layer would make of rows of the stream if it were linear: Σ_h x V_h O_hᵀ, or down·up·x. It turns with
    the stream, and no element of the layer's own space changes it."""
    place, tensors = form.arch.spaces[space], form.part(space)
    if isinstance(place, HeadSpace):
        m = attention_matrices(form.arch, place, {n: t.to("cpu", torch.float64) for n, t in tensors.items()})
        values = (rows @ m.v[:, : rows.shape[1]]).repeat_interleave(place.group_size, 0)
        return (values @ m.o.mT).sum(0)
    read: list[Tensor] = []
    written: list[Tensor] = []
    for name, tensor in tensors.items():
        words = form.arch.tensors[name].roles[0].axes
        if len(words) == 2 and all(len(w.terms) == 1 for w in words) and not any(w.terms[0].magnitude for w in words):
            inside = next(k for k, w in enumerate(words) if form.arch.space_of(w.terms[0]).name == space)
            matrix = tensor.movedim(inside, 0).to("cpu", torch.float64)
            (written if words[inside].terms[0].dual else read).append(matrix)
    return rows @ read[0].mT @ written[0] if read and written else rows


def _order(form: Form, space: Space) -> Monomial:
    """Coordinates sorted by what fixed numbers make of their rows, with signs where the stream has them.

    Where all signs change together, means do not count: what has one there holds a constant (see `upright`), which
    stays when the stream changes its sign.
    """
    turning, still = (torch.zeros(space.size, dtype=torch.float64) for _ in range(2))
    for name, rows in _vectors(form):
        turning += fixed(name, len(rows)) @ rows.cpu() / len(rows) ** 0.5
    for name, _, gain in tables(form.arch, form.parts[ENDS]):
        still += fixed(name, 1) * form.read(name).to("cpu", torch.float64) if gain else 0
    sign = torch.ones_like(turning)
    if space.kind == "signed":
        sign = torch.where(turning < 0, -1.0, 1.0).to(torch.float64)
    elif space.kind == "permutation±":
        turning -= turning.mean()
        sign = sign if float(turning.pow(3).sum()) >= 0 else -sign
    index = torch.argsort(sign * turning + still, stable=True)
    return Monomial(index, sign[index])
