"""Pairs for encoder-decoders: the loss of target tokens against plain loops, texts and ids, and what is refused."""

import copy
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from task_subjects import WORDS, word_tokenizer
from torch import Tensor

import isobasin as ib
import model_types
from isobasin.cli import run
from isobasin.path.evaluation import evaluate_path
from isobasin.runtime import module_of
from isobasin.tasks import open_task, unlabeled
from isobasin.tasks.task import task_kind

pytestmark = pytest.mark.hf

TYPES = ("t5-own-head", "mt5-gated", "umt5-relu", "bart-tied", "mbart-tied", "whisper-tied")
SENTENCES = (("the heads of a model", "may be shuffled"), ("nobody sees it", "and turned and"), ("a", "the heads"))


@cache
def pair(name: str) -> tuple[ib.Weights, ib.Weights]:
    """Two models in memory; T5's class does not know a start token."""
    made = [model_types.built(name, seed) for seed in (0, 1)]
    if name.startswith("t5"):
        for model in made:
            model.config.decoder_start_token_id = 4
    a, b = map(ib.load, made)
    return a, b


def rows(name: str) -> list[dict[str, Any]]:
    """Sources and targets of several lengths, none of them padded."""
    rng = torch.Generator().manual_seed(0)
    found: list[dict[str, Any]] = []
    for n, m in ((3, 5), (7, 1), (4, 4), (1, 6), (5, 2)):
        source, target = (torch.randint(3, 30, (k,), generator=rng).tolist() for k in (n, m))
        features = torch.randn(5, 12, generator=rng).tolist()
        audio = name.startswith("whisper")
        found.append({"input_features": features} if audio else {"input_ids": source})
        found[-1]["labels"] = target
    return found


def write(folder: Path, each: list[dict[str, Any]]) -> Path:
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, each)))
    return folder / "pairs.jsonl"


def plain_loss(a: ib.Weights, b: ib.Weights, lam: float, each: list[dict[str, Any]]) -> float:
    """The mean loss over tokens at one point: transformers is given the labels of one pair at a time."""
    module: Any = copy.deepcopy(module_of(a))
    other = module_of(b).state_dict()
    mixed = {k: torch.lerp(v, other[k], lam) if v.is_floating_point() else v for k, v in module.state_dict().items()}
    module.load_state_dict(mixed)
    total, count = 0.0, 0
    for row in each:
        with torch.no_grad():
            loss = module(**{key: torch.tensor([value]) for key, value in row.items()}).loss
        total, count = total + float(loss) * len(row["labels"]), count + len(row["labels"])
    return total / count


@pytest.mark.parametrize("name", TYPES)
def test_the_numbers_are_those_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    a, b = pair(name)
    task = open_task(write(tmp_path, rows(name)), [a, b], batch_size=3)
    assert (task.kind, task_kind([a]), task.n_samples) == ("seq2seq", "seq2seq", 5)
    curve = evaluate_path(a, b, task, n_points=3)
    expected = [plain_loss(a, b, lam, rows(name)) for lam in curve.lambdas]
    assert curve.metrics["loss"] == pytest.approx(expected, abs=2e-6)
    assert len({round(loss, 3) for loss in expected}) == 3
    assert set(curve.metrics) == {"loss", "accuracy", "perplexity"}


def told(folder: Path, models: tuple[ib.Weights, ...], frame: str = "$A [SEP]", **options: Any) -> list[Any]:
    """The batches of the sentences, read by a tokenizer of words."""
    word_tokenizer(folder / "words", frame=frame, words=WORDS, pad_token="[PAD]")
    lines = [{"Source": source, "target": target} for source, target in SENTENCES]
    return list(open_task(write(folder, lines), models, tokenizer=folder / "words", **options))


def test_texts_go_through_the_tokenizer(tmp_path: Path) -> None:
    (batch,) = told(tmp_path, pair("t5-own-head"))
    the, heads, of, a, model, may, be, shuffled = range(5, 13)
    assert batch.targets[0].tolist() == [may, be, shuffled, 2]
    assert batch.inputs["decoder_input_ids"][0].tolist() == [4, may, be, shuffled]  # without the last, behind the start
    assert batch.targets[2].tolist() == [the, heads, 2, -100]
    assert batch.inputs["input_ids"][0].tolist() == [the, heads, of, a, model, 2]
    assert batch.inputs["input_ids"][2].tolist() == [a, 2, 0, 0, 0, 0]
    assert batch.inputs["attention_mask"].sum(1).tolist() == [6, 4, 2]
    (cut,) = told(tmp_path, pair("t5-own-head"), seq_len=3)
    assert cut.inputs["input_ids"][0].tolist() == [the, heads, 2]
    (one,) = told(tmp_path, pair("t5-own-head"), max_samples=1)
    assert len(one) == 1


def test_a_target_ends_with_what_mbart_reads_first(tmp_path: Path) -> None:
    (batch,) = told(tmp_path, pair("mbart-tied"))
    assert batch.inputs["decoder_input_ids"][:, 0].tolist() == [2, 2, 2]


