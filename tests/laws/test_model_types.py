"""The laws of symmetry over the model types of `model_types`; transformers in float64 is the oracle."""

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from null_space import Measured, null_space
from outside import Undual, act, step_outside
from safetensors.torch import load_file
from torch import Tensor

import isobasin as ib
import model_types as mt
import tiny
from isobasin.arch import FAMILIES, HeadSpace, Space
from isobasin.arch.registry import REFUSED
from isobasin.compare.degenerate import remove_degeneracies
from isobasin.compare.fingerprint import compare_fingerprints, fingerprint
from isobasin.config_keys import differing_settings
from isobasin.groups import Monomial, Orthogonal, Phases, RotaryCommutant
from isobasin.symmetries import symmetry
from isobasin.symmetries.norm_coordinates import NormCoordinate
from isobasin.symmetries.normal_form import normalize
from isobasin.symmetries.transform import scramble
from isobasin.views import AsFloat64
from isobasin.weights import Weights

pytestmark = pytest.mark.hf

EXACT, SEEN = 1e-9, 1e-3
NAMES = [each.name for each in mt.MODEL_TYPES]
FIRST = list({each.family: each.name for each in reversed(mt.MODEL_TYPES)}.values())[::-1]
# One of every structural element; the others run in the slow version.
SHORT = (
    *(
        "gemma3_text-tied",
        "glm-untied",
        "cohere2-tied",
        "cohere-head-norms",
        "stablelm-head-norms",
        "olmo-untied",
        "olmo2-untied",
        "mixtral-untied",
        "falcon-groups",
    ),
    *("opt-tied", "modernbert-masked-lm", "t5-relu", "bart-tied", "beit-classifier", "whisper-tied", "clip-towers"),
    "siglip-towers",
    *("llava-untied", "gemma3-tied", "qwen2_5_vl-untied", "gpt_oss-untied", "deepseek_v3-groups"),
)
SOME = NAMES if os.environ.get("ISOBASIN_SLOW") == "1" else SHORT
every = pytest.mark.parametrize("name", NAMES if SOME is NAMES else FIRST)  # one of every model type
some = pytest.mark.parametrize("name", SOME)

