# SHIM
# mypy: implicit-reexport
from isobasin.compare.canonical import canonical as canonical  # noqa: F401
