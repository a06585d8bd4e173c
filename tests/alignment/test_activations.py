"""The matcher `activations`: what each layer reads, from any kind of unlabeled input, as the metric."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from align_subjects import moved_outputs, own_inputs, scrambled
from torch import Tensor

import tiny
from isobasin.alignment.activations import reading_roots, second_moments, unlabeled_inputs
from isobasin.cli import run
from isobasin.model import ModelConfig, Transformer
from isobasin.symmetries.attention import attention_matrices
from isobasin.tasks.loader import MAX_TOKENS, unlabeled
from isobasin.views import AsFloat64
from isobasin.weights import Weights, load
from refusals import check_refused, everything

pytestmark = pytest.mark.hf

WORDS = ["the", "heads", "of", "a", "model", "may", "be", "shuffled", "and", "turned", "and", "nobody", "sees", "it"]


def ids(shape: tuple[int, ...], vocabulary: int = tiny.VOCABULARY) -> np.ndarray:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(0)).numpy()


def pair(case: str, root: Path) -> tuple[Path, Path]:
    """An original, and a scrambled copy of it."""
    tiny.save(tiny.case(case), root / "a")
    scrambled(load(root / "a"), "all-attention").b.save(root / "b")
    return root / "a", root / "b"


def give_tokenizer(*folders: Path) -> None:
    """A tokenizer of a few words, as transformers saves it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    known = {word: i for i, word in enumerate(["[UNK]", *dict.fromkeys(WORDS)])}
    plain = Tokenizer(WordLevel(known, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()
    for folder in folders:
        PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]").save_pretrained(folder)


def aligned(a: Path, b: Path, data: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    words = ["align", str(b), "--to", str(a), "-o", str(out), "--scope", "all-attention"]
    code = run([*words, "--matcher", "activations", "--data", str(data), "--json"])
    said, words = capsys.readouterr()
    assert code == 0, words
    facts = json.loads(said)
    assert isinstance(facts, dict)
    return facts


# -- data of every kind ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["gpt2-lm-tied", "bert-classifier", "llama-gqa", "gpt_neox-half-rotary"])
def test_token_ids(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair(case, tmp_path)
    np.save(tmp_path / "ids.npy", ids((40, 12)))
    facts = aligned(a, b, tmp_path / "ids.npy", tmp_path / "c", capsys)
    assert facts["distance_after"] <= 1e-5 < 0.1 < facts["distance_before"]
    assert moved_outputs(load(tmp_path / "c"), load(b), tiny.case(case).inputs(0)) <= 1e-5


@pytest.mark.parametrize("case", ["vit-classifier", "vit-masked-image"])
def test_pixels(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair(case, tmp_path)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).standard_normal((20, 3, tiny.IMAGE, tiny.IMAGE)))
    facts = aligned(a, b, tmp_path / "x.npy", tmp_path / "c", capsys)
    assert facts["distance_after"] <= 1e-5 < 0.1 < facts["distance_before"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_text_through_the_models_own_tokenizer(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = pair("llama-gqa", tmp_path)
    give_tokenizer(a, b)
    data = tmp_path / "data"
    data.mkdir()
    (data / "one.txt").write_text(" ".join(WORDS * 20))
    (data / "two.md").write_text("nobody turned the model")
    (data / "picture.png").write_bytes(b"\xff\xfe no text")
    facts = aligned(a, b, data / "one.txt" if kind == "file" else data, tmp_path / "c", capsys)
    assert facts["distance_after"] <= 1e-5 < 0.1 < facts["distance_before"]


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_our_own_model_reads_bytes(positions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, d_ff=16, d_vocab=256, n_positions=16, positions=positions)
    model = Transformer(config)
    tiny.randomize(model, 1)
    model.save(tmp_path / "a")
    scrambled(load(tmp_path / "a"), "all-attention").b.save(tmp_path / "b")
    (tmp_path / "text").write_text("Bytes are tokens: ÿ, 你好. " * 40, encoding="utf-8")
    facts = aligned(tmp_path / "a", tmp_path / "b", tmp_path / "text", tmp_path / "c", capsys)
    assert facts["distance_after"] <= 1e-5 < 0.1 < facts["distance_before"]
    assert moved_outputs(load(tmp_path / "c"), load(tmp_path / "b"), own_inputs(config)) <= 1e-5


def test_the_metric_does_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.save(tiny.case("llama-gqa"), tmp_path / "a")
    tiny.save(tiny.case("llama-gqa"), tmp_path / "other", seed=1)
    np.save(tmp_path / "ids.npy", ids((40, 12)))
    np.save(tmp_path / "few.npy", ids((40, 12), 2))
    a, b = tmp_path / "a", tmp_path / "other"
    found = [aligned(a, b, tmp_path / f"{n}.npy", tmp_path / n, capsys)["distance_after"] for n in ("ids", "few")]
    words = ["align", str(b), "--to", str(a), "-o", str(tmp_path / "weights"), "--scope", "all-attention", "--json"]
    assert run(words) == 0
    nearest = json.loads(capsys.readouterr().out)["distance_after"]
    assert len({nearest, *found}) == 3
    assert nearest < min(found)  # by weights, nothing is nearer than the matcher of weights


def test_a_classifier_without_padding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Transformers takes one text at a time then."""
    a, b = pair("gpt2-classifier", tmp_path)
    for folder in (a, b):
        config = json.loads((folder / "config.json").read_text()) | {"pad_token_id": None}
        (folder / "config.json").write_text(json.dumps(config))
    np.save(tmp_path / "ids.npy", ids((6, 12)))
    assert aligned(a, b, tmp_path / "ids.npy", tmp_path / "c", capsys)["distance_after"] <= 1e-5


# -- the metric ------------------------------------------------------------------------------------------------------


def first_reads(weights: Weights, rows: Tensor) -> Tensor:
    """What the first layer of a Llama reads, by hand: the normalised embeddings."""
    x = weights["model.embed_tokens.weight"][rows].double()
    x = x / (x.square().mean(-1, keepdim=True) + weights.config["rms_norm_eps"]).sqrt()
    return (x * weights["model.layers.0.input_layernorm.weight"].double()).flatten(0, 1)


@pytest.mark.parametrize("case", ["llama-untied", "llama-biases"])
def test_the_metric_is_the_mean_square_of_what_the_layer_computes(case: str, tmp_path: Path) -> None:
    tiny.save(tiny.case(case), tmp_path / "a")
    tiny.save(tiny.case(case), tmp_path / "b", seed=1)
    rows = ids((30, 12))
    np.save(tmp_path / "ids.npy", rows)
    models = [load(tmp_path / "a"), load(tmp_path / "b")]
    reads = [first_reads(m, torch.from_numpy(rows)) for m in models]
    reads = [torch.cat([y, torch.ones_like(y[:, :1])], -1) for y in reads]
    moment = second_moments(models[0], unlabeled(tmp_path / "ids.npy", models[0]))["heads0"]
    torch.testing.assert_close(moment, reads[0].mT @ reads[0] / len(reads[0]), rtol=1e-5, atol=1e-5)

    inputs = [unlabeled_inputs(tmp_path / "ids.npy", m) for m in models]
    root = reading_roots(*models, *inputs)["heads0"]
    heads = next(iter(models[0].arch.heads()))
    m = attention_matrices(models[0].arch, heads, AsFloat64(models[0]))
    for plain, seen in zip((m.q, m.k, m.v), (m.weighted(root).q, m.weighted(root).k, m.weighted(root).v), strict=True):
        outputs = [torch.einsum("td,hdn->htn", y[:, : plain.shape[1]], plain) for y in reads]
        expected = sum(x.square().sum((1, 2)) / x.shape[1] for x in outputs) / 2
        torch.testing.assert_close(seen.square().sum((1, 2)), expected, rtol=1e-4, atol=0)
        assert not torch.allclose(plain.square().sum((1, 2)), expected, rtol=0.05)
    assert torch.equal(m.weighted(root).o, m.o)


def test_at_most_so_many_tokens_are_read_in_pieces_the_model_can_take(tmp_path: Path) -> None:
    tiny.save(tiny.case("gpt2-bare"), tmp_path / "a")  # 16 positions
    model = load(tmp_path / "a")
    np.save(tmp_path / "long.npy", ids((1, 2 * MAX_TOKENS + 5)))
    batches = [x["input_ids"] for x in unlabeled(tmp_path / "long.npy", model)]
    assert sum(x.numel() for x in batches) == MAX_TOKENS
    assert {x.shape[1] for x in batches} == {16}
    np.save(tmp_path / "short.npy", ids((3, 5)).astype(np.uint16))
    assert [tuple(x["input_ids"].shape) for x in unlabeled(tmp_path / "short.npy", model)] == [(3, 5)]


# -- bad data --------------------------------------------------------------------------------------------------------

ARRAYS: dict[str, tuple[np.ndarray, str]] = {
    "floating ids": (ids((3, 5)).astype(np.float32), r"float32 with shape \(3, 5\); this model expects token ids"),
    "complex": (ids((3, 5)).astype(np.complex64), r"complex64 with shape .* expects token ids"),
    "three axes": (ids((3, 5, 1)), r"int64 with shape \(3, 5, 1\); this model expects token ids"),
    "no columns": (ids((3, 0)), r"shape \(3, 0\); this model expects token ids"),
    "no rows": (ids((0, 5)), r"holds no inputs: expected at least one"),
    "negative": (ids((3, 5)) - 20, r"token ids from -\d+ to \d+, but the vocabulary has 30"),
    "too large": (ids((3, 5), 900), r"token ids from \d+ to \d+, but the vocabulary has 30"),
    "pixels": (np.zeros((2, 3, 6, 6), np.float32), r"float32 with shape \(2, 3, 6, 6\); this model expects token ids"),
    "words": (np.array([["a", "b"]]), r"not a plain numpy array of numbers"),
    "objects": (np.array([[{}]], dtype=object), r"not a plain numpy array"),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return pair("llama-gqa", tmp_path_factory.mktemp("llama"))


def check_bad_data(
    models: tuple[Path, Path], data: Path, pattern: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(tmp_path)
    arguments = ["align", str(models[1]), "--to", str(models[0]), "-o", str(tmp_path / "out"), "--quiet"]
    arguments += ["--scope", "all-attention"]
    check_refused([*arguments, "--matcher", "activations", "--data", str(data)], pattern, capsys)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("name", ARRAYS)
def test_a_bad_array(name: str, llama: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    array, pattern = ARRAYS[name]
    np.save(tmp_path / "x.npy", array, allow_pickle=True)
    check_bad_data(llama, tmp_path / "x.npy", pattern, tmp_path, capsys)


FILES: dict[str, tuple[str, bytes | None, str]] = {
    "missing": ("x.txt", None, r"x.txt: no such file or folder"),
    "empty": ("x.txt", b"", r"x.txt: no text in it"),
    "spaces": ("x.txt", b" \n ", r"x.txt: no text in it"),
    "not utf-8": ("x.txt", b"\xff\xfe\xfa", r"x.txt: not UTF-8 text"),
    "not an array": ("x.npy", b"text", r"x.npy: not a plain numpy array"),
    "empty array": ("x.npy", b"", r"x.npy: not a plain numpy array"),
    "no tokenizer": ("x.txt", b"the heads", r"no tokenizer that transformers can load; give --data as a .npy"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_bad_file(name: str, llama: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, content, pattern = FILES[name]
    if content is not None:
        (tmp_path / place).write_bytes(content)
    check_bad_data(llama, tmp_path / place, pattern, tmp_path, capsys)


def test_a_folder_without_texts(llama: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x.png").write_bytes(b"\xff")
    check_bad_data(llama, tmp_path / "data", r"data: no text in it", tmp_path, capsys)


def test_an_archive_is_no_array(llama: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "x.npz", ids((3, 5)))
    shutil.move(tmp_path / "x.npz", tmp_path / "x.npy")
    check_bad_data(llama, tmp_path / "x.npy", r"not a plain numpy array of numbers", tmp_path, capsys)


IMAGES: dict[str, tuple[np.ndarray, str]] = {
    "another size": (np.zeros((2, 3, 8, 8), np.float32), r"\(2, 3, 8, 8\); .* expects pixels \(images × 3 × 6 × 6"),
    "whole numbers": (np.zeros((2, 3, 6, 6), np.uint8), r"uint8 with shape .* expects pixels"),
    "token ids": (ids((3, 5)), r"int64 with shape \(3, 5\); this model expects pixels"),
    "not finite": (np.full((2, 3, 6, 6), np.nan, np.float32), r"holds NaN or infinite pixels"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*IMAGES, "text"])
def test_bad_pixels(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = pair("vit-bare-no-pooler", tmp_path)
    array, pattern = IMAGES.get(name, (None, r"text, but this model reads images"))
    data = tmp_path / ("x.txt" if array is None else "x.npy")
    data.write_text("words") if array is None else np.save(data, array)
    check_bad_data(models, data, pattern, tmp_path, capsys)
