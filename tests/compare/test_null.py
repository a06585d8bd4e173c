"""Unrelated models: shuffled in one random frame they are as unrelated as if every part had been rotated anew."""

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

import pytest
from compared_models import held, own
from torch import Tensor

from isobasin.action import Action
from isobasin.compare.normal_form import Form
from isobasin.compare.null import Turned, Unrelated
from isobasin.compare.similarity import Meeting, Parted
from isobasin.match.canonical import STREAM, stream_of
from isobasin.model import ModelConfig
from isobasin.symmetries import group_of

FRAMES, DRAWS = 5, 6
SIZES = {"d_model": 32, "n_heads": 2, "d_head": 8, "d_ff": 48, "d_vocab": 64, "n_positions": 16, "n_layers": 1}


class Rotated(Turned):
    """Every part in a frame of its own."""

    def part(self, space: str) -> Mapping[str, Tensor]:
        number = list(self.parts).index(space)
        turn = group_of(stream_of(self.arch)).sample(seed=1000 * self.seed + number)
        action = Action(self.arch, {STREAM: turn})
        return {name: action.tensor(name, t) for name, t in self.model.part(space).items()}


def loud(preset: str, seed: int) -> Form:
    """One coordinate of the stream is read far louder than the others, as in trained models."""
    weights = own(ModelConfig.preset(preset, **SIZES), seed)
    changed = {}
    for name in ("blocks.0.mlp.up.weight", "blocks.0.attn.q.weight"):
        changed[name] = weights[name].clone()
        changed[name][:, 3] *= 12
    return Form(held(weights, changed))


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_a_shuffle_in_a_random_frame_is_as_good_as_a_rotation(preset: str) -> None:
    a, b = loud(preset, 0), loud(preset, 1)
    still = group_of(stream_of(a.arch)).identity()

    def similarities(models: Sequence[Parted]) -> tuple[float, float]:
        found = [Meeting.of(a, model, "ff0", "ff0", still).pair().similarity for model in models]
        return fmean(found), stdev(found)

    n = FRAMES * DRAWS
    mean, spread = similarities([Unrelated(Turned(b, frame), k) for frame in range(FRAMES) for k in range(DRAWS)])
    expected, usual = similarities([Rotated(b, k) for k in range(n)])
    assert abs(mean - expected) < 4 * usual * (2 / n) ** 0.5
    assert 0.5 < spread / usual < 1.5
    _, bare = similarities([Unrelated(b, k) for k in range(n)])
    assert bare > 2 * usual, "without the frame loud coordinates meet, or do not"
