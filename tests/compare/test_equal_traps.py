"""Where the answer is easy to get wrong: rotary traps, slopes, ranks, shared patterns, sizes, ties, types."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from compared_models import (
    held,
    output_difference,
    perturbed,
    scrambled_file,
    small_model,
    stored,
    tiny_model,
    with_tensors,
)
from torch import Tensor

import isobasin as ib
import model_types as mt
from isobasin.arch import HeadSpace
from isobasin.compare.degenerate import remove_degeneracies
from isobasin.compare.equivalence import refine_transform
from isobasin.compare.outputs import OutputComparison
from isobasin.errors import ArchitectureError, IsobasinError
from isobasin.groups import Matrix
from isobasin.runtime import Runner
from isobasin.weights import untied

pytestmark = pytest.mark.hf

Q, K, V, O = (f"blocks.0.attn.{x}.weight" for x in "qkvo")  # noqa: E741
UP, DOWN = (f"blocks.0.mlp.{x}.weight" for x in ("up", "down"))
BARE = {"bias": False}
D, N, F = 12, 4, 10  # width, columns of a head, units of a small model
FULL = os.environ.get("ISOBASIN_SLOW", "0") == "1"
TIED = ["bert-masked-lm-tied", *(["llama-tied", "gpt2-lm-tied", "gpt_neox-tied"] if FULL else [])]
TOKENS = {"input_ids": torch.arange(9)[None]}


def heads_of(weights: ib.Weights) -> HeadSpace:
    return next(iter(weights.arch.heads()))


def with_changed_basis(weights: ib.Weights, factor: Tensor) -> ib.Weights:
    """Q Uᵀ and K U⁻¹ in every head: QKᵀ stays as it is."""
    n = heads_of(weights).d_head
    q, k = (weights[x].double().unflatten(0, (-1, n)) for x in (Q, K))
    back = torch.linalg.inv(factor)
    return with_tensors(weights, {Q: (factor @ q).flatten(0, 1), K: (back.mT @ k).flatten(0, 1)})


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(("positions", "expected"), [("rope", "different"), ("none", "same")])
def test_the_rotary_trap(positions: str, expected: str) -> None:
    """The same change of coordinates inside a head: outside H it is seen by rotary positions, elsewhere by nobody."""
    a = small_model(positions=positions, **BARE)
    b = with_changed_basis(a, torch.eye(N, dtype=torch.float64) + 0.3 * drawn(N, N))
    products = [w[Q].double().unflatten(0, (-1, N)).mT @ w[K].double().unflatten(0, (-1, N)) for w in (a, b)]
    assert torch.allclose(*products, atol=1e-5)
    found = ib.equivalent(a, b)
    assert found.answer == expected, str(found)
    if expected == "different":
        assert found.largest_residual is not None
        assert (found.largest_residual.kind, found.largest_residual.layer) == ("heads", 0)
        assert found.witness is not None
        assert output_difference(a, b, found.witness.inputs) > 1e-2


@pytest.mark.parametrize(("positions", "expected"), [("alibi", "different"), ("none", "same")])
def test_heads_with_slopes_do_not_change_places(positions: str, expected: str) -> None:
    a = small_model(positions=positions, **BARE)
    rows = {x: a[x].roll(N, dims=0) for x in (Q, K, V)}
    found = ib.equivalent(a, with_tensors(a, rows | {O: a[O].roll(N, dims=1)}))
    assert found.answer == expected, str(found)


def test_a_head_that_says_nothing_may_have_any_queries() -> None:
    a = small_model(positions="rope", **BARE)
    silent = with_tensors(a, {O: torch.cat([a[O][:, :N], torch.zeros(D, N)], 1)})
    other = with_tensors(silent, {Q: torch.cat([a[Q][:N], drawn(N, D).float()])})
    found = ib.equivalent(silent, scrambled_file(other))
    assert found.answer == "same", str(found)
    assert found.evidence.kind == "larger group"
    assert any("says nothing" in step for step in found.evidence.steps)
    assert output_difference(a, with_tensors(a, {Q: other[Q]}), TOKENS) > 1e-3


def test_what_a_deficient_head_does_not_meet_is_not_seen() -> None:
    """V without its last column: the last column of O is free."""
    a = small_model(n_heads=1, **BARE)
    thin = with_tensors(a, {V: torch.cat([a[V][: N - 1], torch.zeros(1, D)])})
    free = with_tensors(thin, {O: torch.cat([a[O][:, : N - 1], drawn(D, 1).float()], 1)})
    found = ib.equivalent(thin, scrambled_file(free))
    assert found.answer == "same", str(found)
    assert any("V–O of kv head 0" in step for step in found.evidence.steps)
    assert output_difference(a, with_tensors(a, {O: free[O]}), TOKENS) > 1e-3


def test_heads_with_one_pattern_may_mix_their_values() -> None:
    """GL(2 d_h) on V and O of two heads with equal QKᵀ: no element of the group, and yet the same function."""
    a = small_model(**BARE)
    twin = with_tensors(a, {x: a[x][:N].repeat(2, 1) for x in (Q, K)})
    mix = torch.eye(2 * N, dtype=torch.float64) + 0.2 * drawn(2 * N, 2 * N)
    values = {V: mix @ twin[V].double(), O: twin[O].double() @ torch.linalg.inv(mix)}
    found = ib.equivalent(twin, scrambled_file(with_tensors(twin, values)))
    assert found.answer == "same", str(found)
    assert found.evidence.kind == "larger group"
    assert any("heads 0 and 1 have one pattern" in step for step in found.evidence.steps)
    assert output_difference(a, with_tensors(a, {V: values[V], O: values[O]}), TOKENS) > 1e-3


def test_dead_units_are_not_seen() -> None:
    a = small_model(feed_forward="swiglu", norm="rms", **BARE)
    dead = with_tensors(a, {DOWN: a[DOWN] * (torch.arange(F) != 3)})
    other = with_tensors(dead, {UP: torch.where(torch.arange(F)[:, None] == 3, drawn(F, D).float(), a[UP])})
    found = ib.equivalent(dead, other)
    assert found.answer == "same", str(found)
    assert any("units are not seen" in step for step in found.evidence.steps)
    assert output_difference(a, with_tensors(a, {UP: other[UP]}), TOKENS) > 1e-3


@pytest.mark.parametrize(
    "name", ["llama-gqa", "gpt_neox-half-rotary", *(["gpt2-lm-tied", "bert-classifier"] if FULL else [])]
)
def test_taking_out_what_is_not_seen_keeps_the_function(name: str) -> None:
    """On models that have such freedom in every layout of heads: the first head's O, one unit, one key row."""
    a = tiny_model(name)
    lean, notes = remove_degeneracies(a)
    inputs = {"input_ids": torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(0))}
    assert notes == ()
    assert output_difference(a, lean, inputs) < 1e-12
    writer = next(n for n, _, _, t in a.arch.carriers("vo0") if t.dual)
    axis = next(axis for n, axis, _, t in a.arch.carriers("vo0") if n == writer and t.dual)
    quiet = a[writer].clone()
    # All queries of the first kv head write through one column.
    quiet.movedim(axis, 0).unflatten(0, (-1, heads_of(a).d_head))[: heads_of(a).group_size, :-1] = 0
    thin = with_tensors(a, {writer: quiet})
    lean, notes = remove_degeneracies(thin)
    assert any("not of full rank" in note for note in notes)
    assert output_difference(thin, lean, inputs) < 1e-9
    assert output_difference(a, thin, inputs) > 1e-3


