"""The map between the streams of two models: from embeddings, positions and head; from layers where they must help."""

from collections.abc import Sequence

import torch

from isobasin.arch import Space
from isobasin.arch.architecture import ROTATED
from isobasin.groups import Element
from isobasin.likeness.pairs import Meeting, Parted
from isobasin.match.canonical import ENDS, STREAM
from isobasin.match.overlap import Overlap
from isobasin.match.spaces import match_space
from isobasin.symmetries import group_of

SWEEPS = 12
ALIKE = 0.5  # similarity of the ends above which nothing else is worth a look
THIN = 1e-6  # smallest singular value of the ends' overlap, of the largest, below which they do not fix a rotation

Spaces = Sequence[tuple[str, str]]


def stream_map(a: Parted, b: Parted, pairs: Spaces) -> Element:
    """The element that brings B's stream to A's; `pairs` are the parts that belong together.

    The ends alone decide where they are alike. Otherwise their map competes with leaving the stream as it is
    (embeddings may be new while layers are shared) on the ends and all heads.
    """
    space = a.arch.spaces[STREAM]
    assert isinstance(space, Space)
    still = group_of(space).identity()
    if space.kind == "fixed":
        return still
    ends = Meeting.of(a, b, ENDS, ENDS, still).on_stream(still)
    found = match_space(space, ends)
    if _thin(space, ends):
        return _swept(a, b, pairs, ends, found, space)
    if Meeting.of(a, b, ENDS, ENDS, found).pair().similarity > ALIKE:
        return found
    probed = [(ENDS, ENDS), *((x, y) for x, y in pairs if x.startswith("heads"))]
    return max((found, still), key=lambda g: sum(Meeting.of(a, b, x, y, g).pair().similarity for x, y in probed))


def _thin(space: Space, ends: Overlap) -> bool:
    if space.kind not in ROTATED:
        return False
    values = torch.linalg.svdvals(ends.turning.to(torch.float64))
    last = len(values) - 1 - (space.kind == "orthogonal1")
    return bool(values[last] <= THIN * values[0])


def _swept(a: Parted, b: Parted, pairs: Spaces, ends: Overlap, start: Element, space: Space) -> Element:
    """Few rows leave a rotation undecided: layers are matched where the stream stands, then the stream again."""
    best, least = start, float("inf")
    now = start
    for _ in range(SWEEPS):
        total, square = ends, Meeting.of(a, b, ENDS, ENDS, now).square(None)
        for x, y in pairs:
            meeting = Meeting.of(a, b, x, y, now)
            square += meeting.pair().square
            total = total + meeting.on_stream(now)
        if not square < least * (1 - 1e-6):
            break
        best, least = now, square
        now = match_space(space, total)
    return best
