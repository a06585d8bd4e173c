# SHIM
# mypy: implicit-reexport
from isobasin.compare.normal_form import BalancedModel as Form  # noqa: F401
