"""The command line. Each command parses, calls one library function and prints; `--help` imports no torch."""

import os
import sys
import traceback

from isobasin.errors import IsobasinError


def main() -> None:
    """The program `isobasin`: exit codes 0 fine, 1 no, 2 the user's mistake, 3 undecided, 4 ours, 130 interrupted."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and give back its exit code; every error is one line on standard error."""
    import typer
    from typer.exceptions import TyperException

    from isobasin.cli.program import app

    try:
        code = app(arguments, prog_name="isobasin", standalone_mode=False)
        if code == 130:  # what typer makes of an interrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except TyperException as error:
        message = _one_line(error.format_message())
        if message:  # a bare `isobasin` has printed its help instead
            print(f"isobasin: {message} (isobasin --help shows how)", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("isobasin: interrupted; no unfinished output is left", file=sys.stderr)
        return 130
    except IsobasinError as error:
        _show_traceback()
        print(f"isobasin: {_one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        _show_traceback()
        print(
            f"isobasin: internal error, {type(error).__name__}: {_one_line(str(error))}; "
            "please report it (ISOBASIN_DEBUG=1 shows the traceback)",
            file=sys.stderr,
        )
        return 4


def _show_traceback() -> None:
    """Where the error came from, if asked for; the exit code stays what it is without."""
    if os.environ.get("ISOBASIN_DEBUG") == "1":
        traceback.print_exc()


def _one_line(text: str) -> str:
    return " ".join(text.split())
