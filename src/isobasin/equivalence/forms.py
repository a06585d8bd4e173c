# SHIM
# mypy: implicit-reexport
from isobasin.compare.forms import is_tied as is_tied  # noqa: F401
