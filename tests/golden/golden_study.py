"""The part `study`: a small study from end to end, and the keys of jobs that make results of 0.1.0 readable.

There is no command that lists the jobs of a grid without doing them. Where results are committed under results/study,
`study run` on a copy of them finds everything done and names every job. Where there are none (`digits`), `done` is a
file instead of a folder, so that every job fails at once and study.json still names all of them.
"""

import json
from pathlib import Path
from typing import Any

from golden_command import Commands, chosen

ROOT = Path(__file__).resolve().parents[2]
GRIDS = ROOT / "examples/study"
RESULTS = ROOT / "results/study"
# Empty folders that stand for the data sets of the grids: nothing is read from them when all is done.
DATA = ("MNIST", "FashionMNIST", "cifar10", "cifar100", "ag_news", "imdb", "dbpedia", "enwik8", "wikitext-103")
GRID_NAMES = tuple(sorted(path.stem for path in GRIDS.glob("*.toml")))
STUDY_ITEMS = ("small", *(f"jobs {name}" for name in GRID_NAMES))

_CELL = """
[[cells]]
model = "vit"
positions = "rope"
layers = 1
heads = 2
width = 16
dataset = "digits"
seeds = [1, 2]
points = 3
samples = 100
pretrain = { steps = 300, batch = 32, rate = 6e-3 }
"""
SMALL = f"""name = "golden"
{_CELL}
scope = "first-attention"
finetune = {{ steps = 60, batch = 32, rate = 3e-3 }}
ablations = ["stage2"]
{_CELL}
scope = "model"
matchers = ["weights", "activations", {{ matcher = "learned", steps = 5 }}]
"""
NUMBERS = ("cell", "status", "accuracy", "loss", "naive", "barrier", "share", "connected", "n_pairs")


def record_study(item: str, root: Path) -> dict[str, Any]:
    commands = Commands(root)
    kind, _, name = item.partition(" ")
    return _small(commands) if kind == "small" else _jobs(commands, name)


def _small(commands: Commands) -> dict[str, Any]:
    grid, out = commands.root / "grid.toml", commands.root / "out"
    grid.write_text(SMALL, encoding="utf-8")
    facts = commands.run("study", "run", grid, "-o", out, "--workers", 2, "--device", "cpu")
    again = commands.run("study", "run", grid, "-o", out, "--workers", 1, "--device", "cpu")
    return {
        "exit_codes": [facts["exit_code"], again["exit_code"]],
        "cells": [_row(cell, *NUMBERS) for cell in facts.get("cells", [])],
        "same_again": facts.get("cells") == again.get("cells"),
        "files": sorted(path.relative_to(out).as_posix() for path in (out / "done").rglob("*") if path.is_file()),
        "result_keys": {
            path.parent.name: sorted(json.loads(path.read_text(encoding="utf-8")))
            for path in sorted((out / "done").glob("*/result.json"))
        },
        "study_keys": sorted(json.loads((out / "study.json").read_text(encoding="utf-8"))),
        "json_keys": commands.keys,
    }


def _jobs(commands: Commands, name: str) -> dict[str, Any]:
    """The cells and job names of a grid; where results are committed, that all are found and what their rows say."""
    out, data, stored = commands.root / "out", commands.root / "data", RESULTS / f"{name}.jsonl"
    for place in DATA:
        (data / place).mkdir(parents=True)
    before: list[str] = []
    if stored.is_file():
        commands.run("study", "unpack", stored, "-o", out)
        before = sorted(path.name for path in (out / "done").iterdir())
    else:
        out.mkdir()
        (out / "study.json").write_text('{"runs": []}\n', encoding="utf-8")
        (out / "done").touch()
    grid = GRIDS / f"{name}.toml"
    facts = commands.run("study", "run", grid, "-o", out, "--data", data, "--workers", 1, "--device", "cpu")
    names = NUMBERS if stored.is_file() else ("cell",)
    found = {"cells": [_row(cell, *names) for cell in facts.get("cells", [])]} | chosen(facts)
    folders = sorted(path.name for path in (out / "done").iterdir()) if stored.is_file() else []
    return found | {"n_stored": len(before), "nothing_was_done": folders == before}


def _row(cell: dict[str, Any], *names: str) -> dict[str, Any]:
    jobs = cell["jobs"]
    listed = {
        kind: [each["job"] if isinstance(each, dict) else each for each in found] if isinstance(found, list) else found
        for kind, found in jobs.items()
    }
    return {name: cell[name] for name in names} | {"jobs": listed}
