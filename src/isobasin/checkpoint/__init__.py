"""A folder of weights on disk: lazy, distrustful reading and atomic writing; knows no architectures."""

from isobasin.checkpoint.dtypes import DTYPE_POLICIES, dtype_name, output_dtype, with_dtype
from isobasin.checkpoint.header import TensorInfo
from isobasin.checkpoint.reading import Checkpoint, open_checkpoint
from isobasin.checkpoint.writing import CheckpointWriter

__all__ = [
    "DTYPE_POLICIES",
    "Checkpoint",
    "CheckpointWriter",
    "TensorInfo",
    "dtype_name",
    "open_checkpoint",
    "output_dtype",
    "with_dtype",
]
