# SHIM
# mypy: implicit-reexport
from isobasin.study.trainer import Augment as Augment  # noqa: F401
from isobasin.study.trainer import TrainResult as Trained  # noqa: F401
from isobasin.study.trainer import train as train  # noqa: F401
