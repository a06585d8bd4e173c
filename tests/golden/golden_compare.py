"""Comparison of recorded with recomputed results: text and whole numbers exactly, floats within a stated tolerance."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

RELATIVE, ABSOLUTE = 1e-9, 1e-12


@dataclass(frozen=True)
class Tolerance:
    """What floats may differ by at key paths that fit the pattern (as of fnmatch), and why it is not the usual."""

    pattern: str
    relative: float
    absolute: float
    reason: str


@dataclass(frozen=True)
class Comparison:
    """How results are compared. `least_*` widen every tolerance; `hashes` says whether hashes of bytes count."""

    tolerances: Sequence[Tolerance] = ()
    least_relative: float = 0.0
    least_absolute: float = 0.0
    hashes: bool = True

    def deviations(self, expected: Any, found: Any, path: str = "") -> Iterator[str]:
        """A line for each deviation, beginning with its key path."""
        if isinstance(expected, dict) and isinstance(found, dict):
            for key in expected.keys() | found.keys():
                where = f"{path}/{key}" if path else str(key)
                if key not in found:
                    yield f"{where}: missing, recorded {expected[key]!r:.80}"
                elif key not in expected:
                    yield f"{where}: not recorded, found {found[key]!r:.80}"
                else:
                    yield from self.deviations(expected[key], found[key], where)
        elif isinstance(expected, list) and isinstance(found, list):
            if len(expected) != len(found):
                yield f"{path}: {len(found)} entries, recorded {len(expected)}"
                return
            for index, (one, two) in enumerate(zip(expected, found)):
                yield from self.deviations(one, two, f"{path}/{index}")
        elif not self._agree(expected, found, path):
            yield f"{path}: found {found!r}, recorded {expected!r}"

    def _agree(self, expected: Any, found: Any, path: str) -> bool:
        if path.endswith("sha256") and not self.hashes:
            return True
        if not (isinstance(expected, float) and isinstance(found, float)):
            return type(expected) is type(found) and bool(expected == found)
        relative, absolute = self._allowed(path)
        return math.isclose(expected, found, rel_tol=relative, abs_tol=absolute)

    def _allowed(self, path: str) -> tuple[float, float]:
        fits = [each for each in self.tolerances if fnmatchcase(path, each.pattern)]
        relative = max([RELATIVE, self.least_relative, *(each.relative for each in fits)])
        return relative, max([ABSOLUTE, self.least_absolute, *(each.absolute for each in fits)])
