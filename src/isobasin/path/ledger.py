# SHIM
# mypy: implicit-reexport
from isobasin.path.evaluation import ResultCache as FileLedger  # noqa: F401
