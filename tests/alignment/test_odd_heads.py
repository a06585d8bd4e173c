"""Heads that are odd and no mistake: rank-deficient, zero, or equal. Told, finite, and the function stays."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from align_subjects import held, model, moved_outputs, scrambled, worst_tensor
from safetensors.torch import load_file, save_file
from torch import Tensor

import tiny
from isobasin.alignment.align import align
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.reference import ReferenceMatching
from isobasin.alignment.result import Alignment
from isobasin.arch import HeadSpace
from isobasin.cli import run
from isobasin.symmetries.coordinate import face_columns
from isobasin.weights import Weights
from refusals import check_refused, everything

pytestmark = pytest.mark.hf

ODD: Mapping[str, Callable[[Tensor], Tensor]] = {
    "zero": lambda heads: torch.cat([torch.zeros_like(heads[:1]), heads[1:]]),
    "all zero": torch.zeros_like,
    "rank one": lambda heads: torch.cat([_outer(heads[0])[None], heads[1:]]),  # as a file holds it, rounded
    "equal": lambda heads: heads[:1].expand_as(heads),
}


def _outer(head: Tensor) -> Tensor:
    steps = torch.randn(len(head), generator=torch.Generator().manual_seed(3))
    return steps[:, None] * head[:1] if head.dim() == 2 else steps * head[:1]


def with_odd_heads(weights: Weights, kind: str, parts: str) -> Weights:
    """Replace the heads of Q, K, V or O in every layer, biases too."""
    changes: dict[str, Tensor] = {}
    for heads in weights.arch.heads():
        for part in parts:
            face, dual = heads.qk if part in "qk" else heads.vo, part in "qo"
            for name, axis, words, term in weights.arch.carriers(face):
                if term.dual == dual:
                    columns = face_columns(weights.arch, words, face, dual=dual)
                    changes[name] = _replaced(changes.get(name, weights[name]), axis, columns, heads, kind, dual)
    return held(weights, changes)


def _replaced(tensor: Tensor, axis: int, columns: list[int], heads: HeadSpace, kind: str, dual: bool) -> Tensor:
    rows = tensor.clone().movedim(axis, 0)
    count = heads.n_heads if dual else heads.n_kv_heads
    odd = ODD[kind](rows[columns].unflatten(0, (count, heads.d_head)))
    rows[columns] = odd.flatten(0, 1)
    return rows.movedim(0, axis).contiguous()


# gpt2: GL and biases; llama: H, no biases; neox: H, biases inside each head; vit: GL, no biases on Q, K, V.
ODD_HEADS = [
    ("gpt2-bare", "zero", "qkvo"),
    ("gpt2-bare", "rank one", "q"),
    ("gpt2-bare", "rank one", "qkvo"),
    ("gpt2-bare", "all zero", "v"),
    ("llama-bare", "zero", "qkvo"),
    ("llama-bare", "zero", "q"),
    ("llama-bare", "rank one", "qkvo"),
    ("llama-bare", "all zero", "qkvo"),
    ("gpt_neox-full-rotary", "zero", "o"),
    ("gpt_neox-full-rotary", "rank one", "q"),
    ("gpt_neox-half-rotary", "rank one", "q"),
    ("vit-no-qkv-bias", "zero", "q"),
    ("vit-no-qkv-bias", "rank one", "v"),
]


def check_sound(found: Alignment, b: Weights, case: str) -> None:
    """Finite, no farther than before, the same function; with numbers that JSON can hold."""
    assert found.distance_after <= found.distance_before
    for row in found.per_layer:
        assert all(math.isfinite(float(str(row[key]))) for key in ("distance_before", "distance_after"))
    moved = found.transform.apply(b)
    assert all(bool(torch.isfinite(moved[n]).all()) for n in moved)
    assert moved_outputs(moved, b, tiny.case(case).inputs(0)) <= 1e-9


@pytest.mark.parametrize(("case", "kind", "parts"), ODD_HEADS)
def test_rank_deficient_heads_are_told_and_keep_the_function(case: str, kind: str, parts: str) -> None:
    a, b = (with_odd_heads(model(case, seed=s), kind, parts) for s in (0, 1))
    found = align(b, to=a, matcher=WeightMatching(scope="all-attention"))
    expected = set(range(4)) if kind == "all zero" else {0}
    for row in found.per_layer:
        told = row["rank_deficient_kv_heads"]
        assert isinstance(told, list)
        assert expected <= set(told) <= set(range(4))
    if kind != "all zero":  # one odd head does not keep the others from being moved
        assert found.distance_after < 0.95 * found.distance_before
    check_sound(found, b, case)
    again = scrambled(a, "all-attention")
    check_sound(align(again.b, to=a, matcher=WeightMatching(scope="all-attention")), again.b, case)


@pytest.mark.parametrize("case", ["gpt2-bare", "llama-gqa", "gpt_neox-full-rotary", "vit-bare-no-pooler"])
def test_sound_heads_are_not_called_deficient(case: str) -> None:
    for b in (model(case, seed=1), scrambled(model(case), "all-attention").b):
        found = align(b, to=model(case), matcher=WeightMatching(scope="all-attention"))
        assert [row["rank_deficient_kv_heads"] for row in found.per_layer] == [[]] * len(found.per_layer)


@pytest.mark.parametrize("case", ["gpt2-bare", "llama-gqa", "gpt_neox-full-rotary"])
def test_equal_heads_come_back_in_some_order(case: str) -> None:
    a = with_odd_heads(model(case), "equal", "qkvo")
    pair = scrambled(a, "all-attention")
    found = align(pair.b, to=a, matcher=WeightMatching(scope="all-attention"))
    assert worst_tensor(found.transform.apply(pair.b), a) <= 1e-5
    check_sound(found, pair.b, case)


@pytest.mark.parametrize(
    ("case", "kind"), [("llama-bare", "zero"), ("gpt2-bare", "rank one"), ("llama-bare", "all zero")]
)
def test_the_recipe_survives_odd_heads(case: str, kind: str) -> None:
    a, b = (with_odd_heads(model(case, seed=s), kind, "qkvo") for s in (0, 1))
    found = align(b, to=a, matcher=ReferenceMatching(max_steps=30))
    assert all(row["rank_deficient_kv_heads"] for row in found.per_layer)
    check_sound(found, b, case)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_pair_that_holds_next_to_nothing_stays_within_what_a_file_can_carry(
    guarded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its best |u| is ten million: unguarded, such an element is saved and can not be read again."""
    for folder, part in (("a", "k"), ("b", "q")):
        tiny.save(tiny.case("llama-bare"), tmp_path / folder)
        tensors, name = load_file(tmp_path / folder / "model.safetensors"), f"layers.0.self_attn.{part}_proj.weight"
        tensors[name][[0, 3]] *= 1e-7  # the first rotary pair of the first head
        save_file(tensors, tmp_path / folder / "model.safetensors")
    if not guarded:
        monkeypatch.setattr("isobasin.alignment.heads.WIDEST", 1e20)
    keep, b = str(tmp_path / "t.safetensors"), str(tmp_path / "b")
    align_it = ["align", b, "--to", str(tmp_path / "a"), "-o", str(tmp_path / "c"), "--save-transform", keep]
    align_it += ["--scope", "all-attention"]
    assert run([*align_it, "--quiet"]) == 0
    apply_it = ["apply", keep, b, "-o", str(tmp_path / "d"), "--quiet"]
    if guarded:
        assert run(apply_it) == 0
        assert everything(tmp_path / "c") == everything(tmp_path / "d")
    else:
        check_refused(apply_it, r"too badly conditioned", capsys)
