"""One isobasin command in this process, through `isobasin.cli.main` alone."""

import contextlib
import hashlib
import io
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOISE = 1e-6  # a smaller change is rounding: only that it is small is recorded
OUTPUT_CHANGE = 1e-4


def run_command(*arguments: object) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON object of `isobasin ARGUMENTS --json`."""
    from isobasin.cli import main

    before, text = sys.argv, io.StringIO()
    sys.argv = ["isobasin", *map(str, arguments), "--json"]
    try:
        with contextlib.redirect_stdout(text):
            main()
        code: Any = 0
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = before
    return int(code or 0), json.loads(text.getvalue()) if text.getvalue() else {}


@dataclass
class Commands:
    """Runs commands that write below one folder; keeps the keys of each command's JSON object."""

    root: Path
    keys: dict[str, list[str]] = field(default_factory=dict)

    def run(self, *arguments: object) -> dict[str, Any]:
        """The JSON object of a command, its exit code under `exit_code`."""
        code, facts = run_command(*arguments)
        name = str(arguments[0])
        self.keys[name] = sorted({*self.keys.get(name, ()), *facts})
        return {"exit_code": code, **facts}

    def write(self, name: str, command: str, *arguments: object) -> dict[str, Any]:
        """The same for a command that writes below the root: `-o root/name`."""
        return self.run(command, *arguments, "-o", self.root / name)


def level(value: float | None) -> float | str | None:
    """A distance; one that is rounding and nothing else as a bound."""
    return "below 1e-06" if value is not None and abs(value) < NOISE else value


def chosen(facts: dict[str, Any], *names: str) -> dict[str, Any]:
    """Some of the facts, those that are there."""
    return {name: facts[name] for name in ("exit_code", *names) if name in facts}


def align_record(facts: dict[str, Any]) -> dict[str, Any]:
    """What is recorded of an alignment: permutations exactly, distances, the change of outputs as a bound."""
    rows = [
        {
            "layer": row["layer"],
            "space": row["space"],
            "distances": [level(row["distance_before"]), level(row["distance_after"])],
            "converged": row["converged"],
            "rank_deficient_kv_heads": row["rank_deficient_kv_heads"],
        }
        for row in facts.get("per_layer", [])
    ]
    change = facts.get("max_output_change")
    return chosen(facts, "head_permutation", "kv_head_permutation") | {
        "distances": [level(facts.get("distance_before")), level(facts.get("distance_after"))],
        "per_layer": rows,
        "outputs_unchanged": change is not None and change < OUTPUT_CHANGE,
    }


def file_hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