def test_different_head_counts() -> None:
    a, b = small_model(n_heads=2), small_model(n_heads=1)
    found = ib.equivalent(a, b)
    assert found.answer == "different"
    assert found.witness is not None
    assert "never the same function" in found.reason
    assert found.conditions == ()


def test_a_silent_head_more_is_undecided() -> None:
    """The same function with one head more: outputs agree, no element can exist, and the reason is named."""
    a = small_model(n_heads=1, **BARE)
    rows = {x: torch.cat([a[x], drawn(N, D).float()]) for x in (Q, K, V)}
    wide = ib.load(
        {name: rows.get(name, a[name]) for name in a} | {O: torch.cat([a[O], torch.zeros(D, N)], 1)},
        dict(a.config) | {"n_heads": 2, "n_kv_heads": 2},
    )
    found = ib.equivalent(a, wide)
    assert found.answer == "undecided", str(found)
    assert "n_heads: A has 1, B has 2" in found.reason
    assert any(c.condition == "O has rank 0 of 4" for c in found.conditions)
    assert found.witness is None


@pytest.mark.parametrize("key", ["n_layers", "d_ff"])
def test_other_sizes_are_different_by_a_witness(key: str) -> None:
    found = ib.equivalent(small_model(), small_model(**{key: {"n_layers": 2, "d_ff": 14}[key]}))
    assert found.answer == "different"
    assert found.witness is not None
    assert key in found.reason


