"""Unlabeled inputs from labelled formats, and data sets of the `datasets` library."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from task_subjects import TEXT, WORDS, own, pixels, saved, word_tokenizer, write_idx, write_picture

from isobasin.errors import IsobasinError
from isobasin.tasks import open_task, read_images, scaled, unlabeled
from isobasin.tasks.loader import MAX_IMAGES, MAX_TOKENS
from isobasin.tasks.text import read_table, read_text

pytestmark = pytest.mark.hf


def test_the_texts_of_a_table(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": word, "label": 0}) for word in WORDS))
    (batch,) = unlabeled(tmp_path / "x.jsonl", own(), length=32, batch=8)
    assert bytes(batch["input_ids"][0].tolist()) in "\n".join(WORDS).encode()
    assert batch.keys() == {"input_ids"}


def test_pieces_stand_between_the_special_tokens(tmp_path: Path) -> None:
    word_tokenizer(tmp_path / "m", frame="[CLS] $A [SEP]")
    (tmp_path / "x.txt").write_text(" ".join(WORDS * 9))
    for case, framed in (("bert-bare", True), ("llama-bare", False)):
        rows = torch.cat([x["input_ids"] for x in unlabeled(tmp_path / "x.txt", saved(case, tmp_path / "m"), length=8)])
        assert rows.shape[1] == 8
        assert (rows[:, 0] == 1).all()
        assert bool((rows[:, -1] == 2).all()) is framed


def test_a_long_text_is_read_as_far_as_needed(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(TEXT * 200, encoding="utf-8")
    assert len((TEXT * 200).encode()) > 2 * MAX_TOKENS
    found = [x["input_ids"] for x in unlabeled(tmp_path / "x.txt", own())]
    assert sum(x.numel() for x in found) == MAX_TOKENS
    again = [x["input_ids"] for x in unlabeled(tmp_path / "x.txt", own(), seed=1)]
    assert not torch.equal(found[0], again[0])


def test_token_ids_of_one_axis(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(20))
    (batch,) = unlabeled(tmp_path / "x.npy", own(), length=5)
    assert torch.equal(batch["input_ids"], torch.arange(20).reshape(4, 5))


def test_labelled_images(tmp_path: Path) -> None:
    array = pixels(MAX_IMAGES + 9, 6, 6)
    write_idx(tmp_path / "t10k-images-idx3-ubyte", array)
    write_idx(tmp_path / "t10k-labels-idx1-ubyte", np.full(len(array), 77, np.uint8))  # no class of the model
    model = own(image_size=6, patch_size=3, n_channels=1, n_classes=2)
    found = torch.cat([x["pixel_values"] for x in unlabeled(tmp_path, model)])
    known = {x.numpy().tobytes() for x in scaled(array[..., None])}
    assert len(found) == MAX_IMAGES
    assert {x.numpy().tobytes() for x in found} <= known


def test_a_folder_of_pictures(tmp_path: Path) -> None:
    array = pixels(6, 6, 3)
    write_picture(tmp_path / "x" / "a" / "0.png", array)
    (batch,) = unlabeled(tmp_path / "x", saved("vit-bare", tmp_path / "m"))
    assert torch.equal(batch["pixel_values"], scaled(array[None]))


# -- datasets --------------------------------------------------------------------------------------------------------


class Rows(list[dict[str, Any]]):
    """As much of a `datasets.Dataset` as is used."""

    def __init__(self, rows: list[dict[str, Any]], **features: Any) -> None:
        super().__init__(rows)
        self.features, self.column_names = features, list(features)

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


class Image:
    """Named as the feature of `datasets` is."""


class ClassLabel(SimpleNamespace):
    """Named as the feature of `datasets` is."""


def library(monkeypatch: pytest.MonkeyPatch, found: Any) -> None:
    """A `datasets` that finds this on disk, and whose hub has it under one name."""

    def load_dataset(name: str) -> Any:
        if name != "someone/words":
            raise FileNotFoundError(f"no {name}\nanywhere")
        return found

    fake = ModuleType("datasets")
    monkeypatch.setattr(fake, "load_from_disk", lambda _: found, raising=False)
    monkeypatch.setattr(fake, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", fake)


def saved_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "dataset_dict.json").write_text("{}")
    return folder


def test_texts_of_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": word, "label": i % 2} for i, word in enumerate(WORDS)]
    library(monkeypatch, {"train": Rows([]), "validation": Rows(rows, text=None, label=None)})
    for place in (saved_folder(tmp_path / "x"), Path("someone/words")):
        found = read_table(place)
        assert found.texts == tuple(WORDS)
        assert found.labels == tuple(i % 2 for i in range(len(WORDS)))
        assert read_text(place) == "\n".join(WORDS)
        assert open_task(place, [own(n_classes=2)]).n_samples == len(WORDS)
    with pytest.raises(
        IsobasinError, match=r"someone/else: no such file .* no data set of that name .*no someone/else a"
    ):
        read_table("someone/else")
    with pytest.raises(IsobasinError, match=r"x.txt: no such file or folder$"):
        open_task("x.txt", [own(n_classes=2)])


def test_splits_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, {"train": Rows([])})
    with pytest.raises(IsobasinError, match=r"has the splits train; expected test or validation"):
        read_table(saved_folder(tmp_path / "x"))


def test_images_of_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image as pillow

    array = pixels(3, 6, 6)
    rows = [{"img": pillow.fromarray(x), "label": 2 - i} for i, x in enumerate(array)]
    library(monkeypatch, {"test": Rows(rows, img=Image(), label=ClassLabel(names=["a", "b", "c"]))})
    found = read_images(saved_folder(tmp_path / "x"))
    assert np.array_equal(np.stack(list(found.pixels)), array[..., None])
    assert (found.labels.tolist(), found.classes) == ([2, 1, 0], ("a", "b", "c"))
    model = own(image_size=6, patch_size=3, n_channels=1, n_classes=3)
    (batch,) = open_task(tmp_path / "x", [model])
    assert torch.equal(batch.inputs["pixel_values"], scaled(array[..., None]))
    library(monkeypatch, {"test": Rows([], text=None, label=None)})
    with pytest.raises(IsobasinError, match=r"columns text, label; expected an image and a label"):
        read_images(tmp_path / "x")


def test_a_data_set_without_its_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(IsobasinError, match=r"saved by datasets, which is not here: pip install 'isobasin\[study\]'"):
        read_table(saved_folder(tmp_path / "x"))
    with pytest.raises(IsobasinError, match=r"someone/words: no such file or folder"):
        read_table("someone/words")


def test_a_folder_that_the_library_itself_saved(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset.from_dict({"text": WORDS, "label": [i % 2 for i in range(len(WORDS))]})
    datasets.DatasetDict({"test": made}).save_to_disk(tmp_path / "x")
    made.save_to_disk(tmp_path / "y")
    assert read_table(tmp_path / "x") == read_table(tmp_path / "y")
    assert read_table(tmp_path / "x").texts == tuple(WORDS)
    write_picture(tmp_path / "0.png", pixels(6, 6, 3))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [str(tmp_path / "0.png")], "label": [1]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "z")
    assert np.array_equal(read_images(tmp_path / "z").pixels[0], pixels(6, 6, 3))
