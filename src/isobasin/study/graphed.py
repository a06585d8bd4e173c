# SHIM
# mypy: implicit-reexport
from isobasin.study.trainer import GraphedStep as GraphedStep  # noqa: F401
from isobasin.study.trainer import can_compile as can_compile  # noqa: F401
from isobasin.study.trainer import capture_graph as recorded  # noqa: F401
