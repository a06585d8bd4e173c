# SHIM
# mypy: implicit-reexport
from isobasin.checkpoint.writer import parse_size as parse_size
