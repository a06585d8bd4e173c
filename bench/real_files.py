"""Trained models from public packages: check, scramble, align of the scrambled copy, equal, fingerprint.

    python bench/real_files.py FOLDER… --json results/families/real_files.json

Each FOLDER is a checkpoint; rows of folders that are in the file already are replaced. docs/families.md has the table,
and says where the folders come from.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import isobasin as ib


def run(command: str, *arguments: str | Path) -> dict[str, Any]:
    """What a command prints as JSON, with its exit code and its seconds; where it fails, its error."""
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "isobasin", command, *map(str, arguments), "--json"], capture_output=True, text=True
    )
    found = json.loads(done.stdout) if done.stdout.strip() else {"error": done.stderr.strip()}
    return {"exit_code": done.returncode, "seconds": round(time.monotonic() - start, 1), **found}


def sha256(folder: Path) -> dict[str, str]:
    files = sorted([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def row(folder: Path) -> dict[str, Any]:
    """All five commands on one folder, by its name."""
    found: dict[str, Any] = {"name": folder.name, "files": sha256(folder), "info": run("info", folder)}
    found["check"] = run("check", folder)
    with TemporaryDirectory() as place:
        copy, back = Path(place, "scrambled"), Path(place, "aligned")
        found["scramble"] = run("scramble", folder, "-o", copy, "--seed", "1")
        found["align"] = run("align", copy, "--to", folder, "-o", back)
        found["equal"] = run("equal", folder, copy)
        found["fingerprint"] = run("fingerprint", folder, "--compare", copy)
    return found


def brief(each: dict[str, Any]) -> str:
    steps = ("check", "scramble", "align", "equal", "fingerprint")
    told = [f"{step} {each[step]['exit_code']} ({each[step]['seconds']} s)" for step in steps]
    return f"{each['name']}: {', '.join(told)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    if args.json is not None and args.json.exists():
        rows = {each["name"]: each for each in json.loads(args.json.read_text())["rows"]}
    for folder in args.folders:
        rows[folder.name] = row(folder)
        print(brief(rows[folder.name]), file=sys.stderr)
        if args.json is not None:
            document = {"version": ib.__version__, "command": "bench/real_files.py", "rows": list(rows.values())}
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
