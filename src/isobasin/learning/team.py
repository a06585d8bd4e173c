# SHIM
# mypy: implicit-reexport
from isobasin.learn.distributed import ProcessGroup as Team  # noqa: F401
from isobasin.learn.distributed import SingleProcess as Alone  # noqa: F401
from isobasin.learn.distributed import average_gradients as average  # noqa: F401
from isobasin.learn.distributed import current_group as team_of  # noqa: F401
