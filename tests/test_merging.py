"""Merging in Python: the arithmetic against a direct computation, alignment, blocks, types, and what is written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

import tiny
from isobasin.alignment.align import align
from isobasin.alignment.matchers import WeightMatching
from isobasin.checkpoint import open_checkpoint
from isobasin.errors import ArchitectureError, CheckpointError, IsobasinError
from isobasin.merging.average import CHUNK, Linear, Slerp, combine
from isobasin.merging.card import ParentCard, escaped, model_card
from isobasin.merging.joint_alignment import align_many
from isobasin.merging.merge import MergeResult, merge
from isobasin.merging.recipe import MergeRecipe
from isobasin.symmetries import symmetry
from isobasin.symmetries.transform import scramble
from isobasin.weights import Weights, load

pytestmark = pytest.mark.hf
LLAMA, TIED = "llama-gqa", "llama-tied"
QUICK = WeightMatching(scope="first-attention", stage2="orthogonal")  # where any alignment will do


def folder(place: Path, name: str = LLAMA, seed: int = 0, dtype: torch.dtype = torch.float32, **options) -> Weights:
    tiny.save(tiny.case(name), place / f"{name}-{seed}", seed=seed, dtype=dtype, **options)
    return load(place / f"{name}-{seed}")


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.dtype.itemsize])


def same(a: Weights, b: Weights) -> bool:
    return set(a) == set(b) and all(torch.equal(bits(a[n]), bits(b[n])) for n in a)


def direct(models: list[Weights], weights: list[float], name: str, *, normalize: bool = True) -> Tensor:
    total = sum(w * m[name].double() for w, m in zip(weights, models))
    return total / sum(weights) if normalize else total


def worst(a: Weights, b: Weights) -> float:
    return max(float((a[n].double() - b[n].double()).norm() / b[n].double().norm()) for n in b)


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    place = tmp_path_factory.mktemp("trio")
    return [folder(place, seed=seed) for seed in range(3)]


@pytest.mark.parametrize(("weights", "normalize"), [([0.7, 0.3], True), ([1.0, 2.0, 5.0], True), ([0.5, -0.25], False)])
def test_linear_is_the_weighted_mean(trio: list[Weights], weights: list[float], normalize: bool) -> None:
    models = trio[: len(weights)]
    found = merge(models, weights=weights, normalize=normalize, align=False).weights
    for name in found:
        expected = direct(models, weights, name, normalize=normalize)
        assert torch.allclose(found[name].double(), expected, rtol=1e-6, atol=1e-6), name
        assert not torch.allclose(found[name].double(), models[0][name].double(), rtol=1e-3, atol=1e-3), name


def test_equal_weights_unless_given_and_a_model_with_itself(trio: list[Weights]) -> None:
    found = merge(trio, align=False).weights
    name = next(iter(found))
    assert torch.allclose(found[name].double(), direct(trio, [1, 1, 1], name), rtol=1e-6, atol=1e-7)
    assert same(merge([trio[0], trio[0]], align=False).weights, trio[0])
    assert not same(merge([trio[0], trio[1]], align=False).weights, trio[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_is_that_of_float32_sums_in_the_order_given(dtype: torch.dtype) -> None:
    """A processor rounds a product and a sum together or one after the other; torch takes what it has."""
    rng = torch.Generator().manual_seed(0)
    parts = [torch.randn(CHUNK + 17, generator=rng).to(dtype) for _ in range(3)]
    weights = (0.2, 0.3, 0.7)
    w = torch.tensor(weights)
    once = twice = torch.zeros(CHUNK + 17)
    for part, each in zip(parts, w):
        once = (once.double() + part.double() * each.double()).float()
        twice = twice + part.float() * each
    linear = Linear(weights).combination(lambda *_: parts, 0, dtype)
    found, finite = combine(linear, parts, dtype, dtype)
    assert finite
    assert any(torch.equal(bits(found), bits((total / w.sum()).to(dtype))) for total in (once, twice))
    turned, _ = combine(linear, parts[::-1], dtype, dtype)
    assert not torch.equal(bits(found), bits(turned))


def test_slerp_keeps_to_the_circle_and_its_ends() -> None:
    x, y = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 3.0])

    def at(t: float, base: int = 0) -> Tensor:
        method = Slerp(t, base)
        return combine(method.combination(lambda a, b: [x[a:b], y[a:b]], 2, x.dtype), [x, y], x.dtype, torch.float32)[0]

    assert torch.allclose(at(0.0), x, atol=1e-6)
    assert torch.allclose(at(1.0), y, atol=1e-6)
    assert torch.allclose(at(0.0, base=1), y, atol=1e-6)
    assert torch.allclose(at(1 / 3), torch.tensor([3 * 0.75**0.5, 1.5]), atol=1e-6)
    assert float(at(0.5).norm()) == pytest.approx(3, abs=1e-5)
    assert float(((x + y) / 2).norm()) == pytest.approx(3 * 0.5**0.5, abs=1e-5)  # the straight line is shorter


def test_slerp_of_collinear_and_zero_tensors_is_a_straight_line() -> None:
    x = torch.tensor([1.0, 2.0, 0.0])
    for y in (2 * x, -x, 0 * x):
        parts = [x, y]
        combination = Slerp(0.25).combination(lambda a, b, parts=parts: [p[a:b] for p in parts], 3, x.dtype)
        expected = 0.75 * x + 0.25 * y
        if float(y.norm()) == 0:  # at a right angle to everything
            expected = x * torch.sin(torch.tensor(0.75 * torch.pi / 2))
        assert torch.allclose(combine(combination, parts, x.dtype, torch.float32)[0], expected, atol=1e-6)


@pytest.mark.parametrize("method", ["linear", "slerp"])
@pytest.mark.parametrize("name", [LLAMA, TIED])
def test_blocks_of_any_size_write_what_whole_tensors_hold(tmp_path: Path, method: str, name: str) -> None:
    models = [folder(tmp_path, name, seed, torch.bfloat16) for seed in range(2)]
    merged = merge(models, weights=[0.6, 0.4], method=method, align=False)
    for number, size in enumerate((600, 1000, 2**23)):
        merged.save(tmp_path / f"out{number}", block_bytes=size, max_shard_size="8KB" if size == 1000 else "5GB")
        found = load(tmp_path / f"out{number}")
        assert same(found, merged.weights)
        assert {found.dtypes[n] for n in found} == {torch.bfloat16}
    assert len(list((tmp_path / "out1").glob("*.safetensors"))) > 3
    assert not same(load(tmp_path / "out0"), models[0])


def test_a_scrambled_copy_comes_back_aligned_and_not_otherwise(trio: list[Weights]) -> None:
    a = trio[0]
    b = scramble(a, scope="all-attention", seed=3).apply(a)
    aligned, naive = merge([a, b], matcher=WeightMatching(scope="all-attention")), merge([a, b], align=False)
    assert worst(aligned.weights, a) < 1e-6
    assert worst(naive.weights, a) > 0.1
    assert aligned.distances[0].before == aligned.distances[0].after == 0
    assert aligned.distances[1].after < 1e-6 < 0.1 < aligned.distances[1].before
    assert aligned.alignments[0] is None
    assert aligned.alignments[1] is not None
    assert naive.distances == naive.alignments == ()
    assert "→" in str(aligned)
    assert "not aligned" in str(naive)


def test_the_reference_is_where_the_result_lies(trio: list[Weights]) -> None:
    a = trio[0]
    b = scramble(a, scope="all-attention", seed=3).apply(a)
    assert worst(merge([a, b], matcher=WeightMatching(scope="all-attention"), to=1).weights, b) < 1e-5
    assert worst(merge([a, b], align=False).weights, b) > 0.1


def test_three_scrambled_copies_meet_at_their_mean_in_the_gauge_of_the_first(trio: list[Weights]) -> None:
    a = trio[0]
    copies = [a, *(scramble(a, scope="all-attention", seed=seed).apply(a) for seed in (3, 4))]
    merged = merge(copies, matcher=WeightMatching(scope="all-attention"), to="mean")
    assert worst(merged.weights, a) < 1e-6
    assert worst(merge(copies, align=False).weights, a) > 0.1
    assert all(d.after < 1e-6 < 0.1 < d.before for d in merged.distances)
    assert merged.rounds == 1  # nothing is left to gain


def noisy(model: Weights, seed: int) -> Weights:
    """Somewhere else on its orbit, and a tenth of noise beside it."""
    rng = torch.Generator().manual_seed(seed)
    moved = scramble(model, scope="first-attention", seed=seed).apply(model)
    tensors = {n: moved[n] * (1 + 0.1 * torch.randn(moved[n].shape, generator=rng)) for n in moved}
    return replace(model, tensors=tensors, checkpoint=None)


def test_the_objective_of_a_common_mean_never_rises(trio: list[Weights]) -> None:
    models = [trio[0], *(noisy(trio[0], seed) for seed in (1, 2))]
    found = align_many(models, matcher=WeightMatching(scope="first-attention"), to="mean", rounds=4)
    assert 2 <= found.rounds <= 4
    assert len(found.history) == found.rounds
    assert all(later <= earlier for earlier, later in zip(found.history, found.history[1:]))
    assert found.history[-1] < found.history[0]
    assert found.transported[0] is models[0]
    spread = sum(
        float((m[n].double() - found.mean[n].double()).square().sum())
        for n in symmetry(trio[0].arch).scoped("first-attention").tensors
        for m in found.transported
    )
    assert spread == pytest.approx(found.history[-1], rel=1e-9)


def test_tensors_outside_the_scope_are_mixed_as_they_are(trio: list[Weights]) -> None:
    aligned, naive = merge(trio[:2], matcher=QUICK), merge(trio[:2], align=False)
    inside = set(symmetry(trio[0].arch).scoped("first-attention").tensors)
    outside = [name for name in trio[0] if name not in inside]
    assert outside
    assert all(torch.equal(aligned.weights[n], naive.weights[n]) for n in outside)
    assert any(not torch.equal(aligned.weights[n], naive.weights[n]) for n in inside)


@pytest.mark.parametrize("name", [TIED, "gpt2-lm-tied", "bert-classifier", "vit-classifier"])
def test_what_is_written_loads_in_transformers(tmp_path: Path, name: str) -> None:
    case = tiny.case(name)
    models = [folder(tmp_path, name, seed) for seed in range(2)]
    merge(models, weights=[0.7, 0.3], matcher=QUICK).save(tmp_path / "out")
    merge(models, weights=[0.7, 0.3], align=False).save(tmp_path / "naive")
    inputs = case.inputs(0)
    expected = tiny.load(tmp_path / f"{name}-0")
    states = [tiny.load(tmp_path / f"{name}-{seed}").state_dict() for seed in range(2)]
    expected.load_state_dict({key: 0.7 * states[0][key] + 0.3 * states[1][key] for key in states[0]})
    said = tiny.logits(tiny.load(tmp_path / "naive"), inputs)
    assert torch.allclose(said, tiny.logits(expected, inputs), atol=1e-5)
    assert not torch.allclose(tiny.logits(tiny.load(tmp_path / "out"), inputs), said, atol=1e-3)


@pytest.mark.parametrize("legacy", [False, True])
def test_models_in_memory_and_in_pickles_are_mixed_the_same(tmp_path: Path, legacy: bool) -> None:
    files = [folder(tmp_path, seed=seed, legacy_bin=legacy) for seed in range(2)]
    memory = [load(*tiny.read(tmp_path / f"{LLAMA}-{seed}")) for seed in range(2)]
    assert same(merge(files, align=False).weights, merge(memory, align=False).weights)
    merge(memory, align=False).save(tmp_path / "out")
    merge(files, align=False).save(tmp_path / "out2")
    assert same(load(tmp_path / "out"), load(tmp_path / "out2"))


def test_types_asked_for_kept_and_combine(tmp_path: Path) -> None:
    half, full = folder(tmp_path, seed=0, dtype=torch.bfloat16), folder(tmp_path, seed=1)
    for models, dtype, expected in (
        ([half, full], None, "float32"),
        ([full, half], "keep", "float32"),
        ([half, half], None, "bfloat16"),
        ([full, full], "float16", "float16"),
        ([half, half], "float32", "float32"),
    ):
        out = tmp_path / f"{expected}-{dtype}-{len(list(tmp_path.iterdir()))}"
        merge(models, dtype=dtype, align=False).save(out)
        assert {str(info.dtype) for info in open_checkpoint(out).infos.values()} == {f"torch.{expected}"}
        assert json.loads((out / "config.json").read_text())["dtype"] == expected
    # As in mergekit, inputs are rounded to the type first.
    found = merge([full, full], weights=[1 / 3, 2 / 3], dtype="bfloat16", align=False).weights
    assert all(torch.equal(found[n], full[n].bfloat16()) for n in found)


def test_companions_come_along_and_the_card_is_ours(tmp_path: Path) -> None:
    models = [folder(tmp_path, seed=seed) for seed in range(2)]
    (tmp_path / f"{LLAMA}-0" / "tokenizer.json").write_text("{}")
    (tmp_path / f"{LLAMA}-0" / "README.md").write_text("theirs")
    (tmp_path / f"{LLAMA}-1" / "vocab.txt").write_text("a")
    merge(models, matcher=QUICK).save(tmp_path / "out")
    merge(models, align=False).save(tmp_path / "other", companions=tmp_path / f"{LLAMA}-1")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert not (tmp_path / "out" / "vocab.txt").exists()
    assert (tmp_path / "other" / "vocab.txt").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "theirs" not in card
    assert "matcher `WeightMatching`" in card
    assert "distance after" in card
    assert "distance after" not in (tmp_path / "other" / "README.md").read_text()


ODD = ["a: b", "*x|y*`", '"q"\n---\n', "```", "ü ☃", "bad\udcff", "{{x}} #", "- - -", "org/name", "<b>"]


@pytest.mark.parametrize("name", ODD)
def test_a_card_is_valid_whatever_models_are_called(name: str) -> None:
    recipe = MergeRecipe(models=(name, "other"), weights=(0.5, 0.5), align=True, scope="s", matcher="m")
    card = model_card(name, recipe, (ParentCard(), ParentCard()), (), 1)
    card.encode("utf-8")
    _, front, body = card.split("---\n", 2)
    assert yaml.safe_load(front)["tags"] == ["merge", "isobasin"]
    assert yaml.safe_load(front)["base_model"] == [n for n in (name, "other") if n in ("org/name", "other")]
    opening = next(line for line in body.splitlines() if line.endswith("`yaml"))
    fence = opening.removesuffix("yaml")
    inside = body.split(f"{opening}\n")[1].split(f"\n{fence}\n")[0]
    assert yaml.safe_load(inside)["models"][0]["model"] == name
    (row,) = [line for line in body.splitlines() if line.startswith("| 0 |")]
    assert len(row.replace("\\|", "").split("|")) == 5
    assert escaped(name).isprintable()


def test_nan_is_named_with_its_tensor_and_file(tmp_path: Path) -> None:
    good = folder(tmp_path)
    tensors, config = tiny.read(tmp_path / f"{LLAMA}-0")
    name = "model.layers.1.mlp.up_proj.weight"
    for value in (float("nan"), float("inf")):
        broken = {k: v.clone() for k, v in tensors.items()}
        broken[name][3, 2] = value
        memory = load(broken, config)
        with pytest.raises(CheckpointError, match=r"up_proj.weight' holds . NaN and . inf.*: found in model 1"):
            merge([good, memory], align=False).weights[name]
    from safetensors.torch import save_file

    save_file(broken, tmp_path / f"{LLAMA}-0" / "model.safetensors")
    other = folder(tmp_path, seed=1)
    with pytest.raises(CheckpointError, match=r"up_proj.weight' holds 0 NaN and 1 inf.*: found in .*llama-gqa-0"):
        merge([other, load(tmp_path / f"{LLAMA}-0")], align=False).save(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [p.name for p in tmp_path.iterdir() if "tmp" in p.name] == []


def test_an_overflow_is_told_apart(tmp_path: Path) -> None:
    models = [folder(tmp_path, seed=seed) for seed in range(2)]
    big = merge(models, weights=[1e5, 1e5], normalize=False, dtype="float16", align=False)
    with pytest.raises(CheckpointError, match="the merge overflows: float16 ends at 65504"):
        big.save(tmp_path / "out")
    large = [replace(m, tensors={n: m[n] * 1e15 for n in m}, checkpoint=None) for m in models]
    with pytest.raises(CheckpointError, match="the merge overflows: choose smaller weights"):
        merge(large, weights=[1e30, 1e30], normalize=False, align=False).save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_tied_copy_that_differs_is_an_error(tmp_path: Path) -> None:
    models = [folder(tmp_path, TIED, seed) for seed in range(2)]
    file = tmp_path / f"{TIED}-1" / "model.safetensors"
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, file)
    merge([models[0], load(file.parent)], align=False).save(tmp_path / "fine")
    save_file(tensors | {"lm_head.weight": embedding + 1}, file)
    with pytest.raises(CheckpointError, match=r"lm_head.weight: config.json ties it to model.embed_tokens.weight"):
        merge([models[0], load(file.parent)], align=False).save(tmp_path / "out")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": [1]}, "1 weights for 2 models"),
        ({"weights": [1, -1]}, "add up to 0"),
        ({"weights": [0, 0], "normalize": False}, "add up to 0"),
        ({"weights": [1, -1], "normalize": False}, "add up to 0"),
        ({"weights": [1, float("nan")]}, "expected an ordinary finite number"),
        ({"method": "ties"}, "'ties' is not one of linear, slerp; for others align first .*, then mergekit"),
        ({"method": "linear", "t": 0.5}, "t belongs to slerp"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
        ({"to": 2}, "align to 2: expected mean, or the number of a model from 0 to 1"),
        ({"to": "median"}, "align to 'median'"),
        ({"to": True}, "align to True"),
        ({"matcher": WeightMatching(), "rounds": 0}, "rounds 0"),
        ({"names": ["a"]}, "1 model to merge|names"),
        ({"to": "mean", "aligner": align}, "align to the mean: what lowers losses need not come nearer"),
    ],
)
def test_choices_that_make_no_sense(trio: list[Weights], options: dict, message: str) -> None:
    with pytest.raises(IsobasinError, match=message):
        merge(trio[:2], **options)


def test_models_that_can_not_be_merged(tmp_path: Path, trio: list[Weights]) -> None:
    with pytest.raises(IsobasinError, match="1 model to merge: expected two or more"):
        merge(trio[:1], align=False)
    with pytest.raises(IsobasinError, match="slerp goes from one model to another, and there are 3"):
        merge(trio, method="slerp", align=False)
    with pytest.raises(ArchitectureError, match="only models of the same architecture"):
        merge([trio[0], folder(tmp_path, "llama-untied")], align=False)


def test_an_input_is_never_overwritten(tmp_path: Path) -> None:
    models = [folder(tmp_path, seed=seed) for seed in range(2)]
    merged: MergeResult = merge(models, align=False)
    for seed in range(2):
        with pytest.raises(CheckpointError, match="is the input"):
            merged.save(tmp_path / f"{LLAMA}-{seed}", force=True)
    merged.save(tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        merged.save(tmp_path / "out")
    merged.save(tmp_path / "out", force=True)
    assert same(load(tmp_path / "out"), merged.weights)
