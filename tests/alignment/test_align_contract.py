"""The contract of `align`: what it prints, what it writes, what it leaves alone."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from align_subjects import head_order_back, moved_outputs
from safetensors.torch import save_file

import tiny
from isobasin.alignment import descent, verification
from isobasin.alignment.heads import HeadMatch, match_heads
from isobasin.alignment.matchers import WeightMatching
from isobasin.cli import run
from isobasin.groups import GL
from isobasin.symmetries.attention import AttentionMatrices
from isobasin.symmetries.transform import Transform
from isobasin.symmetries.transform_file import load_transform
from isobasin.weights import load
from refusals import everything

pytestmark = pytest.mark.hf

Answer = Callable[..., dict[str, Any]]
KEYS = {
    "output",
    "distance_before",
    "distance_after",
    "per_layer",
    "head_permutation",
    "kv_head_permutation",
    "seconds",
    "peak_rss_mb",
    "peak_anon_mb",
    "max_output_change",
    "model_output_change",
}
LAYER_KEYS = {
    "layer",
    "space",
    "distance_before",
    "distance_after",
    "converged",
    "rank_deficient_kv_heads",
    "max_output_change",
}
FAMILIES = ("gpt2-lm-tied", "bert-classifier", "vit-no-qkv-bias", "llama-biases", "mistral-gqa", "gpt_neox-half-rotary")


ATTENTION = ("--scope", "all-attention")


@pytest.fixture
def answer(capsys: pytest.CaptureFixture[str]) -> Answer:
    """Run a command with --json: exit code 0, one strict JSON object and nothing else on either stream."""

    def call(*arguments: object) -> dict[str, Any]:
        capsys.readouterr()
        if arguments[0] == "align" and "--scope" not in arguments:  # whole models have a file of their own
            arguments = (*arguments, *ATTENTION)
        code = run([*map(str, arguments), "--json"])
        out, err = capsys.readouterr()
        assert (code, err) == (0, "")
        assert out.count("\n") == 1
        facts = json.loads(out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert isinstance(facts, dict)
        return facts

    return call


def saved(case: str, folder: Path, **options: Any) -> Path:
    tiny.save(tiny.case(case), folder, **options)
    return folder


def weight_files(folder: Path) -> dict[str, bytes | None]:
    return {name: data for name, data in everything(folder).items() if ".safetensors" in name}


def check_same_tensors(found: Path, expected: Path, *, same: bool = True) -> None:
    """Bitwise the same tensors in the same types."""
    a, b = load(found), load(expected)
    assert set(a) == set(b)
    equal = [a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a]
    assert all(equal) == same


# -- what it says and writes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", FAMILIES)
def test_scramble_then_align_gives_the_original_and_reads_only(case: str, tmp_path: Path, answer: Answer) -> None:
    a, b, c = saved(case, tmp_path / "a"), tmp_path / "b", tmp_path / "c"
    answer("scramble", a, "-o", b, "--scope", "all-attention")
    before = {folder: everything(folder) for folder in (a, b)}
    facts = answer("align", b, "--to", a, "-o", c)
    assert {folder: everything(folder) for folder in (a, b)} == before
    assert set(facts) == KEYS
    assert facts["output"] == str(c)
    assert facts["distance_after"] <= 1e-5 < 0.1 < facts["distance_before"]
    assert 0 <= facts["max_output_change"] <= 1e-6
    assert facts["seconds"] > 0
    assert facts["peak_rss_mb"] > facts["peak_anon_mb"] > 1

    sizes = load(a).arch.sizes
    assert [row["layer"] for row in facts["per_layer"]] == list(range(sizes.n_layers))
    for row in facts["per_layer"]:
        assert set(row) == LAYER_KEYS
        assert row["distance_after"] <= 1e-5 < row["distance_before"]
        assert (row["converged"], row["rank_deficient_kv_heads"]) == (True, [])
    for key, n in (("head_permutation", sizes.n_heads), ("kv_head_permutation", sizes.n_kv_heads)):
        assert [sorted(p) for p in facts[key]] == [list(range(n))] * sizes.n_layers

    model = tiny.load(c)
    inputs = tiny.case(case).inputs(0)
    torch.testing.assert_close(tiny.logits(model, inputs), tiny.logits(tiny.load(b), inputs), rtol=0, atol=1e-4)
    assert {p.name for p in c.iterdir()} == {p.name for p in b.iterdir()}


def permuted_heads(folder: Path, kv: list[int], queries: list[list[int]]) -> None:
    """Move the heads of a grouped-query Llama by hand: kv head i is the old `kv[i]`, its queries as listed."""
    tensors, config = tiny.read(folder)
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    order = [kv[i] * group + j for i, row in enumerate(queries) for j in row]
    for name in list(tensors):
        if not name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")):
            continue
        axis, index = (1, order) if "o_proj" in name else (0, order if "q_proj" in name else kv)
        heads = tensors[name].unflatten(axis, (len(index), -1))
        tensors[name] = heads.index_select(axis, torch.tensor(index)).flatten(axis, axis + 1).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_permutation_names_the_head_of_b_that_lands_on_each_head_of_a(
    dtype: torch.dtype, tmp_path: Path, answer: Answer
) -> None:
    a, b, c = (saved("llama-gqa", tmp_path / x, dtype=dtype) for x in ("a", "b", "out"))
    permuted_heads(b, [1, 0], [[1, 0], [0, 1]])  # B's heads are A's 3, 2, 0, 1
    facts = answer("align", b, "--to", a, "-o", c, "--stage2", "none", "--force")
    assert facts["head_permutation"] == [[2, 3, 1, 0]] * 3
    assert facts["kv_head_permutation"] == [[1, 0]] * 3
    assert facts["distance_after"] == 0 < facts["distance_before"]
    check_same_tensors(c, a)  # permutations round nothing, so the type stays
    check_same_tensors(b, a, same=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["gpt2-lm-tied", "llama-biases", "gpt_neox-half-rotary"])
def test_the_same_model_stays_bitwise(case: str, dtype: torch.dtype, tmp_path: Path, answer: Answer) -> None:
    a, b, c = saved(case, tmp_path / "a", dtype=dtype), saved(case, tmp_path / "b", dtype=dtype), tmp_path / "c"
    facts = answer("align", b, "--to", a, "-o", c)
    assert facts["distance_before"] == facts["distance_after"] == facts["max_output_change"] == 0
    assert facts["head_permutation"] == [list(range(4))] * len(facts["per_layer"])
    check_same_tensors(c, b)
    assert load(c).config == load(b).config


def test_where_nothing_improves_b_stays_bitwise(tmp_path: Path, answer: Answer) -> None:
    a = saved("llama-untied", tmp_path / "a", dtype=torch.bfloat16)
    tensors, _ = tiny.read(a)
    near = {n: (t.float() + 0.01 * torch.randn(t.shape, generator=torch.Generator().manual_seed(1))).bfloat16()
            for n, t in tensors.items()}  # fmt: skip
    b = saved("llama-untied", tmp_path / "b", dtype=torch.bfloat16)
    save_file(near, b / "model.safetensors", metadata={"format": "pt"})
    facts = answer("align", b, "--to", a, "-o", tmp_path / "none", "--stage2", "none")
    assert facts["distance_after"] == facts["distance_before"] > 0
    check_same_tensors(tmp_path / "none", b)
    better = answer("align", b, "--to", a, "-o", tmp_path / "full", "--stage2", "full")
    assert better["distance_after"] < better["distance_before"] == facts["distance_before"]
    check_same_tensors(tmp_path / "full", b, same=False)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((case, "auto") for case in FAMILIES), ("gpt2-lm-tied", "bfloat16"), ("mistral-gqa", "float16")],
)
def test_a_saved_transform_gives_bitwise_the_same_folder(case: str, dtype: str, tmp_path: Path, answer: Answer) -> None:
    a, b = saved(case, tmp_path / "a"), saved(case, tmp_path / "b", seed=1)
    t, options = tmp_path / "t.safetensors", ("--dtype", dtype, "--max-shard-size", "20KB")
    facts = answer("align", b, "--to", a, "-o", tmp_path / "c", "--save-transform", t, *options)
    assert facts["transform"] == str(t)
    assert facts["distance_after"] < facts["distance_before"]
    answer("apply", t, b, "-o", tmp_path / "d", *options)
    assert everything(tmp_path / "c") == everything(tmp_path / "d")
    assert len(weight_files(tmp_path / "c")) > 2
    assert weight_files(tmp_path / "c") != weight_files(b)
    assert {p.name for p in tmp_path.iterdir()} == {"a", "b", "c", "d", "t.safetensors"}


def test_types_of_the_output(tmp_path: Path, answer: Answer) -> None:
    a = saved("mistral-gqa", tmp_path / "a", dtype=torch.bfloat16)
    b = saved("mistral-gqa", tmp_path / "b", dtype=torch.bfloat16, seed=1)
    facts, written = {}, {}
    for policy in ("auto", "keep", "bfloat16", "float16", "float32"):
        facts[policy] = answer("align", b, "--to", a, "-o", tmp_path / policy, "--dtype", policy)
        found = load(tmp_path / policy)
        written[policy] = {found[n].dtype for n in found}
        assert found.config["dtype"] == str(found.dtype).removeprefix("torch.")
        scope = [n for n in found if ".self_attn." in n]
        reference, original = load(a), load(b)
        rest = sum((found[n].double() - reference[n].double()).square().sum() for n in scope)
        size = sum(reference[n].double().square().sum() for n in scope)
        assert facts[policy]["distance_after"] == pytest.approx(float(rest / size) ** 0.5, rel=1e-9)  # as written
        assert moved_outputs(found, original, tiny.case("mistral-gqa").inputs(0)) <= 0.2
    wide, narrow = {torch.float32}, {torch.bfloat16}
    assert written == {"auto": wide, "keep": narrow, "bfloat16": narrow, "float16": {torch.float16}, "float32": wide}
    assert facts["bfloat16"]["max_output_change"] > 1e-4 > 1e-6 > facts["auto"]["max_output_change"]
    assert facts["auto"]["distance_after"] < facts["auto"]["distance_before"]


def test_a_narrower_type_is_part_of_both_distances(tmp_path: Path, answer: Answer) -> None:
    """Asked for bfloat16, the same model is as far from itself as its rounding; it is not called nearer or farther."""
    a = saved("llama-untied", tmp_path / "a")
    facts = answer("align", a, "--to", a, "-o", tmp_path / "c", "--dtype", "bfloat16", "--stage2", "none")
    assert 1e-4 < facts["distance_after"] == facts["distance_before"] < 1e-2


# -- choices ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Originals and scrambled copies, to be read only."""
    root = tmp_path_factory.mktemp("pairs")
    for case in ("gpt2-bare", "llama-gqa", "gpt_neox-half-rotary"):
        saved(case, root / f"{case}-a")
        scramble = ["scramble", str(root / f"{case}-a"), "-o", str(root / f"{case}-b"), "--scope", "all-attention"]
        assert run([*scramble, "--save-transform", str(root / f"{case}.safetensors"), "--json"]) == 0
    return root


