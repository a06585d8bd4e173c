# SHIM
# mypy: implicit-reexport
from isobasin.learn.trainer import PERMUTATIONS as PERMUTATIONS  # noqa: F401
from isobasin.learn.trainer import TrainConfig as Lessons  # noqa: F401
