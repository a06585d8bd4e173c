"""Checkpoint folders on disk: lazy reading of untrusted files and atomic writing, for any architecture."""

from isobasin.checkpoint.header import DTYPE_POLICIES, TensorInfo, check_finite, dtype_name, output_dtype, with_dtype
from isobasin.checkpoint.reader import Checkpoint, open_checkpoint
from isobasin.checkpoint.writer import CheckpointWriter

__all__ = [
    "DTYPE_POLICIES",
    "Checkpoint",
    "CheckpointWriter",
    "TensorInfo",
    "check_finite",
    "dtype_name",
    "open_checkpoint",
    "output_dtype",
    "with_dtype",
]
