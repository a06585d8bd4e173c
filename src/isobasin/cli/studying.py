"""The commands of the study: run, report."""

import shlex
import sys
from pathlib import Path
from typing import Any

from isobasin.study.page import write_study_report
from isobasin.study.run import Setting, run_study


def study_facts(grid: Path, output: Path, setting: Setting) -> dict[str, Any]:
    command = shlex.join(["isobasin", *sys.argv[1:]])
    found = run_study(grid, output, setting, command=command)
    return found | {"output": str(output), **page_facts(output, None)}


def page_facts(folder: Path, output: Path | None) -> dict[str, Any]:
    return {"report": str(write_study_report(folder, output))}


def study_lines(facts: dict[str, Any]) -> list[str]:
    """A table of the cells, and where the page lies."""
    rows = [_row(cell) for cell in facts["cells"]]
    head = ("cell", "models", "naive", "aligned", "share", "")
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in [head, *rows]]
    return [*lines, f"{facts['report']}: open it in any browser"]


def _row(cell: dict[str, Any]) -> tuple[str, ...]:
    """The first matcher speaks for the cell."""
    label = next(iter(cell["barrier"]), None)
    barrier, share = (cell[name].get(label) for name in ("barrier", "share"))
    connected = "connected" if cell["connected"].get(label) else "not connected"
    verdict = connected if cell["status"] == "done" else ": ".join(filter(None, [cell["status"], cell["why"]]))
    return (cell["cell"], _quality(cell), _short(cell["naive"]), _short(barrier), _percent(share), verdict)


def _quality(cell: dict[str, Any]) -> str:
    for name in ("bits_per_byte", "accuracy"):
        if cell[name] is not None:
            mean = cell[name]["mean"]
            return f"{mean:.1%}" if name == "accuracy" else f"{mean:.3f} bits"
    return "–"


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
