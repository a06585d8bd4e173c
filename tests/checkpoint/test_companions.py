"""Files beside the weights: what is copied with a model, what stays behind, and why."""

import json
import os
from pathlib import Path

import pytest
import torch

import tiny
from isobasin.checkpoint import CheckpointWriter, find_companions
from isobasin.cli import run
from isobasin.errors import CheckpointError

COPIED = {
    "README.md": "a card",
    "modules.json": json.dumps(
        [{"idx": 0, "path": ""}, {"idx": 1, "path": "1_Pooling"}, {"idx": 2, "path": "2_Dense"}]
    ),
    "sentence_bert_config.json": '{"max_seq_length": 128}',
    "config_sentence_transformers.json": '{"prompts": {}}',
    "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
    "2_Dense/config.json": "{}",
    "2_Dense/model.safetensors": "weights behind the model",
    "data/labels/names.txt": "cat",
    "some.json": '{"auto_map": "a token"}',
}
LEFT = {
    "model.fp16.safetensors": "other weights",
    "pytorch_model.bin": "pickle",
    "model.onnx": "other weights",
    "other/model.safetensors": "other weights",
    "tf_model.h5": "other weights",
    "flax_model.msgpack": "other weights",
    "model-q8.gguf": "other weights",
    "pytorch_model.bin.index.json": "other weights",
    "2_Dense/pytorch_model.bin": "pickle",
    "onnx/": "other weights",
    "checkpoint-100/": "state of a training",
    ".hidden": "hidden",
    ".hide/": "hidden",
    "trainer_state.json": "state of a training",
    "optimizer.pt": "state of a training",
    "modeling_x.py": "--trust-remote-code",
    "1_Pooling/pool.py": "--trust-remote-code",
    "install.sh": "a program",
}


def fill(folder: Path, names: dict[str, str]) -> None:
    for name, text in names.items():
        file = folder / name if not name.endswith("/") else folder / name / "inside.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    fill(folder, {"config.json": "{}", "model.safetensors": "x", ".gitattributes": "", ".cache/x": ""})
    fill(folder, COPIED | LEFT)
    return folder


def write(out: Path, source: Path, **options: object) -> Path:
    infos = {"w": (torch.float32, (2,))}
    with CheckpointWriter(out, infos, config={"auto_map": {}}, companions=source, **options) as writer:  # type: ignore[arg-type]
        writer.write("w", torch.ones(2))
    return out


def files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_all_files_are_copied_but_weights_and_what_is_stale_or_dangerous(source: Path, tmp_path: Path) -> None:
    found = find_companions(source)
    assert set(found.files) == set(COPIED)
    assert set(found.left_out) == set(LEFT)
    for name, reason in LEFT.items():
        assert reason in found.left_out[name], name
    out = write(tmp_path / "out", source)
    assert files(out) == {"config.json", "model.safetensors", *COPIED}
    assert all((out / name).read_text() == text for name, text in COPIED.items())
    assert (out / "model.safetensors").read_bytes() != b"x"


def test_code_is_copied_only_where_it_is_trusted(source: Path, tmp_path: Path) -> None:
    (source / "1_Pooling" / "config.json").write_text('{"auto_map": "x", "a": 1}')
    (source / "odd_config.json").write_text("no JSON")
    out = write(tmp_path / "out", source)
    assert json.loads((out / "1_Pooling" / "config.json").read_text()) == {"a": 1}
    assert json.loads((out / "config.json").read_text()) == {}
    assert (out / "odd_config.json").read_text() == "no JSON"
    out = write(tmp_path / "trusted", source, trust_remote_code=True)
    assert {"modeling_x.py", "1_Pooling/pool.py"} <= files(out)
    assert "install.sh" not in files(out)
    assert json.loads((out / "1_Pooling" / "config.json").read_text()) == {"auto_map": "x", "a": 1}
    assert json.loads((out / "config.json").read_text()) == {"auto_map": {}}


