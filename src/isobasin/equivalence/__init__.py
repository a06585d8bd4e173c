# SHIM
# mypy: implicit-reexport
from isobasin.compare.equivalence import equivalent as equivalent  # noqa: F401
from isobasin.compare.verdict import Verdict as Verdict  # noqa: F401
