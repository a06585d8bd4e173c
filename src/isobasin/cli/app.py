"""The program `isobasin`: its commands, its errors and its exit codes."""

import io
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated

import typer
from typer.exceptions import TyperException

from isobasin.cli.align import align_command
from isobasin.cli.apply import apply_command, invert_command, scramble_command
from isobasin.cli.demo import demo_command
from isobasin.cli.distance import canonical_command, distance_command, fingerprint_command
from isobasin.cli.equal import equal_command
from isobasin.cli.help import HELP_NAMES, Command, Group, ModelCommand
from isobasin.cli.info import check_command, families_command, info_command
from isobasin.cli.lineage import lineage_command
from isobasin.cli.merge import merge_command
from isobasin.cli.output import discard_output, note
from isobasin.cli.path import path_command, report_command
from isobasin.cli.study import study
from isobasin.errors import IsobasinError, one_line, system_problem
from isobasin.files import release, remove_unfinished

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
    "lineage": lineage_command,
    "canonical": canonical_command,
    "fingerprint": fingerprint_command,
}
READ_MODELS = frozenset(COMMANDS) - {"report", "demo", "invert"}
_REPORT = "please report it (ISOBASIN_DEBUG=1 shows the traceback)"

app = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    context_settings=HELP_NAMES,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Do two Transformers compute the same function? Do they lie in the same basin?",
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("-v", "--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from isobasin import __version__

        typer.echo(__version__)
        raise typer.Exit


for _name, _command in COMMANDS.items():
    app.command(_name, cls=ModelCommand if _name in READ_MODELS else Command)(_command)
app.add_typer(study, name="study")


def main() -> None:
    """Run the program. Exit codes: 0 success, 1 no, 2 a user's mistake, 3 undecided, 4 a bug, 130 interrupted."""
    # Threads of OpenMP that wait for work spin by default: with tiny models on a busy machine, ten times slower. torch
    # reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if sys.stderr is None:  # closed; libraries write to it, and the next file that is opened must not take its place
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for name in ("SIGTERM", "SIGHUP"):  # a request to stop (timeout, batch systems), a closed terminal
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)  # as Ctrl-C does
    code = run(sys.argv[1:])
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # all is done: a signal while Python ends does not change the code
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Every error is one line on standard error."""
    code = None
    try:
        try:
            with _quiet_streams():
                code = app(arguments, prog_name="isobasin", standalone_mode=False)
                sys.stdout.flush()
        finally:
            release()
        if code == 130:  # typer returns it for an interrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except TyperException as error:
        message = error.format_message()
        if type(error).__name__ == "NoArgsIsHelpError":  # `isobasin` alone: its help, in newer versions as the message
            sys.stderr.write(f"{message}\n" if message else "")
        elif message:
            note(one_line(f"isobasin: {message} ({_command_path(arguments)} --help shows how)"))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        remove_unfinished()
        release()
        note("isobasin: interrupted; no unfinished output is left")
        return 130
    except IsobasinError as error:
        _print_traceback()
        note(one_line(f"isobasin: {error}"))
        return error.exit_code
    except Exception as error:
        _print_traceback()
        if problem := system_problem(error):
            note(one_line(f"isobasin: {problem}"))
            return 2
        note(one_line(f"isobasin: internal error, {type(error).__name__}: {error}; {_REPORT}"))
        return 4


def _command_path(arguments: list[str]) -> str:
    """The command that these arguments name: `isobasin align`, `isobasin study run`, or `isobasin` where it is none."""
    first, second = [*arguments, "", ""][:2]
    if first == "study":
        return f"isobasin study {second}" if second in {c.name for c in study.registered_commands} else "isobasin study"
    return f"isobasin {first}" if first in COMMANDS else "isobasin"


@contextmanager
def _quiet_streams() -> Iterator[None]:
    """No warnings and logs of libraries; escapes for letters that the terminal does not have; no full stream left."""
    if sys.stdout is None:
        raise IsobasinError("standard output is closed: open it, or discard what is printed (> /dev/null)")
    logs = logging.root.manager.disable
    changed = [(x, x.errors) for x in (sys.stdout, sys.stderr) if isinstance(x, io.TextIOWrapper)]
    for stream, _ in changed:
        stream.reconfigure(errors="backslashreplace")
    try:
        with warnings.catch_warnings():
            if not _debugging():
                warnings.simplefilter("ignore")
                logging.disable()
            yield
    except (BrokenPipeError, SystemExit):  # the reader of the help closed the pipe (`| head`); typer exits then
        discard_output(sys.stdout)
    except OSError:
        discard_output(sys.stdout)  # if it is full, the flush below would fail again
        raise
    finally:
        logging.disable(logs)
        for stream, errors in changed:
            with suppress(OSError):
                stream.reconfigure(errors=errors)


def _debugging() -> bool:
    return os.environ.get("ISOBASIN_DEBUG") == "1"


def _print_traceback() -> None:
    if _debugging():
        traceback.print_exc()
