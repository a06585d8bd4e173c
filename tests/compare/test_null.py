"""Unrelated models: a shuffle of each block in one random frame serves as well as a rotation of each block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import pytest
import torch
from compared_models import held, own_model
from torch import Tensor

from isobasin.arch import Architecture
from isobasin.compare.distance import BlockModel, BlockPair, RotatedModel, UnrelatedModel
from isobasin.model import ModelConfig
from isobasin.symmetries import group_of
from isobasin.symmetries.action import Action
from isobasin.symmetries.normal_form import NormalForm

FRAMES, DRAWS = 5, 6
SIZES = {"d_model": 32, "n_heads": 2, "d_head": 8, "d_ff": 48, "d_vocab": 64, "n_positions": 16, "n_layers": 1}


@dataclass(frozen=True)
class Independent:
    """A model with the stream of every block in a random frame of its own."""

    model: NormalForm
    seed: int

    @property
    def arch(self) -> Architecture:
        return self.model.arch

    def block(self, space: str) -> Mapping[str, Tensor]:
        number = list(self.model.blocks).index(space)
        rotation = group_of(self.arch.spaces["resid"]).sample(seed=1000 * self.seed + number)
        action = Action(self.arch, {"resid": rotation})
        return {name: action.tensor(name, t) for name, t in self.model.block(space).items()}


def with_large_coordinate(preset: str, seed: int) -> NormalForm:
    """One coordinate of the stream has far larger weights than the others, as in trained models."""
    weights = own_model(ModelConfig.preset(preset, **SIZES), seed, torch.float64)
    changed = {}
    for name in ("blocks.0.mlp.up.weight", "blocks.0.attn.q.weight"):
        changed[name] = weights[name].clone()
        changed[name][:, 3] *= 12
    return NormalForm.for_comparison(held(weights, changed))


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_a_shuffle_in_a_random_frame_is_as_good_as_a_rotation(preset: str) -> None:
    a, b = with_large_coordinate(preset, 0), with_large_coordinate(preset, 1)
    identity = {"resid": group_of(a.arch.spaces["resid"]).identity()}

    def similarities(models: Sequence[BlockModel]) -> tuple[float, float]:
        found = [BlockPair.of(a, model, "ff0", "ff0", identity).distance().similarity for model in models]
        return fmean(found), stdev(found)

    n = FRAMES * DRAWS
    mean, spread = similarities(
        [UnrelatedModel(RotatedModel(b, frame), k) for frame in range(FRAMES) for k in range(DRAWS)]
    )
    expected, usual = similarities([Independent(b, k) for k in range(n)])
    assert abs(mean - expected) < 4 * usual * (2 / n) ** 0.5
    assert 0.5 < spread / usual < 1.5
    _, bare = similarities([UnrelatedModel(b, k) for k in range(n)])
    assert bare > 2 * usual, "without a random frame the large coordinates decide"
