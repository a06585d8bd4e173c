# SHIM
# mypy: implicit-reexport
from isobasin.study.trainer import empty_queue as nothing  # noqa: F401
from isobasin.study.trainer import model_inputs as ready  # noqa: F401
from isobasin.study.trainer import training_examples as examples  # noqa: F401
from isobasin.study.trainer import windows as windows  # noqa: F401