def test_an_empty_layer_more_is_undecided() -> None:
    a = small_model(n_layers=1, **BARE)
    deep = small_model(n_layers=2, **BARE)
    empty = {n: torch.zeros_like(deep[n]) for n in ("blocks.1.attn.o.weight", "blocks.1.mlp.down.weight")}
    found = ib.equivalent(a, with_tensors(deep, {n: a[n] for n in a} | empty))
    assert found.answer == "undecided", str(found)
    assert "n_layers: A has 1, B has 2" in found.reason


@pytest.mark.parametrize("name", TIED)
def test_a_tied_model_and_its_untied_copy(name: str) -> None:
    a = tiny_model(name)
    copy = untied(a)
    assert len(copy) > len(a)
    assert ib.equivalent(a, copy).answer == "same"
    head = next(n for n in copy if n not in a and len(copy.arch.shapes[n]) > 1)
    assert ib.equivalent(perturbed(copy, head), a).answer == "different"


def test_an_untied_copy_may_turn_its_stream() -> None:
    a = tiny_model("llama-tied")
    found = ib.equivalent(scrambled_file(untied(a)), a)
    assert found.answer == "same", str(found)


def test_types_are_named_and_nothing_finer_is_claimed() -> None:
    a = small_model()
    assert ib.equivalent(a, a).reason == "the weights are the same numbers"
    for dtype in (torch.bfloat16, torch.float16):
        found = ib.equivalent(a, stored(a, dtype))
        assert (found.answer, found.precision) == ("same", str(dtype).removeprefix("torch."))
        assert found.evidence.kind == "identity"
    # In bfloat16 a thousandth is below rounding; in float32 the same change is seen, and reported to be that small.
    b = perturbed(a, UP)
    assert ib.equivalent(stored(a, torch.bfloat16), stored(b, torch.bfloat16)).answer == "same"
    seen = ib.equivalent(a, b)
    assert seen.answer == "different"
    assert seen.sufficient_precision in ("float16", "bfloat16")
    assert ib.equivalent(a, b, precision="bfloat16").answer == "same"
    assert ib.equivalent(a, perturbed(a, UP, 0.5), precision="bfloat16").answer == "different"


def test_one_word_changed_is_found() -> None:
    """A single row of a long table: a share of the whole that only rows can show, and an input that uses the word."""
    a = small_model(d_vocab=2000)
    words = a["embed.tokens.weight"].clone()
    words[1234] += 0.05 * drawn(D).float()
    found = ib.equivalent(a, with_tensors(a, {"embed.tokens.weight": words}))
    assert found.answer == "different", str(found)
    assert found.witness is not None
    assert 1234 in found.witness.inputs["input_ids"]


def test_a_change_too_small_for_the_outputs_is_undecided() -> None:
    a = small_model()
    found = ib.equivalent(a, perturbed(a, UP, 2e-6))
    assert found.answer == "undecided", str(found)
    assert "tolerance" in found.reason


@pytest.mark.parametrize(
    ("a", "b", "match"),
    [
        ("gpt2-lm-tied", "llama-tied", "family: A has gpt2, B has llama"),
        ("llama-untied", "llama-bare", "class: A has LlamaForCausalLM, B has LlamaModel"),
    ],
)
def test_models_for_other_things_are_a_mistake(a: str, b: str, match: str) -> None:
    with pytest.raises(IsobasinError, match=match):
        ib.equivalent(tiny_model(a), tiny_model(b))


def test_another_vocabulary_is_a_mistake() -> None:
    with pytest.raises(IsobasinError, match="vocabulary: A has 17, B has 18"):
        ib.equivalent(small_model(), small_model(d_vocab=18))
    with pytest.raises(IsobasinError, match="--precision 'double' is unknown"):
        ib.equivalent(small_model(), small_model(), precision="double")


def test_nothing_is_mutated_and_the_answer_is_repeatable() -> None:
    a = small_model(positions="rope")
    b = scrambled_file(a, torch.bfloat16)
    before = {(k, n): w[n].clone() for k, w in enumerate((a, b)) for n in w}
    one, two = ib.equivalent(a, b), ib.equivalent(a, b)
    assert one.to_dict() == two.to_dict()
    assert all(torch.equal(w[n], before[k, n]) for k, w in enumerate((a, b)) for n in w)


