# SHIM
# mypy: implicit-reexport
from isobasin.tasks.task import is_own as is_own
from isobasin.tasks.task import name_of as name_of
from isobasin.tasks.task import task_kind as task_kind
from isobasin.tasks.task import vocabulary_size as vocabulary  # noqa: F401
from isobasin.tasks.task import window_length as window_length
