"""Writing: bitwise round trips, shards, companions, and refusals before anything is touched."""

import errno
import json
import math

import pytest
import torch
from checkpoint_imitations import CONFIG, EVERY_KIND, make_folder, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from isobasin.checkpoint import CheckpointWriter, open_checkpoint
from isobasin.checkpoint.writer import parse_size
from isobasin.errors import CheckpointError


def infos_of(tensors):
    return {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}


def write(out, tensors=EVERY_KIND, **options):
    with CheckpointWriter(out, infos_of(tensors), **{"config": CONFIG, **options}) as writer:
        for name in tensors:
            writer.write(name, tensors[name])
    return out


def names(folder):
    return sorted(file.name for file in folder.iterdir())


def test_round_trip_bitwise(tmp_path):
    found = open_checkpoint(write(tmp_path / "out"))
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["config.json", "model.safetensors"]
    reference = load_file(tmp_path / "out" / "model.safetensors")
    assert set(found) == set(reference) == set(EVERY_KIND)
    for name, value in EVERY_KIND.items():
        assert same_bits(found[name], value)
        assert same_bits(reference[name], value)


def test_every_tensor_begins_at_a_multiple_of_its_item_size(tmp_path):
    tensors = {"flag": torch.tensor([True]), "w": torch.ones(3), "h": torch.ones(1, dtype=torch.float16)}
    found = open_checkpoint(write(tmp_path / "out", tensors))
    assert all(info.offset % info.dtype.itemsize == 0 for info in found.infos.values())


def test_sharded_equals_single(tmp_path):
    write(tmp_path / "single")
    write(tmp_path / "sharded", max_shard_size=40)
    single, sharded = open_checkpoint(tmp_path / "single"), open_checkpoint(tmp_path / "sharded")
    assert set(single) == set(sharded)
    assert all(same_bits(single[name], sharded[name]) for name in single)
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert [file.name for file in files] == [f"model-{i:05d}-of-00004.safetensors" for i in range(1, 5)]
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in single.infos.values())
    assert index["weight_map"] == {name: info.file.name for name, info in sharded.infos.items()}
    merged = {name: value for file in files for name, value in load_file(file).items()}
    assert all(same_bits(merged[name], value) for name, value in EVERY_KIND.items())


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    max_size=st.integers(1, 80),
    seed=st.integers(0, 99),
)
def test_any_sizes_any_shards_any_order(tmp_path_factory, sizes, max_size, seed):
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    tensors = {f"t{i}": torch.randn(n, 2, generator=generator).to(dtypes[(i + seed) % 3]) for i, n in enumerate(sizes)}
    out = tmp_path_factory.mktemp("any") / "out"
    with CheckpointWriter(out, infos_of(tensors), config=CONFIG, max_shard_size=max_size) as writer:
        shuffled = torch.randperm(len(sizes), generator=generator).tolist()
        for i in shuffled:
            writer.write(f"t{i}", tensors[f"t{i}"])
    found = open_checkpoint(out)
    assert tuple(found) == writer.order
    assert all(same_bits(found[name], tensors[name]) for name in tensors)
    for file in {info.file for info in found.infos.values()}:
        held = [info.nbytes for info in found.infos.values() if info.file == file]
        assert sum(held) <= max_size or sum(size > 0 for size in held) == 1


def test_blocks_interleaved_between_tensors(tmp_path):
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(4, 2).bfloat16(), "none": torch.zeros(0, 2)}
    a, b = tensors["a"].flatten(), tensors["b"].flatten()
    with CheckpointWriter(tmp_path / "out", infos_of(tensors), config=CONFIG) as writer:
        for start in (0, 4):
            writer.write_flat("a", start, a[start : start + 4])
            writer.write_flat("b", start, b[start : start + 4])
        writer.write_flat("none", 0, tensors["none"].flatten())
        writer.write_flat("a", 8, a[8:])
    found = open_checkpoint(tmp_path / "out")
    assert all(same_bits(found[name], tensors[name]) for name in tensors)


