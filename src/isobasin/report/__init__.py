"""The report: one self-contained page from path.json files, and the facts it states."""

from isobasin.report.facts import Verdict, table_rows, verdict
from isobasin.report.page import write_report
from isobasin.report.reading import read_result

__all__ = ["Verdict", "read_result", "table_rows", "verdict", "write_report"]
