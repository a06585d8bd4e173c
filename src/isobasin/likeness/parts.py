# SHIM
# mypy: implicit-reexport
from isobasin.compare.normal_form import Form as Form  # noqa: F401
