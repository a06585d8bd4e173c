"""Output appears whole or not at all, whatever happens, and never at the cost of something else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_imitations import CONFIG, make_folder

from isobasin import files
from isobasin.checkpoint import CheckpointWriter, open_checkpoint
from isobasin.errors import CheckpointError

INFOS = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}


def write(out, value=1.0, **options):
    with CheckpointWriter(out, INFOS, config=CONFIG, **options) as writer:
        for name in writer.order:
            writer.write(name, torch.full((2,), value))


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def value_at(out):
    return open_checkpoint(out)["a"][0].item()


def temporary(folder):
    return [file for file in folder.iterdir() if ".isobasin-tmp-" in file.name]


def test_nothing_is_visible_before_the_end(tmp_path):
    with CheckpointWriter(tmp_path / "out", INFOS, config=CONFIG) as writer:
        writer.write("a", torch.ones(2))
        (root,) = temporary(tmp_path)
        assert root.name.startswith(".out.isobasin-tmp-")
        assert names(root) == ["isobasin-writer.json", "new"]
        assert not (tmp_path / "out").exists()
        writer.write("b", torch.ones(2))
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("error", [RuntimeError("stop"), KeyboardInterrupt("stop"), SystemExit("stop")])
@pytest.mark.parametrize("exists", [False, True])
def test_an_exception_leaves_what_was_there(tmp_path, error, exists):
    if exists:
        write(tmp_path / "out", 1.0)
    writer = CheckpointWriter(tmp_path / "out", INFOS, config=CONFIG, force=exists)

    def stopped():
        with writer:
            writer.write("a", torch.ones(2))
            raise error

    with pytest.raises(type(error), match="stop"):
        stopped()
    assert names(tmp_path) == (["out"] if exists else [])
    assert not exists or value_at(tmp_path / "out") == 1.0


@pytest.mark.parametrize("at", ["mkdir", "write_text", "fsync"])
def test_an_error_in_our_own_steps_leaves_nothing(tmp_path, monkeypatch, at):
    def fails(*arguments, **options):
        raise OSError(5, "an error")

    out = tmp_path / "out"
    monkeypatch.setattr(os if at == "fsync" else Path, at, fails)
    with pytest.raises(CheckpointError, match=r"can not be written: .*an error"):
        write(out)
    assert names(tmp_path) == []


def test_existing_outputs(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    write(out, 1.0)  # an empty folder is no loss
    with pytest.raises(CheckpointError, match="exists and is not empty: choose another name"):
        write(out, 2.0)
    assert value_at(out) == 1.0
    write(out, 2.0, force=True)
    assert value_at(out) == 2.0
    assert names(out) == ["config.json", "model.safetensors"]
    assert names(tmp_path) == ["out"]


def test_force_replaces_only_checkpoints(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match=r"holds thesis\.tex, which no checkpoint of isobasin has, so it is not"):
        write(home, force=True)
    with pytest.raises(CheckpointError, match="is a file, expected a folder"):
        write(home / "thesis.tex", force=True)
    with pytest.raises(CheckpointError, match="root of the file system"):
        write("/", force=True)
    assert names(home) == ["thesis.tex"]
    project = tmp_path / "project"
    project.mkdir()
    for name in ("config.json", "tokenizer.json", "vocab.txt"):
        (project / name).touch()
    with pytest.raises(CheckpointError, match=r"holds no config\.json with weights, so it is no checkpoint"):
        write(project, force=True)
    assert len(names(project)) == 3


EARLIER = (
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    ".DS_Store",
)


def test_an_earlier_output_is_replaced_with_all_its_parts(tmp_path):
    write(tmp_path / "out", 1.0)
    for name in EARLIER:
        (tmp_path / "out" / name).touch()
    (tmp_path / "out" / "README.md").write_text("A linear merge, made with isobasin 0.1.0.")
    write(tmp_path / "out", 2.0, force=True)
    assert names(tmp_path / "out") == ["config.json", "model.safetensors"]
    assert value_at(tmp_path / "out") == 2.0


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "data.csv",
        ".git/",
        "runs/",
        "LICENSES/",
        "pytorch_model.bin",
        "model.safetensors.bak",
        "LICENSE.py",
        "README.md",
        "LICENSE",
        "LICENSE-notes.txt",
        "NOTICE.txt",
    ],
)
def test_what_no_output_of_ours_has_is_kept(tmp_path, name):
    out = tmp_path / "out"
    write(out, 1.0)
    (out / name).mkdir() if name.endswith("/") else (out / name).touch()
    before = names(out)
    with pytest.raises(CheckpointError, match=f"holds {name.rstrip('/')}, which no checkpoint .* move or delete that"):
        write(out, 2.0, force=True)
    assert names(out) == before
    assert value_at(out) == 1.0


def test_the_licence_of_an_input_is_replaced_by_itself(tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    write(source)
    (source / "LICENSE").write_text("terms")
    write(out, 1.0, companions=source)
    write(out, 2.0, companions=source, force=True)
    assert value_at(out) == 2.0
    (out / "LICENSE").write_text("other terms")
    with pytest.raises(CheckpointError, match="holds LICENSE, which"):
        write(out, 3.0, companions=source, force=True)


def test_links_and_many_unknown_files_are_kept(tmp_path):
    out = tmp_path / "out"
    write(out, 1.0)
    (tmp_path / "card").touch()
    (out / "README.md").symlink_to(tmp_path / "card")
    with pytest.raises(CheckpointError, match=r"holds README\.md, which"):
        write(out, 2.0, force=True)
    for i in range(5):
        (out / f"{i}").touch()
    with pytest.raises(CheckpointError, match=r"holds 0, 1, 2 and 3 more, which"):
        write(out, 2.0, force=True)
    assert value_at(out) == 1.0


def test_a_file_that_appears_while_the_output_is_written_is_kept(tmp_path, monkeypatch):
    """Also while the new output is flushed to the disk, which takes long for a large one."""
    write(tmp_path / "out", 1.0)
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (fsync(handle), (tmp_path / "out" / "notes").touch()))
    with pytest.raises(CheckpointError, match="holds notes, which"):
        write(tmp_path / "out", 2.0, force=True)
    assert names(tmp_path / "out") == ["config.json", "model.safetensors", "notes"]
    assert names(tmp_path) == ["out"]


def test_an_output_that_appears_meanwhile_is_kept(tmp_path):
    def overtaken():
        with CheckpointWriter(tmp_path / "out", INFOS, config=CONFIG) as writer:
            for name in writer.order:
                writer.write(name, torch.ones(2))
            write(tmp_path / "out", 3.0)

    with pytest.raises(CheckpointError, match="exists and is not empty"):
        overtaken()
    assert value_at(tmp_path / "out") == 3.0
    assert names(tmp_path) == ["out"]


def test_an_output_that_is_a_link_is_replaced_behind_it(tmp_path):
    write(tmp_path / "real", 1.0)
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", 2.0, force=True)
    assert (tmp_path / "link").is_symlink()
    assert value_at(tmp_path / "real") == 2.0


@pytest.mark.parametrize("error", [OSError(13, "denied"), KeyboardInterrupt()])
def test_stopped_between_the_two_renames_the_old_folder_returns(tmp_path, monkeypatch, error):
    """Where the system can not exchange two folders."""
    write(tmp_path / "out", 1.0)
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    rename = os.rename

    def fails_for_new(source, target):
        if Path(source).name == "new":
            assert not (tmp_path / "out").exists()
            raise error
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails_for_new)
    with pytest.raises((CheckpointError, KeyboardInterrupt), match=r"denied|^$"):
        write(tmp_path / "out", 2.0, force=True)
    assert value_at(tmp_path / "out") == 1.0
    assert names(tmp_path) == ["out"]


def test_outputs_and_inputs_stay_apart(tmp_path):
    source = make_folder(tmp_path / "a" / "source")
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "model.safetensors").symlink_to(source / "model.safetensors")
    for out, given, message in [
        (source, source, "is the input"),
        (tmp_path / "link", source, "is the input"),
        (source, tmp_path / "link", "is the input"),
        (source / "x", source, "or inside it"),
        (tmp_path / "link" / "x", source, "or inside it"),
        (source / ".." / "source" / "x", source, "or inside it"),
        (tmp_path / "a", source, "lies inside the output"),
        (source, tmp_path / "links", "lies inside the output"),
    ]:
        for role in ({"inputs": [given]}, {"companions": given}):
            with pytest.raises(CheckpointError, match=message):
                write(out, force=True, **role)
    write(tmp_path / "a" / "source2", inputs=[source], companions=source)
    assert names(source) == ["config.json", "model.safetensors"]
    assert names(tmp_path / "a") == ["source", "source2"]


CHILD = """
import sys, time
import torch
from isobasin import files
from isobasin.checkpoint import CheckpointWriter
infos = {"a": (torch.float32, (2,)), "b": (torch.float32, (2,))}
with CheckpointWriter(sys.argv[1], infos, config={}) as writer:
    writer.write("a", torch.ones(2))
    print("half", flush=True)
    time.sleep(600)
