# SHIM
# mypy: implicit-reexport
from isobasin.learn.trainer import SECTION as SECTION  # noqa: F401
from isobasin.learn.trainer import OnProgress as Watch  # noqa: F401
from isobasin.learn.trainer import TrainConfig as Lessons  # noqa: F401
from isobasin.learn.trainer import learn as learn  # noqa: F401
