# SHIM
# mypy: implicit-reexport
from isobasin.cli.merge import merge_lines as merge_lines
