"""The dtype policy, and the two keys under which configurations name a dtype."""

import pytest
import torch

from isobasin.checkpoint import dtype_name, output_dtype, with_dtype
from isobasin.errors import CheckpointError


def test_policy_converts_floating_tensors_only():
    assert output_dtype("keep", torch.float64) == torch.float64
    assert output_dtype("float16", torch.float64) == torch.float16
    assert output_dtype("float32", torch.bfloat16) == torch.float32
    assert output_dtype("bfloat16", torch.int64) == torch.int64
    with pytest.raises(CheckpointError, match="dtype 'int8' is unknown: give one of keep, float32"):
        output_dtype("int8", torch.float32)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n": 1}, {"n": 1, "dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": None}, {"torch_dtype": "bfloat16"}),
        ({"torch_dtype": "float16", "dtype": "float32"}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}),
    ],
)
def test_the_config_follows(config, expected):
    before = dict(config)
    assert with_dtype(config, "bfloat16") == with_dtype(config, torch.bfloat16) == expected
    assert with_dtype(config, "keep") == config == before


def test_unknown_names_and_spelling():
    assert dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(CheckpointError, match="dtype 'half' is unknown"):
        with_dtype({}, "half")
