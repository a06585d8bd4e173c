"""Q and K of a model changed by matrices of its own symmetry, or by matrices outside it: the causal control."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from isobasin.groups import GL, Heads
from isobasin.symmetries import symmetry
from isobasin.weights import Weights

Side = Literal["inside", "outside"]


@dataclass(frozen=True)
class Disguise:
    """What is done to the query and key vectors of every head: q → U q, k → V k."""

    name: str
    queries: Tensor
    keys: Tensor


def disguise(model: Weights, side: Side, layer: int, *, seed: int) -> Disguise:
    """A random change of one layer's heads, singular values in ½ … 2.

    Inside, V = U⁻ᵀ with U of the group: a complex number per rotary pair under RoPE, any invertible matrix without it.
    Outside, under RoPE, V = U⁻ᵀ with any invertible U: QKᵀ stays, what positions see of it does not. Without rotary
    positions that is inside, so outside only the queries move.
    """
    group = symmetry(model.arch).groups[f"heads{layer}"]
    assert isinstance(group, Heads)
    rotary = any(heads.rotary for heads in model.arch.heads())
    n, width = group.n_kv, group.qk.n
    inner = group.qk if side == "inside" else GL(width)
    keys = inner.sample(n, seed=seed).matrix()
    queries = torch.linalg.inv(keys).mT
    if side == "outside" and not rotary:
        return Disguise("queries alone", queries, torch.eye(width, dtype=keys.dtype).expand_as(keys))
    return Disguise(str(inner), queries, keys)


def disguised(model: Weights, layers: list[int], side: Side, *, seed: int) -> tuple[Weights, str]:
    """One of our own models with these layers' attention disguised, and what kind of matrix did it."""
    tensors: dict[str, Tensor] = {name: model[name] for name in model}
    names = []
    for layer in layers:
        found = disguise(model, side, layer, seed=seed + layer)
        names.append(found.name)
        for letter, matrix in (("q", found.queries), ("k", found.keys)):
            for kind in ("weight", "bias"):
                name = f"blocks.{layer}.attn.{letter}.{kind}"
                if name in tensors:
                    tensors[name] = _moved(tensors[name], matrix)
    return replace(model, tensors=tensors), names[0]


def _moved(tensor: Tensor, matrix: Tensor) -> Tensor:
    """Rows of a projection by head, each head's rows times its matrix; query heads of a group share one."""
    width = matrix.shape[-1]
    heads = tensor.to(torch.float64).reshape(-1, width, *tensor.shape[1:])
    each = matrix.repeat_interleave(len(heads) // len(matrix), 0)
    return torch.einsum("hij,hj...->hi...", each, heads).reshape(tensor.shape).to(tensor.dtype)
