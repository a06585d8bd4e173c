"""`python -m isobasin.study GRID -o DIR`: run a study where torch is installed, but not the rest of the command line.

`python -m isobasin.study pack DIR` writes a finished study as one file, DIR.jsonl, which `study report` reads like the
folder; `unpack FILE.jsonl` writes the folder again.
"""

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from isobasin.errors import IsobasinError, one_line, system_problem
from isobasin.study.run import RunConfig, run_study
from isobasin.study.store import pack, unpack
from isobasin.workers import ENGINES


def main(arguments: Sequence[str]) -> int:
    """Exit codes as of `isobasin study run`: 0 all done, 1 some cells failed, 2 the user's mistake, 130 interrupted."""
    convert = {"pack": pack, "unpack": unpack}.get(arguments[0] if arguments else "")
    try:
        return _convert(convert, arguments) if convert else _run(arguments)
    except IsobasinError as error:
        print(one_line(f"isobasin.study: {error}"), file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if (problem := system_problem(error)) is None:
            raise
        print(one_line(f"isobasin.study: {problem}"), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("isobasin.study: interrupted; the same command goes on from here", file=sys.stderr)
        return 130


def _convert(convert: Callable[[Path, Path | None], Path], arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(f"python -m isobasin.study {arguments[0]}", description=convert.__doc__)
    parser.add_argument("path", type=Path, help="the study: its folder, or its file NAME.jsonl")
    parser.add_argument("-o", "--output", type=Path, help="where to write; by default beside the study")
    given = parser.parse_args(arguments[1:])
    print(json.dumps({"output": str(convert(given.path, given.output))}))
    return 0


def _run(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m isobasin.study", description=__doc__)
    parser.add_argument("grid", type=Path, help="the grid file, TOML")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder of the study; what is there stays")
    parser.add_argument("--data", type=Path, help="the root of the data sets")
    parser.add_argument("--engine", choices=ENGINES, default="local")
    parser.add_argument("--workers", type=int, help="processes at a time")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    parser.add_argument("--only", help="only cells whose name contains this text")
    parser.add_argument("--retry", action="store_true", help="try again what failed in an earlier run")
    parser.add_argument(
        "--drop-weights", dest="keep_weights", action="store_false", help="delete the models when all is measured"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress")
    options = vars(parser.parse_args(arguments))
    grid, output = options.pop("grid"), options.pop("output")
    command = shlex.join(["python", "-m", "isobasin.study", *arguments])
    found = run_study(grid, output, RunConfig(**options), command=command)
    print(json.dumps({"output": str(output), "failed": found["failed"], "n_cells": len(found["cells"])}))
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
