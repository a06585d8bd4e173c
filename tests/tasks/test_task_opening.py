"""Opening a task: what the models' heads say, what contradicts, and bad text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_subjects import TEXT, WORDS, own, pixels, saved, word_tokenizer, write_idx

import tiny
from isobasin.data import shipped
from isobasin.errors import IsobasinError
from isobasin.tasks import Task, open_task
from isobasin.tasks.task import Request, task_kind
from isobasin.weights import Weights, load

pytestmark = pytest.mark.hf


def text(folder: Path, content: str = TEXT) -> Path:
    (folder / "x.txt").write_text(content, encoding="utf-8")
    return folder / "x.txt"


# -- kinds -----------------------------------------------------------------------------------------------------------

KINDS = {
    "gpt2-lm-tied": "lm",
    "llama-untied": "lm",
    "mistral-gqa": "lm",
    "gpt_neox-tied": "lm",
    "bert-masked-lm-tied": "mlm",
    "bert-pretraining": "mlm",
    "bert-classifier": "text",
    "gpt2-classifier": "text",
    "llama-classifier": "text",
    "vit-classifier": "image",
}


@pytest.mark.parametrize("case", KINDS)
def test_the_head_says_what_is_measured(case: str) -> None:
    model = load(tiny.case(case).build())
    assert task_kind([model]) == task_kind([model, model], KINDS[case]) == KINDS[case]
    other = "text" if KINDS[case] != "text" else "lm"
    with pytest.raises(IsobasinError, match=rf"--task {other}: .* has a head for {KINDS[case]}; give --task"):
        task_kind([model], other)


@pytest.mark.parametrize("case", ["gpt2-bare", "bert-bare", "vit-bare", "bert-tokens", "vit-masked-image"])
def test_a_model_without_a_head_that_is_measured(case: str) -> None:
    with pytest.raises(IsobasinError, match=r"has no head to measure; expected a class that ends in ForCausalLM"):
        task_kind([load(tiny.case(case).build())])


def test_our_own_models() -> None:
    image = own(image_size=6, patch_size=3, n_channels=1, n_classes=2)
    models = {"image": image, "text": own(n_classes=2, causal=True), "lm": own(causal=True), "mlm": own()}
    assert {kind: task_kind([model]) for kind, model in models.items()} == {kind: kind for kind in models}
    with pytest.raises(IsobasinError, match=r"task: .* has lm, .* has mlm; expected models with the same"):
        task_kind([models["lm"], models["mlm"]])
    with pytest.raises(IsobasinError, match=r"--task words: expected one of auto, lm, mlm, seq2seq, text, image"):
        task_kind([image], "words")
    with pytest.raises(IsobasinError, match=r"no model is given"):
        task_kind([])


def test_a_regression_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("0,a\n")
    word_tokenizer(tmp_path, pad_token="[PAD]")
    case = tiny.case("bert-classifier").build()
    case.classifier = torch.nn.Linear(24, 1)
    case.config.num_labels = 1
    model = load(case)
    with pytest.raises(IsobasinError, match=r"a classifier with one class is a regression"):
        open_task(tmp_path / "x.csv", [model], tokenizer=tmp_path)


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"seq_len": 33}, r"--seq-len 33: the model takes at most 32 tokens"),
        ({"seq_len": 0}, r"--seq-len 0: expected a whole number of at least 1"),
        ({"seq_len": 1}, r"--seq-len 1: no room"),
        ({"max_samples": 0}, r"--max-samples 0: expected"),
        ({"batch_size": -1}, r"--batch-size -1: expected"),
        ({"seed": -1}, r"--seed -1: expected"),
    ],
)
def test_numbers_that_can_not_be(options: dict[str, Any], pattern: str, tmp_path: Path) -> None:
    with pytest.raises(IsobasinError, match=pattern):
        open_task(text(tmp_path), [own(causal=True)], **options)
    assert open_task(text(tmp_path), [own(causal=True)]).settings["seq_len"] == 32  # all that it takes
    assert open_task(text(tmp_path), [own(causal=True, n_positions=999)]).settings["seq_len"] == 256


# -- tokenizers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["gpt2-lm-tied", "llama-untied", "gpt_neox-tied"])
def test_text_without_a_tokenizer(case: str, tmp_path: Path) -> None:
    """Of an empty folder transformers makes a GPT-2 tokenizer that knows no word: it must not be used."""
    with pytest.raises(IsobasinError, match=r"no tokenizer that .*; give --tokenizer or a .npy file of token ids"):
        open_task(text(tmp_path), [saved(case, tmp_path / "m")])
    word_tokenizer(tmp_path / "m")
    assert open_task(text(tmp_path), [load(tmp_path / "m")]).n_samples > 1


def test_a_damaged_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(IsobasinError, match=r"--tokenizer .*tokenizer.json: no tokenizer that transformers can load"):
        open_task(text(tmp_path), [own(causal=True)], tokenizer=tmp_path / "tokenizer.json")


def test_our_own_model_with_a_tokenizer_in_its_folder(tmp_path: Path) -> None:
    own(causal=True).save(tmp_path / "m")
    made = word_tokenizer(tmp_path / "m")
    (batch,) = open_task(text(tmp_path, " ".join(WORDS)), [load(tmp_path / "m")])
    assert batch.inputs["input_ids"][0].tolist() == made.convert_tokens_to_ids(WORDS)
    assert batch.n_bytes == len(" ".join(WORDS)) - len(WORDS[0])
    with pytest.raises(IsobasinError, match=r"no tokenizer that transformers can load"):
        open_task(tmp_path / "x.txt", [own(causal=True, d_vocab=100)])  # no room for bytes


def two_models(folder: Path, **second: Any) -> list[Weights]:
    word_tokenizer(folder / "a")
    word_tokenizer(folder / "b", **second)
    return [saved("llama-untied", folder / name) for name in "ab"]


def test_tokenizers_that_disagree(tmp_path: Path) -> None:
    place = text(tmp_path, " ".join(WORDS))
    assert open_task(place, two_models(tmp_path / "1", frame="[CLS] $A")).n_samples == 1  # the same words
    models = two_models(tmp_path / "2", first=6)
    with pytest.raises(IsobasinError, match=r"b: its tokenizer maps words to other ids than that of .*a; expected one"):
        open_task(place, models)
    assert open_task(place, models, tokenizer=tmp_path / "2" / "a").n_samples == 1


def test_a_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "m", words=[*WORDS, *(f"w{i}" for i in range(20))])
    model = saved("llama-untied", tmp_path / "m")  # 30 words
    assert open_task(text(tmp_path, " ".join(WORDS)), [model]).n_samples == 1  # ids beyond are not used
    with pytest.raises(IsobasinError, match=r"x.txt: token ids from \d+ to 3\d, but the vocabulary has 30"):
        open_task(text(tmp_path, "the w19 of a"), [model])


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (np.array([1, 30]), r"token ids from 1 to 30, but the vocabulary has 30"),
        (np.array([-1, 3]), r"token ids from -1 to 3"),
        (np.array([0.5, 1.0]), r"float64 with shape \(2,\); this model expects token ids"),
        (np.array([3]), r"too little text: expected at least two tokens"),
        (np.zeros((0, 3), int), r"holds no inputs"),
        (np.array(["a"]), r"not a plain numpy array of numbers"),
        (np.array([{}], dtype=object), r"not a plain numpy array"),
    ],
)
def test_bad_token_ids(content: np.ndarray, pattern: str, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", content, allow_pickle=True)
    with pytest.raises(IsobasinError, match=pattern):
        open_task(tmp_path / "x.npy", [saved("gpt2-lm-tied", tmp_path / "m")])


def test_a_stream_of_half_a_token(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"abc")
    with pytest.raises(IsobasinError, match=r"x.bin: 3 bytes are no whole number of token ids of 2 bytes"):
        open_task(tmp_path / "x.bin", [own(causal=True)])


# -- bad text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "pattern"),
    [
        (b"", r"x.txt: no text in it"),
        (b" \n\t ", r"x.txt: no text in it"),
        ("Äpfel".encode("latin-1"), r"x.txt: not UTF-8 text"),
        ("Äpfel".encode("utf-16"), r"x.txt: not UTF-8 text"),
        (b"a", r"x.txt: too little text"),
        (None, r"x.txt: no such file or folder"),
    ],
)
def test_bad_text(content: bytes | None, pattern: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "x.txt").write_bytes(content)
    with pytest.raises(IsobasinError, match=pattern) as caught:
        open_task(tmp_path / "x.txt", [own(causal=True)])
    assert str(caught.value).startswith("--data ")
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"\xff")
    with pytest.raises(IsobasinError, match=r"no text in it; expected UTF-8 text, in a folder in files .txt"):
        open_task(tmp_path, [own(causal=True)])


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    model, _ = own(causal=True), text(tmp_path)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(IsobasinError, match=r"x.txt: can not be read \(Permission denied\)"):
        open_task(tmp_path / "x.txt", [model])


# -- label maps ------------------------------------------------------------------------------------------------------


def named(folder: Path, *names: str) -> Weights:
    word_tokenizer(folder, pad_token="[PAD]")
    return saved("bert-classifier", folder, id2label={str(i): name for i, name in enumerate(names)})


def test_models_with_different_label_maps(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("0,the heads\n1,of a model\n")
    a, b = named(tmp_path / "a", *"vwxyz"), named(tmp_path / "b", *"wvxyz")
    plain = named(tmp_path / "c", *(f"LABEL_{i}" for i in range(5)))
    with pytest.raises(IsobasinError, match=r"b: its classes are w, v, x, y…, those of .*a v, w, x, y…; models with"):
        open_task(tmp_path / "x.csv", [a, b])
    assert open_task(tmp_path / "x.csv", [a, plain, a]).n_samples == 2  # LABEL_0 says nothing


# -- what names a task -----------------------------------------------------------------------------------------------


def opened(folder: Path, content: str = TEXT, **options: Any) -> Task:
    folder.mkdir(exist_ok=True)
    return open_task(text(folder, content), [own(causal=True)], **options)


def test_the_fingerprint_names_data_and_settings(tmp_path: Path) -> None:
    first = opened(tmp_path)
    assert opened(tmp_path / "elsewhere").fingerprint == first.fingerprint
    others = [
        opened(tmp_path, TEXT[:-1] + "x"),
        opened(tmp_path, seq_len=16),
        opened(tmp_path, max_samples=3),
        opened(tmp_path, seed=1),
    ]
    assert len({first.fingerprint, *(task.fingerprint for task in others)}) == 5
    assert json.loads(json.dumps(dict(first.settings))) == dict(first.settings)
    lm, mlm = (Request(tmp_path, []).task(kind, 1, {"a": 1}, "x", lambda: iter(())) for kind in ("lm", "mlm"))
    assert lm.fingerprint != mlm.fingerprint


def test_the_fingerprint_names_the_tokenizer(tmp_path: Path) -> None:
    place, found = text(tmp_path, " ".join(WORDS)), []
    for name, first in (("a", 5), ("b", 5), ("c", 6)):
        word_tokenizer(tmp_path / name, first=first)
        found.append(open_task(place, [own(causal=True)], tokenizer=tmp_path / name).fingerprint)
    assert found[0] == found[1] != found[2]


def test_names_for_figures(tmp_path: Path) -> None:
    task = opened(tmp_path)
    assert (task.name, task.kind, task.source) == ("x", "lm", str(tmp_path / "x.txt"))
    assert str(task) == f"x: {task.n_samples} windows of text"
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    write_idx(raw / "t10k-images-idx3-ubyte", pixels(20, 6, 6))
    write_idx(raw / "t10k-labels-idx1-ubyte", np.arange(20, dtype=np.uint8) // 10)
    model = own(image_size=6, patch_size=3, n_channels=1, n_classes=2)
    images = open_task(raw, [model], max_samples=10)
    assert (images.name, images.kind, images.n_samples) == ("mnist", "image", 10)
    found = torch.cat([batch.targets for batch in images])
    assert found.tolist() == sorted(found.tolist())  # in the order of the file
    assert 0 < int(found.sum()) < 10  # of both classes


def test_data_that_ship_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = shipped("digits") / "A"
    task = open_task("digits", model, max_samples=5)
    assert (task.n_samples, task.source) == (5, "digits")
    assert task.fingerprint == open_task(shipped("mnist"), model, max_samples=5).fingerprint
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()  # a folder of that name is what is meant
    with pytest.raises(IsobasinError, match="digits"):
        open_task("digits", model)
