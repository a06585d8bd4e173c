"""Labelled text: every layout of a table, padded batches, and labels as the model counts them."""

import csv
import json
import sys
from pathlib import Path

import pytest
import torch
from task_subjects import WORDS, own, saved, word_tokenizer

from isobasin.errors import IsobasinError
from isobasin.model import Transformer
from isobasin.runtime import module_of
from isobasin.tasks import open_task
from isobasin.tasks.text import read_table, read_text

pytestmark = pytest.mark.hf

TEXTS = ["the heads of a model", 'may be "shuffled", and\nturned', "nobody sees it"]
LABELS = [1, 0, 1]


def write_csv(file: Path, rows: list[list[object]]) -> Path:
    with file.open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream, delimiter="\t" if file.suffix == ".tsv" else ",").writerows(rows)
    return file


def write(layout: str, folder: Path) -> Path:
    """The three texts in some layout."""
    pairs = list(zip(LABELS, TEXTS))
    if layout == "header":
        return write_csv(folder / "x.csv", [["idx", "Sentence", "label"], *([9, t, n] for n, t in pairs)])
    if layout == "bom":
        file = write_csv(folder / "x.csv", [["label", "text"], *pairs])
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
        return file
    if layout == "no-header":
        return write_csv(folder / "x.csv", [[n, *t.split(" ", 1)] for n, t in pairs])
    if layout == "titled":
        rows = [[n, *t.split(" ", 1)] for n, t in pairs]
        return write_csv(folder / "x.tsv", [["class", "title", "description"], *rows])
    objects = [{"text": t, "label": n} for n, t in pairs]
    if layout == "jsonl":
        (folder / "x.jsonl").write_text("\n".join(map(json.dumps, objects)) + "\n\n")
        return folder / "x.jsonl"
    if layout == "json":
        (folder / "x.json").write_text(json.dumps(objects))
        return folder / "x.json"
    write_csv(folder / "train.csv", [[0, "another"]])
    write_csv(folder / "test.csv", pairs)
    return folder


@pytest.mark.parametrize("layout", ["header", "bom", "no-header", "titled", "jsonl", "json", "folder"])
def test_every_layout_of_a_table(layout: str, tmp_path: Path) -> None:
    found = read_table(write(layout, tmp_path))
    assert list(found.texts) == TEXTS
    assert [int(label) for label in found.labels] == LABELS


def test_parquet(tmp_path: Path) -> None:
    pq = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").table({"text": TEXTS, "label": LABELS})
    pq.write_table(table, tmp_path / "x.parquet")
    assert read_table(tmp_path / "x.parquet").texts == tuple(TEXTS)
    assert read_table(tmp_path / "x.parquet").labels == tuple(LABELS)
    (tmp_path / "bad.parquet").write_bytes(b"PAR1")
    with pytest.raises(IsobasinError, match=r"bad.parquet: not a parquet file"):
        read_table(tmp_path / "bad.parquet")


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "x.parquet").write_bytes(b"PAR1")
    with pytest.raises(IsobasinError, match=r"needs pyarrow: pip install 'isobasin\[study\]'"):
        read_table(tmp_path / "x.parquet")


def test_a_table_is_text_for_a_language_model(tmp_path: Path) -> None:
    assert read_text(write("jsonl", tmp_path)) == "\n".join(TEXTS)
    assert read_text(tmp_path / "x.jsonl", 7) == TEXTS[0][:7]
    (tmp_path / "plain.jsonl").write_text('{"text": "no label"}')
    assert read_text(tmp_path / "plain.jsonl") == "no label"
    with pytest.raises(IsobasinError, match=r"columns text; expected .* and one of label, labels"):
        read_table(tmp_path / "plain.jsonl")


# -- batches ---------------------------------------------------------------------------------------------------------


