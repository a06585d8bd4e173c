"""The command line. Each command parses, calls one library function and prints; `--help` imports no torch."""

import os
import sys

from isobasin.errors import IsobasinError


def main() -> None:
    """The program `isobasin`: exit codes 0 fine, 1 no, 2 the user's mistake, 3 undecided, 4 ours, 130 interrupted."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and give back its exit code; every error is one line on standard error."""
    import click

    from isobasin.cli.app import app

    debug = os.environ.get("ISOBASIN_DEBUG") == "1"
    try:
        code = app(arguments, prog_name="isobasin", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.exceptions.Abort):
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except IsobasinError as error:
        if debug:
            raise
        print(f"isobasin: {_one_line(error)}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 0
    except Exception as error:
        if debug:
            raise
        print(
            f"isobasin: internal error, {type(error).__name__}: {_one_line(error)}; "
            "please report it (ISOBASIN_DEBUG=1 shows the traceback)",
            file=sys.stderr,
        )
        return 4


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