CHOICES: Mapping[str, tuple[str, ...]] = {
    "complete": ("--head-distance", "complete"),
    "frobenius": ("--head-distance", "frobenius"),
    "singular": ("--head-distance", "singular"),
    "cosine": ("--head-distance", "cosine"),
    "full": ("--stage2", "full"),
    "orthogonal": ("--stage2", "orthogonal"),
    "none": ("--stage2", "none"),
    "verify-model": ("--verify", "model"),
    "verify-none": ("--verify", "none"),
    "reference": ("--matcher", "reference"),
    "reference-orthogonal": ("--matcher", "reference", "--stage2", "orthogonal", "--head-distance", "complete"),
    "first": ("--scope", "first-attention"),
    "seed": ("--seed", "7"),
}


# The recipe's gradient descent goes head by head: two cases show both of its halves.
@pytest.mark.parametrize(
    ("choice", "case"),
    [
        (choice, case)
        for choice in CHOICES
        for case in ("gpt2-bare", "llama-gqa", "gpt_neox-half-rotary")
        if (choice, case) != ("reference", "gpt_neox-half-rotary")
    ],
)
def test_every_choice_keeps_the_function(choice: str, case: str, pairs: Path, tmp_path: Path, answer: Answer) -> None:
    a, b, c = pairs / f"{case}-a", pairs / f"{case}-b", tmp_path / "c"
    facts = answer("align", b, "--to", a, "-o", c, *CHOICES[choice])
    assert facts["distance_after"] < facts["distance_before"]
    assert moved_outputs(load(c), load(b), tiny.case(case).inputs(0)) <= 1e-5
    queries, kv = head_order_back(load_transform(pairs / f"{case}.safetensors"))
    if choice in ("complete", "frobenius", "singular", "cosine", "full", "seed"):
        assert facts["distance_after"] <= 1e-5
    elif choice in ("none", "orthogonal"):
        assert facts["distance_after"] > 0.1
    n = 1 if choice == "first" else len(queries)
    assert (facts["head_permutation"], facts["kv_head_permutation"]) == (
        [list(p) for p in queries[:n]],
        [list(p) for p in kv[:n]],
    )
    assert (facts["max_output_change"] is None) == (choice == "verify-none")


