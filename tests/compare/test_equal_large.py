"""Models too large to load: outputs are compared first, and unrelated models are then not aligned."""

from pathlib import Path

import pytest
import torch
from compared_models import output_difference, perturbed, scrambled_file, with_tensors

import isobasin as ib
import tiny
from isobasin.alignment import descent
from isobasin.alignment.descent import embedding_distance
from isobasin.alignment.problem import AlignmentProblem, Elements

pytestmark = pytest.mark.hf
V = "model.layers.0.self_attn.v_proj.weight"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[ib.Weights, ib.Weights]:
    """Two unrelated Llamas of one shape, with a vocabulary far larger than the width of the stream."""
    from transformers import LlamaConfig, LlamaForCausalLM

    found = []
    for seed in (0, 1):
        folder: Path = tmp_path_factory.mktemp(f"llama{seed}")
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 400}
        config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
        model = LlamaForCausalLM(config)
        tiny.write(tiny.randomize(model, seed), folder)  # type: ignore[arg-type]
        found.append(ib.load(*tiny.read(folder)))
    return found[0], found[1]


@pytest.fixture(autouse=True)
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isobasin.runtime.MAX_LOADED_PARAMETERS", 0)


@pytest.fixture
def sweeps(monkeypatch: pytest.MonkeyPatch) -> list[Elements]:
    """The elements at which each visit of all blocks started."""
    seen: list[Elements] = []
    real = descent.match_blocks

    def spy(problem: AlignmentProblem, elements: Elements, *overlaps: object) -> object:
        seen.append(elements)
        return real(problem, elements, *overlaps)  # type: ignore[arg-type]

    monkeypatch.setattr(descent, "match_blocks", spy)
    return seen


def by_chance(a: ib.Weights, b: ib.Weights) -> float:
    """The overlap that the best rotation finds between two tables, with the gain before the head folded into it."""
    tables = [torch.cat([w[EMBEDDING], w[HEAD] * w["model.norm.weight"]]).double() for w in (a, b)]
    return float(2 * torch.linalg.svdvals(tables[0].T @ tables[1]).sum() / sum(t.square().sum() for t in tables))


def test_unrelated_models_are_distinguished_by_their_outputs(
    models: tuple[ib.Weights, ib.Weights], sweeps: list[Elements]
) -> None:
    a, b = models
    found = ib.equivalent(a, b)
    assert found.answer == "different"
    assert found.witness is not None
    assert output_difference(a, b, found.witness.inputs) > 1e-2
    assert embedding_distance(a, b, device=CPU) == pytest.approx(1 - by_chance(a, b), abs=1e-6)
    assert not sweeps
    assert found.largest_residual is not None
    assert "as they are: no layer is near its place" in str(found)
    assert found.to_dict()["evidence"]["obstacle"] in str(found)  # type: ignore[index]


def test_unrelated_models_are_aligned_where_outputs_are_not_certain(
    models: tuple[ib.Weights, ib.Weights], sweeps: list[Elements], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isobasin.compare.equivalence.CERTAIN_THRESHOLD", float("inf"))
    found = ib.equivalent(*models)
    assert found.answer == "different"
    assert sweeps
    assert found.evidence.kind == "group"


@pytest.mark.parametrize("scrambled", [True, False])
def test_related_models_are_aligned_to_locate_the_difference(
    scrambled: bool, models: tuple[ib.Weights, ib.Weights], sweeps: list[Elements]
) -> None:
    a, _ = models
    changed = perturbed(a, V, 0.3)
    found = ib.equivalent(a, scrambled_file(changed) if scrambled else changed)
    assert found.answer == "different"
    assert found.largest_residual is not None
    assert (found.largest_residual.kind, found.largest_residual.layer, found.largest_residual.tensor) == ("heads", 0, V)
    assert sweeps


def test_models_with_new_embeddings_alone_are_not_unrelated(
    models: tuple[ib.Weights, ib.Weights], sweeps: list[Elements]
) -> None:
    """The layers as stored are compared, too."""
    a, other = models
    ends = {name: other[name] for name in (EMBEDDING, HEAD)}
    b = with_tensors(a, ends)
    assert embedding_distance(a, b, device=CPU) > 0.5
    found = ib.equivalent(a, b)
    assert found.answer == "different"
    assert sweeps
    assert found.evidence.kind == "group"


def test_a_scrambled_copy_is_found(models: tuple[ib.Weights, ib.Weights], sweeps: list[Elements]) -> None:
    a, _ = models
    b = scrambled_file(a)
    assert ib.equivalent(a, b).answer == "same"
    assert sweeps
    assert embedding_distance(a, b, device=CPU) < 1e-9