def test_a_badly_conditioned_reparametrisation() -> None:
    """V–O multiplied by matrices of condition 1e4: the copy is that much further off, and so is its rounding."""
    a = small_model(positions="rope", **BARE)
    left, right = (torch.linalg.qr(drawn(2, N, N, seed=s))[0] for s in (1, 2))
    wild = left * torch.tensor([100.0, 1.0, 1.0, 0.01]) @ right
    v, o = a[V].double().unflatten(0, (2, N)), a[O].double().unflatten(1, (2, N))
    values = {V: (wild @ v).flatten(0, 1), O: torch.einsum("dhn,hnm->dhm", o, torch.linalg.inv(wild)).flatten(1)}
    found = ib.equivalent(a, with_tensors(a, values))
    assert found.answer == "same", str(found)
    heads = next(r for r in found.evidence.residuals if (r.kind, r.layer) == ("heads", 0))
    assert heads.rounding > 1e-6  # a fixed tolerance for float32 would have refused it


def test_an_element_that_float32_left_unfinished_is_refined() -> None:
    """Wide models are swept in float32: the stream's rotation is then off by 1e-5, too much for files of that type."""
    a = small_model(norm="rms", **BARE)
    b = scrambled_file(a)
    found = ib.align(b, to=a, matcher=ib.WeightMatching(scope="model"), verify=False).transform
    turn = torch.linalg.matrix_exp(1e-5 * (drawn(D, D) - drawn(D, D).mT))
    stream = found.elements["resid"]
    assert isinstance(stream, Matrix)
    rough = replace(found, elements={**found.elements, "resid": Matrix(turn @ stream.value, orthogonal=True)})
    fine = refine_transform(a, b, rough, torch.device("cpu"))
    far = [max(float((t.apply(b)[n] - a[n]).norm() / a[n].norm()) for n in a) for t in (rough, fine)]
    assert far[1] < 3e-7 < 5e-6 < far[0]


# -- configs that differ ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("llama-classifier", "pad_token_id", 5),
        ("gpt2-classifier", "pad_token_id", None),
        ("llama-gqa", "is_causal", False),
        ("bert-masked-lm-tied", "is_causal", True),
        ("bert-masked-lm-tied", "is_decoder", True),
        ("vit-bare", "pooler_act", "relu"),
        ("gpt_neox-quarter-rotary", "head_dim", 4),
    ],
)
def test_the_same_weights_with_another_config_are_different(case: str, key: str, value: object) -> None:
    a = tiny_model(case)
    b = replace_config(a, {key: value})
    found = ib.equivalent(a, b)
    assert found.answer == "different", found
    assert found.witness is not None
    assert not ib.fingerprint(a).matches(ib.fingerprint(b))


@pytest.mark.parametrize(
    ("case", "keys"),
    [
        ("llama-gqa", {"pad_token_id": 7, "attention_dropout": 0.5, "use_cache": False, "another_program": {"v": 1}}),
        ("llama-gqa", {"return_dict": False, "output_attentions": True, "output_hidden_states": True}),
        ("bert-masked-lm-tied", {"return_dict": False, "chunk_size_feed_forward": 1, "hidden_dropout_prob": 0.9}),
        ("qwen2-gqa", {"sliding_window": 3, "max_window_layers": 0}),
        ("llama-gqa", {"partial_rotary_factor": 0.5}),
    ],
)
def test_keys_that_change_no_output_do_not_count(case: str, keys: dict[str, object]) -> None:
    a = tiny_model(case)
    b = replace_config(a, keys)
    found = ib.equivalent(a, b)
    assert found.answer == "same", found
    assert ib.fingerprint(a).matches(ib.fingerprint(b))


def test_models_with_and_without_a_pooler_have_different_outputs() -> None:
    with pytest.raises(ib.IsobasinError, match=r"pooler: A has one, B has none; only models that map the same inputs"):
        ib.equivalent(tiny_model("bert-bare"), tiny_model("bert-bare-no-pooler"))