def test_views_are_written_as_they_read(tmp_path):
    base = torch.randn(4, 6, requires_grad=True)
    tensors = {"turned": base.T, "strided": base[:, ::2], "spread": torch.ones(1).expand(3)}
    found = open_checkpoint(write(tmp_path / "out", tensors))
    assert all(same_bits(found[name], value.detach().contiguous()) for name, value in tensors.items())


def test_our_own_mistakes_are_value_errors_and_leave_nothing(tmp_path):
    tensors = {"a": torch.ones(4, 2), "s": torch.ones(())}

    def attempt(*steps):
        with CheckpointWriter(tmp_path / "out", infos_of(tensors), config=CONFIG) as writer:
            for verb, *arguments in steps:
                getattr(writer, verb)(*arguments)

    whole = ("write", "a", tensors["a"])
    for message, steps in {
        "2 tensors were not written, the first 'a'": [],
        "1 tensors were not written, the first 's'": [whole],
        "expected .4, 2., once": [("write", "a", torch.ones(2, 4))],
        "once, at one go": [whole, whole],
        "as torch.float64: expected torch.float32": [("write", "a", tensors["a"].double())],
        "from 0 on": [("write_flat", "a", 1, torch.ones(7))],
        "from 2 on": [("write_flat", "a", 0, torch.ones(2)), ("write_flat", "a", 0, torch.ones(2))],
        "numbers 0:9 of 'a'": [("write_flat", "a", 0, torch.ones(9))],
        "numbers 0:8 of 'a'": [("write_flat", "a", 0, torch.ones(4, 2))],
        "numbers 0:1 of 's'": [("write_flat", "s", 0, torch.ones(()))],
    }.items():
        with pytest.raises(ValueError, match=message):
            attempt(*steps)
        assert names(tmp_path) == []
    attempt(whole, ("write", "s", tensors["s"]))
    assert names(tmp_path) == ["out"]


def test_writing_outside_the_block_and_impossible_tensors(tmp_path):
    writer = CheckpointWriter(tmp_path / "out", {"a": (torch.float32, (1,))}, config=CONFIG)
    with pytest.raises(ValueError, match="inside the `with` block"):
        writer.write("a", torch.ones(1))
    for infos in ({}, {"__metadata__": (torch.float32, (1,))}, {"a": (torch.complex64, (1,))}):
        with pytest.raises(ValueError, match=r"without tensors|no place in a safetensors file"):
            CheckpointWriter(tmp_path / "out", infos, config=CONFIG)
    assert names(tmp_path) == []


def test_an_overflow_is_not_written(tmp_path):
    wide = torch.tensor([1.0, 1e6])
    write(tmp_path / "fine", {"w": wide.bfloat16()})
    with pytest.raises(CheckpointError, match="tensor 'w' holds 0 NaN and 1 infinite values: float16 ends"):
        write(tmp_path / "out", {"w": wide.half()})
    assert names(tmp_path) == ["fine"]
    with CheckpointWriter(tmp_path / "mask", {"w": (torch.float16, (2,))}, config=CONFIG) as writer:
        writer.write("w", wide.half(), finite=False)
    assert same_bits(open_checkpoint(tmp_path / "mask").read("w", finite=False), wide.half())


@pytest.mark.parametrize(
    ("given_size", "expected"),
    [("5GB", 5 * 10**9), ("200mb", 2 * 10**8), ("1.5 KiB", 1536), (7, 7), ("12", 12)],
)
def test_sizes(given_size, expected):
    assert parse_size(given_size) == expected


@pytest.mark.parametrize("size", ["", "5 pounds", "-1", 0, "0GB", "9" * 400, "1e9"])
def test_sizes_that_are_none(tmp_path, size):
    with pytest.raises(CheckpointError, match="is not a size"):
        write(tmp_path / "out", max_shard_size=size)


