"""An element brought to its end in float64: wide models are swept in float32, and for a few sweeps only."""

import torch

from isobasin.match.canonical import Canonical
from isobasin.match.matchers import WeightMatching
from isobasin.match.sweep import Board
from isobasin.match.whole import dressed
from isobasin.symmetries import symmetry
from isobasin.transform import Transform
from isobasin.weights import Weights

SWEEPS = 10


def polished(a: Weights, b: Weights, transform: Transform, device: torch.device) -> Transform:
    """A few more sweeps from where `transform` brought B, block by block, and dressed for A again."""
    part = symmetry(b.arch)
    board = Board(
        Canonical(a, part, torch.float64, device),
        Canonical(b, part, torch.float64, device),
        WeightMatching(scope="model"),
    )
    scales = {name: (board.a.balance(name), board.b.balance(name)) for name in part.groups}
    start = {
        name: scales[name][0] @ transform.elements.get(name, group.identity()) @ scales[name][1].inverse()
        for name, group in part.groups.items()
    }
    found = board.descend(start, most=SWEEPS).elements
    elements = {name: scales[name][0].inverse() @ g @ scales[name][1] for name, g in found.items()}
    return dressed(a, b, part, elements, device)
