# SHIM
# mypy: implicit-reexport
from isobasin.report.text import NBSP as NBSP
