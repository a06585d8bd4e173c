# SHIM
# mypy: implicit-reexport
from isobasin.compare.distance import Likeness as Likeness  # noqa: F401
from isobasin.compare.distance import distance as distance  # noqa: F401
