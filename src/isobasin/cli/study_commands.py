# SHIM
# mypy: implicit-reexport
from isobasin.cli.study import study as study