def test_no_link_leads_out_of_the_folder(source: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.txt").write_text("secret")
    (source / "key.txt").symlink_to(tmp_path / "secret" / "key.txt")
    (source / "1_Pooling" / "up.txt").symlink_to("../../secret/key.txt")
    (source / "keys").symlink_to(tmp_path / "secret")
    (source / "loop").symlink_to(".")
    (source / "gone.txt").symlink_to("nowhere")
    (source / "same.txt").symlink_to("README.md")
    os.mkfifo(source / "pipe")
    found = find_companions(source)
    assert set(found.files) == {*COPIED, "same.txt"}
    for name in ("key.txt", "1_Pooling/up.txt"):
        assert "leads out of the folder" in found.left_out[name]
    assert found.left_out["keys/"] == found.left_out["loop/"] == "a link to a folder"
    assert "leads nowhere" in found.left_out["gone.txt"]
    assert "no regular file" in found.left_out["pipe"]
    assert not (write(tmp_path / "out", source) / "same.txt").is_symlink()


def test_a_snapshot_of_the_cache_is_copied_from_its_blobs(tmp_path: Path) -> None:
    home = tmp_path / "models--a--b"
    fill(home, {"blobs/1": "mean", "refs/main": "abc", "snapshots/abc/1_Pooling/": ""})
    (home / "snapshots" / "abc" / "1_Pooling" / "more.txt").symlink_to("../../../blobs/1")
    (home / "snapshots" / "abc" / "bad.txt").symlink_to("../../refs/main")
    found = find_companions(home / "snapshots" / "abc")
    assert "1_Pooling/more.txt" in found.files
    assert "bad.txt" in found.left_out


def test_an_output_is_replaced_by_itself_and_kept_with_files_of_others(source: Path, tmp_path: Path) -> None:
    out = write(tmp_path / "out", source)
    write(out, source, force=True)
    (out / "data" / "labels" / "names.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds data/labels/names\.txt, which no checkpoint of isobasin has"):
        write(out, source, force=True)
    (out / "data" / "labels" / "names.txt").write_text("cat")
    (out / "empty").mkdir()
    with pytest.raises(CheckpointError, match="holds empty, which"):
        write(out, source, force=True)


def test_sub_folders_that_are_nested_too_deep_stay_behind(tmp_path: Path) -> None:
    fill(tmp_path, {"/".join(["a"] * n) + "/x.txt": "" for n in (1, 8, 9)})
    found = find_companions(tmp_path)
    assert [name.count("/") for name in found.files] == [8, 1]
    assert list(found.left_out.values()) == ["nested too deep"]


@pytest.mark.hf
def test_commands_copy_what_goes_with_a_model_and_list_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model"
    tiny.save(tiny.case("bert-bare-no-pooler"), model)
    fill(model, {"1_Pooling/config.json": "{}", "modules.json": "[]", "run.py": "x", "old.onnx": "x"})
    transform = tmp_path / "t.safetensors"
    assert run(["scramble", str(model), "-o", str(tmp_path / "s"), "--save-transform", str(transform)]) == 0
    assert "not copied  old.onnx (other weights" in capsys.readouterr().out
    commands = {
        "aligned": ["align", str(tmp_path / "s"), "--to", str(model)],
        "applied": ["apply", str(transform), str(model), "--trust-remote-code"],
        "point": ["canonical", str(model)],
        "merged": ["merge", str(model), str(tmp_path / "s")],
    }
    for name, words in commands.items():
        out = tmp_path / name
        assert run([*words, "-o", str(out), "--verify", "none", "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        left = {"aligned": None, "applied": {"old.onnx"}}.get(name, {"old.onnx", "run.py"})
        assert (set(facts["not_copied"]) if left else facts.get("not_copied")) == left, name
        assert {"1_Pooling/config.json", "modules.json"} <= files(out)
        assert (out / "run.py").exists() == (name == "applied")
