"""A tall tensor of the stream, such as an embedding, a few rows at a time: what acts on it acts on every row alike."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from isobasin.gauge import Stage
from isobasin.symmetries import Symmetry
from isobasin.views import View
from isobasin.weights import Weights

ROWS = 2**23  # numbers in a slice


def slices(weights: Weights, part: Symmetry, name: str) -> Iterator[Weights]:
    """The model again and again, each time with the next rows of this tensor in its place; once if it is small."""
    shape = weights.arch.shapes[name]
    if not _by_rows(part, name) or torch.Size(shape).numel() <= ROWS:
        yield weights
        return
    step = max(1, ROWS * shape[0] // torch.Size(shape).numel())
    whole = None if _on_disk(weights, name) else weights[name]
    for start in range(0, shape[0], step):
        rows = _rows(weights, name, whole, start, min(start + step, shape[0]))
        yield replace(weights, tensors=View(weights.tensors, {name: lambda _, r=rows: r}))  # type: ignore[misc]


def _rows(weights: Weights, name: str, whole: Tensor | None, start: int, stop: int) -> Tensor:
    if whole is not None:
        return whole[start:stop]
    assert weights.checkpoint is not None
    return weights.checkpoint.rows(weights.names.on_disk[name], start, stop)


def _by_rows(part: Symmetry, name: str) -> bool:
    """Nothing acts on the rows' axis, and no coordinate adds rows up."""
    plain = all(len(role.axes) > 1 and not role.axes[0].terms for role in part.arch.tensors[name].roles)
    return plain and not any(c.stage == Stage.SUM and name in c.touches for c in part.coordinates.values())


def _on_disk(weights: Weights, name: str) -> bool:
    return weights.checkpoint is not None and name not in weights.changed and name not in weights.names.copies.values()