# Tensors that no symmetry can move: see test_families.
_BARE = ("embeddings", *(f"encoder.layer.{i}.{part}" for i in (0, 1) for part in ("attention.output", "output")))
_BART_NORMS = [
    (stack, i, norm)
    for stack in ("encoder", "decoder")
    for i in (0, 1)
    for norm in ("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
    if stack == "decoder" or norm != "encoder_attn_layer_norm"
]
UNCHANGED: Mapping[str, set[str]] = {
    "roberta-masked-lm-untied": {"lm_head.bias"},
    "nomic_bert-untied-masked-lm": {"cls.predictions.bias"},
    "roberta-classifier": {"classifier.out_proj.bias"},
    "roberta-bare": {f"roberta.{place}.LayerNorm.weight" for place in _BARE}
    | {"roberta.encoder.layer.1.output.LayerNorm.bias"},
    "distilbert-classifier": {"classifier.bias"},
    "bart-tied": {"final_logits_bias"},
    "bart-relu": {"final_logits_bias"},
    "mbart-tied": {"final_logits_bias"},
    "bart-classifier": {"classification_head.out_proj.bias"},
    "bart-bare": {f"model.{stack}.layernorm_embedding.weight" for stack in ("encoder", "decoder")}
    | {f"model.{stack}.layers.{i}.{norm}.weight" for stack, i, norm in _BART_NORMS}
    | {f"model.{stack}.layers.1.final_layer_norm.bias" for stack in ("encoder", "decoder")},
    "whisper-bare": {"model.encoder.conv2.bias"}
    | {f"model.{stack}.layer_norm.{kind}" for stack in ("encoder", "decoder") for kind in ("weight", "bias")},
    "whisper-audio": {"classifier.weight", "classifier.bias"},
    "clip-towers": {"logit_scale"},
    "clip_text_model-bare": {f"text_model.final_layer_norm.{kind}" for kind in ("weight", "bias")},
    "clip_text_model-projection": {"text_projection.weight"}
    | {f"text_model.final_layer_norm.{kind}" for kind in ("weight", "bias")},
    "clip_vision_model-bare": {f"vision_model.encoder.layers.{i}.mlp.fc2.bias" for i in (0, 1)}
    | {f"vision_model.{norm}.{kind}" for norm in ("pre_layrnorm", "post_layernorm") for kind in ("weight", "bias")},
    "clip_vision_model-projection": {f"vision_model.encoder.layers.{i}.mlp.fc2.bias" for i in (0, 1)}
    | {f"vision_model.pre_layrnorm.{kind}" for kind in ("weight", "bias")},
    "siglip-towers": {"logit_scale", "logit_bias", "vision_model.head.probe", "vision_model.head.mlp.fc2.bias"},
    "siglip_text_model-bare": {f"text_model.final_layer_norm.{kind}" for kind in ("weight", "bias")},
    "siglip_vision_model-bare": {f"vision_model.post_layernorm.{kind}" for kind in ("weight", "bias")}
    | {"vision_model.head.probe", "vision_model.head.mlp.fc2.bias"},
    "siglip_vision_model-no-head": {f"vision_model.post_layernorm.{kind}" for kind in ("weight", "bias")},
    "t5-bare": {"shared.weight", "encoder.final_layer_norm.weight", "decoder.final_layer_norm.weight"},
    "t5-encoder": {"shared.weight", "encoder.final_layer_norm.weight"},
    "dinov2-classifier": {"classifier.bias"},
    "modernbert-masked-lm": {"decoder.bias"},
    "ernie-classifier": {"classifier.bias"},
    "mpnet-classifier": {"classifier.out_proj.bias"},
    "modernbert-classifier": {"classifier.bias"},
    "modernbert-bare": {"model.embeddings.norm.weight", "model.final_norm.weight"},
    "nomic_bert-bare": {f"nomic_bert.emb_ln.{kind}" for kind in ("weight", "bias")}
    | {f"nomic_bert.encoder.layers.{i}.norm{n}.{kind}" for i in (0, 1) for n in (1, 2) for kind in ("weight", "bias")},
    "dinov2-gated": {"classifier.bias"},
    "dinov2-bare": {"dinov2.layernorm.weight", "dinov2.layernorm.bias"},
    "deit-bare": {"deit.layernorm.weight", "deit.layernorm.bias"},
}


def error(name: str, moved: Weights) -> float:
    """The largest change of the outputs, relative to the largest output, in float64."""
    model, start = mt.built(name), mt.weights(name)
    x = mt.inputs(start)
    before = mt.outputs(start, model, x)
    return float((mt.outputs(moved, model, x) - before).abs().max() / before.abs().max())


def held(weights: Weights, changes: Mapping[str, Tensor] | None = None) -> Weights:
    return replace(weights, tensors={n: weights[n] for n in weights} | dict(changes or {}))


def stored(weights: Weights, dtype: torch.dtype) -> Weights:
    """As a file of this type would hold it."""
    tensors = {n: weights[n].to(dtype) for n in weights}
    return replace(weights, tensors=tensors, dtypes=dict.fromkeys(tensors, dtype))


def test_every_model_type_has_a_case() -> None:
    covered = {each.family for each in mt.MODEL_TYPES} | {case.family for case in tiny.CASES}
    assert covered == set(FAMILIES) - {"isobasin"}


@every
def test_a_scrambled_model_computes_the_same_and_every_tensor_moves_that_can(name: str) -> None:
    start = mt.weights(name)
    there = held(scramble(start, seed=1).apply(start))
    assert error(name, there) <= EXACT
    still = {n for n in start if torch.equal(there[n].double(), start[n].double())}
    assert still == UNCHANGED.get(name, set()) | set(start.arch.copied_tensors)
    assert error(name, mt.weights(name, seed=1)) > SEEN


@every
def test_a_transform_in_float32_is_that_in_float64_up_to_its_rounding(name: str) -> None:
    start = mt.weights(name)
    drawn = scramble(start, seed=1)
    exact, rough = drawn.apply(start), drawn.apply(start, dtype=torch.float32)
    tensors = [n for n in exact if exact[n].is_floating_point() and float(exact[n].double().norm()) > 0]
    errors = [float((exact[n].double() - rough[n].double()).norm() / exact[n].double().norm()) for n in tensors]
    assert max(errors) < 1e-5
    assert max(errors) > 0 or not any(g.rotates for g in drawn.elements.values())


@some
def test_a_scrambled_file_says_the_same_to_transformers(name: str, tmp_path: Path) -> None:
    mt.save(name, tmp_path / "a")
    a = ib.load(tmp_path / "a")
    transform = scramble(a, seed=1)
    transform.apply(a).save(tmp_path / "b")
    x = mt.inputs(a)
    before, after = (tiny.logits(tiny.load(tmp_path / each), x) for each in "ab")
    assert float((after - before).abs().max() / before.abs().max()) <= 1e-5 * a.arch.sizes.n_layers
    back = transform.inverse().apply(ib.load(tmp_path / "b"))
    for n in a:
        assert float((back[n].double() - a[n].double()).norm()) <= 1e-5 * float(a[n].double().norm()), n


@some
def test_the_names_of_a_live_model_and_of_its_file_lead_to_the_same_tensors(name: str, tmp_path: Path) -> None:
    live, stored = mt.weights(name), ib.load(mt.save(name, tmp_path / "a"))
    assert set(live) == set(stored)
    assert all(torch.equal(live[n], stored[n]) for n in live)


@some
def test_a_planted_element_is_found_again(name: str) -> None:
    a = mt.weights(name)
    b = held(scramble(a, seed=3).apply(a))
    found = ib.align(b, to=a)
    assert found.distance_before > 0.1
    assert found.distance_after <= 1e-5
    assert error(name, found.transform.apply(b)) <= EXACT


@pytest.mark.parametrize("name", ["falcon-groups", "gptj-tied", "gpt_neo-tied"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_sign_of_the_stream_is_found_whatever_constants_readers_hold(name: str, seed: int) -> None:
    a = mt.weights(name)
    assert ib.align(held(scramble(a, seed=seed).apply(a)), to=a).distance_after <= 1e-5


@some
def test_a_copy_is_the_same_and_a_changed_matrix_is_different(name: str) -> None:
    a = mt.weights(name)
    b = held(scramble(a, seed=3).apply(a))
    verdict = ib.equivalent(a, b)
    assert verdict.answer == "same", verdict
    units = next(s for s in a.arch.spaces.values() if s.role == "units" and s.layer == 0)
    matrix = next(n for n in a.arch.blocks[units.name] if len(a.arch.shapes[n]) == 2)
    rng = torch.Generator().manual_seed(0)
    changed = b[matrix].double() * (1 + 0.1 * torch.randn(b[matrix].shape, generator=rng, dtype=torch.float64))
    verdict = ib.equivalent(a, held(b, {matrix: changed}))
    assert verdict.answer == "different", verdict


@some
def test_copies_share_their_fingerprint_and_their_canonical_point(name: str) -> None:
    a, other = mt.weights(name), mt.weights(name, seed=1)
    b = held(scramble(a, seed=5).apply(a))
    assert compare_fingerprints(fingerprint(a), fingerprint(b)).equal
    assert not compare_fingerprints(fingerprint(a), fingerprint(other)).equal
    points = [ib.canonical(each).apply(each) for each in (a, b)]
    assert error(name, points[0]) <= EXACT
    for n in a:
        assert float((points[0][n] - points[1][n]).norm()) <= 1e-6 * float(points[0][n].double().norm() + 1), n


# Norms before readers without biases: beyond a shift of one, and with a shift that leaves no place for a constant.
SHIFTS = ("falcon-groups", "beit-classifier", "whisper-tied", "opt-untied")
CONSTANTS = NAMES if SOME is NAMES else SHIFTS


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_canonical_copy_is_found_to_be_one(name: str) -> None:
    """Its norms have a shift of one, which holds the constants of readers without biases; those of A may not."""
    a = mt.weights(name)
    there = stored(ib.canonical(a).apply(a), torch.float32)
    back = ib.align(a, to=there)
    assert back.distance_after <= 1e-5
    assert error(name, back.transform.apply(a)) <= EXACT
    if name != "opt-untied":  # the shift of its last norm has no mean: no transform leads there from another one
        found = ib.align(there, to=a)
        assert found.distance_after <= 1e-5
        assert error(name, found.transform.apply(there)) <= 1e-5
    if SOME is NAMES:
        assert ib.equivalent(a, there).answer == "same"
        assert ib.equivalent(there, a).answer == "same"
        assert ib.equivalent(a, stored(there, torch.bfloat16)).answer == "same"


def test_a_shift_that_holds_no_constant_may_be_any_other() -> None:
    """Shifts with next to no mean, in both models and not the same: the form with a shift of one shows that nothing
    else differs, and a change of a reader along the all-ones vector, which carries its constant, is seen."""
    name, shift, reader = "opt-untied", "model.decoder.final_layer_norm.bias", "lm_head.weight"
    a = mt.weights(name)
    norm = next(c for c in symmetry(a.arch).coordinates.values() if shift in c.touches)
    assert isinstance(norm, NormCoordinate)
    assert not norm.holds(AsFloat64(a))
    other = norm.rows(AsFloat64(a)).flip(1)
    slope = other[1] / other[0]
    other[1] = other[0] * (slope - slope.mean() + 0.06 * slope.square().mean().sqrt())
    b = stored(held(a, {n: change(AsFloat64(a)) for n, change in norm.set(other).items()}), torch.float32)
    assert not norm.holds(AsFloat64(b))
    assert error(name, b) <= 1e-5
    verdict = ib.equivalent(a, b)
    assert verdict.answer == "same", verdict
    assert verdict.evidence.steps
    assert verdict.transform is None
    changed = held(b, {reader: b[reader] + 0.01 * b[reader].abs().max()})
    assert ib.equivalent(a, changed).answer == "different"


@some
def test_one_step_outside_the_group_is_seen(name: str) -> None:
    """A step outside the group of each space, keys that move as queries do, and heads that change places where each has
    positions of its own."""
    a = mt.weights(name)
    flat, groups = held(normalize(a).apply(a)), symmetry(a.arch).groups
    assert error(name, flat) <= EXACT
    for space in a.arch.spaces.values():
        if space.name == "probe":  # linear maps there are symmetries that are not used
            continue
        if isinstance(space, Space) and space.name in groups:
            assert error(name, act(flat, {space.name: step_outside(space.kind, space.size)})) > SEEN, space.name
        elif isinstance(space, HeadSpace):
            inside = groups[space.name].sample(seed=2)
            assert error(name, act(flat, {space.name: inside})) <= EXACT, space.name
            assert error(name, act(flat, {space.name: inside}, Undual)) > SEEN, space.name
            if space.qk_norm:  # behind a norm with gains that differ inside pairs, a phase is no symmetry
                turn = RotaryCommutant(space.d_head, space.interleaved).sample(space.n_kv_heads, seed=1)
                turned = replace(groups[space.name].identity(), qk=Phases(turn.u / turn.u.abs(), space.interleaved))  # type: ignore[type-var]
                assert error(name, act(flat, {space.name: turned})) > SEEN, space.name
            if not space.permutable:
                swapped = replace(groups[space.name].identity(), kv=torch.arange(space.n_kv_heads).flip(0))  # type: ignore[type-var]
                assert error(name, act(flat, {space.name: swapped})) > SEEN, space.name


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        *((f"{family}-untied", False) for family in ("gemma2", "gemma3_text", "olmo2", "olmo3")),
        ("qwen3-untied", True),
    ],
)
def test_a_stream_beside_norms_behind_sublayers_does_not_rotate(name: str, inside: bool) -> None:
    a = mt.weights(name)
    flat, n = held(normalize(a).apply(a)), a.arch.streams["resid"].size
    change = error(name, act(flat, {"resid": Orthogonal(n).sample(seed=1)}))
    assert change <= EXACT if inside else change > SEEN


@pytest.mark.parametrize("name", ["qwen3-untied", "gemma3_text-untied", "olmo2-untied", "olmo3-untied"])
def test_a_phase_behind_a_norm_of_queries_and_keys_needs_gains_that_are_equal_inside_pairs(name: str) -> None:
    a, heads = mt.weights(name), mt.weights(name).arch.spaces["heads0"]
    assert isinstance(heads, HeadSpace)
    turn = RotaryCommutant(heads.d_head, heads.interleaved).sample(heads.n_kv_heads, seed=1)
    phase = Phases(turn.u / turn.u.abs(), heads.interleaved)
    turned = replace(symmetry(a.arch).groups["heads0"].identity(), qk=phase)  # type: ignore[type-var]
    gains = {
        n: a[n].reshape(-1, 2, heads.d_head // 2)
        for n in a
        if ".layers.0." in n and n.endswith(("q_norm.weight", "k_norm.weight"))
    }
    paired = held(a, {n: x.mean(1, keepdim=True).expand_as(x).reshape(a[n].shape) for n, x in gains.items()})
    model, x = mt.built(name), mt.inputs(a)
    for weights, inside in ((a, False), (paired, True)):
        before, after = (mt.outputs(each, model, x) for each in (weights, act(weights, {"heads0": turned})))
        change = float((after - before).abs().max() / before.abs().max())
        assert change <= EXACT if inside else change > SEEN


def with_heads_swapped(a: Weights, layers: list[int], table: str = "") -> Weights:
    """The first two heads of these layers change places, and their columns in a table."""
    changes = {}
    for i in layers:
        space = a.arch.spaces[f"heads{i}"]
        assert isinstance(space, HeadSpace)
        order = torch.arange(space.n_kv_heads)
        order[:2] = torch.tensor([1, 0])
        swapped = replace(symmetry(a.arch).groups[space.name].identity(), kv=order)  # type: ignore[type-var]
        moved = act(a, {space.name: swapped})
        changes |= {n: moved[n] for n in a if not torch.equal(moved[n], a[n].double())}
    return held(a, changes | ({table: a[table][:, order]} if table else {}))


@pytest.mark.parametrize("name", ["falcon-alibi", "bloom-tied", "mpt-tied"])
def test_heads_of_alibi_do_not_change_places(name: str) -> None:
    assert error(name, with_heads_swapped(mt.weights(name), [0])) > SEEN


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("t5-relu", "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        ("mpnet-masked-lm", "mpnet.encoder.relative_attention_bias.weight"),
    ],
)
def test_heads_that_share_a_table_change_places_in_all_layers_or_in_none(name: str, table: str) -> None:
    a = mt.weights(name)
    assert error(name, with_heads_swapped(a, [0, 1], table)) <= EXACT
    for layers, columns in (([0], ""), ([0], table), ([0, 1], "")):
        assert error(name, with_heads_swapped(a, layers, columns)) > SEEN, (layers, columns)


def test_heads_carry_their_sinks() -> None:
    a = mt.weights("gpt_oss-untied")
    heads = a.arch.spaces["heads0"]
    assert isinstance(heads, HeadSpace)
    swapped = replace(symmetry(a.arch).groups["heads0"].identity(), kv=torch.tensor([1, 0]))  # type: ignore[type-var]
    moved = held(act(a, {"heads0": swapped}))
    assert error("gpt_oss-untied", moved) <= EXACT
    assert error("gpt_oss-untied", held(moved, {heads.sinks: a[heads.sinks]})) > SEEN
    # Attention weights do not sum to one beside a sink, so no bias takes over that of the values.
    assert not any(name.startswith(("value:", "key:")) for name in symmetry(a.arch).coordinates)


def test_fingerprints_see_sinks_and_the_biases_of_routers_and_experts() -> None:
    a = mt.weights("gpt_oss-untied")
    for name in ("self_attn.sinks", "mlp.router.bias", "mlp.experts.1.down_proj.bias", "mlp.experts.1.up_proj.bias"):
        tensor = a[f"model.layers.0.{name}"]
        changed = held(a, {f"model.layers.0.{name}": tensor + torch.linspace(-1, 1, len(tensor))})
        assert not compare_fingerprints(fingerprint(a), fingerprint(changed)).equal, name


def test_a_clamped_unit_without_up_still_counts() -> None:
    a = mt.weights("gpt_oss-untied")
    place = "model.layers.0.mlp.experts.1"
    some = torch.arange(14) < 3
    names = [f"{place}.up_proj.weight", f"{place}.up_proj.bias"]
    without_up = held(a, {name: torch.where(some, 0, a[name]) for name in names})
    reduced, notes = remove_degeneracies(without_up)
    assert not notes
    x = mt.inputs(a)
    before, after = (mt.outputs(each, mt.built("gpt_oss-untied"), x) for each in (without_up, held(reduced)))
    assert float((after - before).abs().max() / before.abs().max()) <= EXACT
    gates = [name.replace("up_proj", "gate_proj") for name in names]
    assert remove_degeneracies(held(a, {name: torch.where(some, 0, a[name]) for name in gates}))[1]


def test_a_tensor_that_holds_several_is_written_as_it_was_found(tmp_path: Path) -> None:
    a = ib.load(mt.save("gpt_oss-untied", tmp_path / "a"))
    a.save(tmp_path / "b")
    scramble(a, seed=1).apply(a).save(tmp_path / "c")
    ib.merge([a, ib.load(tmp_path / "c")], align=False).save(tmp_path / "d")
    files = [load_file(tmp_path / each / "model.safetensors") for each in "abcd"]
    for file in files[1:]:
        assert {n: t.shape for n, t in file.items()} == {n: t.shape for n, t in files[0].items()}
    assert all(torch.equal(files[0][n], t) for n, t in files[1].items())
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert not torch.equal(files[0][name], files[2][name])
    assert torch.allclose((files[0][name] + files[2][name]) / 2, files[3][name], atol=1e-6)
    with pytest.raises(ib.IsobasinError, match=r"gate_up_proj: found shape 3×24×26, expected 3×24×28"):
        ib.load(files[0] | {name: files[0][name][..., :26]}, a.config)


@pytest.mark.parametrize("name", ["cohere-head-norms", "stablelm-head-norms"])
def test_what_a_layer_norm_of_each_head_does_not_see(name: str) -> None:
    """The same vector in all rows of a head, and the sign of its rows with its gains; nothing less."""
    a = mt.weights(name)
    heads = next(a.arch.heads())
    (gain, *_), weight, n = heads.gain_names[0], "model.layers.0.self_attn.q_proj.weight", heads.d_head
    rng = torch.Generator().manual_seed(0)
    vector, first = torch.randn(a[weight].shape[1], generator=rng), torch.arange(len(a[weight])) < n
    row, pair = (first & (torch.arange(len(a[weight])) < k) for k in (1, 2))
    signs, turned = torch.where(first, -1.0, 1.0)[:, None], a[weight].clone()
    turned[[0, 1]] = torch.stack([-a[weight][1], a[weight][0]])
    rows = a[gain].reshape(-1, n).clone()
    rows[0] *= -1
    flipped = rows.reshape(a[gain].shape)
    assert error(name, held(a, {weight: a[weight] + first[:, None] * vector})) <= 1e-6  # float32 here
    assert error(name, held(a, {weight: a[weight] * signs, gain: flipped})) <= EXACT
    for outside in (
        {weight: a[weight] + row[:, None] * vector},
        {weight: a[weight] * signs},
        {weight: a[weight] * torch.where(pair, -1.0, 1.0)[:, None]},
        {weight: turned},
    ):
        assert error(name, held(a, outside)) > SEEN


MLA = "model.layers.0.self_attn"


def test_heads_of_latent_attention_share_the_rotary_columns_of_their_keys() -> None:
    a = mt.weights("deepseek_v3-groups")
    flat, heads = held(normalize(a).apply(a)), a.arch.spaces["heads0"]
    assert isinstance(heads, HeadSpace)
    inside = symmetry(a.arch).groups["heads0"].sample(seed=4)
    turn = RotaryCommutant(heads.rotary, heads.interleaved).sample(1, seed=1)
    assert error("deepseek_v3-groups", act(flat, {"heads0": replace(inside, shared=turn)})) <= EXACT  # type: ignore[type-var]
    wrong = RotaryCommutant(heads.rotary, not heads.interleaved).sample(1, seed=1)
    assert error("deepseek_v3-groups", act(flat, {"heads0": replace(inside, shared=wrong)})) > SEEN  # type: ignore[type-var]
    # A factor for each head moves the queries of each, but there is one key.
    own = RotaryCommutant(heads.rotary, heads.interleaved).sample(heads.n_heads, seed=1).matrix()
    queries = flat[f"{MLA}.q_b_proj.weight"].unflatten(0, (heads.n_heads, -1)).clone()
    queries[:, -heads.rotary :] = own @ queries[:, -heads.rotary :]
    assert error("deepseek_v3-groups", held(flat, {f"{MLA}.q_b_proj.weight": queries.flatten(0, 1)})) > SEEN


def test_a_latent_vector_rotates_with_both_maps_beside_it() -> None:
    a = mt.weights("deepseek_v3-groups")
    flat = held(normalize(a).apply(a))
    for latent, maps in (("kv0", ("kv_a_proj", "kv_b_proj")), ("q0", ("q_a_proj", "q_b_proj"))):
        moved = act(flat, {latent: symmetry(a.arch).groups[latent].sample(seed=1)})
        assert error("deepseek_v3-groups", moved) <= EXACT
        for each in maps:
            name = f"{MLA}.{each}.weight"
            assert error("deepseek_v3-groups", held(moved, {name: flat[name]})) > SEEN


@pytest.mark.parametrize("name", ["deepseek_v3-groups", "deepseek_v2-groups"])
def test_experts_keep_to_their_groups(name: str) -> None:
    a = mt.weights(name)
    group = symmetry(a.arch).groups["experts1"]
    for order, inside in (((1, 0, 2, 3, 4, 5), True), ((4, 5, 0, 1, 3, 2), True), ((2, 1, 0, 3, 4, 5), False)):
        element = Monomial(torch.tensor(order), torch.ones(6, dtype=torch.float64))
        assert group.contains(element) is inside
        change = error(name, act(a, {"experts1": element}))
        assert change <= EXACT if inside else change > SEEN, order
    alone = mt.weights("deepseek_v3-one-group")
    assert symmetry(alone.arch).groups["experts1"].contains(element)
    assert error("deepseek_v3-one-group", act(alone, {"experts1": element})) <= EXACT


def test_the_correction_bias_moves_with_experts_and_counts() -> None:
    name, bias = "deepseek_v3-groups", "model.layers.1.mlp.gate.e_score_correction_bias"
    a = mt.weights(name)
    swapped = Monomial(torch.tensor([1, 0, 2, 3, 4, 5]), torch.ones(6, dtype=torch.float64))
    assert torch.equal(act(a, {"experts1": swapped})[bias], a[bias][swapped.index].double())
    other = held(a, {bias: a[bias] + torch.linspace(-0.5, 0.5, 6)})
    assert error(name, other) > SEEN
    assert not compare_fingerprints(fingerprint(a), fingerprint(other)).equal


@pytest.mark.parametrize(
    ("name", "layer", "constant"), [("deepseek_v3-groups", 1, 0.37), ("deepseek_v3-one-group", 0, -3.0)]
)
def test_a_constant_of_the_correction_bias_is_free(name: str, layer: int, constant: float) -> None:
    bias = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
    a = mt.weights(name)
    b = held(scramble(a, seed=3).apply(a))
    shifted = held(b, {bias: b[bias] + constant})
    assert error(name, shifted) <= EXACT
    assert compare_fingerprints(fingerprint(a), fingerprint(shifted)).equal
    found = ib.align(shifted, to=a)
    assert found.distance_after <= 1e-5
    assert float((found.transform.apply(shifted)[bias] - a[bias]).abs().max()) <= 1e-6
    # Another number for one of the experts is a change.
    other = held(shifted, {bias: shifted[bias] + constant * (torch.arange(6) == 0)})
    assert error(name, other) > SEEN
    assert not compare_fingerprints(fingerprint(a), fingerprint(other)).equal
    if os.environ.get("ISOBASIN_SLOW") == "1":
        assert ib.equivalent(a, shifted).answer == "same"
        assert ib.equivalent(a, other).answer == "different"


def degenerate(a: Weights, kind: str) -> tuple[Weights, Weights]:
    """Two models of one function with a head that writes nothing, values of lower rank, or keys of zeros."""
    heads = a.arch.spaces["heads0"]
    assert isinstance(heads, HeadSpace)
    nope, v = heads.d_head - heads.rotary, heads.value_size
    q, kv, o = (a[f"{MLA}.{each}.weight"].clone() for each in ("q_b_proj", "kv_b_proj", "o_proj"))
    others = [q.clone(), kv.clone(), o.clone()]
    keys = {}
    if kind == "silent head":
        for each in (o, others[2]):
            each[:, :v] = 0
        others[0][: heads.d_head] += 1
        others[1][: nope + v] += 1
    elif kind == "rank of values":
        for each in (kv, others[1]):
            each[2 * nope + v] = 0
        others[2][:, v] += 1
    else:
        for each in ("weight", "bias"):
            keys[f"{MLA}.k_rope_proj.{each}"] = a[f"{MLA}.k_rope_proj.{each}"].clone()
            keys[f"{MLA}.k_rope_proj.{each}"][:2] = 0  # one interleaved pair
        for head in range(heads.n_heads):
            others[0][head * heads.d_head + nope + torch.arange(2)] += 1
    names = [f"{MLA}.{each}.weight" for each in ("q_b_proj", "kv_b_proj", "o_proj")]
    return held(a, keys | dict(zip(names, (q, kv, o)))), held(a, keys | dict(zip(names, others)))


@pytest.mark.parametrize("kind", ["silent head", "rank of values", "keys of zeros"])
def test_what_degenerate_heads_of_latent_attention_ignore_is_removed(kind: str) -> None:
    a = mt.weights("deepseek_v3-groups")
    x, model = mt.inputs(a), mt.built("deepseek_v3-groups")
    one, two = degenerate(a, kind)
    reduced = [remove_degeneracies(each) for each in (one, two)]
    assert all(notes for _, notes in reduced)
    outputs = [mt.outputs(held(each), model, x) for each in (one, two, reduced[0][0], reduced[1][0])]
    for each in outputs[1:]:
        assert float((each - outputs[0]).abs().max() / outputs[0].abs().max()) <= EXACT
    for n in a:
        assert float((reduced[0][0][n].double() - reduced[1][0][n].double()).norm()) <= EXACT, n
    if os.environ.get("ISOBASIN_SLOW") == "1":  # half a minute each
        verdict = ib.equivalent(one, held(scramble(two, seed=3).apply(two)))
        assert (verdict.answer, verdict.evidence.kind) == ("same", "larger group"), verdict


def test_matchers_refuse_the_attention_of_latent_keys_where_they_do_not_know_it() -> None:
    a = mt.weights("deepseek_v3-groups")
    with pytest.raises(ib.IsobasinError, match="matcher reference does not know latent attention"):
        ib.align(a, to=a, matcher=ib.ReferenceMatching())
    data = [mt.inputs(a)]
    with pytest.raises(ib.IsobasinError, match="attention scopes are not supported for latent attention"):
        ib.align(a, to=a, matcher=ib.ActivationMatching(data, scope="all-attention"))


def test_two_streams_move_apart() -> None:
    a = mt.weights("whisper-tied")
    moved = scramble(a, seed=1).elements
    assert not torch.equal(moved["enc"].tensors()["index"], moved["dec"].tensors()["index"])
    assert error("whisper-tied", act(a, {"enc": moved["enc"]})) <= EXACT
    assert error("whisper-tied", act(a, {"enc": moved["enc"], "dec": moved["enc"]})) <= EXACT
    # A sign of the encoder's stream, which an activation writes, is no symmetry; that of the decoder's is one.
    turned = step_outside("permutation", a.arch.spaces["enc"].size)
    assert error("whisper-tied", act(a, {"enc": turned})) > SEEN
    assert error("whisper-tied", act(a, {"dec": turned})) <= EXACT


@pytest.mark.parametrize("name", ["whisper-tied", "bart-tied", "mixtral-untied"])
def test_layers_with_different_parts_are_not_compared_with_each_other(name: str) -> None:
    a, b = mt.weights(name), mt.weights(name, seed=1)
    assert ib.distance(a, a, null_samples=2).score > 0.999
    with pytest.raises(ib.IsobasinError, match=r"have different parts .*, without --layers"):
        ib.distance(a, b, layers=True)


@pytest.mark.parametrize("name", ["clip-towers", "siglip-towers"])
def test_models_with_two_towers_are_measured_and_merged(name: str) -> None:
    a, other = mt.weights(name), mt.weights(name, seed=1)
    b = held(scramble(a, seed=4).apply(a))
    assert ib.distance(a, b, null_samples=2).score > 0.999
    assert ib.distance(a, other, null_samples=2).score < 0.1
    assert error(name, held(ib.merge([a, b]).weights)) <= EXACT
    assert error(name, held(ib.merge([a, b], align=False).weights)) > SEEN


def test_two_symmetries_of_siglip_are_not_used() -> None:
    """A constant that the bias of the pooling attention gives to that of the last linear map: the norm between them
    does not see it, and the sum of both branches stays. And a scale of the head of texts, which is normalised."""
    a, head = mt.weights("siglip-towers"), "vision_model.head"
    out, down = f"{head}.attention.out_proj.bias", f"{head}.mlp.fc2.bias"
    constant, vector = torch.tensor(0.7), torch.linspace(-0.7, 0.7, len(a[out]))
    for step, seen in ((constant, False), (vector, True)):
        change = error("siglip-towers", held(a, {out: a[out].double() + step, down: a[down].double() - step}))
        assert change > SEEN if seen else change <= EXACT
    assert error("siglip-towers", held(a, {out: a[out] + constant})) > SEEN
    text = [f"text_model.head.{kind}" for kind in ("weight", "bias")]
    assert error("siglip-towers", held(a, {name: 1.7 * a[name].double() for name in text})) <= EXACT
    assert error("siglip-towers", held(a, {text[0]: 1.7 * a[text[0]]})) > SEEN


def test_activations_need_modules_of_their_own() -> None:
    a = mt.weights("siglip_vision_model-bare")
    inputs = [mt.inputs(a)]
    with pytest.raises(ib.IsobasinError, match=r"heads2: .*without modules of their own.*; match by weights"):
        ib.align(a, to=a, matcher=ib.ActivationMatching(inputs))
    with pytest.raises(ib.IsobasinError, match=r"head.attention.k_proj.weight: .*in one parameter with other tensors"):
        ib.align(a, to=a, matcher=ib.ActivationMatching(inputs, scope="all-attention"))


def test_data_files_are_no_audio(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text")
    a = mt.weights("whisper-tied")
    with pytest.raises(ib.IsobasinError, match="a whisper model reads audio"):
        ib.align(a, to=a, matcher=ib.ActivationMatching(tmp_path / "text.txt"))


# What the derivation of the groups marks as no symmetry, each beside the element of the group that is next to it.
@pytest.mark.parametrize(
    "name", ["gemma2-untied", "gemma3_text-untied", "glm4-untied", "olmo2-untied", "olmo3-untied", "bloom-untied"]
)
def test_a_norm_that_writes_the_stream_keeps_it_from_rotating(name: str) -> None:
    a = mt.weights(name)
    flat, (stream,) = held(normalize(a).apply(a)), a.arch.streams.values()
    assert error(name, act(flat, {stream.name: symmetry(a.arch).groups[stream.name].sample(seed=1)})) <= EXACT
    assert error(name, act(flat, {stream.name: Orthogonal(stream.size).sample(seed=1)})) > SEEN


@pytest.mark.parametrize(
    "name",
    [
        *("qwen3-untied", "gemma3_text-tied", "olmo2-untied", "olmo3-untied", "olmoe-untied", "qwen3_moe-untied"),
        "gemma3-tied",
    ],
)
def test_norms_on_queries_and_keys_leave_no_phases(name: str) -> None:
    """A phase for each rotary pair turns queries and keys against the gains of their norms; a sign does not."""
    a = mt.weights(name)
    heads = next(a.arch.heads())
    still = replace(symmetry(a.arch).groups[heads.name].identity())
    turn = RotaryCommutant(heads.rotary, heads.interleaved).sample(heads.n_kv_heads, seed=1)
    phases = turn.u / turn.u.abs()
    signs = torch.where(phases.real > 0, 1.0, -1.0).to(phases.dtype)
    assert (signs.real < 0).any()
    for factor, seen in ((signs, False), (phases, True)):
        changed = error(name, act(a, {heads.name: replace(still, qk=Phases(factor, heads.interleaved))}))  # type: ignore[type-var]
        assert changed > SEEN if seen else changed <= EXACT


@pytest.mark.parametrize("name", ["bloom-tied", "mpt-tied", "falcon-alibi", "t5-relu", "mt5-gated", "mpnet-masked-lm"])
def test_heads_with_positions_of_their_own_keep_their_places(name: str) -> None:
    """ALiBi has a slope for each head. A table of relative positions that all layers share ties the order of heads:
    with the columns of the table those of all layers may be exchanged at once, and those of one layer may not."""
    a = mt.weights(name)
    fixed = [heads for heads in a.arch.heads() if not heads.permutable and heads.stack != "decoder"]
    order = torch.arange(fixed[0].n_kv_heads).flip(0)
    swapped = {heads.name: replace(symmetry(a.arch).groups[heads.name].identity(), kv=order) for heads in fixed}  # type: ignore[type-var]
    assert len(swapped) == 2
    for heads in swapped:
        assert error(name, act(a, {heads: swapped[heads]})) > SEEN
    moved = act(a, swapped)
    assert error(name, moved) > SEEN
    for table in a.arch.tables:
        if "decoder" not in table:
            assert error(name, held(moved, {table: a[table][:, order]})) <= EXACT


# -- configs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "key", "alias"),
    [
        ("bloom-tied", "n_head", "num_attention_heads"),
        ("bloom-tied", "hidden_size", "n_embed"),
        ("gpt_neo-tied", "num_heads", "num_attention_heads"),
        ("distilbert-masked-lm", "dim", "hidden_size"),
        ("gptj-untied", "n_layer", "num_hidden_layers"),
    ],
)
def test_another_name_of_a_key_is_read(name: str, key: str, alias: str) -> None:
    a = mt.weights(name)
    config = {k: v for k, v in a.config.items() if k != key} | {alias: a.config[key]}
    b = ib.load(mt.built(name).state_dict(), config)
    assert b.arch.spaces == a.arch.spaces
    assert not differing_settings(a, b)


def test_no_description_takes_every_key_for_known() -> None:
    """A key that no family reads may still be read by transformers: it has to stay unknown."""
    for each in mt.MODEL_TYPES:
        config = {**each.config, "model_type": each.family, "architectures": [each.model], "no_such_key": 1}
        assert "no_such_key" not in FAMILIES[each.family].known_keys(config), each.name


def test_known_model_types_are_refused_with_the_reason() -> None:
    for name, reason in REFUSED.items():
        with pytest.raises(ib.IsobasinError, match=re.escape(reason)):
            ib.load({}, {"model_type": name})
    assert not REFUSED.keys() & FAMILIES.keys()
    with pytest.raises(ib.IsobasinError, match=r"expected one of the \d+ that `isobasin families` lists"):
        ib.load({}, {"model_type": "no such type"})
    with pytest.raises(ib.IsobasinError, match=r"lists \(qwen2, .*\?\); for another"):
        ib.load({}, {"model_type": "qwen2_"})


def test_the_post_norm_opt_is_refused_with_the_reason() -> None:
    """OPT 350M, alone of its type: its stream begins without a norm, and its embeddings are projected."""
    opt = mt.weights("opt-tied")
    for key, value, reason in (
        ("do_layer_norm_before", False, r"do_layer_norm_before is false \(OPT 350M\)"),
        ("word_embed_proj_dim", 12, "word_embed_proj_dim is not hidden_size"),
    ):
        with pytest.raises(ib.IsobasinError, match=reason):
            ib.load(mt.built("opt-tied").state_dict(), {**opt.config, key: value})


def test_keys_that_change_what_transformers_computes_count_or_are_refused() -> None:
    bloom, neo = mt.weights("bloom-tied"), mt.weights("gpt_neo-tied")
    with pytest.raises(ib.IsobasinError, match="slow_but_exact with pretraining_tp"):
        ib.load(mt.built("bloom-tied").state_dict(), {**bloom.config, "slow_but_exact": True, "pretraining_tp": 2})
    layers = {**neo.config, "attention_layers": ["global", "global"]}
    assert "attention_layers" in differing_settings(neo, ib.load(mt.built("gpt_neo-tied").state_dict(), layers))


# -- the null space -------------------------------------------------------------------------------------------------

# The configurations of a derivation by hand, with its count of directions; 5 places, 41 words unless said otherwise.
_D8 = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6}
_W = {"vocab_size": 41, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LLAMA = _D8 | _W | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 5}
_LLAMA |= {"vocab_size": 13, "rms_norm_eps": 0.1}
_PAIR = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 6}
_N = _D8 | _W | {"layer_norm_eps": 0.1, "max_position_embeddings": 5}
_G = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_inner": 6, "n_positions": 5, "layer_norm_epsilon": 0.1} | _W
_F = _D8 | _W | {"ffn_hidden_size": 6, "layer_norm_epsilon": 0.1}
_RW = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
_B = {"hidden_size": 8, "n_layer": 1, "n_head": 2, "layer_norm_epsilon": 0.1} | _W
_O = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 6, "word_embed_proj_dim": 8}
_O |= _W | {"max_position_embeddings": 5, "pad_token_id": 1}
_NEO = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 6, "max_position_embeddings": 5}
_NEO |= _W | {"attention_types": [[["global"], 1]], "layer_norm_epsilon": 0.1}
_R = _N | {"pad_token_id": 1, "max_position_embeddings": 7, "type_vocab_size": 1}
_D = {"dim": 8, "hidden_dim": 6, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 5} | _W
_I = _D8 | {"num_hidden_layers": 2, "image_size": 4, "patch_size": 2, "num_labels": 5, "layer_norm_eps": 0.1}
_MOE = _LLAMA | {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 17, "num_experts_per_tok": 2}
_SPARSE = {"num_experts": 4, "moe_intermediate_size": 3}
_T = {"vocab_size": 41, "d_model": 8, "d_kv": 4, "d_ff": 6, "num_layers": 2, "num_heads": 2, "layer_norm_epsilon": 0.1}
_T |= {"relative_attention_num_buckets": 4, "relative_attention_max_distance": 3}
_BA = {"vocab_size": 41, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 5}
_BA |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 6, "decoder_ffn_dim": 6}
_WH = {k: v for k, v in _BA.items() if k != "max_position_embeddings"} | {"pad_token_id": 0}
_WH |= {"num_mel_bins": 3, "max_source_positions": 4, "max_target_positions": 5}
_MODERN = {"num_hidden_layers": 2, "norm_eps": 0.1, "cls_token_id": None, "sep_token_id": None}
_STABLE = {"use_qkv_bias": True, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
_MLA = _D8 | _W | {"intermediate_size": 6, "qk_nope_head_dim": 2, "qk_rope_head_dim": 4, "v_head_dim": 3}
_MLA |= {"kv_lora_rank": 6, "q_lora_rank": 6, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1}
_MLA |= {"moe_intermediate_size": 2, "first_k_dense_replace": 0, "num_key_value_heads": 2, "rms_norm_eps": 0.1}
_TOWER = _N | {"num_hidden_layers": 2, "patch_size": 2}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 100.0}
_U, _V19 = {"tie_word_embeddings": False}, {"tie_word_embeddings": False, "vocab_size": 19}
_L2 = _LLAMA | {"num_hidden_layers": 2, "intermediate_size": 7, "vocab_size": 23}
_GROUPS = {"new_decoder_architecture": True, "num_attention_heads": 4, "num_kv_heads": 2}
DERIVED: Mapping[str, tuple[str, dict[str, Any], int]] = {
    "llama": ("LlamaForCausalLM", _L2, 162),
    "mistral": ("MistralForCausalLM", _L2, 162),
    "qwen2": ("Qwen2ForCausalLM", _L2, 162),
    "qwen2 tied": ("Qwen2ForCausalLM", _L2 | {"head_dim": 2, "tie_word_embeddings": True}, 70),
    "phi3": ("Phi3ForCausalLM", _LLAMA | {"pad_token_id": 0}, 97),
    "whisper": ("WhisperForConditionalGeneration", _WH, 446),
    "gemma tied": ("GemmaForCausalLM", _LLAMA, 61),
    "gemma untied": ("GemmaForCausalLM", _LLAMA | _U, 97),
    "gemma2 tied": ("Gemma2ForCausalLM", _LLAMA, 61),
    "gemma2 untied": ("Gemma2ForCausalLM", _LLAMA | _U, 69),
    "gemma3 tied": ("Gemma3ForCausalLM", _LLAMA, 55),
    "gemma3 untied": ("Gemma3ForCausalLM", _LLAMA | _U, 63),
    "qwen3 untied": ("Qwen3ForCausalLM", _LLAMA, 91),
    "qwen3 tied": ("Qwen3ForCausalLM", _LLAMA | {"tie_word_embeddings": True}, 55),
    "granite": ("GraniteForCausalLM", _LLAMA | _PAIR | _U, 98),
    "smollm3": ("SmolLM3ForCausalLM", _LLAMA | _PAIR | _U | {"num_hidden_layers": 2, "no_rope_layers": [1, 0]}, 184),
    "gptj": ("GPTJForCausalLM", _G | {"rotary_dim": 2}, 212),
    "phi": ("PhiForCausalLM", _N, 244),
    "falcon 7b tied": ("FalconForCausalLM", _F, 50),
    "falcon 7b untied": ("FalconForCausalLM", _F | _U, 128),
    "falcon rw tied": ("FalconForCausalLM", _F | _RW, 158),
    "falcon rw untied": ("FalconForCausalLM", _F | _RW | _U, 236),
    "falcon 40b tied": ("FalconForCausalLM", _F | _GROUPS, 58),
    "falcon 40b untied": ("FalconForCausalLM", _F | _GROUPS | _U, 136),
    "bloom tied": ("BloomForCausalLM", _B, 211),
    "bloom untied": ("BloomForCausalLM", _B | _U, 304),
    "mpt tied": ("MptForCausalLM", _W | {"d_model": 8, "n_layers": 1, "n_heads": 2, "layer_norm_epsilon": 0.1}, 176),
    "opt tied": ("OPTForCausalLM", _O, 185),
    "opt untied": ("OPTForCausalLM", _O | _U, 270),
    "gpt_neo tied": ("GPTNeoForCausalLM", _NEO, 139),
    "gpt_bigcode tied": ("GPTBigCodeForCausalLM", _G, 115),
    "starcoder2 tied": ("Starcoder2ForCausalLM", _D8 | _W | {"num_key_value_heads": 2, "norm_epsilon": 0.1}, 126),
    "starcoder2 untied": (
        "Starcoder2ForCausalLM",
        _D8 | _W | _U | {"num_key_value_heads": 2, "norm_epsilon": 0.1},
        204,
    ),
    "stablelm": ("StableLmForCausalLM", _N | _PAIR | _STABLE, 203),
    "stablelm parallel": ("StableLmForCausalLM", _N | _PAIR | _STABLE | {"use_parallel_residual": True}, 187),
    "cohere tied": ("CohereForCausalLM", _N | _PAIR, 104),
    "cohere untied": ("CohereForCausalLM", _N | _PAIR | _U, 215),
    "stablelm head norms": ("StableLmForCausalLM", _N | _PAIR | _STABLE | {"qk_layernorm": True}, 225),
    "stablelm parallel head norms": (
        "StableLmForCausalLM",
        _N | _PAIR | _STABLE | {"qk_layernorm": True, "use_parallel_residual": True},
        209,
    ),
    "cohere tied head norms": ("CohereForCausalLM", _N | _PAIR | {"use_qk_norm": True}, 128),
    "cohere untied head norms": ("CohereForCausalLM", _N | _PAIR | _U | {"use_qk_norm": True}, 239),
    "nemotron": ("NemotronForCausalLM", _D8 | _W | _PAIR | {"norm_eps": 0.1}, 179),
    "olmo untied": ("OlmoForCausalLM", _D8 | _W | _PAIR, 199),
    "olmo tied": ("OlmoForCausalLM", _D8 | _W | _PAIR | {"tie_word_embeddings": True}, 158),
    "olmo2": ("Olmo2ForCausalLM", _LLAMA | _PAIR | {"vocab_size": 29, "intermediate_size": 5}, 49),
    "olmo3": ("Olmo3ForCausalLM", _LLAMA | {"vocab_size": 29}, 49),
    "mixtral": ("MixtralForCausalLM", _MOE | {"num_local_experts": 4, "intermediate_size": 3}, 92),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _MOE | _SPARSE, 90),
    "qwen3_moe normalised": ("Qwen3MoeForCausalLM", _MOE | _SPARSE | {"norm_topk_prob": True}, 90),
    "qwen2_moe": ("Qwen2MoeForCausalLM", _MOE | _SPARSE | {"shared_expert_intermediate_size": 5}, 97),
    "gpt_oss": (
        "GptOssForCausalLM",
        _MOE | {"num_local_experts": 4, "intermediate_size": 3, "swiglu_limit": 0.8, "rope_parameters": _PLAIN_ROPE},
        81,
    ),
    "deepseek_v2": (
        "DeepseekV2ForCausalLM",
        _MLA | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
        150,
    ),
    "deepseek_v2 lite": ("DeepseekV2ForCausalLM", _MLA | {"q_lora_rank": None}, 129),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _MLA | {"n_group": 4, "topk_group": 2}, 142),
    "deepseek_v3 one group": (
        "DeepseekV3ForCausalLM",
        _MLA | {"n_group": 1, "topk_group": 1, "q_lora_rank": None},
        121,
    ),
    "t5": ("T5ForConditionalGeneration", _T, 502),
    "t5 gated": ("T5ForConditionalGeneration", _T | {"feed_forward_proj": "gated-gelu"}, 502),
    "t5 own head": ("T5ForConditionalGeneration", _T | {"own_head": True}, 538),
    "bart": ("BartForConditionalGeneration", _BA, 463),
    "mbart": ("MBartForConditionalGeneration", _BA, 505),
    "roberta tied": ("RobertaForMaskedLM", _R, 204),
    "roberta untied": ("RobertaForMaskedLM", _R | _V19, 275),
    "distilbert tied": ("DistilBertForMaskedLM", _D, 180),
    "distilbert untied": ("DistilBertForMaskedLM", _D | _V19, 232),
    "dinov2": ("Dinov2ForImageClassification", _I | {"num_hidden_layers": 1, "mlp_ratio": 1}, 266),
    "beit": ("BeitForImageClassification", _I | {"use_relative_position_bias": True}, 398),
    "modernbert": ("ModernBertForMaskedLM", _D8 | _W | _MODERN, 232),
    "modernbert untied": ("ModernBertForMaskedLM", _D8 | _W | _MODERN | _U, 351),
    "nomic_bert": ("NomicBertForMaskedLM", _N | {"num_hidden_layers": 2, "pad_token_id": 0}, 175),
    "mpnet": ("MPNetForMaskedLM", _R | {"num_hidden_layers": 2}, 386),
    "deit": ("DeiTForImageClassificationWithTeacher", _I, 405),
    "siglip": ("SiglipModel", {"text_config": _TOWER | _W, "vision_config": _TOWER | {"image_size": 4}}, 1001),
    "clip": (
        "CLIPModel",
        {"text_config": _TOWER | {"eos_token_id": 2}, "vision_config": _TOWER | {"image_size": 4}, "projection_dim": 4},
        767,
    ),
}
# Directions that are symmetries and not part of the group used here: the scales of squared ReLU units; and, where heads
# without an output bias fill the stream, a constant of the values that becomes a multiple of ones, which no norm sees.
# A classifier of DINOv2 reads a norm twice: rotations (21), gain and shift (16) and the means of its rows (10).
# Where heads without an output bias fill the stream (Nomic BERT), so does what they may add whatever they read: it
# frees the shift of the norm before them (8), which stands on the skip path, and two more directions in each layer.
# An untied word table in front of a norm can leave the sphere of that norm: with eps it then imitates gains, shifts and
# rotations (36 directions in BLOOM, 29 in ModernBERT; they vanish with eps).
UNUSED = {"nomic_bert": 2 * 10, "dinov2": 47, "nemotron": 6 + 1}
UNUSED |= {"bloom untied": 36, "modernbert untied": 29}
# The pooling head of SigLIP sees its probe, queries and keys through one vector for each head (90); its last two biases
# exchange a constant; and texts are normalised, so that their head has a scale.
UNUSED |= {"siglip": 90 + 1 + 1}
# Both projections of CLIP have a scale, as embeddings are normalised. The norm on the embeddings of its images stands
# on the skip path between two streams that may rotate: one curve of its gains, with a rotation of its own, is free. On
# the logits alone the joint space may rotate as well: 767 + 6 = 773 (measured once).
UNUSED |= {"clip": 2 + 1}
UNUSED |= dict.fromkeys((name for name in DERIVED if name.startswith("stablelm")), 1)
# Rows that no input reads are free as a whole, and so is the bias of an untied head that transformers never reads.
UNREAD = {
    "mpnet": 46 + 14,
    "dinov2": 7,
    "beit": 2,
    "bart": 28,
    "mbart": 28,
    "t5": 2,
    "t5 gated": 2,
    "t5 own head": 2,
    "opt tied": 14,
    "opt untied": 14,
    "roberta tied": 14,
    "roberta untied": 14 + 19,
}

