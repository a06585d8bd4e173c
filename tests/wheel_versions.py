"""The wheel in empty environments, with the lowest and with the newest versions of what it needs: `make wheel-test`.

    python tests/wheel_versions.py --work out/wheel-test -o results/reliability/wheel.json

Each environment is removed before the next is made; torch for CUDA takes about 6 GB of disk, and twice that while it is
unpacked. Needs a network or a local index.
"""

import argparse
import importlib.metadata as metadata
import json
import platform
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path
from typing import Any

from test_wheel import PROJECT, build_wheel, smoke

SETS = ("lowest", "newest")


def requirements(which: str, wheel: Path) -> list[str]:
    """The arguments of `pip install`: the wheel, and for the lowest versions every bound as an equality."""
    return [str(wheel), *([line.replace(">=", "==") for line in PROJECT["dependencies"]] if which == "lowest" else [])]


def installed(library: Path) -> dict[str, str]:
    """The versions of the direct dependencies in an environment."""
    found = {d.metadata["Name"].lower(): d.version for d in metadata.distributions(path=[str(library)])}
    return {name: found[name] for name in (line.split(">=")[0] for line in PROJECT["dependencies"])}


def checked(which: str, wheel: Path, folder: Path) -> dict[str, Any]:
    """Install, run the smoke test with the demo, and remove the environment."""
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder / "env", with_pip=True)
    python = folder / "env/bin/python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-cache-dir"]
    subprocess.run([*pip, *requirements(which, wheel)], check=True)
    library = next((folder / "env/lib").glob("python*/site-packages"))
    start = time.monotonic()
    smoke(str(python), library, "installed", folder / "run", demo=True)
    facts = {"versions": which, "python": platform.python_version(), **installed(library)}
    shutil.rmtree(folder)
    return {**facts, "seconds": round(time.monotonic() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the environments")
    parser.add_argument("--only", choices=SETS, help="one of the two sets")
    parser.add_argument("-o", "--output", type=Path, help="a JSON file for the versions that passed")
    options = parser.parse_args()
    work = options.work.resolve()
    wheel = build_wheel(work)
    passed = []
    for which in [options.only] if options.only else SETS:
        passed.append(checked(which, wheel, work / which))
        print("passed:", ", ".join(f"{k} {v}" for k, v in passed[-1].items()), file=sys.stderr)
    if options.output:
        options.output.write_text(json.dumps(passed, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