def test_usual_companions_are_copied_and_lose_their_code(tmp_path):
    source = make_folder(tmp_path / "source")
    token_map = '{"auto_map": 5, "a": 1}'
    kept = {
        "vocab.json": token_map,
        "added_tokens.json": token_map,
        "tokenizer.json": "{}",
        "merges.txt": "a b",
        "LICENSE": "yes",
        "LICENSE.txt": "yes",
        "NOTICE.md": "yes",
        "generation_config.json": '{"x":1}',
    }
    left = ["modeling_x.py", "LICENSE.py", "NOTICE.pkl", "training_args.bin", "pytorch_model.bin"]
    for name, text in {**kept, **dict.fromkeys(left, "no")}.items():
        (source / name).write_text(text)
    (source / "LICENSES").mkdir()
    (source / "tokenizer_config.json").write_text('{"a": 1, "auto_map": {"AutoTokenizer": ["x.Y", null]}}')
    (tmp_path / "blob").write_text("template")
    (source / "chat_template.jinja").symlink_to("../blob")
    (source / "spiece.model").symlink_to("../gone")
    out = write(tmp_path / "out", companions=source)
    written = {"config.json", "model.safetensors", "tokenizer_config.json", "chat_template.jinja"}
    assert set(names(out)) == set(kept) | written
    assert all((out / name).read_text() == text for name, text in kept.items())
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"a": 1}
    assert (out / "chat_template.jinja").read_text() == "template"
    assert not (out / "chat_template.jinja").is_symlink()


def test_config_without_code_and_untouched(tmp_path):
    config = {
        **CONFIG,
        "auto_map": {"AutoModel": "x.Y"},
        "text": {"auto_map": {}, "n": 1},
        "l": [{"auto_map": 0}],
    }
    out = write(tmp_path / "out", config=config)
    assert json.loads((out / "config.json").read_text()) == {**CONFIG, "text": {"n": 1}, "l": [{}]}
    assert "auto_map" in config
    assert "auto_map" in config["text"]


def test_a_damaged_companion_is_one_line_and_leaves_nothing(tmp_path):
    source = make_folder(tmp_path / "source")
    (source / "tokenizer_config.json").write_text("{oops")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json is not valid JSON"):
        write(tmp_path / "out", companions=source)
    assert names(tmp_path) == ["source"]


def test_too_little_space_is_said_before_writing(tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 10**6})
    monkeypatch.setattr("isobasin.checkpoint.writer.shutil.disk_usage", lambda _: usage)
    usage.free = 2000
    with pytest.raises(CheckpointError, match=r"needs 0\.\d+ MB, the disk has 0.002 MB free: make room"):
        write(tmp_path / "deep" / "out")
    assert names(tmp_path) == []
    usage.free = 10**9
    write(tmp_path / "deep" / "out")
    assert names(tmp_path / "deep") == ["out"]
    n_blocks = sum(math.ceil(file.stat().st_size / 4096) for file in (tmp_path / "deep" / "out").iterdir())
    usage.free = 4096 * n_blocks - 1
    with pytest.raises(CheckpointError, match="make room"):
        write(tmp_path / "deep" / "again")
    usage.free = 4096 * n_blocks + 50_000  # a small disk is enough for a small model
    write(tmp_path / "deep" / "again")


@pytest.mark.parametrize(
    ("code", "message"),
    [(errno.ENOSPC, "the disk became full, nothing is written"), (errno.EIO, "can not be written: .*error")],
)
def test_a_disk_that_fails_in_the_middle(tmp_path, monkeypatch, code, message):
    from isobasin.checkpoint import writer

    done = []

    def failing(file, offset, data, write_at=writer.write_at):
        if len(done) == 3:
            raise OSError(code, "an error")
        done.append(write_at(file, offset, data))

    monkeypatch.setattr(writer, "write_at", failing)
    with pytest.raises(CheckpointError, match=message) as caught:
        write(tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert len(done) == 3
    assert names(tmp_path) == []