# Directions of buffers, which the null space of the parameters does not contain: the constant of a correction bias.
IN_BUFFERS = {"deepseek_v3": 1, "deepseek_v3 one group": 1}


def measure(name: str) -> tuple[Measured, int]:
    """The dimension of the null space of the derivative of all outputs, and of the declared symmetry."""
    kind, config, _ = DERIVED[name]
    case = mt.ModelType(name, "", kind, config)
    model = case.build(seed=3).double()
    weights = ib.load(model)
    for module in model.modules():  # some classes have a small eps of their own
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 0.1
        if type(module).__name__.startswith("Deepseek") and hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.1
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None  # its row would have no gradient
        if type(module).__name__ == "BloomGelu":  # a function of its own, which can not be differentiated twice
            module.forward = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    params = {n: p.detach().clone() for n, p in model.named_parameters()}
    rng = torch.Generator().manual_seed(0)
    x = mt.inputs(weights, n=1)
    n = 20 + int(2 * sum(p.numel() for p in params.values()) / (5 * 8))
    more = {"GptOssForCausalLM": 6, "DeepseekV2ForCausalLM": 2, "DeepseekV3ForCausalLM": 2}  # units seldom reached
    n *= more.get(kind, 3 if kind == "CLIPModel" else 1)  # short embeddings
    if "input_features" in x:
        x = mt.inputs(weights, n=n, length=5)
        x["input_features"] = x["input_features"].double()
    elif "pixel_values" in x:
        texts = "input_ids" in x  # beside images
        m = n if texts else 5 * n
        x = {"pixel_values": torch.randn(m, 3, 4, 4, generator=rng, dtype=torch.float64)}
        x |= {"input_ids": torch.randint(41, (m, 5), generator=rng)} if texts else {}
    else:
        x = {"input_ids": torch.randint(config["vocab_size"], (n, 5), generator=rng)}
        if weights.family.inputs.decoder:
            x["decoder_input_ids"] = torch.randint(config["vocab_size"], (n, 5), generator=rng)
        if kind.startswith("Nomic"):
            x["token_type_ids"] = torch.randint(2, (n, 5), generator=rng)
        if kind.startswith(("Roberta", "MPNet")):
            x["position_ids"] = torch.arange(2, 7).expand(n, -1)

    def function(p: dict[str, Tensor]) -> Tensor:
        with mt.Float64():
            said = torch.func.functional_call(model, p, (), x)
        if "logits_per_image" in said:  # embeddings say the rest
            said["logits_per_image"] = said["logits_per_image"][:, :4]
        return torch.cat([said[k].flatten(1) for k in mt.OUTPUTS if said.get(k) is not None], dim=1)

    return null_space(function, params), symmetry(weights.arch).dim


# Large for what they add to the others.
LONG = ("llama", "mistral", "qwen2", "qwen2 tied", "phi3", "falcon 40b untied", "bloom untied", "modernbert untied")
LONG += ("t5 gated", "t5 own head", "mbart", "qwen3_moe normalised", "falcon rw untied", "roberta untied", "opt untied")
LONG += (
    "gemma untied",
    "gemma2 untied",
    "gemma3 untied",
    "qwen3 tied",
    "falcon 7b untied",
    "starcoder2 untied",
    "bart",
)
LONG += ("siglip", "clip", "deepseek_v2", "deepseek_v3", "deepseek_v3 one group")
LONG += ("distilbert untied", "stablelm parallel", "cohere untied", "granite", "falcon 40b tied")


@pytest.mark.parametrize("name", [n for n in DERIVED if os.environ.get("ISOBASIN_SLOW") == "1" or n not in LONG])
def test_the_null_space_has_the_dimension_of_the_derivation(name: str) -> None:
    measured, declared = measure(name)
    expected = DERIVED[name][2]
    assert measured.dim == expected, measured
    assert measured.gap > 1e4, measured
    assert declared == expected - UNREAD.get(name, 0) - UNUSED.get(name, 0) + IN_BUFFERS.get(name, 0)
