# SHIM
# mypy: implicit-reexport
from isobasin.compare.normal_form import is_tied as is_tied  # noqa: F401
