"""No header is believed before it is checked: truncation, lies about lengths, overlaps, unknown formats."""

import copy
import json
from pathlib import Path

import pytest
import torch
from checkpoint_imitations import EVERY_KIND, make_folder, make_raw, raw_file
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from isobasin.checkpoint import open_checkpoint
from isobasin.checkpoint.header import encode_header, read_header
from isobasin.errors import CheckpointError

GOOD = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
}
DATA = bytes(24)


def changed(name, key, value):
    header = copy.deepcopy(GOOD)
    header[name][key] = value
    return header


def test_the_undamaged_imitation_opens(tmp_path):
    found = open_checkpoint(make_raw(tmp_path / "m", raw_file(GOOD, DATA)))
    assert {name: (info.dtype, info.shape, info.nbytes) for name, info in found.infos.items()} == {
        "a": (torch.float32, (2, 2), 16),
        "b": (torch.bfloat16, (4,), 8),
    }
    assert found.infos["a"].file == tmp_path / "m" / "model.safetensors"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header has 0 bytes, but the file has 0"),
        (b"\x01\x00", "but the file has 2"),
        (raw_file(GOOD, DATA)[:-1], "is truncated: its header describes 24 bytes of data, the file holds 23"),
        (raw_file(GOOD, DATA)[:60], "says that its header has"),
        (raw_file(GOOD, DATA + b"x"), "has bytes that belong to no tensor"),
        (raw_file(GOOD, DATA, length=2**63), "header has 9223372036854775808 bytes, but the file has"),
        (raw_file(GOOD, DATA, length=40), "is not valid JSON"),
        (raw_file(b"[1]", b""), "does not begin with '{'"),
        (raw_file(b"{broken", b""), "is not valid JSON"),
        (raw_file(b'{"\xff": 1}', b""), "is not valid JSON"),
        (raw_file(b'{"a":' + b"[" * 100_000, b""), "is not valid JSON"),
        (raw_file(b'{"a": 1, "a": 2}', b""), "the key 'a' occurs twice"),
        (raw_file(b"{}", b""), "holds no tensors"),
        (raw_file({"__metadata__": {"format": 3}}, b""), "__metadata__ that is not an object of strings"),
        (raw_file({"a": 3}, b""), "gives tensor 'a' the data_offsets None"),
        (raw_file({"a\nb": GOOD["a"]}, bytes(16)), "expected a printable name"),
        (raw_file(changed("a", "data_offsets", [0, 20]), DATA), "'b' at byte 16, expected 20: it overlaps"),
        (raw_file(changed("b", "data_offsets", [18, 26]), DATA + b"xx"), "it leaves a hole"),
        (raw_file(changed("b", "data_offsets", [16, 2**62]), DATA), "is truncated"),
        (raw_file(changed("b", "data_offsets", [24, 16]), DATA), "expected \\[begin, end\\]"),
        (raw_file(changed("b", "data_offsets", [16, 24, 32]), DATA), "expected \\[begin, end\\]"),
        (raw_file(changed("b", "data_offsets", [-8, 24]), DATA), "expected \\[begin, end\\]"),
        (raw_file(changed("a", "shape", [2, 3]), DATA), "16 bytes, but F32 of \\[2, 3\\] needs 24"),
        (raw_file(changed("a", "shape", [-2, -2]), DATA), "expected a list of sizes"),
        (raw_file(changed("a", "shape", [4, True]), DATA), "expected a list of sizes"),
        (raw_file(changed("a", "shape", "44"), DATA), "expected a list of sizes"),
        (raw_file(changed("a", "shape", [0, 2**62, 2**62]), DATA), "expected a list of sizes"),
        (raw_file(changed("a", "shape", [1] * 99), DATA), "expected a list of sizes"),
        (
            raw_file(changed("a", "dtype", "F8_E4M3"), DATA),
            "quantised .F8_E4M3.: dequantise the model",
        ),
        (raw_file(changed("a", "dtype", "C64"), DATA), "number format C64"),
        (raw_file(changed("a", "dtype", ["F32"]), DATA), "number format"),
    ],
)
def test_a_damaged_header_is_one_line(tmp_path, content, message):
    folder = make_raw(tmp_path / "m", content)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


def test_a_header_over_the_cap_is_refused_unread(tmp_path):
    folder = make_raw(tmp_path / "m", raw_file(GOOD, DATA, length=200_000_000))
    with (folder / "model.safetensors").open("r+b") as stream:
        stream.truncate(300_000_000)  # sparse: the length is true as far as the file's size goes
    with pytest.raises(CheckpointError, match="expected at most 100000000"):
        open_checkpoint(folder)


@pytest.fixture(scope="module")
def sound_file(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("sound")) / "model.safetensors"


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_is_accepted_after_random_damage_the_reference_accepts(sound_file, data):
    content = bytearray(sound_file.read_bytes())
    text_end = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, text_end - 1))] = data.draw(st.sampled_from(b'{}[]",:0123459 FIB\x00\xff'))
    damaged = sound_file.with_name("damaged.safetensors")
    damaged.write_bytes(content)
    try:
        ours = read_header(damaged)
    except CheckpointError:
        return
    with safe_open(damaged, "pt") as reference:
        assert set(reference.keys()) == set(ours)
        assert all(tuple(reference.get_slice(name).get_shape()) == ours[name].shape for name in ours)


def test_the_reference_refuses_what_the_damage_test_relies_on(sound_file):
    damaged = sound_file.with_name("short.safetensors")
    damaged.write_bytes(sound_file.read_bytes()[:-1])
    with pytest.raises(SafetensorError, match=r"(?i)incomplete|invalid"):
        safe_open(damaged, "pt").__enter__()


def test_encode_then_read_gives_the_tensors_back(tmp_path):
    tensors = {name: (value.dtype, tuple(value.shape)) for name, value in EVERY_KIND.items()}
    header, offsets = encode_header(tensors)
    size = sum(value.numel() * value.element_size() for value in EVERY_KIND.values())
    file = tmp_path / "x.safetensors"
    file.write_bytes(header + bytes(size))
    found = read_header(file)
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == tensors
    assert {name: info.offset for name, info in found.items()} == offsets
    assert len(header) % 8 == 0
    assert json.loads(header[8:])["__metadata__"] == {"format": "pt"}
