"""The free coordinates of a model: gains and shifts, means along all-ones, biases that are not seen."""

from isobasin.arch import Architecture
from isobasin.gauge.biases import key_biases, sum_shares, value_biases
from isobasin.gauge.coordinate import Coordinate, Stage
from isobasin.gauge.means import ReaderMean, reader_means, writer_means
from isobasin.gauge.norms import NormCoordinate, norm_coordinates

__all__ = ["Coordinate", "NormCoordinate", "ReaderMean", "Stage", "coordinates"]


def coordinates(arch: Architecture) -> dict[str, Coordinate]:
    """Every free coordinate of a bound architecture, by name, in the order in which they are set."""
    found: list[Coordinate] = [
        *reader_means(arch),
        *norm_coordinates(arch),
        *key_biases(arch),
        *value_biases(arch),
        *sum_shares(arch),
        *writer_means(arch),
    ]
    return {c.name: c for c in sorted(found, key=lambda c: c.stage)}