# -- configs by which transformers loads something else ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "keys", "message"),
    [
        ("llama-gqa", {"transformers_weights": "other.safetensors"}, "transformers_weights is other.safetensors"),
        ("llama-gqa", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ("vit-classifier", {"qkv_bias": False}, "qkv_bias false, so transformers ignores this bias"),
        ("gpt_neox-half-rotary", {"attention_bias": False}, "attention_bias false, so transformers ignores this bias"),
        ("llama-biases", {"attention_bias": False}, "attention_bias false, so transformers ignores this bias"),
        ("gpt2-lm-tied", {"num_attention_heads": 1}, "num_attention_heads, another name of it, is 1"),
    ],
)
def test_a_config_by_which_transformers_loads_something_else_is_refused(
    case: str, keys: dict[str, object], message: str
) -> None:
    weights = tiny_model(case)
    with pytest.raises(IsobasinError, match=message):
        replace_config(weights, keys)


def test_yarn_without_a_factor_depends_on_the_longest_sequence() -> None:
    weights = tiny_model("llama-rope-yarn")
    table = weights.config["rope_parameters"] | {"factor": None, "original_max_position_embeddings": 16}
    a, b = (replace_config(weights, {"rope_parameters": table, "max_position_embeddings": n}) for n in (64, 640))
    assert ib.equivalent(a, b).answer == "different"
    assert not ib.fingerprint(a).matches(ib.fingerprint(b))


@pytest.mark.parametrize(
    ("case", "keys"), [("llama-gqa", {"hidden_act": "swish"}), ("vit-classifier", {"patch_size": [2, 2]})]
)
def test_two_spellings_of_one_value_are_the_same(case: str, keys: dict[str, object]) -> None:
    a, b = tiny_model(case), replace_config(tiny_model(case), keys)
    assert ib.equivalent(a, b).answer == "same"
    assert ib.fingerprint(a).matches(ib.fingerprint(b))


def replace_config(weights: ib.Weights, keys: dict[str, object]) -> ib.Weights:
    """The same tensors, described by another config."""
    tensors = {disk: weights[name] for name, disk in weights.names.on_disk.items()}
    return ib.load(tensors, {**weights.config, **keys})


@pytest.mark.parametrize("table", ["token_type_embeddings", "position_embeddings"])
def test_a_copy_of_a_model_with_a_table_of_zeros_is_the_same(table: str) -> None:
    a = tiny_model("bert-bare")
    name = next(n for n in a if n.endswith(f"{table}.weight"))
    empty = with_tensors(a, {name: torch.zeros_like(a[name])})
    assert ib.equivalent(empty, scrambled_file(empty, seed=1)).answer == "same"


