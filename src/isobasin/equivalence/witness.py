# SHIM
# mypy: implicit-reexport
from isobasin.compare.outputs import ComparedInput as Witness  # noqa: F401