def test_the_choice_of_head_distance_is_used(
    pairs: Path, tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[str] = []

    def spy(a: AttentionMatrices, b: AttentionMatrices, heads: Any, **options: Any) -> HeadMatch:
        used.append(f"{options['distance']} {options['stage2']}")
        return match_heads(a, b, heads, **options)

    monkeypatch.setattr("isobasin.alignment.matchers.match_heads", spy)
    options = ("--head-distance", "cosine", "--stage2", "orthogonal")
    answer("align", pairs / "gpt2-bare-b", "--to", pairs / "gpt2-bare-a", "-o", tmp_path / "c", *options)
    assert used == ["cosine orthogonal"]


def test_two_workers_give_the_numbers_of_one(pairs: Path, tmp_path: Path, answer: Answer) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        np.save(tmp_path / "ids.npy", torch.arange(60).reshape(5, 12).numpy() % 30)
        data = ("--matcher", "activations", "--data", tmp_path / "ids.npy")  # its metric has to reach the workers too
        a, b = pairs / "llama-gqa-a", pairs / "llama-gqa-b"
        one, two = (answer("align", b, "--to", a, "-o", tmp_path / n, "--workers", n, *data) for n in ("1", "2"))
    finally:
        torch.set_num_threads(threads)
    cost = {"output", "seconds", "peak_rss_mb", "peak_anon_mb"}
    assert {k: v for k, v in one.items() if k not in cost} == {k: v for k, v in two.items() if k not in cost}
    assert everything(tmp_path / "1") == everything(tmp_path / "2")
    assert everything(tmp_path / "1") != everything(b)


# -- words and numbers apart -----------------------------------------------------------------------------------------


def test_words_for_a_person(pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*["align", "--scope", "all-attention", "--to"], str(pairs / "llama-gqa-a"), str(pairs / "llama-gqa-b")]
    assert run([*arguments, "-o", str(tmp_path / "c")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert [line.split()[:2] for line in out.splitlines()[:3]] == [["layer", str(i)] for i in range(3)]
    assert str(tmp_path / "c") in out.splitlines()[-1]
    assert run([*arguments, "-o", str(tmp_path / "d"), "--quiet"]) == 0
    assert capsys.readouterr().err == ""


def test_progress_goes_to_standard_error(
    pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    arguments = [*["align", "--scope", "all-attention", "--to"], str(pairs / "llama-gqa-a"), str(pairs / "llama-gqa-b")]
    assert run([*arguments, "-o", str(tmp_path / "c")]) == 0
    out, err = capsys.readouterr()
    assert "aligning layers" in err
    assert "3/3" in err
    assert "aligning layers" not in out
    assert run([*arguments, "-o", str(tmp_path / "d"), "--json"]) == 0
    assert capsys.readouterr().err == ""


# -- an alignment that would change the function ---------------------------------------------------------------------


def outside(matcher: WeightMatching, a: AttentionMatrices, b: AttentionMatrices, heads: Any) -> HeadMatch:
    """An element of GL where only H is allowed: it keeps QKᵀ and changes what the layer computes."""
    found = match_heads(a, b, heads)
    wrong = replace(found.element, qk=GL(heads.d_head).sample(heads.n_kv_heads, seed=1))
    return replace(found, element=wrong)


def report_closer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every candidate seem closer to A than B is and than the one before it, as an effective wrong element would
    be."""
    distances = iter(range(10**6 - 1, 0, -1))
    monkeypatch.setattr(verification, "_squares", lambda *_: (1e6, float(next(distances)), 1.0))


def no_check(*_: Any) -> None:
    """In place of a check that a test takes away."""


@pytest.mark.parametrize("removed", [0, 1, 2])
def test_an_alignment_that_would_change_the_function_is_exit_4_and_no_output(
    removed: int, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three checks, one after the other: membership of the group, the layer's outputs, the whole model's."""
    monkeypatch.setattr(WeightMatching, "match", outside)
    report_closer(monkeypatch)
    if removed:
        monkeypatch.setattr(descent, "check_element", no_check)
        monkeypatch.setattr(Transform, "check_elements", no_check)
    if removed == 2:
        monkeypatch.setattr(verification, "require_unchanged", no_check)
    words = ("not in S2 ≀", "would change what this layer adds", "the moved model's outputs would differ")
    arguments = ["align", str(pairs / "llama-gqa-b"), "--to", str(pairs / "llama-gqa-a"), "-o", str(tmp_path / "c")]
    code = run(
        [*arguments, "--save-transform", str(tmp_path / "t.safetensors"), "--verify", "model", "--quiet", *ATTENTION]
    )
    out, err = capsys.readouterr()
    assert (code, out) == (4, "")
    assert words[removed] in err
    assert err.count("\n") == 1
    assert everything(tmp_path) == {}


def test_without_any_check_the_wrong_element_is_written(
    pairs: Path, tmp_path: Path, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control: the element above does change the function, so something had to catch it."""
    monkeypatch.setattr(WeightMatching, "match", outside)
    report_closer(monkeypatch)
    monkeypatch.setattr(descent, "check_element", no_check)
    monkeypatch.setattr(verification, "require_unchanged", no_check)
    monkeypatch.setattr(Transform, "check_elements", no_check)
    a, b, c = pairs / "llama-gqa-a", pairs / "llama-gqa-b", tmp_path / "c"
    answer("align", b, "--to", a, "-o", c, "--verify", "none")
    assert moved_outputs(load(c), load(b), tiny.case("llama-gqa").inputs(0)) > 1e-3
