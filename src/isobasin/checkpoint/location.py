# SHIM
# mypy: implicit-reexport
from isobasin.checkpoint.folder import find_folder as find_folder
