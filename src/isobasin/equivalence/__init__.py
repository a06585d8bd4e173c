"""Do two models compute the same function? Same, different or undecided, with the evidence."""

from isobasin.equivalence.judging import equivalent
from isobasin.equivalence.verdict import Verdict

__all__ = ["Verdict", "equivalent"]
