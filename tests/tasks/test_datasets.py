"""Data by name and by path: the standard layouts, the splits, the tokens, and one line for what is not there."""

import csv
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from isobasin.data import shipped
from isobasin.errors import IsobasinError
from isobasin.tasks import read_images, scaled
from isobasin.tasks.datasets import KNOWN, cut, locate, open_dataset


def table(file: Path, rows: list[list[object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)


def picture(file: Path, size: tuple[int, int], shade: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((*size, 3), shade, dtype=np.uint8)).save(file)


def test_shipped_pictures_are_the_bytes_that_tasks_read() -> None:
    digits = open_dataset("digits", None)
    batch = next(iter(digits.task("train", batch_size=100)))
    images = read_images(shipped("mnist"), "train")
    assert torch.equal(batch.inputs["pixel_values"], scaled(np.asarray(images.pixels)[:100]))
    assert batch.targets.tolist() == images.labels[:100].tolist()
    assert digits.train.inputs.dtype == torch.uint8
    assert (digits.kind, digits.n_classes, digits.image, digits.pad) == ("image", 10, (1, 28, 28), None)


def test_a_task_holds_all_or_a_random_part_in_its_order() -> None:
    digits = open_dataset("digits", None)
    assert sum(len(batch) for batch in digits.task()) == 2000
    some, again, other = (digits.task(samples=70, seed=seed) for seed in (0, 0, 1))
    classes = [torch.cat([batch.targets for batch in task]).tolist() for task in (some, again, other)]
    assert classes[0] == classes[1] != classes[2]
    assert (some.n_samples, some.fingerprint == again.fingerprint) == (70, True)
    assert other.fingerprint != some.fingerprint
    with pytest.raises(IsobasinError, match="no split 'valid'"):
        digits.task("valid")


def test_a_long_text_is_cut_and_every_byte_but_the_first_is_predicted() -> None:
    text = shipped("shakespeare").read_bytes()
    data = open_dataset("shakespeare", None, sequence=100)
    assert data.valid is not None
    assert torch.cat([data.train.inputs, data.valid.inputs, data.test.inputs]).numpy().tobytes() == text
    batches = list(data.task())
    held = data.test.inputs.long()
    seen = torch.cat([batch.targets.flatten() for batch in batches])
    assert torch.equal(seen, held[1 : 1 + len(seen)])
    assert len(held) - len(seen) <= 100
    assert sum(batch.n_bytes or 0 for batch in batches) == len(seen)
    assert torch.equal(batches[0].inputs["input_ids"][0], held[:100])


@pytest.mark.parametrize(
    ("length", "enwik8", "test"), [(1000, False, 50), (5_000_000, True, 1_000_000), (5_000_000, False, 250_000)]
)
def test_an_enwik8_that_is_not_whole_ends_in_a_megabyte_of_test(length: int, enwik8: bool, test: int) -> None:
    parts = cut(bytes(length), enwik8=enwik8)
    assert [len(parts.train), len(parts.valid), len(parts.test)] == [length - 2 * test, test, test]


def test_enwik8_is_found_under_the_root_by_its_layout(tmp_path: Path) -> None:
    (tmp_path / "enwik8").write_bytes(b"abc " * 1_250_000)
    whole = open_dataset("enwik8", tmp_path, sequence=64)
    assert (len(whole.train), len(whole.test)) == (3_000_000, 1_000_000)
    assert list(whole.facts["files"]) == ["enwik8"]


def test_a_text_with_its_own_parts_is_not_cut(tmp_path: Path) -> None:
    for part, words in (("train", "aaaa "), ("valid", "bbb "), ("test", "cc ")):
        (tmp_path / "wikitext-103").mkdir(exist_ok=True)
        (tmp_path / "wikitext-103" / f"wiki.{part}.tokens").write_text(words * 50)
    data = open_dataset("wikitext-103", tmp_path, sequence=16)
    assert data.valid is not None
    assert [len(part.inputs) for part in (data.train, data.valid, data.test)] == [250, 200, 150]
    (tmp_path / "wikitext-103" / "wiki.train.tokens").unlink()
    with pytest.raises(IsobasinError, match=r"expected text files for training and for tests"):
        open_dataset("wikitext-103", tmp_path, sequence=17)


def test_labelled_tables_of_every_layout(tmp_path: Path) -> None:
    rows = [[1, "", "stocks fall"], [2, "a title", "goal late goal"], [1, "", "stocks rise"], [2, "", "late goal"]]
    table(tmp_path / "ag_news" / "train_subset.csv", rows)
    table(tmp_path / "ag_news" / "test.csv", rows[:2])
    news = open_dataset("ag_news", tmp_path, sequence=4)
    assert (news.kind, news.n_classes, len(news.train), len(news.test)) == ("text", 2, 4, 2)
    assert news.train.targets is not None
    assert news.train.targets.tolist() == [0, 1, 0, 1]
    # by count, then by the alphabet, behind three special tokens; what occurs once is unknown
    assert news.vocabulary is not None
    assert news.vocabulary.words == {"[PAD]": 0, "[UNK]": 1, "[MASK]": 2, "goal": 3, "late": 4, "stocks": 5}
    assert news.train.inputs.tolist() == [[5, 1, 0, 0], [1, 1, 3, 4], [5, 1, 0, 0], [4, 3, 0, 0]]
    batch = next(iter(news.task("train", batch_size=4)))
    assert batch.inputs["attention_mask"].sum(1).tolist() == [2, 4, 2, 2]
    short = next(iter(open_dataset("ag_news", tmp_path, sequence=9).task("train", batch_size=1)))
    assert short.inputs["input_ids"].shape == (1, 2)  # no wider than its longest row
    measured = list(news.task("test", batch_size=1))
    assert [batch.inputs["input_ids"].tolist() for batch in measured] == [[[1, 1, 3, 4]], [[5, 1]]]  # longest first
    assert [batch.targets.tolist() for batch in measured] == [[1], [0]]  # each with its own class
    table(tmp_path / "dbpedia" / "train_subset.csv", rows)
    table(tmp_path / "dbpedia" / "test_subset.csv", rows[:3])
    table(tmp_path / "dbpedia" / "test_raw_subset.csv", rows[:1])
    assert len(open_dataset("dbpedia", tmp_path).test) == 3


def test_reviews_in_folders(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for kind in ("pos", "neg"):
            place = tmp_path / "aclImdb" / split / kind
            place.mkdir(parents=True)
            (place / "0_1.txt").write_text(f"so {kind} so {kind}<br />")
    data = open_dataset("imdb", tmp_path, sequence=8)
    assert data.train.targets is not None
    assert data.train.targets.tolist() == [0, 1]
    assert (data.train.inputs != 0).sum(1).tolist() == [4, 4]  # a line break is no word


def test_pictures_in_folders_by_class_in_one_size(tmp_path: Path) -> None:
    for split in ("train", "val"):
        picture(tmp_path / "imagenet" / split / "cat" / "a.png", (10, 14), 255)
        picture(tmp_path / "imagenet" / split / "dog" / "b.png", (16, 8), 0)
    data = open_dataset("imagenet", tmp_path, side=8)
    assert (data.image, data.n_classes) == ((3, 8, 8), 2)
    assert data.test.inputs.unique().tolist() == [0, 255]
    assert open_dataset("imagenet", tmp_path).image == (3, 224, 224)


def test_tiny_imagenet_has_a_list_for_its_validation(tmp_path: Path) -> None:
    root = tmp_path / "tiny-imagenet-200"
    for i, name in enumerate(("n02", "n01")):
        picture(root / "train" / name / "images" / f"{name}_0.JPEG", (64, 64), 10 * i)
        picture(root / "val" / "images" / f"val_{i}.JPEG", (64, 64), 10 * i)
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn02\t0\t0\t9\t9\nval_1.JPEG\tn01\t0\t0\t9\t9\n")
    data = open_dataset("tiny-imagenet", tmp_path)
    assert data.image == (3, 64, 64)
    for split in (data.train, data.test):
        assert split.targets is not None
        assert split.targets.tolist() == [0, 1]
        assert split.inputs[:, 0, 0, 0].tolist() == [10, 0]  # n01 first


def test_any_path_is_what_lies_there(tmp_path: Path) -> None:
    (tmp_path / "story.txt").write_text("once upon a time " * 40)
    assert locate(str(tmp_path / "story.txt"), None)[0] == "lm"
    assert locate("story.txt", tmp_path)[0] == "lm"
    table(tmp_path / "rows" / "train.csv", [["label", "text"], [0, "x y"]])
    assert locate("rows", tmp_path)[0] == "text"
    picture(tmp_path / "shots" / "train" / "a" / "1.png", (8, 8), 3)
    assert locate("shots", tmp_path)[0] == "image"
    assert locate("digits", None)[0] == "image"


@pytest.mark.parametrize("name", sorted(name for name, known in KNOWN.items() if not known.shipped))
def test_what_is_not_there_is_said_in_one_line_with_its_files(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(IsobasinError, match=f"data set '{name}': not under .*{KNOWN[name].places[0]}") as caught:
        open_dataset(name, tmp_path)
    assert "\n" not in str(caught.value)
    with pytest.raises(IsobasinError, match="no data root was given"):
        locate(name, None)


def test_the_hub_is_asked_only_where_there_may_be_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(*names: str | None) -> dict[str, dict[str, list[str]]]:
        asked.append(names)
        if names[0] != "Salesforce/wikitext":
            raise OSError("no\nnetwork")
        return {split: {"text": ["many words"] * n} for split, n in (("train", 9), ("validation", 3), ("test", 2))}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    data = open_dataset("wikitext-103", tmp_path, sequence=5)
    assert asked == [("Salesforce/wikitext", "wikitext-103-raw-v1")]
    assert [len(part) for part in (data.train, data.test)] == [9 * 11 - 1, 2 * 11 - 1]
    with pytest.raises(IsobasinError, match="'billion-word-benchmark/lm1b' is not to be had from the hub") as caught:
        open_dataset("one-billion-word", tmp_path)
    assert "\n" not in str(caught.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(IsobasinError, match="not under"):
        open_dataset("wikitext-103", tmp_path, sequence=6)
    assert len(asked) == 2


def test_a_name_nobody_knows_is_refused_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(IsobasinError, match=f"'mnits': no such file or folder.*{', '.join(KNOWN)}"):
        open_dataset("mnits", tmp_path)
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(IsobasinError, match="too short"):
        open_dataset("a.txt", tmp_path)
    with pytest.raises(IsobasinError, match="expected 1 or more tokens"):
        open_dataset("shakespeare", None, sequence=-1)
    assert math.isclose(len(open_dataset("shakespeare", None).train) / 249_547, 0.9, rel_tol=1e-3)
