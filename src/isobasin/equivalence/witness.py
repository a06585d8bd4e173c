# SHIM
# mypy: implicit-reexport
from isobasin.compare.witness import Witness as Witness  # noqa: F401
