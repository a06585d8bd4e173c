"""Reading: every layout of a checkpoint folder, lazily, with one-line errors for what is wrong with it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from checkpoint_imitations import CONFIG, EVERY_KIND, make_folder, make_raw, make_sharded, raw_file, same_bits

from isobasin.checkpoint import header, open_checkpoint
from isobasin.errors import CheckpointError

A, B = {"a": torch.ones(2, 3)}, {"b": torch.zeros(4)}
SHARDS = {"model-00001-of-00002.safetensors": A, "model-00002-of-00002.safetensors": B}
FIRST, SECOND = SHARDS


def assert_holds(checkpoint, tensors):
    assert set(checkpoint) == set(tensors)
    assert all(same_bits(checkpoint[name], tensors[name]) for name in tensors)


def test_single_file_bitwise(tmp_path):
    found = open_checkpoint(make_folder(tmp_path / "m"))
    assert_holds(found, EVERY_KIND)
    assert found.config == CONFIG
    assert found.path == tmp_path / "m"
    assert "9 tensors" in repr(found)


def test_same_bits_tells_tensors_apart():
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bits(torch.zeros(2), torch.zeros(1, 2))
    assert not same_bits(torch.zeros(2), torch.zeros(2, dtype=torch.float16))


def test_it_is_a_mapping(tmp_path):
    found = open_checkpoint(make_folder(tmp_path / "m", A))
    assert "a" in found
    assert "b" not in found
    assert found.get("b") is None
    assert found == found
    assert found != open_checkpoint(tmp_path / "m")
    with pytest.raises(KeyError, match="b"):
        found["b"]
    with pytest.raises(TypeError, match="assignment"):
        found.infos["b"] = None


def test_a_tensor_handed_out_is_the_callers_own(tmp_path):
    found = open_checkpoint(make_folder(tmp_path / "m", A))
    found["a"].zero_()
    assert same_bits(found["a"], A["a"])


def test_sharded_and_symlinked_snapshot(tmp_path):
    make_sharded(tmp_path / "m", SHARDS)
    assert_holds(open_checkpoint(tmp_path / "m"), A | B)
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in (tmp_path / "m").iterdir():
        (snapshot / file.name).symlink_to(f"../../m/{file.name}")
    assert_holds(open_checkpoint(snapshot), A | B)


def test_safetensors_is_preferred_to_bin(tmp_path):
    folder = make_folder(tmp_path / "m", A)
    torch.save(B, folder / "pytorch_model.bin")
    assert set(open_checkpoint(folder)) == {"a"}
    (folder / "model.safetensors").unlink()
    assert set(open_checkpoint(folder)) == {"b"}


def test_a_tensor_of_a_shard_that_the_index_forgets_is_read(tmp_path):
    make_sharded(tmp_path / "m", {FIRST: A | {"c": torch.ones(1)}, SECOND: B}, {"a": FIRST, "b": SECOND})
    assert set(open_checkpoint(tmp_path / "m")) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": FIRST, "b": "../x"}, "names the file '../x', expected a plain name"),
        ({"a": FIRST, "b": "/etc/passwd"}, "expected a plain name"),
        ({"a": FIRST, "b": "sub\\x"}, "expected a plain name"),
        ({"a": FIRST, "b": ".."}, "expected a plain name"),
        ({"a": FIRST, "b": 3}, "expected a plain name"),
        ({"a": FIRST, "b": None}, "expected a plain name"),
        ({"a": FIRST, "b": "x\ny"}, "expected a plain name"),
        ({"a": FIRST, "b": "gone.safetensors"}, "gone.safetensors is named in .* but is not there"),
        ({"a": FIRST, "b": FIRST}, "tensor 'b' is not in .*00001-of-00002.safetensors, where the index"),
        ({"a": SECOND, "b": FIRST}, "tensor 'a' is not in .*00002-of-00002.safetensors, where the index"),
        ({"a": FIRST, "b": SECOND, "c": SECOND}, "tensor 'c' is not in"),
        ([FIRST], "has no weight_map"),
        ({}, "has no weight_map"),
    ],
)
def test_a_bad_index_is_one_line(tmp_path, weight_map, message):
    make_sharded(tmp_path / "m", SHARDS, weight_map)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(tmp_path / "m")
    assert "\n" not in str(caught.value)


def test_a_tensor_in_two_shards(tmp_path):
    make_sharded(tmp_path / "m", {FIRST: A, SECOND: A | B}, {"a": FIRST, "b": SECOND})
    with pytest.raises(CheckpointError, match="tensor 'a' lies in two shards"):
        open_checkpoint(tmp_path / "m")


def test_a_truncated_shard_is_found_at_open(tmp_path):
    make_sharded(tmp_path / "m", SHARDS)
    shard = tmp_path / "m" / SECOND
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=f"{SECOND} is truncated"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "config.json is missing"),
        ("{oops", "config.json is not valid JSON"),
        ("[]", "config.json holds a JSON list, expected an object"),
        ('{"quantization_config": {"bits": 4}}', "has a quantization_config: dequantise"),
    ],
)
def test_a_bad_config_is_one_line(tmp_path, config, message):
    folder = make_folder(tmp_path / "m", A)
    (folder / "config.json").unlink()
    if config is not None:
        (folder / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_no_weights_no_folder_no_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no weights: expected one of"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="is a file, expected a checkpoint folder"):
        open_checkpoint(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="neither a folder nor a model in the local"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_hub_id_through_the_local_cache(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    repo, commit = tmp_path / "models--org--name", "0" * 40
    make_folder(repo / "snapshots" / commit, A)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert_holds(open_checkpoint("org/name"), A)
    with pytest.raises(CheckpointError, match=r"'org/other' is neither .*: .*hf download"):
        open_checkpoint("org/other")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 100, -1])
def test_values_that_are_no_numbers(tmp_path, monkeypatch, dtype, value, place):
    monkeypatch.setattr(header, "_BLOCK", 37)
    tensor = torch.ones(101, dtype=dtype)
    assert_holds(open_checkpoint(make_folder(tmp_path / "good", {"w": tensor})), {"w": tensor})
    tensor[place] = value
    found = open_checkpoint(make_folder(tmp_path / "m", {"w": tensor, "ok": torch.ones(1)}))
    kind = "1 NaN and 0 infinite" if value != value else "0 NaN and 1 infinite"
    with pytest.raises(CheckpointError, match=f"tensor 'w' holds {kind} values: .*repair or re-download"):
        found["w"]
    assert same_bits(found["ok"], torch.ones(1))
    assert same_bits(found.read("w", finite=False), tensor)


def test_rows(tmp_path):
    tensor = torch.arange(24, dtype=torch.bfloat16).reshape(6, 2, 2)
    found = open_checkpoint(make_folder(tmp_path / "m", {"pad": torch.ones(3), "w": tensor, "s": torch.ones(())}))
    assert same_bits(found.rows("w", 2, 5), tensor[2:5])
    assert same_bits(found.rows("w", 6, 6), tensor[6:])
    for name, start, stop in [("w", 0, 7), ("w", -1, 2), ("w", 3, 2), ("s", 0, 1)]:
        with pytest.raises(ValueError, match=f"rows {start}:{stop} of tensor '{name}'"):
            found.rows(name, start, stop)


def test_nothing_is_read_but_what_is_asked_for(tmp_path):
    """A sparse file of 4 TB: whoever touches more than the rows asked for does not come back."""
    n_rows = 2**30
    header = {
        "huge": {"dtype": "F32", "shape": [n_rows, 1024], "data_offsets": [0, 4096 * n_rows]},
        "small": {"dtype": "F32", "shape": [2], "data_offsets": [4096 * n_rows, 4096 * n_rows + 8]},
    }
    folder = make_raw(tmp_path / "m", raw_file(header, b""))
    file = folder / "model.safetensors"
    with file.open("r+b") as stream:
        stream.seek(file.stat().st_size + 4096 * n_rows)
        stream.write(torch.tensor([1.0, 2.0]).numpy().tobytes())
    found = open_checkpoint(folder)
    assert found["small"].tolist() == [1.0, 2.0]
    assert found.rows("huge", n_rows - 3, n_rows - 1).shape == (2, 1024)


def test_a_file_that_changes_under_the_reader(tmp_path):
    folder = make_folder(tmp_path / "m", A)
    found = open_checkpoint(folder)
    assert same_bits(found["a"], A["a"])
    os.truncate(folder / "model.safetensors", 20)
    with pytest.raises(CheckpointError, match="changed while it was in use"):
        found["a"]
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="can not be read: No such file"):
        found["a"]


PEAK = r"""
import re, sys
import torch
from isobasin.checkpoint import CheckpointWriter, open_checkpoint
def peak():  # ru_maxrss would begin at the peak of the parent
    return int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1]) // 1024
