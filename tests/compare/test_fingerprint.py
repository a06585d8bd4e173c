"""Fingerprints: one for a whole orbit, whatever the rounding; another one for everything else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compared_models import CASES, FULL, cast, held, noisy, own_model, scrambled, stored, tiny_model, with_tensors
from hypothesis import given
from hypothesis import strategies as st

import model_types as mt
from isobasin.compare.fingerprint import (
    COUNT,
    FIRST_COUNT,
    QUANTUM,
    Fingerprint,
    _quantised,
    compare_fingerprints,
    doubts,
    entry_errors,
    fingerprint,
    fingerprint_with_errors,
    invariants,
    type_doubts,
)
from isobasin.errors import IsobasinError
from isobasin.groups import HeadsElement, Matrix
from isobasin.model import ModelConfig
from isobasin.symmetries import symmetry
from isobasin.symmetries.action import Action
from isobasin.symmetries.transform import scramble
from isobasin.weights import Weights, load, untied

COPIES, UNRELATED = (1000, 100) if FULL else (40, 20)
SMALL = {"d_model": 16, "n_layers": 2, "n_heads": 4, "d_head": 4, "d_ff": 12, "d_vocab": 20, "n_positions": 8}


def small(seed: int = 0, **switches: object) -> Weights:
    return own_model(
        ModelConfig(**{**SMALL, "positions": "rope", "norm": "rms", "feed_forward": "swiglu", **switches}),
        seed,
        torch.float64,
    )


@pytest.mark.slow
def test_scrambled_copies_of_one_model_compare_equal_and_unrelated_models_do_not() -> None:
    weights = small()
    mine = fingerprint(weights)
    copies = [fingerprint(cast(scrambled(weights, seed), torch.float32)) for seed in range(COPIES)]
    assert all(mine.matches(copy) for copy in copies)
    unrelated = [mine, *(fingerprint(small(seed)) for seed in range(1, UNRELATED))]
    pairs = [(x, y) for k, x in enumerate(unrelated) for y in unrelated[:k]]
    assert not any(x.matches(y) for x, y in pairs)
    assert min(max(x.steps(y)) for x, y in pairs) > 20


@pytest.mark.hf
@pytest.mark.parametrize("name", CASES)
def test_every_family_keeps_its_fingerprint_when_moved_or_cast(name: str) -> None:
    weights = tiny_model(name)
    mine, exact = fingerprint(weights), invariants(weights)
    copy = scrambled(weights)
    assert float((invariants(copy) - exact).abs().max()) < 1e-9
    assert float((invariants(cast(copy, torch.float32)) - exact).abs().max()) < 1e-4 * QUANTUM
    assert mine.matches(fingerprint(cast(copy, torch.bfloat16)))
    assert mine.matches(fingerprint(cast(weights, torch.float16)))
    assert not mine.matches(fingerprint(tiny_model(name, 1)))
    assert not mine.matches(fingerprint(scrambled(noisy(weights, 0.1))))


@pytest.mark.hf
@pytest.mark.parametrize("name", ["gpt2-lm-untied", "bert-masked-lm-untied", "llama-biases", "gpt_neox-sequential"])
def test_every_tensor_is_seen_unless_the_function_does_not_see_it(name: str) -> None:
    weights, other = tiny_model(name), tiny_model(name, 1)
    mine = fingerprint(weights)
    for tensor, pattern in weights.arch.tensors.items():
        if not pattern.buffer:
            changed = fingerprint(held(weights, {tensor: other[tensor]}))
            assert mine.matches(changed) == (tensor in unseen(name)), tensor


def unseen(name: str) -> set[str]:
    """Key biases without rotary positions stand alone in BERT; elsewhere they are fused with others, or matter."""
    return {f"bert.encoder.layer.{i}.attention.self.key.bias" for i in range(2)} if name.startswith("bert") else set()


def test_a_factor_that_rotary_positions_do_not_allow_is_seen() -> None:
    """Q → Q g⁻¹, K → K gᵀ leaves Q Kᵀ as it is, but not what the layer computes at other offsets."""
    weights = small()
    rng = torch.Generator().manual_seed(0)
    identity = symmetry(weights.arch).groups["heads0"].identity()
    assert isinstance(identity, HeadsElement)
    factors = torch.eye(4) + 0.5 * torch.randn(4, 4, 4, generator=rng, dtype=torch.float64)
    outside = replace(identity, qk=Matrix(factors))
    action = Action(weights.arch, {"heads0": outside})
    names = [name for name in weights if "blocks.0.attn" in name]
    moved = held(weights, {name: action.tensor(name, weights[name]) for name in names})
    mine = fingerprint(weights)
    assert not mine.matches(fingerprint(moved))
    plain = small(positions="none")
    allowed = held(plain, {name: action.tensor(name, plain[name]) for name in names})
    assert fingerprint(plain).matches(fingerprint(allowed))


@pytest.mark.parametrize(("positions", "same"), [("alibi", False), ("none", True)])
def test_swapped_heads_are_seen_where_each_has_a_slope(positions: str, same: bool) -> None:
    weights = small(positions=positions)
    swap = torch.tensor([1, 0, 2, 3])
    names = [name for name in weights if "blocks.0.attn" in name and not name.endswith("attn.o.bias")]
    changes = {name: _swapped(weights[name], swap, axis=1 if ".o." in name else 0) for name in names}
    assert fingerprint(weights).matches(fingerprint(held(weights, changes))) == same


def _swapped(tensor: torch.Tensor, order: torch.Tensor, *, axis: int) -> torch.Tensor:
    return tensor.unflatten(axis, (4, -1)).index_select(axis, order).flatten(axis, axis + 1)


def test_the_constant_of_a_head_without_a_bias_does_not_change_with_the_sign_of_the_stream() -> None:
    weights = small(norm="layer", positions="learned", feed_forward="gelu", post_norm=True, norm_eps=1e-3)
    mine = invariants(weights)
    for seed in range(4):  # half of the copies have the other sign
        assert float((invariants(scrambled(weights, seed)) - mine).abs().max()) < 1e-9
    along_ones = weights["head.weight"] + torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None] / 2
    assert not fingerprint(weights).matches(fingerprint(held(weights, {"head.weight": along_ones})))


def test_layers_that_write_nothing_but_rounding_count_as_zero() -> None:
    weights = small(norm="layer", positions="none", feed_forward="gelu", bias=True)
    empty = {f"blocks.0.attn.{x}.weight": torch.zeros_like(weights[f"blocks.0.attn.{x}.weight"]) for x in "qkv"}
    nothing = held(weights, empty)
    rounding = held(weights, {n: t + 1e-18 * torch.randn_like(t) for n, t in empty.items()})
    assert float((invariants(rounding) - invariants(nothing)).abs().max()) < 1e-9
    assert not fingerprint(nothing).matches(fingerprint(weights))


def test_entries_that_rounding_may_change_are_undecided() -> None:
    mine = fingerprint(small())
    apart = replace(mine, entries=(mine.entries[0] + 3, *mine.entries[1:]))
    safe, unsafe = [0.9] * COUNT, [1.1] + [0.9] * (COUNT - 1)
    assert compare_fingerprints(mine, mine, safe).equal is True
    assert compare_fingerprints(mine, apart, safe).equal is False
    assert compare_fingerprints(mine, apart, unsafe).equal is None
    further = replace(mine, entries=(mine.entries[0] + 9, *mine.entries[1:]))
    assert compare_fingerprints(mine, further, unsafe).equal is False
    assert [doubt.space for doubt in doubts(unsafe)] == ["ends"]
    assert not doubts(safe)


def test_the_errors_of_entries_grow_with_the_rounding_of_the_file() -> None:
    weights = small()
    exact, rounded = entry_errors(weights), entry_errors(stored(weights, torch.bfloat16))
    assert max(exact) < 1e-9
    assert 1e-3 < max(rounded) < 1


def test_layers_that_change_places_are_seen() -> None:
    weights = small()
    first = [name for name in weights if name.startswith("blocks.0.")]
    swap = {name: name.replace("blocks.0.", "blocks.1.") for name in first}
    swap |= {second: name for name, second in swap.items()}
    assert not fingerprint(weights).matches(fingerprint(held(weights, {n: weights[m] for n, m in swap.items()})))


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_fresh_model_of_zero_biases_and_unit_gains_keeps_its_fingerprint(model: str) -> None:
    from isobasin.model import Transformer
    from isobasin.weights import load

    config = ModelConfig.preset(model, **{**SMALL, "bias": True})
    module = Transformer(config, seed=0)
    weights = load(module.state_dict(), config.to_dict())
    mine = fingerprint(weights)
    for dtype in (torch.float32, torch.bfloat16):
        assert mine.matches(fingerprint(cast(scrambled(weights), dtype)))
    assert not mine.matches(fingerprint(load(Transformer(config, seed=1).state_dict(), config.to_dict())))


@given(st.lists(st.integers(-2048, 2047), min_size=COUNT, max_size=COUNT))
def test_a_string_comes_back(entries: list[int]) -> None:
    found = Fingerprint("llama", "0123abcd", tuple(entries))
    assert Fingerprint.read(f"  {found}\n") == found
    assert found.matches(found)
    further = replace(found, entries=(entries[0] + (2 if entries[0] < 0 else -2), *entries[1:]))
    near = replace(found, entries=(entries[0] + (1 if entries[0] < 0 else -1), *entries[1:]))
    assert found.matches(near)
    assert not found.matches(further)
    assert not found.matches(replace(found, digest="0123abce"))


@given(st.floats(-50, 50), st.floats(-1, 1))
def test_numbers_within_a_quantum_are_never_two_apart(x: float, step: float) -> None:
    assert abs(round(x / QUANTUM) - round((x + step * QUANTUM) / QUANTUM)) <= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "is no fingerprint, expected"),
        ("ib0.llama.0123abcd.AAAA", "is no fingerprint, expected"),
        ("ib1.llama.0123abcd.AAAA", f"found 4 characters of entries, expected {2 * FIRST_COUNT}"),
        ("ib2.llama.0123abcd.AAAA", f"found 4 characters of entries, expected {2 * COUNT}"),
        ("ib2.llama.0123abcd." + "!!" * COUNT, "letters, digits"),
    ],
)
def test_what_is_no_fingerprint_is_refused(text: str, message: str) -> None:
    with pytest.raises(IsobasinError, match=message):
        Fingerprint.read(text)


def test_a_fingerprint_of_the_first_version_is_compared_on_the_entries_it_has() -> None:
    first, second = Fingerprint("llama", "0123abcd", (0,) * FIRST_COUNT), Fingerprint("llama", "0123abcd", (0,) * COUNT)
    assert str(first).startswith("ib1.")
    assert str(second).startswith("ib2.")
    assert Fingerprint.read(str(first)) == first
    assert first.matches(second)
    assert compare_fingerprints(first, second, [9.0] * COUNT).equal
    assert not first.matches(replace(second, entries=(2, *second.entries[1:])))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("llama-tied", ("gate_proj", "up_proj")),
        ("llama-tied", ("gate_proj", "down_proj")),
        ("t5-relu", (".wi.", ".wo.")),
        ("mixtral-untied", ("w1", "w3")),
    ],
)
def test_two_signs_in_every_unit_are_seen(name: str, parts: tuple[str, ...]) -> None:
    import model_types as mt

    a = tiny_model(name) if name.startswith("llama") else mt.weights(name)
    changes = {n: -a[n] for n in a if any(part in n for part in parts)}
    assert changes
    assert not fingerprint(a).matches(fingerprint(with_tensors(a, changes)))


def type_model(name: str, seed: int = 0) -> Weights:
    model = mt.case(name).build(seed=seed)
    return load(model, model.config.to_dict() | {"architectures": [type(model).__name__]})


@pytest.mark.hf
def test_copies_of_a_model_with_outliers_are_not_called_different() -> None:
    """A shift of 3e3 among numbers of one: bfloat16 copies lose what it was mixed with."""
    model = type_model("gpt_neo-untied")
    name = next(n for n in model if n.endswith("h.0.ln_1.bias"))
    large = stored(held(model, {name: model[name] * 1e4}), torch.bfloat16)
    mine, errors = fingerprint_with_errors(large)
    assert doubts(errors)
    for seed in range(4):
        copy = fingerprint(stored(scrambled(large, seed + 10), torch.bfloat16))
        assert compare_fingerprints(mine, copy, errors).equal is not False
    plain, errors = fingerprint_with_errors(stored(model, torch.bfloat16))
    assert not doubts(errors)
    other = stored(type_model("gpt_neo-untied", 1), torch.bfloat16)
    assert compare_fingerprints(plain, fingerprint(other), errors).equal is False


@pytest.mark.hf
def test_a_type_of_the_config_that_does_not_hold_the_weights_is_in_doubt() -> None:
    model = tiny_model("llama-gqa")
    named = replace(model, config={**model.config, "dtype": "float16"})
    assert not type_doubts(named)
    name = next(n for n in model if n.endswith("up_proj.weight"))
    large = held(named, {name: named[name] * 1e6})
    (doubt,) = type_doubts(large)
    assert "float16" in doubt.reason
    assert not type_doubts(replace(large, config={**model.config, "dtype": "bfloat16"}))


@pytest.mark.hf
@pytest.mark.parametrize("name", ["llama-tied", "bert-masked-lm-tied"])
def test_a_tied_model_has_the_fingerprint_of_its_copy_with_a_head_of_its_own(name: str) -> None:
    tied = tiny_model(name)
    own, mine = untied(tied), fingerprint(tied)
    assert mine.matches(fingerprint(scrambled(own)))
    assert mine.matches(fingerprint(cast(scrambled(tied), torch.bfloat16)))
    assert not mine.matches(fingerprint(untied(tiny_model(name, 1))))
    head = next(n for n in own if n in tied.arch.aliases and own[n].ndim == 2)
    changed = held(own, {head: own[head] * (1 + (torch.arange(len(own[head])) % 3 == 0)[:, None])})
    assert not mine.matches(fingerprint(changed))


@pytest.mark.hf
def test_a_tied_fingerprint_of_an_older_version_is_compared_with_the_model_or_refused() -> None:
    tied = tiny_model("llama-tied")
    old = Fingerprint.read(str(_quantised(tied, invariants(tied))))
    assert old.digest != fingerprint(tied).digest
    assert old.matches(scrambled(tied))
    assert not old.matches(tiny_model("llama-tied", 1))
    for other in (fingerprint(tied), fingerprint(untied(tied)), untied(tied)):
        with pytest.raises(IsobasinError, match=r"made before version 0\.2 of one whose head is tied"):
            old.matches(other)


@pytest.mark.hf
def test_matches_takes_a_model_a_folder_or_a_string(tmp_path: Path) -> None:
    model = tiny_model("llama-gqa")
    mine = fingerprint(model)
    model.save(tmp_path / "m")
    for other in (model, tmp_path / "m", str(tmp_path / "m"), str(mine)):
        assert mine.matches(other)
    assert not mine.matches(tiny_model("llama-gqa", 1))


def test_entries_that_a_scramble_and_rounding_to_bfloat16_change_are_uncertain(tmp_path: Path) -> None:
    """A post-norm model with N(0, 1) parameters, whose rounding this scramble makes larger: not `different`."""
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "vocab_size": 96, "max_position_embeddings": 64}
    model = DistilBertForMaskedLM(DistilBertConfig(**sizes))
    rng = torch.Generator().manual_seed(373_111)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng))
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(tmp_path / "a")
    a = load(tmp_path / "a")
    scramble(a, seed=322_249).apply(a).save(tmp_path / "b", dtype="bfloat16")
    found, other = (fingerprint_with_errors(tmp_path / name) for name in "ab")
    errors = [max(pair) for pair in zip(found[1], other[1])]
    assert compare_fingerprints(found[0], other[0]).equal is False
    assert compare_fingerprints(found[0], other[0], errors).equal is None
