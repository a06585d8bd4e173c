# SHIM
# mypy: implicit-reexport
from isobasin.cli.app import app as app
