# SHIM
# mypy: implicit-reexport
from isobasin.report.study_page import write_study_report as write_study_report