def test_texts_of_the_whole_vocabulary_are_run_where_weights_differ_noticeably(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change may be seen by a single token, which no other input need hold."""
    from isobasin.compare import outputs

    a = stored(tiny_model("llama-gqa"), torch.bfloat16)
    b = scrambled_file(a, torch.bfloat16)
    compared = outputs.OutputComparison(a, b, "stored", 0)
    start = compared.compare(outputs.probes(a, b, seed=0)[:3])
    seen: list[int] = []
    run = outputs.Runner.run

    def recorded(self: outputs.Runner, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
        seen.extend(token for each in inputs for token in each["input_ids"].flatten().tolist())
        return run(self, inputs)

    monkeypatch.setattr(outputs.Runner, "run", recorded)
    assert len(compared.with_vocabulary(start)) == len(start) + 1
    assert set(seen) == set(range(a.config["vocab_size"]))


def changed_config(name: str, **keys: object) -> tuple[ib.Weights, ib.Weights]:
    """A model type and the same tensors with another config."""
    import model_types as mt

    a = mt.weights(name)
    return a, ib.load(mt.built(name), {**a.config, **keys})


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("bart-tied", {"decoder_start_token_id": 7}),
        ("bart-classifier", {"decoder_start_token_id": 7}),
        ("mbart-answers", {"pad_token_id": 9}),
        ("bart-bare", {"pad_token_id": None}),
        ("bart-tied", {"decoder_attention_heads": 2}),
        ("t5-relu", {"dense_act_fn": "silu"}),
    ],
)
def test_keys_of_encoder_decoder_models_count(name: str, keys: dict[str, object]) -> None:
    from isobasin.compare.fingerprint import compare_fingerprints, fingerprint

    a, b = changed_config(name, **keys)
    assert not compare_fingerprints(fingerprint(a), fingerprint(b)).equal
    assert ib.equivalent(a, b).answer != "same"


@pytest.mark.parametrize("name", ["t5-relu", "mt5-gated", "umt5-gated"])
def test_a_key_that_acts_through_the_cache_alone_makes_models_different(name: str) -> None:
    a, b = changed_config(name, is_encoder_decoder=False)
    found = ib.equivalent(a, b)
    assert found.answer == "different", found
    assert found.evidence.settings == {"is_encoder_decoder": (True, False)}
    assert not ib.fingerprint(a).matches(ib.fingerprint(b))


def test_an_encoder_alone_has_no_cache_of_keys_and_values() -> None:
    a, b = changed_config("t5-encoder", is_encoder_decoder=True)
    assert ib.equivalent(a, b).answer == "same"
    assert ib.fingerprint(a).matches(ib.fingerprint(b))


def test_an_older_key_that_another_one_overrides_does_not_count() -> None:
    a, b = changed_config("t5-relu", feed_forward_proj="silu")
    assert ib.equivalent(a, b).answer == "same"


def test_unknown_keys_do_not_count_for_models_with_experts() -> None:
    a, b = changed_config("qwen2_moe-untied", my_note="hello")
    assert ib.equivalent(a, b).answer == "same"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("olmo2-untied", "q_norm"), ("olmo2-untied", "k_norm"), ("umt5-gated", "relative_attention_bias")],
)
def test_gains_and_tables_that_heads_carry_are_in_the_fingerprint(name: str, tensor: str) -> None:
    import model_types as mt
    from isobasin.compare.fingerprint import compare_fingerprints, fingerprint

    a = mt.weights(name)
    changes = {n: a[n].roll(1, 0) for n in a if tensor in n}
    assert changes
    assert not compare_fingerprints(fingerprint(a), fingerprint(with_tensors(a, changes))).equal


def test_a_copy_with_zeros_in_a_table_of_relative_positions_is_the_same() -> None:
    import model_types as mt

    a = mt.weights("t5-relu")
    names = [n for n in a if "relative_attention_bias" in n]
    sparse = with_tensors(a, {n: a[n] * (torch.arange(len(a[n])) % 2)[:, None] for n in names})
    assert ib.equivalent(sparse, scrambled_file(sparse, seed=1)).answer == "same"


def test_listed_kinds_of_layers_count_where_no_window_is_switched_on() -> None:
    a, b = changed_config("qwen2_moe-untied", layer_types=["sliding_attention"] * 2)
    assert not ib.fingerprint(a).matches(ib.fingerprint(b))
    found = ib.equivalent(a, b)
    assert found.answer == "different", found
    same = changed_config("qwen2_moe-untied", layer_types=["full_attention"] * 2)[1]
    assert ib.fingerprint(a).matches(ib.fingerprint(same))


@pytest.mark.parametrize("name", ["cohere2-tied", "modernbert-masked-lm", "qwen2_moe-untied", "gemma2-tied"])
@pytest.mark.parametrize("value", [-1, float("nan"), "full_attention", [1, 2], ["full_attention"]])
def test_kinds_of_layers_that_are_no_list_of_words_are_refused(name: str, value: object) -> None:
    with pytest.raises(ib.IsobasinError, match="layer_types is"):
        changed_config(name, layer_types=value)[1].settings  # noqa: B018


def test_layer_scales_that_transformers_does_not_load_are_refused() -> None:
    with pytest.raises(ib.IsobasinError, match="lambda_1"):
        changed_config("beit-classifier", layer_scale_init_value=0.0)
    with pytest.raises(ib.IsobasinError, match="expected a number"):
        changed_config("beit-classifier", layer_scale_init_value="none")


def test_a_number_of_labels_that_no_tensor_has_takes_no_memory() -> None:
    a = tiny_model("llama-gqa")
    assert ib.equivalent(a, replace_config(a, {"num_labels": 10**30})).answer == "same"


def test_windows_of_qwen2_moe_are_on_every_second_layer_by_default() -> None:
    keys = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 28}
    _, a = changed_config("qwen2_moe-untied", layer_types=None, **keys)
    _, b = changed_config("qwen2_moe-untied", layer_types=["sliding_attention", "full_attention"], **keys)
    assert ib.equivalent(a, b).answer == "same"
    assert ib.fingerprint(a).matches(ib.fingerprint(b))


@pytest.mark.parametrize(
    ("name", "key"), [("qwen2_moe-untied", "mlp_only_layers"), ("gpt_neo-tied", "attention_layers")]
)
@pytest.mark.parametrize("value", [-1, float("nan")])
def test_a_number_in_place_of_a_list_of_layers_is_refused(name: str, key: str, value: float) -> None:
    with pytest.raises(ib.IsobasinError, match=f"config.json: {key} is .*, expected a list"):
        _ = changed_config(name, **{key: value})[1].settings


def named(weights: ib.Weights, dtype: str) -> ib.Weights:
    """The same numbers under a config that names this type."""
    return replace(weights, config={**weights.config, "dtype": dtype})


def scaled(weights: ib.Weights, name: str, factor: float) -> ib.Weights:
    return with_tensors(weights, {name: weights[name].double() * factor})


GATED = "layers.0.mlp.up_proj.weight"


def gated(weights: ib.Weights, end: str = GATED) -> str:
    return next(name for name in weights if name.endswith(end))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_types_that_configs_name_are_named(dtype: str) -> None:
    a = tiny_model("llama-gqa")
    same, copy = ib.equivalent(a, named(a, dtype)), ib.equivalent(named(a, dtype), scrambled_file(a))
    for found in (same, copy):
        assert (found.answer, found.precision) == ("same", dtype), str(found)
        assert f"up to rounding of {dtype}" in found.reason
    assert same.reason.startswith("the weights are the same numbers")
    both = ib.equivalent(named(a, dtype), named(a, dtype))
    assert (both.reason, both.precision) == ("the weights are the same numbers", "float32")
    # A coarser type that a config names excuses no difference of the stored numbers.
    assert ib.equivalent(named(a, dtype), named(perturbed(a, gated(a)), dtype)).answer == "different"


def test_an_overflow_in_the_type_that_a_config_names_is_not_the_same() -> None:
    model = tiny_model("llama-gqa")
    a = scaled(model, gated(model), 1e6)
    for b in (a, scrambled_file(a)):
        found = ib.equivalent(a, named(b, "float16"))
        assert found.answer == "undecided", str(found)
        assert "the outputs of B in float16 are not finite" in found.reason
    assert ib.equivalent(model, named(model, "float16")).answer == "same"
    assert ib.equivalent(named(a, "float16"), named(a, "float16")).answer == "same"


def test_outputs_that_are_not_finite_do_not_agree_with_others() -> None:
    """One model gives NaN in float32, the other numbers: float64 tells whether it is an overflow of the same."""
    model, other = tiny_model("gpt2-lm-tied"), tiny_model("gpt2-lm-tied", seed=1)
    a = scaled(model, gated(model, "h.1.mlp.c_proj.weight"), 1e20)
    found = ib.equivalent(a, other)
    assert found.answer == "different", str(found)
    assert found.witness is not None
    assert found.witness.dtype == "float64"
    assert found.witness.difference > 0.1
    copy = ib.equivalent(a, scrambled_file(a))
    assert copy.answer in ("same", "undecided"), str(copy)
    assert "float64" in copy.reason or "are not finite" in copy.reason


def test_models_that_are_never_finite_and_can_not_run_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without float64 an overflow of a copy and a difference can not be told apart: undecided, with that reason."""
    model, other = tiny_model("gpt2-lm-tied"), tiny_model("gpt2-lm-tied", seed=1)
    a = scaled(model, gated(model, "h.1.mlp.c_proj.weight"), 1e25)
    run = Runner.run

    def narrow(self: Runner, inputs: list[dict[str, Tensor]]) -> list[Tensor]:
        if self.dtype == torch.float64:
            raise ArchitectureError("not in float64")
        return run(self, inputs)

    monkeypatch.setattr(Runner, "run", narrow)
    found = ib.equivalent(a, other)
    assert found.answer == "undecided", str(found)
    assert "can be the overflow of a re-scaled copy" in found.reason
    assert "outputs agree" not in found.reason


def test_outputs_that_are_far_larger_than_the_others_differ_in_both_orders() -> None:
    """Rounding is relative to the larger outputs: those of B are as certain as those of A."""
    a = stored(tiny_model("llama-gqa"), torch.bfloat16)
    b = stored(held(a, {"lm_head.weight": a["lm_head.weight"].float() * 64}), torch.bfloat16)
    for pair in ((a, b), (b, a)):
        found = ib.equivalent(*pair)
        assert found.answer == "different", str(found)
    assert ib.equivalent(b, scrambled_file(b, torch.bfloat16)).answer == "same"
    silent = with_tensors(tiny_model("llama-gqa"), {"lm_head.weight": torch.zeros_like(a["lm_head.weight"])})
    for pair in ((silent, tiny_model("llama-gqa")), (tiny_model("llama-gqa"), silent)):
        assert ib.equivalent(*pair).answer == "different"
    assert ib.equivalent(silent, silent).answer == "same"


def test_queries_of_any_size_beside_keys_of_the_usual_one() -> None:
    a, name = tiny_model("llama-gqa"), "model.layers.0.self_attn.q_proj.weight"
    b = with_tensors(a, {name: a[name].double() * 1e-20})
    for pair in ((a, b), (b, a)):
        assert ib.equivalent(*pair).answer == "different"
    point = ib.canonical(b).apply(b)
    inputs = {"input_ids": torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(0))}
    assert output_difference(b, held(point), inputs) < 1e-9
    moved = held(ib.align(b, to=a, only_if_closer=False).transform.apply(b))
    assert output_difference(b, moved, inputs) < 1e-9 < 1e-3 < output_difference(a, b, inputs)


