"""A checkpoint instead of pretraining: known by its content, and of the size that the cell says."""

import shutil
from pathlib import Path

import pytest

from isobasin.errors import IsobasinError
from isobasin.model import ModelConfig, Transformer
from isobasin.study.config import Cell, read_grid
from isobasin.study.plan import plan_cell
from isobasin.study.run import find_checkpoint, import_checkpoint
from isobasin.study.store import Store

GRID = """
name = "from a checkpoint"
[[cells]]
model = "vit"
positions = "rope"
layers = 1
heads = 2
width = 16
dataset = "digits"
scope = "first-attention"
[cells.pretrain]
checkpoint = "trained"
[cells.finetune]
steps = 2
"""


def cell(tmp_path: Path, text: str = GRID) -> Cell:
    path = tmp_path / "grid.toml"
    path.write_text(text)
    return read_grid(path).cells[0]


def saved(folder: Path, seed: int = 0) -> Path:
    sizes = {"n_layers": 1, "n_heads": 2, "d_model": 16, "d_ff": 64}
    inputs = {"image_size": 28, "patch_size": 7, "n_channels": 1, "n_classes": 10}
    Transformer(ModelConfig.preset("vit", positions="rope", **sizes, **inputs), seed=seed).save(folder)
    return folder


def test_a_checkpoint_is_known_by_its_content(tmp_path: Path) -> None:
    saved(tmp_path / "trained")
    first = find_checkpoint(cell(tmp_path), tmp_path)
    shutil.copytree(tmp_path / "trained", tmp_path / "elsewhere/trained")
    moved = find_checkpoint(cell(tmp_path), tmp_path / "elsewhere")
    saved(tmp_path / "trained", seed=1)
    other = find_checkpoint(cell(tmp_path), tmp_path)
    assert first is not None
    assert moved is not None
    assert other is not None
    jobs = [plan_cell(cell(tmp_path), checkpoint=each.settings).pretrained for each in (first, moved, other)]
    assert jobs[0] == jobs[1]
    assert jobs[0] != jobs[2]


def test_it_takes_the_place_of_a_pretrained_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "trained")
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    found = find_checkpoint(cell(tmp_path), tmp_path)
    assert found is not None
    job = plan_cell(cell(tmp_path), checkpoint=found.settings).pretrained
    assert job is not None
    store = Store(tmp_path / "study")
    import_checkpoint(job, found, store)
    assert store.is_complete(job)
    copied = store.folder(job) / "model"
    assert sorted(path.name for path in copied.iterdir()) == ["config.json", "model.safetensors"]
    assert (copied / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_another_size_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "trained")
    with pytest.raises(IsobasinError, match=r"pretrain\.checkpoint .*: n_heads is 2, but the cell says 4"):
        find_checkpoint(cell(tmp_path, GRID.replace("heads = 2", "heads = 4")), tmp_path)
    with pytest.raises(IsobasinError, match="can not be read"):
        find_checkpoint(cell(tmp_path), tmp_path / "nowhere")


def test_without_one_there_is_pretraining(tmp_path: Path) -> None:
    text = GRID.replace('checkpoint = "trained"', "steps = 3")
    assert find_checkpoint(cell(tmp_path, text), tmp_path) is None
    planned = plan_cell(cell(tmp_path, text)).pretrained
    assert planned is not None
    assert planned.settings["train"]["steps"] == 3
