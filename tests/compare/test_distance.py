"""Distance modulo symmetry: copies, fine-tuned and unrelated models, and layers taken from a deeper model."""

import sys
from dataclasses import replace

import pytest
import torch
from compared_models import CASES, FULL, cast, held, noisy, own_model, scrambled, tiny_model

from isobasin.compare.distance import DistanceResult, distance
from isobasin.errors import ArchitectureError, IsobasinError
from isobasin.model import ModelConfig
from isobasin.weights import Weights, load

DRAWS = 2
COMPARED = CASES if FULL else ("gpt2-lm-untied", "bert-masked-lm-tied", "vit-no-qkv-bias", "llama-gqa", "llama-tied")
DEPTH = 12 if FULL else 4
ODD = list(range(1, DEPTH, 2))
SIZES = {"d_model": 24, "n_heads": 3, "d_head": 8, "d_ff": 48, "d_vocab": 64, "n_positions": 16}


def model(n_layers: int, seed: int = 0, preset: str = "llama", **changes: object) -> Weights:
    return own_model(ModelConfig.preset(preset, **{**SIZES, "n_layers": n_layers, **changes}), seed, torch.float64)


def taken(weights: Weights, layers: list[int]) -> Weights:
    """A shallower model made of some layers of a deeper one."""
    config = {**weights.config, "n_layers": len(layers)}
    tensors = {name: weights[name] for name in weights if not name.startswith("blocks.")}
    for new, old in enumerate(layers):
        prefix = f"blocks.{old}."
        tensors |= {
            f"blocks.{new}.{name.removeprefix(prefix)}": weights[name] for name in weights if name.startswith(prefix)
        }
    return load(tensors, config)


def scores(found: DistanceResult) -> dict[tuple[str, int | None], float]:
    return {(str(row["space"]), row["layer"]): float(str(row["score"])) for row in found.per_layer}  # type: ignore[misc]


@pytest.mark.hf
@pytest.mark.parametrize("name", COMPARED)
def test_copies_changed_copies_and_unrelated_models_separate(name: str) -> None:
    weights = tiny_model(name)
    copy = distance(weights, scrambled(weights), null_samples=DRAWS)
    assert copy.score >= 0.999
    assert copy.distance < 1e-4
    assert copy.naive is not None
    assert copy.naive > 0.1
    tuned = distance(weights, scrambled(noisy(weights, 0.1)), null_samples=DRAWS)
    unrelated = distance(weights, tiny_model(name, 1), null_samples=DRAWS)
    assert copy.score > tuned.score > 0.9
    assert tuned.related
    assert unrelated.score < 0.15 < tuned.score
    assert 0.05 < tuned.distance < 0.3 < unrelated.distance


def test_rounding_is_no_difference_and_the_seed_decides() -> None:
    weights = model(2)
    rough = cast(scrambled(weights), torch.bfloat16)
    first, again, other = (distance(weights, rough, null_samples=DRAWS, seed=seed) for seed in (0, 0, 1))
    assert first.score >= 0.999
    assert first.to_dict() == again.to_dict()
    assert first.null.scores != other.null.scores
    assert first.distance == other.distance


@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_layers_taken_from_a_deeper_model_are_found(preset: str) -> None:
    deep = model(DEPTH, preset=preset)
    half = scrambled(taken(deep, ODD))
    found = distance(deep, half, null_samples=1)
    assert found.layers is not None
    assert list(found.layers.best_in_a) == ODD
    assert found.score >= 0.999
    assert found.naive is None
    reverse = distance(half, deep, null_samples=1)
    assert reverse.layers is not None
    assert list(reverse.layers.best_in_b) == ODD
    assert [row["layer"] for row in found.per_layer if row["space"] == "heads"] == ODD
    assert [row["other_layer"] for row in found.per_layer if row["space"] == "heads"] == list(range(len(ODD)))
    unrelated = distance(deep, model(len(ODD), seed=1, preset=preset), null_samples=1)
    assert unrelated.layers is not None
    assert max(max(row) for row in unrelated.layers.matrix) < 0.2
    assert min(found.layers.matrix[i][j] for j, i in enumerate(ODD)) > 0.99


