"""Verification of an alignment that moves attention alone, layer by layer."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from isobasin.match.alignment import Alignment
from isobasin.match.verification import Probe
from isobasin.symmetries import Symmetry
from isobasin.views import View
from isobasin.weights import Weights


def verified_attention(
    found: Alignment, b: Weights, part: Symmetry, dtypes: Mapping[str, torch.dtype], device: torch.device
) -> Alignment:
    """The same with how far each layer's outputs move as stored; an error if the alignment itself would move one."""
    moved = found.transform.apply(b, device=device)
    stored = View(moved, {name: lambda t, n=name: t[n].to(dtypes[n]) for name in dtypes})  # type: ignore[misc]
    changes: dict[object, float] = {}
    for heads in (h for h in b.arch.heads() if h.name in part.groups):
        probe = Probe.of(b, heads, device)
        if heads.name in found.transform.elements:
            probe.require_unchanged(moved)
        changes[int(heads.name.removeprefix("heads"))] = probe.change(stored)
    rows = tuple(row | {"max_output_change": changes.get(row["layer"])} for row in found.per_layer)
    return replace(found, per_layer=rows, max_output_change=max(changes.values(), default=0.0))
