"""Numbers that are the same everywhere and always: the directions that a canonical point or a fingerprint refers to."""

from zlib import crc32

import numpy as np
import torch
from torch import Tensor


def fixed(label: str, *shape: int) -> Tensor:
    """Numbers without mean and of variance one, a function of the label and the shape alone.

    From the raw bits of PCG64, which numpy promises never to change; a torch generator promises less.
    """
    count = int(np.prod(shape)) if shape else 1
    raw = np.random.PCG64(crc32(label.encode())).random_raw(count)
    uniform = (np.asarray(raw, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return torch.from_numpy((2 * uniform - 1) * 3**0.5).reshape(shape)
