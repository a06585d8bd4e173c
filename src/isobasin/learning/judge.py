# SHIM
# mypy: implicit-reexport
from isobasin.learn.path_loss import ACCELERATOR_BATCHES as WIDER  # noqa: F401
