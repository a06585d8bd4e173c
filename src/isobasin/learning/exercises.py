# SHIM
# mypy: implicit-reexport
from isobasin.learn.data import split_held_out as split  # noqa: F401