def test_means_of_a_reference_with_enormous_weights_are_not_taken() -> None:
    """B's weights would be lost beside them: the means that LayerNorm hides stay B's own."""
    model = tiny_model("gpt2-lm-untied")
    name = next(n for n in model if n.endswith("h.1.mlp.c_fc.weight"))
    to = with_tensors(model, {name: model[name].double() * 1e15})
    moved = held(ib.align(model, to=to).transform.apply(model))
    inputs = {"input_ids": torch.randint(30, (2, 7), generator=torch.Generator().manual_seed(0))}
    assert output_difference(model, moved, inputs) < 1e-9


def test_a_row_that_differs_as_stored_is_tried_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transform that does not fit spreads one number over all rows of a large table, and names others."""
    a = stored(small_model(d_vocab=500, bias=False), torch.float32)
    name = "embed.tokens.weight"
    table = a[name].clone()
    table[123, 5] += 0.1  # no input before has this token
    tried, run = [], OutputComparison.with_row_probes

    def recorded(self: OutputComparison, compared: Any, rows: Any) -> Any:
        tried.append(rows)
        return run(self, compared, rows)

    monkeypatch.setattr(OutputComparison, "with_row_probes", recorded)
    ib.equivalent(a, with_tensors(a, {name: table}))
    assert tried[0] == {name: (123,)}
    ib.equivalent(a, scrambled_file(with_tensors(a, {name: table})))
    assert tried[2] == {}


def test_an_empty_table_of_rotary_positions_is_not_a_missing_one() -> None:
    """transformers makes YaRN of a missing table of GPT-OSS, and plain rotary positions of an empty one."""
    model = mt.built("gpt_oss-untied")
    plain = {key: value for key, value in model.config.to_dict().items() if key != "rope_parameters"}
    plain["architectures"] = [type(model).__name__]
    empty, missing, named = (
        ib.load(model.state_dict(), config=plain | table)
        for table in ({"rope_parameters": {}}, {}, {"rope_parameters": {"rope_type": "default"}})
    )
    assert ib.equivalent(empty, named).answer == "same"
    found = ib.equivalent(empty, missing)
    assert found.answer == "different"
    assert "rotary positions" in str(found)
    assert str(ib.fingerprint(empty)) != str(ib.fingerprint(missing))


@pytest.mark.parametrize("equal", [False, True])
def test_the_order_of_experts_that_tie_decides_unless_they_are_equal(equal: bool) -> None:
    """Experts 2 and 3 have equal rows of the router, and no random token takes them."""
    kind = mt.model_type("mixtral-untied")
    few = {"num_local_experts": 4, "num_experts_per_tok": 1}
    model = replace(kind, config={**kind.config, **few}).build(3).float()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if name.endswith("gate.weight"):
                tensor[1], tensor[2:] = -tensor[0], 0.0
            elif equal and ".experts." in name:
                tensor[3] = tensor[2]
    a = ib.load(model)
    orders = set()
    for seed in range(6):
        drawn = ib.scramble(a, seed=seed)
        moved = replace(
            drawn, elements={n: g for n, g in drawn.elements.items() if n in a.arch.expert_spaces}, gauge={}
        )
        kept = all(g.is_identity for g in moved.elements.values())
        found = ib.equivalent(a, held(moved.apply(a)))
        orders.add(found.answer)
        assert equal or found.answer == "undecided" or kept
        if found.answer == "undecided":
            assert "order of experts whose scores are equal" in str(found)
    assert "undecided" in orders if not equal else orders == {"same"}
