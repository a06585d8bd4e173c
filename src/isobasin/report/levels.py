"""The loss plane as bands of colour: levels that are dense in the basins, and a finer grid to draw them on."""

from bisect import bisect_right
from itertools import pairwise

from isobasin.report.result import Number, Plane, Values

N_BANDS = 12
SAND = ("#fffdf4", "#fdf0cf", "#f6d9a0", "#e8b873", "#cf8f4e", "#a96532")
_CEILING = 0.95  # losses above this quantile share the last band: one wild corner must not flatten the basins


def bands(plane: Plane) -> tuple[float, ...] | None:
    """Ascending levels from the lowest loss, growing quadratically; None where there is nothing to tell apart."""
    known = sorted(value for row in plane.loss for value in row if value is not None)
    if not known:
        return None
    low, high = known[0], known[min(int(_CEILING * len(known)), len(known) - 1)]
    high = high if high > low else known[-1]
    levels = tuple(low + (high - low) * (i / N_BANDS) ** 2 for i in range(N_BANDS + 1))
    # Equal neighbours: the range is below the resolution of the numbers.
    return levels if all(a < b for a, b in pairwise(levels)) else None


def band_of(value: float, levels: tuple[float, ...]) -> int:
    """The index of the band that holds a loss; the last band takes everything above."""
    return max(0, min(sum(value >= level for level in levels) - 1, len(levels) - 2))


def refined(plane: Plane, n: int) -> list[list[Number]]:
    """The loss at the centres of n × n cells, bilinear between the measured points; None next to a hole."""
    columns = [_place(plane.x, (j + 0.5) / n) for j in range(n)]
    rows = [_place(plane.y, (i + 0.5) / n) for i in range(n)]
    return [
        [_mean(_along(plane.loss[i], column), _along(plane.loss[i + 1], column), at) for column in columns]
        for i, at in rows
    ]


def _place(grid: tuple[float, ...], share: float) -> tuple[int, float]:
    """The interval of the grid that a share of its width falls in, and where in that interval."""
    at = grid[0] + share * (grid[-1] - grid[0])
    i = min(max(bisect_right(grid, at) - 1, 0), len(grid) - 2)
    return i, (at - grid[i]) / (grid[i + 1] - grid[i])


def _along(row: Values, place: tuple[int, float]) -> Number:
    i, at = place
    return _mean(row[i], row[i + 1], at)


def _mean(first: Number, second: Number, at: float) -> Number:
    return None if first is None or second is None else (1 - at) * first + at * second
