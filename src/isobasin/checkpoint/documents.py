# SHIM
# mypy: implicit-reexport
from isobasin.checkpoint.folder import read_object as read_object
