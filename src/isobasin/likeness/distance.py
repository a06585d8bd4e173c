# SHIM
# mypy: implicit-reexport
from isobasin.compare.distance import DistanceResult as Likeness  # noqa: F401
from isobasin.compare.distance import distance as distance  # noqa: F401
