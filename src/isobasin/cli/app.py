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
from pathlib import Path
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
from isobasin.cli.output import discard_output, note
from isobasin.cli.path import path_command, report_command
from isobasin.cli.study import study
from isobasin.errors import IsobasinError, one_line, system_problem
from isobasin.files import remove_unfinished

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
READ_MODELS = frozenset(COMMANDS) - {"report", "demo", "invert"}
FAMILY_HELP = (
    "--family FILE: a family of your own, for model types that are not supported (see families --draft). "
    "--revision REV: the branch, tag or commit of hub ids, as ORG/NAME@REV."
)
_REPORT = "please report it (ISOBASIN_DEBUG=1 shows the traceback)"
MODEL_PARAMETERS = {"model", "models", "a", "b", "to"}  # names of arguments and options that take a model
RENAMED = {"--rate": "--lr", "--start": "--init", "--draws": "--null-samples"}  # old spellings stay valid

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Do two Transformers compute the same function? Do they lie in the same basin?",
)


class Command(TyperCommand):
    """A command that accepts the old spelling of an option, and a family of one's own (`--family FILE`). The help shows
    the new spelling only."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        revision = ""
        if self.name in READ_MODELS:
            from isobasin.arch.user_family import use_family

            args, files = _taken(args, "--family", "a file; `isobasin families --draft MODEL` drafts one")
            for file in files:
                use_family(file)
            args, revisions = _taken(args, "--revision", "a branch, tag or commit of the hub")
            revision = revisions[-1] if revisions else ""
        options = {name for param in self.params for name in param.opts}
        for i, word in enumerate(args):
            name, equals, value = word.partition("=")
            if RENAMED.get(name) in options:
                args[i] = RENAMED[name] + equals + value
        rest = super().parse_args(ctx, args)
        for name in MODEL_PARAMETERS & ctx.params.keys() if revision else ():
            given = ctx.params[name]
            ctx.params[name] = _at(given, revision) if isinstance(given, str) else [_at(one, revision) for one in given]
        return rest


def _taken(args: list[str], option: str, what: str) -> tuple[list[str], list[str]]:
    """The arguments without an option that many commands share, and its values."""
    rest, values, words = [], [], iter(args)
    for word in words:
        name, equals, value = word.partition("=")
        if name != option:
            rest.append(word)
            continue
        values.append(value if equals else next(words, ""))
        if not values[-1]:
            raise IsobasinError(f"{option} needs {what}")
    return rest, values


def _at(model: str, revision: str) -> str:
    """A hub id at a revision; a path that exists, and an id with a revision of its own, stay."""
    base, plus, adapter = model.partition("+")
    return model if Path(model).exists() or "@" in base or Path(base).exists() else f"{base}@{revision}{plus}{adapter}"


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        from isobasin import __version__

        typer.echo(__version__)
        raise typer.Exit


for _name, _command in COMMANDS.items():
    app.command(_name, cls=Command, epilog=FAMILY_HELP if _name in READ_MODELS else None)(_command)
app.add_typer(study, name="study")


def main() -> None:
    """Run the program. Exit codes: 0 success, 1 no, 2 a user's mistake, 3 undecided, 4 a bug, 130 interrupted."""
    if sys.stderr is None:  # closed; libraries write to it, and the next file that is opened must not take its place
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for name in ("SIGTERM", "SIGHUP"):  # a request to stop (timeout, batch systems), a closed terminal
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)  # as Ctrl-C does
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code. Every error is one line on standard error."""
    code = None
    try:
        with _quiet_streams():
            code = app(arguments, prog_name="isobasin", standalone_mode=False)
            sys.stdout.flush()
        if code == 130:  # typer returns it for an interrupt
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except typer.Exit as stop:
        return stop.exit_code
    except TyperException as error:
        message = error.format_message()
        if message:  # `isobasin` without arguments has printed its help and has no message
            note(one_line(f"isobasin: {message} (isobasin --help shows how)"))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        remove_unfinished()
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
