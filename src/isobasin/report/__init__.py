"""Figures and self-contained HTML pages from result files."""

from isobasin.report.page import write_report
from isobasin.report.result import PathVerdict, read_result, table_rows, verdict

__all__ = ["PathVerdict", "read_result", "table_rows", "verdict", "write_report"]
