"""The map between the streams of two models: from embeddings, positions and head; from layers where they must help."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from isobasin.arch import Space
from isobasin.arch.architecture import ROTATED
from isobasin.compare.similarity import Meeting, Pair, Parted
from isobasin.groups import Element
from isobasin.match.canonical import ENDS, stream_of
from isobasin.match.overlap import Overlap
from isobasin.match.spaces import match_space
from isobasin.symmetries import group_of

SWEEPS = 12
ALIKE = 0.5  # similarity of the ends above which nothing else is worth a look
THIN = 1e-6  # smallest singular value of the ends' overlap, of the largest, below which they do not fix a rotation

Spaces = Sequence[tuple[str, str]]


class StreamMap(NamedTuple):
    """The element that brings B's stream to A's; the parts that were compared under it on the way; and whether layers
    took part in it, because the ends do not fix a rotation."""

    element: Element
    known: Mapping[tuple[str, str], Pair]
    swept: bool = False


def stream_map(a: Parted, b: Parted, pairs: Spaces) -> StreamMap:
    """How B's stream comes to A's; `pairs` are the parts that belong together.

    The ends alone decide where they are alike. Otherwise their map competes with leaving the stream as it is
    (embeddings may be new while layers are shared) on the ends and all heads.
    """
    space = stream_of(a.arch)
    still = group_of(space).identity()
    if space.kind == "fixed":
        return StreamMap(still, {})
    ends = _ends(a, b)
    found = match_space(space, ends)
    if _thin(space, ends):
        return StreamMap(_swept(a, b, pairs, ends, found, space), {}, swept=True)
    alike = Meeting.of(a, b, ENDS, ENDS, found).pair()
    if alike.similarity > ALIKE:
        return StreamMap(found, {(ENDS, ENDS): alike})
    heads = [(x, y) for x, y in pairs if x.startswith("heads")]
    by_ends = StreamMap(found, {(ENDS, ENDS): alike} | _compared(a, b, heads, found))
    as_it_is = StreamMap(still, _compared(a, b, [(ENDS, ENDS), *heads], still))
    return max(by_ends, as_it_is, key=lambda m: sum(pair.similarity for pair in m.known.values()))


def map_by_ends(a: Parted, b: Parted) -> Element:
    """What embeddings, positions and head alone say."""
    space = stream_of(a.arch)
    return group_of(space).identity() if space.kind == "fixed" else match_space(space, _ends(a, b))


def map_by_all(a: Parted, b: Parted, pairs: Spaces) -> Element:
    """What they and all layers say."""
    space, ends = stream_of(a.arch), _ends(a, b)
    return _swept(a, b, pairs, ends, match_space(space, ends), space)


def _ends(a: Parted, b: Parted) -> Overlap:
    still = group_of(stream_of(a.arch)).identity()
    return Meeting.of(a, b, ENDS, ENDS, still).on_stream(still)


def _compared(a: Parted, b: Parted, pairs: Spaces, stream: Element) -> dict[tuple[str, str], Pair]:
    return {(x, y): Meeting.of(a, b, x, y, stream).pair() for x, y in pairs}


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
