# SHIM
# mypy: implicit-reexport
from isobasin.path.evaluation import Watch as Watch
from isobasin.path.evaluation import evaluate_points as survey  # noqa: F401
