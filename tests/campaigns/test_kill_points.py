"""The campaign of kill points in a short version, and the program broken on purpose, which it must notice."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("kill_points.py")


def campaign(place: Path, *options: str) -> tuple[int, list[dict[str, Any]]]:
    words = [sys.executable, str(SCRIPT), "-o", str(place / "table.json"), *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert (place / "table.json").is_file(), done.stderr
    return done.returncode, json.loads((place / "table.json").read_text())["rows"]


@pytest.mark.skipif(sys.platform != "linux", reason="operations on open files are found in /proc")
def test_a_stopped_command_leaves_the_old_output_or_the_new_one(tmp_path: Path) -> None:
    code, rows = campaign(tmp_path, "--commands", "scramble", "--points", "4")
    assert [row["failures"] for row in rows] == [[]] * 6
    assert code == 0
    assert {(row["signal"], row["force"]) for row in rows} == {
        (name, force) for name in ("SIGKILL", "SIGTERM", "SIGINT") for force in (False, True)
    }
    assert all(row["points"] == row["stopped"] == 4 and {"old", "new"} <= set(row["states"]) for row in rows)


@pytest.mark.skipif(sys.platform != "linux", reason="operations on open files are found in /proc")
def test_a_broken_program_is_noticed(tmp_path: Path) -> None:
    """Old outputs deleted too early, leftovers that nobody removes, and SIGTERM that ends the process at once."""
    expected = {"deleted-first": "the outputs are", "no-recovery": "left in the end", "no-unwinding": "exit code -15"}
    controls = [word for control in expected for word in ("--control", control)]
    code, rows = campaign(tmp_path, "--commands", "apply", "--points", "3", "--signals", "SIGKILL;SIGTERM", *controls)
    problems = [one for row in rows for trial in row["failures"] for one in trial["problems"]]
    assert code == 1
    for beginning in expected.values():
        assert any(one.startswith(beginning) for one in problems), (beginning, problems)
