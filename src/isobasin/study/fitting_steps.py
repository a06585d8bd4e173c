# SHIM
# mypy: implicit-reexport
from isobasin.study.trainer import cross_entropy as loss_of  # noqa: F401
from isobasin.study.trainer import optimized_parameters as parameters  # noqa: F401
