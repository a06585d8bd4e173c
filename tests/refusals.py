"""What the command line does with a user's mistake: the one judge of all tests on bad input."""

import re
from pathlib import Path

import pytest

from isobasin.cli import run


def check_refused(arguments: list[str], pattern: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2, one line on standard error that says what the pattern says, nothing on standard output."""
    capsys.readouterr()
    code = run(arguments)
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("isobasin: "), said.err
    assert said.err.count("\n") == 1, said.err
    assert said.err.endswith("\n")
    assert re.search(pattern, said.err), said.err
    assert code == 2, said.err


def everything(folder: Path) -> dict[str, bytes | None]:
    """All that lies in a folder, hidden things too."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}
