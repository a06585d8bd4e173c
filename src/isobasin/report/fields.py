# SHIM
# mypy: implicit-reexport
from isobasin.report.result import strict_json as strict  # noqa: F401
