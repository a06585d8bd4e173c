# SHIM
# mypy: implicit-reexport
from isobasin.cli.report import report_facts as report_facts
from isobasin.cli.report import report_lines as report_lines