start = peak()
found = open_checkpoint(sys.argv[1])
opened = peak()
with CheckpointWriter(sys.argv[1] + "-copy", {"w": (torch.float32, (64, 2**19))}, config={}) as writer:
    for row in range(0, 64, 8):
        writer.write_flat("w", row * 2**19, found.rows("w", row, row + 8).flatten())
by_rows = peak()
found["w"]
print(opened - start, by_rows - start, peak() - start)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_memory_is_that_of_what_is_asked_for(tmp_path, kind):
    tensors = {"w": torch.ones(64, 2**19)}  # 128 MB
    folder = make_folder(tmp_path / "m", tensors)
    if kind == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    command = [sys.executable, "-c", PEAK, str(folder)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    opened, by_rows, whole = map(int, printed.split())
    assert opened < 16
    assert whole > 120  # the measure sees a tensor when there is one
    if kind == "safetensors":  # the pages of a mapped file count as well, once touched
        assert by_rows < 48


def test_the_index_is_json_with_unique_keys(tmp_path):
    make_sharded(tmp_path / "m", SHARDS)
    index = tmp_path / "m" / "model.safetensors.index.json"
    text = json.dumps({"weight_map": {"a": FIRST, "b": SECOND}})
    index.write_text(text)
    assert set(open_checkpoint(tmp_path / "m")) == {"a", "b"}
    index.write_text(text.replace('"b"', '"a"'))
    with pytest.raises(CheckpointError, match="the key 'a' occurs twice"):
        open_checkpoint(tmp_path / "m")
