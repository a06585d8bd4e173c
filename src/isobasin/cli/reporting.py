"""The command that writes the page: report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isobasin.report import read_result, verdict, write_report


def report_facts(paths: Sequence[Path], output: Path, force: bool) -> dict[str, Any]:
    """Write the page; every result is read and checked first."""
    results = [read_result(path) for path in paths]
    written = write_report(results, output, force=force)
    pairs = [
        {"file": str(path), "pair": pair.key, "verdict": found.state, "sentence": found.sentence}
        for path, result in zip(paths, results)
        for pair in result.pairs
        for found in [verdict(pair)]
    ]
    return {"output": str(written), "pairs": pairs}


def report_lines(facts: dict[str, Any]) -> list[str]:
    return [*(pair["sentence"] for pair in facts["pairs"]), f"{facts['output']}: open it in any browser"]
