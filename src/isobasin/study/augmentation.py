"""Pictures changed at random, so that a few thousand of them go further."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.errors import IsobasinError


def shifted(by: int, fill: float = -1.0) -> Callable[[Tensor, torch.Generator], Tensor]:
    """Each picture of a batch moves by up to `by` pixels both ways; what comes in from outside is `fill`.

    −1 is black, as pictures are scaled here: (x/255 − ½)/½.

    >>> picture = torch.zeros(1, 1, 2, 2)
    >>> shifted(1)(picture, torch.Generator().manual_seed(0)).shape
    torch.Size([1, 1, 2, 2])
    """
    if by < 1:
        raise IsobasinError(f"shift by {by} pixels: expected 1 or more")

    def shift(images: Tensor, generator: torch.Generator) -> Tensor:
        n, _, height, width = images.shape
        moves = torch.randint(2 * by + 1, (2, n, 1), generator=generator, device="cpu").to(images.device)
        rows = moves[0] + torch.arange(height, device=images.device)  # (n, height)
        columns = moves[1] + torch.arange(width, device=images.device)  # (n, width)
        number = torch.arange(n, device=images.device)[:, None, None]
        wide = F.pad(images, (by,) * 4, value=fill).movedim(1, -1)  # (n, height + 2 by, width + 2 by, channels)
        return wide[number, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)

    return shift
