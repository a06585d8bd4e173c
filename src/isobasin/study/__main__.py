"""`python -m isobasin.study GRID -o DIR`: the study where torch is, but perhaps not the rest of the command line."""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from isobasin.errors import IsobasinError

from .run import ENGINES, Setting, run_study


def main(arguments: Sequence[str]) -> int:
    """Exit codes as of `isobasin study run`: 0 all done, 1 some cells failed, 2 the user's mistake, 130 interrupted."""
    asked = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "isobasin.study", *arguments])
    try:
        setting = Setting(
            data=asked.data,
            engine=asked.engine,
            workers=asked.workers,
            device=asked.device,
            only=asked.only,
            retry=asked.retry,
            keep_weights=not asked.drop_weights,
            quiet=asked.quiet,
        )
        facts = run_study(asked.grid, asked.output, setting, command=command)
    except IsobasinError as error:
        print(f"isobasin.study: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("isobasin.study: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    print(json.dumps({"output": str(asked.output), "failed": facts["failed"], "n_cells": len(facts["cells"])}))
    return 1 if facts["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m isobasin.study", description=__doc__)
    parser.add_argument("grid", type=Path, help="the grid file, TOML")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the folder of the study; what is there stays")
    parser.add_argument("--data", type=Path, help="the root of the data sets")
    parser.add_argument("--engine", choices=ENGINES, default="local")
    parser.add_argument("--workers", type=int, help="processes at a time")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:1")
    parser.add_argument("--only", help="only cells whose name holds this text")
    parser.add_argument("--retry", action="store_true", help="try again what failed in an earlier run")
    parser.add_argument("--drop-weights", action="store_true", help="delete the models when all is measured")
    parser.add_argument("--quiet", action="store_true", help="no progress")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
