"""The program `isobasin`: its commands, its errors and its exit codes."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand
from typer.exceptions import TyperException

from isobasin.cli.align import align_command
from isobasin.cli.apply import apply_command, invert_command, scramble_command
from isobasin.cli.demo import demo_command
from isobasin.cli.distance import canonical_command, distance_command, fingerprint_command
from isobasin.cli.equal import equal_command
from isobasin.cli.info import check_command, families_command, info_command
from isobasin.cli.merge import merge_command
from isobasin.cli.path import path_command, report_command
from isobasin.cli.study import study
from isobasin.errors import IsobasinError

COMMANDS: dict[str, Callable[..., None]] = {
    "info": info_command,
    "check": check_command,
    "scramble": scramble_command,
    "align": align_command,
    "apply": apply_command,
    "invert": invert_command,
    "path": path_command,
    "merge": merge_command,
    "report": report_command,
    "demo": demo_command,
    "families": families_command,
    "equal": equal_command,
    "distance": distance_command,
    "canonical": canonical_command,
    "fingerprint": fingerprint_command,
}
RENAMED = {"--rate": "--lr", "--start": "--init", "--draws": "--null-samples"}  # old spellings stay valid

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Do two Transformers compute the same function? Do they lie in the same basin?",
)


class Command(TyperCommand):
    """A command that accepts the old spelling of an option. The help shows the new one only."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for param in self.params for name in param.opts}
        for i, word in enumerate(args):
            name, equals, value = word.partition("=")
            if RENAMED.get(name) in options:
                args[i] = RENAMED[name] + equals + value
        return super().parse_args(ctx, args)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from isobasin import __version__

        typer.echo(__version__)
        raise typer.Exit


for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command)(_command)
app.add_typer(study, name="study")


def main() -> None:
    """Run the program. Exit codes: 0 success, 1 no, 2 a user's mistake, 3 undecided, 4 a bug, 130 interrupted."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Every error is one line on standard error."""
    try:
        code = app(arguments, prog_name="isobasin", standalone_mode=False)
        if code == 130:  # typer returns it for an interrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except TyperException as error:
        message = _one_line(error.format_message())
        if message:  # `isobasin` without arguments has printed its help and has no message
            print(f"isobasin: {message} (isobasin --help shows how)", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        print("isobasin: interrupted; no unfinished output is left", file=sys.stderr)
        return 130
    except IsobasinError as error:
        _print_traceback()
        print(f"isobasin: {_one_line(str(error))}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        _print_traceback()
        print(
            f"isobasin: internal error, {type(error).__name__}: {_one_line(str(error))}; "
            "please report it (ISOBASIN_DEBUG=1 shows the traceback)",
            file=sys.stderr,
        )
        return 4


def _print_traceback() -> None:
    if os.environ.get("ISOBASIN_DEBUG") == "1":
        traceback.print_exc()


def _one_line(text: str) -> str:
    return " ".join(text.split())