def test_a_bert_reads_padded_batches(tmp_path: Path) -> None:
    made = word_tokenizer(tmp_path / "m", frame="[CLS] $A [SEP]", pad_token="[PAD]")
    task = open_task(write("header", tmp_path), [saved("bert-classifier", tmp_path / "m", pad_token_id=4)])
    (batch,) = task
    expected = [made(text)["input_ids"] for text in TEXTS]
    ids, mask = batch.inputs["input_ids"], batch.inputs["attention_mask"]
    assert [row[: len(e)].tolist() for row, e in zip(ids, expected)] == expected
    assert mask.tolist() == [[1] * len(e) + [0] * (ids.shape[1] - len(e)) for e in expected]
    assert (ids[mask == 0] == 4).all()
    assert len({len(e) for e in expected}) > 1  # there was something to pad
    assert torch.equal(batch.inputs["token_type_ids"], torch.zeros_like(ids))
    assert batch.targets.tolist() == LABELS


@pytest.mark.parametrize("pad", [None, 4])
def test_a_decoder_without_padding_reads_one_text_at_a_time(pad: int | None, tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "m", pad_token="[PAD]")
    task = open_task(write("header", tmp_path), [saved("gpt2-classifier", tmp_path / "m", pad_token_id=pad)])
    assert [len(batch) for batch in task] == ([1, 1, 1] if pad is None else [3])
    assert all(batch.inputs.keys() == {"input_ids", "attention_mask"} for batch in task)


@pytest.mark.parametrize("case", ["bert-classifier", "gpt2-classifier", "llama-classifier", "own"])
def test_padding_does_not_change_what_a_model_says(case: str, tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "m", frame="[CLS] $A [SEP]", pad_token="[PAD]")
    model = own(n_classes=5) if case == "own" else saved(case, tmp_path / "m", pad_token_id=4)
    module, said = module_of(model), []
    for batch_size in (1, 3):
        task = open_task(write("header", tmp_path), [model], batch_size=batch_size)
        with torch.no_grad():
            said.append(torch.cat([run(module, batch.inputs) for batch in task]))
    torch.testing.assert_close(said[0], said[1], rtol=1e-5, atol=1e-5)
    (batch,) = task
    mask = batch.inputs["attention_mask"]
    words = batch.inputs["input_ids"].where(mask.bool(), 5)
    spoilt = batch.inputs | {"input_ids": words, "attention_mask": torch.ones_like(mask)}
    with torch.no_grad():
        assert (run(module, spoilt) - said[1]).abs().max() > 1e-3  # the padding can be seen, if it is not declared


def run(module: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(module, Transformer):
        return module(*inputs.values())
    return module(**inputs).logits


def test_our_own_model_reads_bytes_with_a_mask(tmp_path: Path) -> None:
    (batch,) = open_task(write("jsonl", tmp_path), [own(n_classes=2)], seq_len=16)
    mask = batch.inputs["attention_mask"]
    assert mask.dtype == torch.bool
    assert [bytes(row[keep].tolist()) for row, keep in zip(batch.inputs["input_ids"], mask)] == [
        text.encode()[:16] for text in TEXTS
    ]


def test_a_part_of_a_sorted_table_stays_balanced_and_in_order(tmp_path: Path) -> None:
    rows: list[list[object]] = [[n, f"{n} {i}"] for n in range(4) for i in range(100)]
    place = write_csv(tmp_path / "x.csv", rows)
    tasks = [open_task(place, [own(n_classes=4)], max_samples=80, seed=seed) for seed in (0, 0, 1)]
    found = [
        [bytes(ids[mask].tolist()).decode() for b in task for ids, mask in zip(*b.inputs.values())] for task in tasks
    ]
    assert found[0] == found[1] != found[2]
    assert tasks[0].fingerprint == tasks[1].fingerprint != tasks[2].fingerprint
    order = [str(text) for _, text in rows]
    assert sorted(found[0], key=order.index) == found[0]
    counts = torch.cat([b.targets for b in tasks[0]]).bincount()
    assert int(counts.sum()) == 80
    assert int(counts.min()) >= 8  # the first 80 rows would all be of class 0


# -- labels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["0", "4", "2"], [0, 4, 2]),
        (["1", "5", "2"], [0, 4, 1]),  # from one
        (["1", "4", "2"], [1, 4, 2]),  # from zero, as the largest is not the number of classes
        (["e", "a", "b"], [4, 0, 1]),
    ],
)
def test_labels(labels: list[str], expected: list[int], tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "m", pad_token="[PAD]")
    names = {str(i): name for i, name in enumerate("abcde")}
    model = saved("bert-classifier", tmp_path / "m", id2label=names, label2id={n: int(i) for i, n in names.items()})
    task = open_task(write_csv(tmp_path / "x.csv", list(zip(labels, TEXTS))), [model])
    assert torch.cat([batch.targets for batch in task]).tolist() == expected


