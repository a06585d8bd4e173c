# SHIM
# mypy: implicit-reexport
from isobasin.checkpoint.dtypes import check_finite as check_finite
