"""Models that differ only in heads or rows of the vocabulary: compared, aligned and merged on what they share.

`same` must be the answer for scrambled copies of one trunk, whatever the heads; `different` for a trunk with one
changed matrix and for an unrelated one. Whatever is moved or merged runs in transformers' own classes.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compared_models import stored
from torch import Tensor
from typer.testing import CliRunner

import tiny
from isobasin.alignment.align import align
from isobasin.alignment.trunk import is_fixed, trunk_pair
from isobasin.cli.app import app
from isobasin.compare.distance import distance
from isobasin.compare.equivalence import equivalent
from isobasin.errors import ArchitectureError
from isobasin.merging import merge
from isobasin.runtime import output_difference, outputs, random_inputs
from isobasin.symmetries.transform import scramble
from isobasin.weights import Weights, load

_TEXT = {"vocab_size": 30, "pad_token_id": 0}
_SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_BERT = _SIZES | {"max_position_embeddings": 20, "vocab_size": 30, "pad_token_id": 1}
_STACK = {"layers": 1, "attention_heads": 2, "ffn_dim": 24}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 20, **_TEXT},
    "Llama": _SIZES | _TEXT | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
    "Bert": _BERT,
    "Roberta": _BERT,
    "T5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, **_TEXT},
    "Bart": {f"{stack}_{key}": n for stack in ("encoder", "decoder") for key, n in _STACK.items()}
    | {"d_model": 16, "max_position_embeddings": 20, **_TEXT},
    "ViT": _SIZES | {"image_size": 6, "patch_size": 2},
    "Whisper": {f"{stack}_{key}": n for stack in ("encoder", "decoder") for key, n in _STACK.items()}
    | {"d_model": 16, "num_mel_bins": 4, "max_source_positions": 5, "max_target_positions": 20, "vocab_size": 30}
    | {"classifier_proj_size": 7, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
}
TIED = {"tie_word_embeddings": True}
MORE = {"vocab_size": 34}
NO_POOLER = {"add_pooling_layer": False}
Model = tuple[str, Mapping[str, Any]]

# A and B, by the ends of their class names, and what is special about each.
HEADS: dict[str, tuple[str, Model, Model]] = {
    "gpt2": ("GPT2", ("LMHeadModel", {}), ("ForSequenceClassification", {})),
    "llama": ("Llama", ("ForCausalLM", {}), ("ForSequenceClassification", {})),
    "llama-score": ("Llama", ("ForTokenClassification", {}), ("ForSequenceClassification", {})),
    "llama-tied": ("Llama", ("ForCausalLM", TIED), ("ForSequenceClassification", {})),
    "bert": ("Bert", ("ForMaskedLM", {}), ("ForSequenceClassification", {})),
    "bert-bare": ("Bert", ("Model", {}), ("ForMaskedLM", {})),
    "bert-pooler": ("Bert", ("Model", {}), ("Model", NO_POOLER)),
    "roberta": ("Roberta", ("ForMaskedLM", {}), ("ForTokenClassification", {})),
    "vit-labels": ("ViT", ("ForImageClassification", {}), ("ForImageClassification", {"num_labels": 5})),
}
ROWS: dict[str, tuple[str, Model, Model]] = {
    "llama-rows": ("Llama", ("ForCausalLM", {}), ("ForCausalLM", MORE)),
    "llama-tied-rows": ("Llama", ("ForCausalLM", TIED), ("ForCausalLM", TIED | MORE)),
    "gpt2-rows": ("GPT2", ("LMHeadModel", {}), ("LMHeadModel", MORE)),
}
PAIRS = HEADS | ROWS
TWO_STACKS: dict[str, tuple[str, Model, Model]] = {
    "t5": ("T5", ("Model", {}), ("ForConditionalGeneration", {})),
    "bart": ("Bart", ("ForConditionalGeneration", {}), ("Model", {})),
    "whisper": ("Whisper", ("Model", {}), ("ForConditionalGeneration", {})),
}
# One of the two has an encoder alone, or both have.
_AUDIO = "ForAudioClassification"
ENCODERS: dict[str, tuple[str, Model, Model]] = {
    "t5-encoder": ("T5", ("Model", {}), ("EncoderModel", {})),
    "t5-encoder-head": ("T5", ("EncoderModel", {}), ("ForConditionalGeneration", {})),
    "t5-encoder-rows": ("T5", ("ForConditionalGeneration", {}), ("EncoderModel", MORE)),
    "whisper-audio": ("Whisper", (_AUDIO, {}), ("ForConditionalGeneration", {})),
    "whisper-audio-labels": ("Whisper", (_AUDIO, {}), (_AUDIO, {"num_labels": 5})),
}


def build(stem: str, model: Model, seed: int) -> Any:
    import transformers

    head, special = model
    options = {key: value for key, value in special.items() if key == "add_pooling_layer"}
    settings = {key: value for key, value in special.items() if key not in options}
    config = getattr(transformers, f"{stem}Config")(**CONFIGS[stem] | settings)
    return tiny.randomize(getattr(transformers, f"{stem}{head}")(config, **options), seed).eval()


def give_trunk(source: Any, target: Any) -> None:
    """Copy what both models have by the same name, row by row; a head of another task stays as it is."""
    theirs, mine = source.state_dict(), target.state_dict()
    prefix = source.base_model_prefix

    def plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name.removeprefix(f"{prefix}."): t for name, t in tensors.items()}

    theirs, mine = plain(theirs), plain(mine)
    for name in theirs.keys() & mine.keys():
        n = min(len(theirs[name]), len(mine[name]))
        if theirs[name].shape[1:] == mine[name].shape[1:] and not name.startswith(("classifier", "score", "pooler")):
            mine[name][:n].copy_(theirs[name][:n])


@cache
def pair(name: str, swapped: bool = False, related: bool = True) -> tuple[Weights, Weights]:
    """A, and B with the trunk of A and a head of its own, scrambled and stored in float32."""
    stem, *sides = (PAIRS | TWO_STACKS | ENCODERS)[name]
    first, second = build(stem, sides[0], 0), build(stem, sides[1], 1)
    if related:
        give_trunk(first, second)
    a, b = (load(model) for model in ((second, first) if swapped else (first, second)))
    return a, stored(scramble(b, scope="model", seed=3).apply(b), torch.float32)


def with_changed_layer(model: Weights) -> Weights:
    ends = (
        "mlp.down_proj.weight",
        "mlp.c_proj.weight",
        "output.dense.weight",
        "DenseReluDense.wo.weight",
        "fc2.weight",
    )
    name = next(n for n in model if n.endswith(ends))
    tensor = model[name].clone()
    tensor[0] *= 1.05
    return replace(model, tensors={**model.tensors, name: tensor})


@pytest.mark.parametrize(("name", "swapped"), [*((n, False) for n in PAIRS), *((n, True) for n in HEADS)])
def test_a_scrambled_copy_with_another_head_has_the_same_trunk(name: str, swapped: bool) -> None:
    a, b = pair(name, swapped)
    found = equivalent(a, b)
    facts = found.to_dict()
    assert found.answer == "same", found.reason
    assert facts["trunk"] is True
    left_out = facts["left_out"]
    assert isinstance(left_out, dict)
    assert left_out["a"] or left_out["b"]
    part = "about the trunk" if name in HEADS else "about the shared rows of the vocabulary"
    assert found.reason.startswith(part)
    assert "left out: " in found.reason


@pytest.mark.parametrize("zeros", [1, 8, 16])
def test_gains_of_zero_before_the_head_are_no_part_of_it(zeros: int) -> None:
    """A head can undo any gain of the last norm but zero. The control: other gains, which it can undo."""
    first, second = build("Llama", ("ForCausalLM", {}), 0), build("Llama", ("ForSequenceClassification", {}), 1)
    give_trunk(first, second)
    gain = "model.norm.weight"
    a, b = load(first), load(second)
    for factor, same in ((0.0, False), (3.0, True)):
        gains = b[gain].clone()
        gains[:zeros] *= factor
        found = equivalent(a, replace(b, tensors={**{n: b[n] for n in b}, gain: gains}))
        assert (found.answer == "same") is same, found.reason
        assert (f"{gain} is zero in other places" in found.reason) is not same


@pytest.mark.parametrize("name", TWO_STACKS)
def test_encoder_decoders_share_their_trunk(name: str) -> None:
    """Behind the last norm of an encoder its gain moves into cross attention, and that of the bare class is shown."""
    a, b = pair(name)
    found = equivalent(a, b)
    assert found.answer == "same", found.reason
    assert found.reason.startswith("about the trunk")
    heads = [*found.left_out.a, *found.left_out.b]
    assert [n for n in heads if "embed_tokens" in n and "tied to" not in n] == []
    assert any(n.startswith(("lm_head", "proj_out")) for n in heads)
    if name != "bart":
        assert equivalent(a, with_changed_layer(b)).answer == "different"


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_alone_is_the_trunk_of_both_stacks(name: str) -> None:
    a, b = pair(name)
    found = equivalent(a, b)
    assert found.answer == "same", found.reason
    assert found.reason.startswith("about the trunk")
    assert equivalent(a, with_changed_layer(b)).answer == "different"
    decoder = next((n for n in b if "decoder" in n and n.endswith(("o.weight", "fc2.weight"))), None)
    if decoder is not None:  # counts for nothing
        assert decoder in found.left_out.b
        changed = replace(b, tensors={**b.tensors, decoder: 2 * b[decoder]})
        assert equivalent(a, changed).answer == "same"


@pytest.mark.parametrize("name", ["whisper", "t5-encoder-head", "whisper-audio"])
def test_streams_and_encoders_are_aligned_merged_and_measured(name: str) -> None:
    a, b = pair(name)
    found = align(b, to=a)
    inputs = random_inputs(b)
    assert output_difference(outputs(b, inputs), outputs(found.transform.apply(b), inputs)) < 1e-5
    assert found.distance_after < 1e-6 < 0.5 < found.distance_before
    assert distance(a, b, null_samples=2).score > 0.999
    assert distance(*pair(name, related=False), null_samples=2).score < 0.5
    merged, inputs = merge([a, b]).weights, random_inputs(a)
    assert output_difference(outputs(a, inputs), outputs(merged, inputs)) < 1e-5
    assert output_difference(outputs(a, inputs), outputs(merge([a, b], align=False).weights, inputs)) > 0.02


def test_a_pooler_is_no_part_of_the_trunk() -> None:
    """Two classifiers of one encoder, with other labels and a pooler of their own."""
    first, second = (build("Bert", ("ForSequenceClassification", {"num_labels": 2 + 3 * k}), k) for k in range(2))
    give_trunk(first, second)
    found = equivalent(load(first), load(second))
    assert found.answer == "same", found.reason
    assert "bert.pooler.dense.weight" in found.left_out.a
    assert "bert.pooler.dense.weight" not in align(load(second), to=load(first)).left_out.a


@pytest.mark.parametrize("name", PAIRS)
def test_a_changed_trunk_is_different(name: str) -> None:
    a, b = pair(name)
    found = equivalent(a, with_changed_layer(b))
    assert found.answer == "different", found.reason
    assert found.to_dict()["trunk"] is True


@pytest.mark.parametrize("name", ["gpt2", "bert-bare", "vit-labels", "llama-rows"])
def test_an_unrelated_trunk_is_different(name: str) -> None:
    assert equivalent(*pair(name, related=False)).answer == "different"


@pytest.mark.parametrize("name", PAIRS)
def test_the_function_of_b_stays_and_its_trunk_becomes_that_of_a(name: str) -> None:
    a, b = pair(name)
    found = align(b, to=a)
    moved = found.transform.apply(b)
    inputs = random_inputs(b)
    assert output_difference(outputs(b, inputs), outputs(moved, inputs)) < 1e-5
    assert found.to_dict()["trunk"] is True
    assert found.distance_before > 0.5 or is_fixed(b)
    # Of a tied masked language model one direction of the words is not moved: it depends on the head.
    most = 0.1 if name == "bert-bare" else 1e-6
    assert found.distance_after < most < found.distance_before


@pytest.mark.parametrize("name", ["gpt2", "llama-tied", "bert", "llama-rows", "gpt2-rows"])
def test_distance_sees_one_orbit(name: str) -> None:
    found = distance(*pair(name), null_samples=2)
    assert found.score > 0.999
    assert found.to_dict()["trunk"] is True
    assert distance(*pair(name, related=False), null_samples=2).score < 0.5


@pytest.mark.parametrize(
    ("name", "swapped"),
    [
        ("gpt2", False),
        ("llama", True),
        ("bert", False),
        ("vit-labels", False),
        ("llama-rows", True),
        ("llama-rows", False),
    ],
)
def test_merge_averages_what_is_shared_and_keeps_the_rest_of_the_first(
    name: str, swapped: bool, tmp_path: Path
) -> None:
    a, b = pair(name, swapped, related=False)
    b = with_changed_layer(b)
    found = merge([a, b], weights=[2, 1], align=False)
    found.save(tmp_path / "merged")
    written, trunk = load(tmp_path / "merged"), trunk_pair(a, b)
    assert trunk is not None
    assert written.arch.shapes == a.arch.shapes
    for tensor in (n for n in a if not a.arch.tensors[n].buffer):
        if tensor not in trunk.shared:
            assert torch.equal(written[tensor], a[tensor]), tensor
            continue
        n = trunk.rows.get(tensor, len(a[tensor]))
        expected = (2 * a[tensor][:n] + b[tensor][:n]) / 3
        assert torch.allclose(written[tensor][:n], expected, atol=1e-6), tensor
        assert torch.equal(written[tensor][n:], a[tensor][n:]), tensor
    card = (tmp_path / "merged" / "README.md").read_text()
    assert ("Taken from model 0 alone" in card) == bool(trunk.left_out.a)
    assert ("Left out of model 1" in card) == bool(trunk.left_out.b)
    assert outputs(written, random_inputs(written)).isfinite().all()


def test_an_aligned_merge_of_one_trunk_is_that_trunk() -> None:
    from isobasin.alignment.matchers import WeightMatching

    a, b = pair("llama")
    merged = merge([a, b], matcher=WeightMatching())
    inputs = random_inputs(a)
    assert output_difference(outputs(a, inputs), outputs(merged.weights, inputs)) < 1e-5
    naive = merge([a, b], align=False)
    assert output_difference(outputs(a, inputs), outputs(naive.weights, inputs)) > 0.05


def test_a_mean_needs_models_of_one_architecture() -> None:
    from isobasin.alignment.matchers import WeightMatching

    with pytest.raises(ArchitectureError, match="only models of the same architecture"):
        merge(pair("llama"), matcher=WeightMatching(), to="mean")


@pytest.mark.parametrize("setting", [{"num_hidden_layers": 1}, {"rms_norm_eps": 1e-3}, {"rope_theta": 5e3}])
def test_more_than_a_head_is_refused_as_before(setting: dict[str, Any]) -> None:
    a = load(build("Llama", ("ForCausalLM", {}), 0))
    b = load(build("Llama", ("ForSequenceClassification", setting), 1))
    with pytest.raises(ArchitectureError, match="only models of the same architecture can be aligned"):
        align(b, to=a)
    with pytest.raises(ArchitectureError, match="class: A has LlamaForCausalLM, B has LlamaForSequenceClassification"):
        equivalent(a, b)


@pytest.mark.parametrize(("row", "answer"), [(33, "same"), (29, "different")])
def test_only_tokens_of_both_vocabularies_count(row: int, answer: str) -> None:
    """Of 30 and 34 tokens, a changed embedding of a token that A has not is no difference; one that A has is."""
    a, b = pair("llama-rows")
    name = "model.embed_tokens.weight"
    table = b[name].clone()
    table[row] += 1.0
    found = equivalent(a, replace(b, tensors={**b.tensors, name: table}))
    assert found.answer == answer, found.reason
    assert f"{name}[30:34]" in found.left_out.b
    assert not found.left_out.a


def test_the_exit_code_is_that_of_the_trunk(tmp_path: Path) -> None:
    a, b = pair("gpt2")
    a.save(tmp_path / "a")
    with_changed_layer(b).save(tmp_path / "b")
    result = CliRunner().invoke(app, ["equal", str(tmp_path / "a"), str(tmp_path / "b")])
    assert result.exit_code == 1, result.output
    assert "different: about the trunk" in result.stdout


def test_the_command_line_names_what_is_left_out(tmp_path: Path) -> None:
    for name, model in zip("ab", pair("gpt2")):
        model.save(tmp_path / name)
    a, b = (str(tmp_path / name) for name in "ab")
    runner = CliRunner()

    def facts(*arguments: str, code: int = 0) -> dict[str, Any]:
        result = runner.invoke(app, [*arguments, "--json"])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    head = {"a": ["lm_head.weight (tied to transformer.wte.weight)"], "b": ["score.weight"]}
    assert facts("equal", a, b)["left_out"] == head
    assert facts("distance", a, b, "--null-samples", "2")["left_out"] == head
    assert facts("align", b, "--to", a, "-o", str(tmp_path / "moved"))["left_out"] == head
    assert facts("merge", a, b, "-o", str(tmp_path / "merged"))["left_out"] == [head["a"], head["b"]]
    shown = runner.invoke(app, ["equal", a, b])
    assert "same: about the trunk" in shown.stdout
    assert "score.weight of B" in shown.stdout
    refused = runner.invoke(app, ["path", a, b, "-o", str(tmp_path / "path")])
    assert refused.exit_code == 2
