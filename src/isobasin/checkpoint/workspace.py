# SHIM
# mypy: implicit-reexport
from isobasin.checkpoint.writer import check_output as check_output
