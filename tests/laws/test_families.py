"""The laws of a model's symmetry, over every tiny transformers model: what keeps the function, and what does not."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subjects import Subject, change, distance, held, moved, said, subject
from torch import Tensor

import tiny
from isobasin import runtime
from isobasin.arch import HeadSpace
from isobasin.symmetries import group_of, symmetry
from isobasin.symmetries.transform import Transform, scramble
from isobasin.weights import Weights, load

pytestmark = pytest.mark.hf

EXACT = 1e-9  # float64, own forward pass
SEEN = 1e-3  # a change of the function, or of a tensor, that nobody can miss
PARTS = ("first-attention", "all-attention", "first-block")

every_case = pytest.mark.parametrize("name", [case.name for case in tiny.CASES])
seeds = st.integers(0, 2**31)


@cache
def scrambled(name: str) -> tuple[Transform, Weights]:
    """One random move of a case, which several tests look at, and where it leads."""
    transform = scramble(subject(name).weights, seed=1)
    return transform, moved(transform, subject(name).weights)


def empty(weights: Weights) -> Transform:
    return Transform(weights.arch.family, dict(weights.arch.spaces))


# -- the function stays ---------------------------------------------------------------------------------------


@every_case
def test_a_scrambled_file_says_the_same_to_transformers_and_comes_back(name: str, tmp_path: Path) -> None:
    s, after, back = subject(name), tmp_path / "after", tmp_path / "back"
    transform, there = scrambled(name)
    there.save(after)
    model = tiny.load(after)
    assert distance(tiny.logits(model, s.inputs), s.output) <= 1e-5 * s.weights.arch.sizes.n_layers
    assert distance(tiny.logits(model, s.case.inputs(1)), s.output) > SEEN

    transform.inverse().apply(load(after)).save(back)
    off = change(load(back), s.weights)
    assert max(off.values()) <= 1e-6, max(off, key=off.__getitem__)
    assert max(change(load(after), s.weights).values()) > 0.1


@given(st.sampled_from(tiny.CASES), st.integers(0, 1), seeds)
@settings(max_examples=30, deadline=None)
def test_the_function_is_unchanged_and_the_inverse_restores(case: tiny.Case, model: int, seed: int) -> None:
    s = subject(case.name, seed=model)
    transform = scramble(s.weights, seed=seed)
    there = moved(transform, s.weights)
    assert s.error(there) <= EXACT
    assert max(change(moved(transform.inverse(), there), s.weights).values()) <= EXACT


@every_case
def test_another_inverse_does_not_restore_and_another_model_says_otherwise(name: str) -> None:
    s = subject(name)
    wrong = scramble(s.weights, seed=2).inverse()
    assert max(change(moved(wrong, scrambled(name)[1]), s.weights).values()) > SEEN
    assert s.error(subject(name, seed=1).weights) > SEEN


# Tensors that no symmetry can move. A head that reads a tanh unit and writes logits keeps its bias: only a norm's
# shift could be folded into it. A bare model shows the output of its last norm, so nothing may touch that norm, and
# behind RMSNorm not even the embedding; its norms on the skip path keep their gains. An untied BERT file
# has a bias that transformers writes and never reads.
_BERT_GAINS = {
    f"bert.{place}.LayerNorm.weight"
    for place in (
        "embeddings",
        *(f"encoder.layer.{i}.{part}" for i in (0, 1) for part in ("attention.output", "output")),
    )
}
UNCHANGED: Mapping[str, set[str]] = {
    "gpt2-bare": {"transformer.ln_f.weight", "transformer.ln_f.bias"},
    "bert-classifier": {"classifier.bias"},
    "bert-one-head": {"classifier.bias"},
    "bert-relu": {"classifier.bias"},
    "bert-pretraining": {"cls.seq_relationship.bias"},
    "bert-masked-lm-untied": {"cls.predictions.bias"},
    "bert-bare": _BERT_GAINS | {"bert.encoder.layer.1.output.LayerNorm.bias"},
    "bert-bare-no-pooler": {n for n in _BERT_GAINS if ".layer.1." not in n}
    | {"bert.encoder.layer.0.output.LayerNorm.bias"},
    "vit-bare": {"vit.layernorm.weight", "vit.layernorm.bias"},
    "vit-bare-no-pooler": {"vit.layernorm.weight", "vit.layernorm.bias"},
    "llama-bare": {"model.embed_tokens.weight", "model.norm.weight"},
    "gpt_neox-bare": {"gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias"},
}


@every_case
def test_every_tensor_changes_that_can(name: str) -> None:
    weights = subject(name).weights
    there = scrambled(name)[1]
    still = {tensor for tensor in weights if torch.equal(there[tensor], weights[tensor])}
    assert still == UNCHANGED.get(name, set())
    assert all(c > SEEN for tensor, c in change(there, weights).items() if tensor not in still)


def test_the_unmovable_tensors_are_listed_for_cases_that_exist() -> None:
    assert set(UNCHANGED) <= {case.name for case in tiny.CASES}


# -- scopes ---------------------------------------------------------------------------------------------------

# What a scope may change, written down once more, from the files' names alone. In a block of BERT the shift of the
# norm before it is read by nothing else; a parallel NeoX without attention biases has one output bias for both.
ATTENTION = {
    "gpt2": r"transformer\.h\.{}\.attn\..*",
    "bert": r"bert\.encoder\.layer\.{}\.attention\.(self\..*|output\.dense\..*)",
    "vit": r"vit\.encoder\.layer\.{}\.attention\..*",
    "llama": r"model\.layers\.{}\.self_attn\..*",
    "mistral": r"model\.layers\.{}\.self_attn\..*",
    "qwen2": r"model\.layers\.{}\.self_attn\..*",
    "phi3": r"model\.layers\.{}\.self_attn\..*",
    "gpt_neox": r"gpt_neox\.layers\.{}\.attention\..*",
}
BLOCK = {
    "gpt2": r"transformer\.h\.0\..*",
    "bert": r"bert\.encoder\.layer\.0\..*|bert\.embeddings\.LayerNorm\.bias",
    "vit": r"vit\.encoder\.layer\.0\..*",
    "llama": r"model\.layers\.0\..*",
    "mistral": r"model\.layers\.0\..*",
    "qwen2": r"model\.layers\.0\..*",
    "phi3": r"model\.layers\.0\..*",
    "gpt_neox": r"gpt_neox\.layers\.0\..*",
}


def may_change(scope: str, name: str, family: str) -> re.Pattern[str]:
    layer = "0" if scope == "first-attention" else r"\d+"
    shared = rf"|gpt_neox\.layers\.{layer}\.mlp\.dense_4h_to_h\.bias" if "no-attention-bias" in name else ""
    return re.compile(BLOCK[family] if scope == "first-block" else ATTENTION[family].format(layer) + shared)


@every_case
@pytest.mark.parametrize("scope", PARTS)
def test_a_scope_changes_its_own_tensors_only(name: str, scope: str) -> None:
    s = subject(name)
    there = moved(scramble(s.weights, scope=scope, seed=2), s.weights)
    allowed = may_change(scope, name, s.weights.arch.family)
    changed = {tensor for tensor, c in change(there, s.weights).items() if c > 0}
    assert {tensor for tensor in changed if not allowed.fullmatch(tensor)} == set()
    matrices = {t for t in s.weights if allowed.fullmatch(t) and s.weights[t].dim() == 2}
    assert matrices <= changed
    assert s.error(there) <= EXACT


@pytest.mark.parametrize("name", ["gpt2-lm-untied", "bert-classifier", "llama-gqa", "gpt_neox-sequential"])
def test_a_wider_scope_is_caught_by_the_narrower_list(name: str) -> None:
    weights = subject(name).weights
    for wide, narrow in (("all-attention", "first-attention"), ("first-block", "first-attention")):
        there = moved(scramble(weights, scope=wide, seed=2), weights)
        allowed = may_change(narrow, name, weights.arch.family)
        assert any(c > SEEN and not allowed.fullmatch(t) for t, c in change(there, weights).items())


# -- identity, composition, permutations ----------------------------------------------------------------------


@every_case
def test_the_identity_is_bitwise(name: str) -> None:
    weights = subject(name).weights
    still = {space: group.identity() for space, group in symmetry(weights.arch).groups.items()}
    for transform in (empty(weights), replace(empty(weights), elements=still)):
        same = transform.apply(weights)
        assert same.exact
        assert not same.changed
        for tensor in weights:
            assert same[tensor].dtype == weights[tensor].dtype
            assert torch.equal(same[tensor], weights[tensor])
    space, group = next((k, g) for k, g in symmetry(weights.arch).groups.items() if k.startswith("heads"))
    moving = replace(empty(weights), elements=still | {space: group.sample(seed=0)}).apply(weights)
    assert any(not torch.equal(moving[tensor], weights[tensor]) for tensor in moving.changed)


@every_case
def test_the_composition_is_one_after_the_other(name: str) -> None:
    weights = subject(name).weights
    first, there = scrambled(name)
    second = scramble(there, seed=4)
    both = moved(second.compose(first, weights.arch), weights)
    assert max(change(both, moved(second, there)).values()) <= EXACT
    turned = moved(first.compose(second, weights.arch), weights)
    assert max(change(turned, both).values()) > SEEN


# A part that comes second may set a coordinate before one that only the first has set: then the composition keeps
# the function but not every free number, so the second is a block or the whole.
@given(st.sampled_from(tiny.CASES), st.sampled_from([*PARTS, "model"]), st.booleans(), seeds)
@settings(max_examples=25, deadline=None)
def test_a_composition_applies_to_a_model_it_was_not_made_from(
    case: tiny.Case, scope: str, block: bool, seed: int
) -> None:
    source, other = (subject(case.name, seed=k) for k in (0, 1))
    first = scramble(source.weights, scope=scope, seed=seed)
    second = scramble(source.weights, scope="first-block" if block else "model", seed=seed + 1)
    one_by_one = moved(second, moved(first, other.weights))
    at_once = moved(second.compose(first, source.weights.arch), other.weights)
    assert max(change(at_once, one_by_one).values()) <= EXACT
    assert other.error(at_once) <= EXACT


def permutation_only(weights: Weights, seed: int) -> Transform:
    """Permutations and signs of every space that has them; rotated streams and factors stay."""
    elements = {}
    for name, space in weights.arch.spaces.items():
        group = group_of(space)
        drawn = group.sample(seed=seed)
        if isinstance(space, HeadSpace):
            still = group.identity()
            drawn = replace(drawn, qk=still.qk, vo=still.vo)  # type: ignore[attr-defined]
        elif space.kind in ("scaled", "positive"):
            drawn = replace(drawn, scale=drawn.scale.sign())  # type: ignore[attr-defined]
        if drawn.exact:
            elements[name] = drawn
    return replace(empty(weights), elements=elements)


@every_case
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_permutations_are_bitwise_exact(name: str, dtype: torch.dtype) -> None:
    s = as_type(subject(name), dtype)
    transform = permutation_only(s.weights, seed=7)
    there = transform.apply(s.weights)
    assert transform.exact
    assert set(there.output_dtypes().values()) == {dtype}
    stored = held(there, {n: there[n].to(dtype) for n in there})
    assert s.error(stored) <= EXACT
    for tensor in s.weights:
        assert torch.equal(magnitudes(stored[tensor]), magnitudes(s.weights[tensor]))
    back = transform.inverse().apply(stored)
    assert all(torch.equal(back[t].to(dtype), s.weights[t]) for t in s.weights)
    assert any(not torch.equal(stored[t], s.weights[t]) for t in s.weights)


@pytest.mark.parametrize("name", ["gpt2-lm-tied", "bert-relu", "vit-classifier", "llama-gqa", "gpt_neox-bare"])
def test_continuous_elements_are_not_exact_and_are_widened(name: str) -> None:
    s = as_type(subject(name), torch.bfloat16)
    transform = scramble(s.weights, seed=7)
    there = transform.apply(s.weights)
    assert not transform.exact
    assert set(there.output_dtypes().values()) == {torch.float32}
    assert s.error(held(there, {n: there[n].to(torch.bfloat16) for n in there})) > SEEN


def magnitudes(tensor: Tensor) -> Tensor:
    return tensor.abs().flatten().sort().values


def as_type(s: Subject, dtype: torch.dtype) -> Subject:
    """The subject as a file of this type would hold it."""
    stored = {disk: s.weights[name].to(dtype) for name, disk in s.weights.names.on_disk.items()}
    weights = load(stored, s.weights.config)
    return replace(s, weights=weights, output=said(weights, s.inputs))


@pytest.mark.parametrize("name", ["llama-gqa", "mistral-gqa", "qwen2-gqa"])
@pytest.mark.parametrize("inside", [False, True], ids=["top level", "rope_parameters"])
def test_a_rotary_fraction_that_transformers_ignores_changes_nothing(name: str, inside: bool, tmp_path: Path) -> None:
    tiny.save(tiny.case(name), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    table = config.setdefault("rope_parameters", {}) if inside else config
    table["partial_rotary_factor"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path)
    assert all(heads.rotary == heads.d_head for heads in model.arch.heads())
    inputs = runtime.random_inputs(model)
    there = scramble(model, seed=1).apply(model)
    before, after = runtime.outputs(model, inputs), runtime.outputs(there, inputs)
    assert runtime.output_difference(before, after) <= 1e-5 * model.arch.sizes.n_layers
