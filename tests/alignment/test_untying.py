"""A tied head as a tensor of its own: the same logits, a larger group, and what transformers makes of the folder."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from isobasin.alignment.align import align
from isobasin.alignment.matchers import WeightMatching
from isobasin.cli import run
from isobasin.errors import IsobasinError
from isobasin.model import ModelConfig, Transformer
from isobasin.runtime import output_difference, outputs, random_inputs
from isobasin.symmetries.transform import scramble
from isobasin.weights import Weights, load, untied

pytestmark = pytest.mark.hf

TIED = [c for c in tiny.CASES if c.name.endswith("-tied")]
FULL = os.environ.get("ISOBASIN_SLOW") == "1"
ALIGNED = [c for c in TIED if FULL or c.family in ("gpt2", "llama")]
MATCHER = WeightMatching(scope="model")


def kind(weights: Weights) -> str:
    (stream,) = weights.arch.streams.values()
    return stream.kind


def logits(case: tiny.Case, folder: Path) -> Tensor:
    model = type(case.build()).from_pretrained(folder, attn_implementation="eager")
    return tiny.logits(model.eval(), case.inputs(0))


def test_there_are_tied_cases_of_every_family_that_has_some() -> None:
    assert {case.family for case in TIED} >= {"gpt2", "bert", "llama", "gpt_neox"}


@pytest.mark.parametrize("case", TIED, ids=lambda c: c.name)
def test_an_untied_folder_gives_the_same_logits_and_reads_its_own_head(case: tiny.Case, tmp_path: Path) -> None:
    tiny.save(case, tmp_path / "tied")
    model = load(tmp_path / "tied")
    apart = untied(model)
    apart.save(tmp_path / "untied")
    config = json.loads((tmp_path / "untied" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    before, after = (logits(case, tmp_path / name) for name in ("tied", "untied"))
    assert torch.equal(before, after)
    assert untied(load(tmp_path / "untied")).arch.tensors == load(tmp_path / "untied").arch.tensors
    assert kind(apart) != kind(model)
    # The control: the head that was written is the one that is read, not the embedding beside it.
    file = tmp_path / "untied" / "model.safetensors"
    tensors = load_file(file)
    (head,) = set(apart.arch.tensors) & set(model.arch.aliases) & {n for n in tensors if n.endswith("weight")}
    save_file(tensors | {head: 2 * tensors[head]}, file, metadata={"format": "pt"})
    assert output_difference(before, logits(case, tmp_path / "untied")) > 0.1


@pytest.mark.parametrize("case", ALIGNED, ids=lambda c: c.name)
def test_untied_models_come_closer_and_keep_their_logits(
    case: tiny.Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (0, 1):
        tiny.save(case, tmp_path / f"m{seed}", seed=seed)
    words = ["align", str(tmp_path / "m1"), "--to", str(tmp_path / "m0"), "--json", "-o"]
    capsys.readouterr()
    assert run([*words, str(tmp_path / "out"), "--untie"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["distance_after"] < facts["distance_before"]
    assert facts["max_output_change"] <= 1e-5
    expected, found = logits(case, tmp_path / "m1"), logits(case, tmp_path / "out")
    assert output_difference(expected, found) <= 2e-5
    assert output_difference(expected, logits(case, tmp_path / "m0")) > 1e-2
    written = load(tmp_path / "out")
    assert kind(written) == kind(untied(load(tmp_path / "m1")))
    assert kind(written) != kind(load(tmp_path / "m1"))


def test_a_rotation_that_only_an_untied_model_allows_is_found(tmp_path: Path) -> None:
    """B is A untied and rotated: no permutation brings it back, the larger group does."""
    tiny.save(tiny.case("llama-tied"), tmp_path / "a")
    a = load(tmp_path / "a")
    apart = untied(a)
    b = scramble(apart, scope="model", seed=5).apply(apart)
    found = align(b, to=apart, matcher=MATCHER)
    assert found.distance_after <= 1e-6 < 0.5 < found.distance_before
    with pytest.raises(IsobasinError, match="only models of the same architecture can be aligned"):
        align(b, to=a, matcher=MATCHER)


def test_a_folder_without_prefixes_gets_full_names(tmp_path: Path) -> None:
    """Hub folders of GPT-2 say `wte.weight`: beside them transformers would not look for a head."""
    case = tiny.case("gpt2-lm-tied")
    tiny.save(case, tmp_path / "m")
    before = logits(case, tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    tensors = load_file(file)
    short = {n.removeprefix("transformer."): t for n, t in tensors.items() if n != "lm_head.weight"}
    save_file(short, file, metadata={"format": "pt"})
    untied(load(tmp_path / "m")).save(tmp_path / "out")
    assert "transformer.wte.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(before, logits(case, tmp_path / "out"))


def test_our_own_model_can_be_untied() -> None:
    config = ModelConfig(
        d_model=16,
        n_layers=1,
        n_heads=2,
        d_ff=24,
        d_vocab=11,
        norm="rms",
        positions="rope",
        causal=True,
        tied=True,
        n_positions=8,
    )
    tied = load(Transformer(config, seed=0).state_dict(), config.to_dict())
    apart = untied(tied)
    assert (apart.config["tied"], kind(tied), kind(apart)) == (False, "signed", "orthogonal")
    inputs = random_inputs(tied)
    assert output_difference(outputs(tied, inputs), outputs(apart, inputs)) <= 1e-6
    assert untied(apart) is apart
