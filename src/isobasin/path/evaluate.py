# SHIM
# mypy: implicit-reexport
from isobasin.path.evaluation import evaluate_line as along  # noqa: F401
