"""The notebooks of the documentation: their cells run, and give the outputs that are stored."""

import ast
import json
import os
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest

FULL = os.environ.get("ISOBASIN_SLOW", "0") == "1"
NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "docs/notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]\d+)?")


def code_cells(path: Path) -> list[tuple[str, str]]:
    """The source of every code cell, and the text that is stored below it."""
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [
        ("".join(cell["source"]), "".join("".join(output.get("text", "")) for output in cell["outputs"]))
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def alike(stored: str, printed: str) -> bool:
    """The same words, and numbers that differ by at most a fifth, or are both rounding: kernels sum in other orders."""
    if NUMBER.sub("#", stored) != NUMBER.sub("#", printed):
        return False
    pairs = zip(*([float(x.replace(",", "").rstrip(".")) for x in NUMBER.findall(s)] for s in (stored, printed)))
    return all(abs(x - y) <= 0.2 * max(x, y) + 1e-5 for x, y in pairs)


def check_cells(cells: list[tuple[str, str]]) -> None:
    names: dict[str, Any] = {}
    for source, stored in cells:
        printed: list[str] = []
        names["print"] = lambda *values, printed=printed: printed.append(" ".join(map(str, values)) + "\n")
        exec(compile(source, "cell", "exec"), names)
        assert alike(stored, "".join(printed)), f"{source}\n\nprinted\n{''.join(printed)}"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_give_what_is_stored(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plt, "show", lambda: plt.close("all"))
    cells = code_cells(path)
    assert sum(bool(stored) for _, stored in cells) >= 5
    for source, _ in cells:
        ast.parse(source)
    if FULL:
        check_cells(cells)


def test_there_are_two_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["check-a-checkpoint", "two-seeds-one-basin"]


def test_another_output_is_found() -> None:
    check_cells([("x = 2", ""), ("print('loss', 0.12)", "loss 0.13\n")])
    with pytest.raises(AssertionError, match=r"printed\s+loss 0\.12"):
        check_cells([("print('loss', 0.12)", "loss 0.18\n")])
    with pytest.raises(AssertionError, match="same"):
        check_cells([("print('same')", "different\n")])