LABELS_OUTSIDE = {
    "too large": (["0", "1", "5"], r"row 3 has the label 5; the model's classes are 0 to 4"),
    "negative": (["0", "-1", "1"], r"row 2 has the label -1"),
    "from one, too many": (["1", "6", "1"], r"row 2 has the label 6"),
    "a name": (["0", "cat", "1"], r"row 1 has the label '0', which the model does not have: its config.json names no"),
}


@pytest.mark.parametrize("name", LABELS_OUTSIDE)
def test_labels_outside_the_classes(name: str, tmp_path: Path) -> None:
    labels, pattern = LABELS_OUTSIDE[name]
    place = write_csv(tmp_path / "x.csv", list(zip(labels, TEXTS)))
    with pytest.raises(IsobasinError, match=pattern):
        open_task(place, [own(n_classes=5)])


def test_a_name_that_the_model_does_not_know(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "m", pad_token="[PAD]")
    model = saved("bert-classifier", tmp_path / "m", id2label={str(i): n for i, n in enumerate("abcde")})
    place = write_csv(tmp_path / "x.csv", [["a", "x"], ["z", "y"]])
    with pytest.raises(IsobasinError, match=r"row 2 has the label 'z', .* its classes are a, b, c, d, e"):
        open_task(place, [model])


# -- bad tables ------------------------------------------------------------------------------------------------------

BAD = {
    "empty": ("x.csv", b"", r"x.csv: no rows in it"),
    "header only": ("x.csv", b"label,text\n", r"x.csv: no rows in it"),
    "no text column": ("x.csv", b"label,words\n1,a\n", r"columns label, words; expected one of text, sentence"),
    "ragged": ("x.csv", b"label,text\n1,a,b\n", r"row 1 has 3 columns, the header 2"),
    "open quote": ("x.csv", b'1,"abc\n2,d\n', r"not a table that Python's csv can read"),
    "nul": ("x.csv", b"1,a\x00b\n,c\n", r"row 2 has the label ''|csv can read"),
    "no text": ("x.csv", b"0,a\n1,\n", r"row 2 has no text"),
    "latin-1": ("x.csv", "0,Äpfel".encode("latin-1"), r"x.csv: not UTF-8 text"),
    "not json": ("x.jsonl", b"{'text'", r"not JSON, one object a line"),
    "numbers": ("x.jsonl", b"3\n4\n", r"expected JSON objects, one a line"),
    "no label": ("x.jsonl", b'{"text": "a", "label": 0}\n{"text": "b"}', r"row 2 has the label None; expected a whole"),
    "half": ("x.jsonl", b'{"text": "a", "label": 0.5}', r"row 1 has the label 0.5; expected a whole number"),
    "plain text": ("x.txt", b"words", r"x.txt: no labels: a text classifier needs a table"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_table(name: str, tmp_path: Path) -> None:
    file, content, pattern = BAD[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(IsobasinError, match=pattern):
        open_task(tmp_path / file, [own(n_classes=2)])


def test_a_folder_with_several_tables(tmp_path: Path) -> None:
    for name in ("a.csv", "b.csv"):
        write_csv(tmp_path / name, [[0, " ".join(WORDS)]])
    with pytest.raises(IsobasinError, match=r"expected one table for the split 'test', found a.csv, b.csv; name the"):
        read_table(tmp_path)
    assert read_table(tmp_path / "a.csv").labels == ("0",)


def test_special_tokens_need_room(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "m", frame="[CLS] $A [SEP]", pad_token="[PAD]")
    model = saved("bert-classifier", tmp_path / "m")
    with pytest.raises(IsobasinError, match=r"--seq-len 2: no room beside the special tokens"):
        open_task(write("header", tmp_path), [model], seq_len=2)
    (batch,) = open_task(tmp_path / "x.csv", [model], seq_len=3)
    assert batch.inputs["input_ids"].shape == (3, 3)