def test_shared_layers_show_also_behind_new_embeddings() -> None:
    weights, other = model(3), model(3, seed=1)
    mixed = held(other, {name: weights[name] for name in weights if name.startswith("blocks.1.")})
    found = scores(distance(weights, mixed, null_samples=DRAWS))
    shared = [score for (_, layer), score in found.items() if layer == 1]
    assert len(shared) == 2
    assert min(shared) > 0.999
    assert max(score for (_, layer), score in found.items() if layer != 1) < 0.2
    kept = held(weights, {"embed.tokens.weight": other["embed.tokens.weight"], "head.weight": other["head.weight"]})
    found = scores(distance(weights, kept, null_samples=DRAWS))
    assert min(score for (_, layer), score in found.items() if layer is not None) > 0.999
    assert found["resid", None] < 0.2


def test_a_stream_that_tables_do_not_span_is_matched_by_its_layers() -> None:
    few = {"d_model": 12, "n_heads": 2, "d_head": 4, "d_ff": 10, "d_vocab": 5, "n_classes": 3}
    weights = model(1, **few)
    assert distance(weights, scrambled(weights), null_samples=1).score >= 0.999
    assert distance(weights, model(1, seed=1, **few), null_samples=1).score < 0.3


def test_layers_contribute_to_the_map_of_unrelated_models_where_they_do_between_the_two(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A map that uses layers finds some overlap in any model: a null distribution without it would be too low."""
    swept: list[object] = []
    module = sys.modules[distance.__module__]
    map_by_all_blocks = module.map_by_all_blocks
    monkeypatch.setattr(module, "map_by_all_blocks", lambda *args: swept.append(args) or map_by_all_blocks(*args))
    distance(model(1), model(1, seed=1), null_samples=3)
    assert len(swept) == 0
    few = {"d_model": 12, "n_heads": 2, "d_head": 4, "d_ff": 10, "d_vocab": 5, "n_classes": 3}
    distance(model(1, **few), model(1, seed=1, **few), null_samples=3)
    assert len(swept) == 4  # between the two, and for each unrelated model


def test_scales_count() -> None:
    weights = model(2)
    name = "blocks.0.mlp.down.weight"
    found = scores(distance(weights, held(weights, {name: 2 * weights[name]}), null_samples=1))
    assert found["ff", 0] < 0.95
    assert min(score for key, score in found.items() if key != ("ff", 0)) > 0.999


def test_what_can_not_be_compared_is_refused() -> None:
    weights = model(2)
    with pytest.raises(ArchitectureError, match="d_ff: A has 48, B has 40"):
        distance(weights, model(2, d_ff=40))
    with pytest.raises(ArchitectureError, match="n_heads: A has 3, B has 2; only models of one architecture, of any"):
        distance(weights, model(3, n_heads=2, d_head=8))
    with pytest.raises(ArchitectureError, match="rotary positions"):
        distance(weights, model(3, rope_theta=50.0))
    with pytest.raises(ArchitectureError, match="tensors of embeddings and head"):
        distance(weights, model(3, d_vocab=65))
    with pytest.raises(ArchitectureError, match="family"):
        distance(weights, replace(model(3), arch=replace(weights.arch, family="llama", sizes=model(3).arch.sizes)))
    with pytest.raises(IsobasinError, match="0 null samples: expected at least 1"):
        distance(weights, weights, null_samples=0)


def test_the_text_gives_score_null_and_distance() -> None:
    weights = model(2)
    text = str(distance(weights, scrambled(weights), null_samples=1))
    assert text.startswith("same: score 1.0000, unrelated models score at most ")
    assert "of ‖A‖ (as stored " in text
