"""Checkpoint folders on disk: lazy reading of untrusted files and atomic writing, for any architecture."""

from isobasin.checkpoint.adapter import Adapter as Adapter
from isobasin.checkpoint.folder import Companions as Companions
from isobasin.checkpoint.folder import find_companions as find_companions
from isobasin.checkpoint.header import DTYPE_POLICIES as DTYPE_POLICIES
from isobasin.checkpoint.header import TensorInfo as TensorInfo
from isobasin.checkpoint.header import check_finite as check_finite
from isobasin.checkpoint.header import check_kept as check_kept
from isobasin.checkpoint.header import dtype_name as dtype_name
from isobasin.checkpoint.header import output_dtype as output_dtype
from isobasin.checkpoint.header import with_dtype as with_dtype
from isobasin.checkpoint.reader import Checkpoint as Checkpoint
from isobasin.checkpoint.reader import open_checkpoint as open_checkpoint
from isobasin.checkpoint.writer import CheckpointWriter as CheckpointWriter
from isobasin.checkpoint.writer import parse_size as parse_size
