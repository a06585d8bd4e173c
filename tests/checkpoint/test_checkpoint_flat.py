"""Numbers in a row: read and written in blocks that do not follow the rows, and texts that lie beside the weights."""

import pytest
import torch
from checkpoint_imitations import CONFIG, make_folder, same_bits

from isobasin.checkpoint import CheckpointWriter, open_checkpoint
from isobasin.errors import CheckpointError

WEIGHT = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).bfloat16()
INFOS = {"w": (torch.bfloat16, (5, 7)), "v": (torch.float32, (3,))}


def write(out, blocks, **options):
    with CheckpointWriter(out, INFOS, config=CONFIG, **options) as writer:
        for start, stop in blocks:
            writer.write_flat("w", start, WEIGHT.reshape(-1)[start:stop])
        writer.write("v", torch.ones(3))
    return open_checkpoint(out)


@pytest.mark.parametrize("step", [1, 4, 35])
def test_any_blocks_make_the_same_tensor(tmp_path, step):
    blocks = [(start, min(start + step, 35)) for start in range(0, 35, step)]
    found = write(tmp_path / "out", blocks)
    assert same_bits(found["w"], WEIGHT)
    assert all(same_bits(found.flat("w", *block), WEIGHT.reshape(-1)[slice(*block)]) for block in blocks)
    assert not same_bits(found.flat("w", 1, 8), WEIGHT.reshape(-1)[:7])


def test_blocks_out_of_turn_too_long_or_of_another_kind(tmp_path):
    for blocks, message in (
        ([(1, 35)], "from 0 on"),
        ([(0, 5), (0, 5)], "from 5 on"),
        ([(0, 5)], "1 tensors were not written, the first 'w'"),
    ):
        with pytest.raises(ValueError, match=message):
            write(tmp_path / "out", blocks)
    with CheckpointWriter(tmp_path / "out", INFOS, config=CONFIG) as writer:
        with pytest.raises(ValueError, match="expected those of 35"):
            writer.write_flat("w", 0, WEIGHT)
        writer.write_flat("w", 0, WEIGHT.reshape(-1)[:7])
        with pytest.raises(ValueError, match="at one go"):
            writer.write("w", WEIGHT)
        writer.write_flat("w", 7, WEIGHT.reshape(-1)[7:])
        writer.write("v", torch.ones(3))
    assert same_bits(open_checkpoint(tmp_path / "out")["w"], WEIGHT)


def test_reading_beyond_the_end_and_what_is_not_finite(tmp_path):
    found = open_checkpoint(make_folder(tmp_path / "in", {"w": torch.tensor([[1.0, float("nan")]])}))
    with pytest.raises(ValueError, match="numbers 1:3 of tensor 'w'"):
        found.flat("w", 1, 3)
    assert found.flat("w", 1, 2).isnan().all()
    with pytest.raises(CheckpointError, match="'w' holds 1 NaN and 0 infinite values: found in"):
        found.check("w", found.flat("w", 0, 2))
    assert found.check("w", found.flat("w", 0, 1)) is None


def test_documents_are_written_with_the_rest_or_not_at_all(tmp_path):
    write(tmp_path / "out", [(0, 35)], documents={"README.md": "words ✓"})
    assert (tmp_path / "out" / "README.md").read_text("utf-8") == "words ✓"
    with pytest.raises(ValueError, match="not written"):
        write(tmp_path / "other", [(0, 5)], documents={"README.md": "words"})
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
