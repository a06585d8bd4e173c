"""Old `.bin` files: both serialisations, sharded ones, and everything in a pickle that is not a tensor."""

import json
from collections import OrderedDict

import pytest
import torch
from checkpoint_imitations import EVERY_KIND, make_pickled, same_bits

from isobasin.checkpoint import open_checkpoint
from isobasin.errors import CheckpointError

BOTH = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])


@BOTH
def test_bitwise(tmp_path, zipped):
    state = OrderedDict(EVERY_KIND) | {"turned": EVERY_KIND["f32"].T, "p": torch.nn.Parameter(torch.ones(3))}
    found = open_checkpoint(make_pickled(tmp_path / "m", state, zipped=zipped))
    assert set(found) == set(state)
    assert all(same_bits(found[name], state[name].detach().contiguous()) for name in state)
    assert found["turned"].is_contiguous()
    assert not found["p"].requires_grad
    assert same_bits(found.rows("turned", 1, 3), state["turned"][1:3].contiguous())


@BOTH
def test_a_tensor_handed_out_is_the_callers_own(tmp_path, zipped):
    shared = torch.ones(3)
    found = open_checkpoint(make_pickled(tmp_path / "m", {"a": shared, "tied": shared}, zipped=zipped))
    found["a"].zero_()
    assert found["a"].tolist() == found["tied"].tolist() == [1, 1, 1]


@BOTH
def test_sharded(tmp_path, zipped):
    shards = {"x-1.bin": {"a": torch.ones(2)}, "x-2.bin": {"b": torch.zeros(3)}}
    folder = make_pickled(tmp_path / "m", {})
    (folder / "pytorch_model.bin").unlink()
    for file, state in shards.items():
        torch.save(state, folder / file, _use_new_zipfile_serialization=zipped)
    index = {"weight_map": {"a": "x-1.bin", "b": "x-2.bin"}}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    found = open_checkpoint(folder)
    for _ in range(2):  # back and forth between the files
        assert found["a"].tolist() == [1, 1]
        assert found["b"].tolist() == [0, 0, 0]
        kept = found._pickles
        assert (len(kept._mapped), len(kept._whole)) == ((2, 0) if zipped else (0, 1))
    assert found.infos["b"].file == folder / "x-2.bin"


class TouchesAFile:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@BOTH
def test_code_in_a_pickle_does_not_run(tmp_path, zipped):
    trace = tmp_path / "trace"
    folder = make_pickled(tmp_path / "m", {"a": torch.ones(1), "evil": TouchesAFile(trace)}, zipped=zipped)
    with pytest.raises(CheckpointError, match=r"can not be read safely \(.*open.*\): re-download") as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)
    assert not trace.exists()
    torch.load(folder / "pytorch_model.bin", weights_only=False)["evil"].close()
    assert trace.exists()  # the imitation bites where it is let


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": torch.ones(1), "step": 3}, "'step' in .* is a int, expected a tensor"),
        ({"model": {"a": torch.ones(1)}}, "'model' in .* is a dict, expected a tensor"),
        ([torch.ones(1)], "holds a list, expected a dictionary of tensors"),
        ({3: torch.ones(1)}, "has a key 3, expected names of tensors"),
        ({}, "holds no tensors"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "number format torch.complex64"),
        ({"a": torch.ones(1).to(torch.float8_e4m3fn)}, "quantised .torch.float8_e4m3fn.: dequantise"),
        ({"a": torch.eye(2).to_sparse()}, "tensor 'a' in .* is torch.sparse_coo"),
        ({"a": torch.ones(1, device="meta")}, "is torch.strided on meta"),
        ({"a": torch.ones(1).expand(10**12)}, "claims to be larger than its file"),
    ],
)
def test_what_is_not_a_dense_tensor_is_refused(tmp_path, state, message):
    folder = make_pickled(tmp_path / "m", state)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")  # torch is about to drop these tensors; old files keep them
def test_quantised_tensors_are_refused(tmp_path):
    state = {"a": torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8)}
    with pytest.raises(CheckpointError, match=r"quantised .torch.qint8.: dequantise"):
        open_checkpoint(make_pickled(tmp_path / "m", state))


@BOTH
def test_truncated(tmp_path, zipped):
    folder = make_pickled(tmp_path / "m", {"a": torch.ones(1000)}, zipped=zipped)
    file = folder / "pytorch_model.bin"
    assert open_checkpoint(folder)["a"].sum() == 1000
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="can not be read safely"):
        open_checkpoint(folder)


@BOTH
def test_values_that_are_no_numbers(tmp_path, zipped):
    state = {"a": torch.tensor([1.0, float("nan")]), "b": torch.ones(1)}
    found = open_checkpoint(make_pickled(tmp_path / "m", state, zipped=zipped))
    assert found["b"].tolist() == [1]
    with pytest.raises(CheckpointError, match="tensor 'a' holds 1 NaN"):
        found["a"]
    with pytest.raises(CheckpointError, match="tensor 'a' holds 1 NaN"):
        found.rows("a", 1, 2)
    assert found.rows("a", 0, 1).tolist() == [1]
