# SHIM
# mypy: implicit-reexport
from isobasin.path.evaluation import FlatModel as Mixture  # noqa: F401