def test_a_start_token_of_the_tokenizer_is_not_predicted(tmp_path: Path) -> None:
    """Whisper's tokenizer puts it before every text."""
    (plain,), (framed,) = (told(tmp_path, pair("bart-tied"), frame=f"{front}$A") for front in ("", "[SEP] "))
    assert framed.targets.equal(plain.targets)
    assert framed.inputs["decoder_input_ids"].equal(plain.inputs["decoder_input_ids"])
    assert framed.inputs["input_ids"].shape[1] == plain.inputs["input_ids"].shape[1] + 1


def test_the_fingerprint_names_data_and_start(tmp_path: Path) -> None:
    a, b = pair("t5-own-head")
    data = write(tmp_path, rows("t5"))
    first = open_task(data, [a, b]).fingerprint
    assert open_task(data, [a, b]).fingerprint == first
    other = ib.load(model_types.built("t5-own-head"))  # the config is that of the model: its start token is set
    moved = {**other.config, "decoder_start_token_id": 5}
    assert open_task(data, [ib.load({k: other[k] for k in other}, moved)]).fingerprint != first
    write(tmp_path, rows("t5")[1:])
    assert open_task(data, [a, b]).fingerprint != first


def test_activations_come_from_pairs_one_by_one(tmp_path: Path) -> None:
    (a, _), data = pair("t5-own-head"), write(tmp_path, rows("t5"))
    batches = list(unlabeled(data, a))
    assert [x["input_ids"][0].tolist() for x in batches] == [row["input_ids"] for row in rows("t5")]
    assert [x["decoder_input_ids"].shape[1] for x in batches] == [len(row["labels"]) for row in rows("t5")]


REFUSED = {
    "columns": (
        [{"source": "a", "label": 1}],
        r"columns label, source; expected one of source, input.* and one of targ",
    ),
    "words": ([{"input_ids": [3], "labels": ["x"]}], r"row 1 has the target \['x'\]; expected a text or a list of tok"),
    "vocabulary": ([{"input_ids": [30], "labels": [1]}], r"token ids from 30 to 30, but the vocabulary has 30"),
    "ignored": ([{"input_ids": [3], "labels": [-100, 3]}], r"token ids from -100 to 3, but the vocabulary"),
    "empty": ([{"input_ids": [3], "labels": [4]}, {"input_ids": [3], "labels": [-100]}], r"row 2 has a target without"),
    "long": ([{"input_ids": [3] * 9, "labels": [4]}], r"row 1 has a source of 9 tokens, --seq-len is 8; cut it"),
    "padded": (
        [{"input_ids": [3, 0], "attention_mask": [1, 0], "labels": [4]}],
        r"row 1 is padded, as attention_mask says; give token ids without padding",
    ),
    "tokenizer": ([{"source": "a", "target": "b"}], r"no tokenizer .*; give --tokenizer, or token ids in columns"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str, tmp_path: Path) -> None:
    each, message = REFUSED[case]
    with pytest.raises(ib.IsobasinError, match=message) as error:
        open_task(write(tmp_path, each), pair("t5-own-head"), seq_len=8)
    assert "\n" not in str(error.value)


def test_other_refusals(tmp_path: Path) -> None:
    t5, whisper, plain = pair("t5-own-head"), pair("whisper-tied"), tmp_path / "x.txt"
    plain.write_text("text")
    with pytest.raises(ib.IsobasinError, match=r"no pairs: an encoder-decoder needs a table"):
        open_task(plain, t5)
    with pytest.raises(ib.IsobasinError, match=r"this model reads audio, .* input_features of 5 × 12 finite numbers"):
        open_task(write(tmp_path, rows("t5")), whisper)
    nameless = {**t5[0].config, "decoder_start_token_id": None}
    with pytest.raises(ib.IsobasinError, match=r"decoder_start_token_id is None, expected a token id from 0 to 29"):
        open_task(write(tmp_path, rows("t5")), [ib.load({k: t5[0][k] for k in t5[0]}, nameless)])
    with pytest.raises(ib.IsobasinError, match=r"T5Model has no head to measure"):
        task_kind([model_types.weights("t5-bare")])


def test_the_command_aligns_and_measures(tmp_path: Path) -> None:
    folders = [model_types.save("mt5-gated", tmp_path / str(seed), seed) for seed in (0, 1)]
    data, out = write(tmp_path, rows("mt5")), tmp_path / "path.json"
    assert run(["path", *map(str, folders), "--data", str(data), "--align", "--points", "3", "-o", str(out)]) == 0
    found = json.loads(out.read_text())["curves"]["A-B"]
    a, b = map(ib.load, folders)
    ends: list[Tensor] = [torch.tensor(plain_loss(a, b, lam, rows("mt5"))) for lam in (0.0, 1.0)]
    for path in ("naive", "aligned"):  # an alignment keeps the function
        assert [found[path]["loss"][i] for i in (0, -1)] == pytest.approx([float(x) for x in ends], abs=1e-5)
    assert found["naive"]["loss"][1] != found["aligned"]["loss"][1]