"""


def test_what_a_killed_run_leaves_the_next_removes_but_not_what_a_live_one_uses(tmp_path):
    out = tmp_path / "out"
    with subprocess.Popen([sys.executable, "-c", CHILD, str(out)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout.readline() == "half\n"
            (left,) = temporary(tmp_path)
            write(out, 1.0)
            assert left.exists()  # the child lives
        finally:
            child.kill()
    assert left.exists()
    write(tmp_path / "other", 1.0)
    assert left.exists()  # not its name
    write(out, 2.0, force=True)
    assert names(tmp_path) == ["other", "out"]
    assert value_at(out) == 2.0


def leave(root, *parts):
    """What a killed writer to `out` leaves."""
    for part in parts:
        (root / part).mkdir(parents=True)
    (root / "isobasin-writer.json").write_text(json.dumps({"output": "out", **files._machine()}))


def test_killed_between_the_two_renames_the_old_folder_returns(tmp_path):
    root = tmp_path / ".out.isobasin-tmp-x"
    leave(root, "new")
    write(root / "old", 1.0)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        write(tmp_path / "out", 2.0)
    assert value_at(tmp_path / "out") == 1.0
    assert names(tmp_path) == ["out"]


def test_killed_while_deleting_the_old_folder_the_new_one_stays(tmp_path):
    root = tmp_path / ".out.isobasin-tmp-x"
    leave(root, "old")
    write(root / "old", 1.0)
    write(tmp_path / "elsewhere", 2.0)
    (tmp_path / "elsewhere").rename(tmp_path / "out")
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        write(tmp_path / "out", 3.0)
    assert value_at(tmp_path / "out") == 2.0
    assert names(tmp_path) == ["out"]
