"""Pictures and texts changed at random, so that a few thousand of them go further."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.errors import IsobasinError

Augmentation = Callable[[Tensor, torch.Generator], Tensor]
NAMES = ("none", "shift", "flip-crop", "drop-words")
DROPPED = 0.2  # share of words
_CHANGES = {"shift": "image", "flip-crop": "image", "drop-words": "text"}


def augmentation(name: str, kind: str | None = None) -> Augmentation | None:
    """By the name that a grid gives it: `shift` by a pixel, `flip-crop`, or `drop-words`; `none` is None.

    `kind` is that of the data, if they are to be checked: image, text or lm.
    """
    if name not in NAMES:
        raise IsobasinError(f"augment {name!r} is unknown, expected one of {', '.join(NAMES)}")
    if kind is not None and _CHANGES.get(name, kind) != kind:
        raise IsobasinError(f"augment {name!r} changes {_CHANGES[name]} data, but these are {kind}; use none")
    return {"shift": shifted(by=1), "flip-crop": flipped_and_cropped(by=4), "drop-words": dropped(DROPPED)}.get(name)


def shifted(by: int, fill: float = -1.0) -> Augmentation:
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


def flipped_and_cropped(by: int, fill: float = -1.0) -> Augmentation:
    """Each picture is mirrored with chance one half, then shifted: the usual thing for CIFAR."""
    shift = shifted(by, fill)

    def change(images: Tensor, generator: torch.Generator) -> Tensor:
        mirrored = (torch.rand(len(images), generator=generator, device="cpu") < 0.5).to(images.device)
        return shift(torch.where(mirrored[:, None, None, None], images.flip(-1), images), generator)

    return change


def dropped(share: float, *, pad: int = 0, unknown: int = 1) -> Augmentation:
    """Each word becomes the unknown one with chance `share`; padding stays.

    >>> dropped(0.5)(torch.tensor([[5, 6, 7, 0]]), torch.Generator().manual_seed(0)).tolist()
    [[1, 6, 1, 0]]
    """
    if not 0 < share < 1:
        raise IsobasinError(f"drop a share of {share} of all words: expected more than 0 and less than 1")

    def drop(tokens: Tensor, generator: torch.Generator) -> Tensor:
        chance = torch.rand(tokens.shape, generator=generator, device="cpu").to(tokens.device)
        return torch.where((chance < share) & (tokens != pad), unknown, tokens)

    return drop
