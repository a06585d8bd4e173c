"""Help of the command line: one line for each option, in groups, and examples; old spellings; `--family FILE`."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup

from isobasin.errors import IsobasinError

GENERAL = "Options"
GROUPS = (GENERAL, "Alignment", "Learning (--matcher learned)", "Data", "Output", "General")  # in this order
HELP_NAMES: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
RENAMED = {"--rate": "--lr", "--start": "--init", "--draws": "--null-samples"}  # old spellings stay valid
MODEL_PARAMETERS = {"model", "models", "a", "b", "to"}  # names of arguments and options that take a model
OF_MODELS = (
    ("--family FILE", "A family of your own (see families --draft)."),
    ("--revision REV", "Of hub ids: branch, tag or commit, as ORG/NAME@REV."),
)
# Options that one row of the help describes together.
JOINED = {
    ("--device", "--cuda"): "cpu, cuda (or --cuda), cuda:1, … [cpu]",
    ("--quiet", "--json"): "No progress; one JSON object and nothing else.",
}
SHORT = "short help"  # what was asked for: `-h`, not `--help`
EXAMPLES: dict[str, Sequence[str]] = {
    "info": ("info path/to/model",),
    "check": ("check path/to/model",),
    "scramble": ("scramble base -o copy", "scramble base -o copy --save-transform moved.safetensors"),
    "align": ("align b --to a -o b-aligned", "align b --to a -o b-aligned --matcher learned --data text.txt"),
    "apply": ("apply moved.safetensors fine-tune -o fine-tune-moved",),
    "invert": ("invert moved.safetensors -o back.safetensors",),
    "path": ("path a b --data text.txt --align -o path.json", "path a b c --data images --points 11 -o path.json"),
    "merge": ("merge a b -o merged", "merge a b --weights 0.7,0.3 -o merged", "merge recipe.yml -o merged"),
    "report": ("report path.json -o report.html",),
    "demo": ("demo", "demo --train --seed 1 -o demo-1"),
    "families": ("families", "families --draft path/to/model > my_family.py"),
    "equal": ("equal base suspect", "equal base suspect --save-witness witness.safetensors"),
    "distance": ("distance base suspect", "distance base suspect --plot layers.png"),
    "lineage": ("lineage models/* -o lineage.html", "lineage base a b merged --base base --json"),
    "canonical": ("canonical model -o canonical",),
    "fingerprint": ("fingerprint base", "fingerprint base --compare suspect"),
    "study run": ("study run grid.toml -o study", "study run grid.toml -o study --engine ray"),
    "study report": ("study report study",),
    "study pack": ("study pack study",),
    "study unpack": ("study unpack study.jsonl -o study",),
}


class Command(TyperCommand):
    """A command whose help fits a screen, and with `-h`, which names the options alone, one of 24 lines. It accepts the
    old spelling of an option, which its help does not show, and commands that read models accept a family of one's own.
    """

    reads_models = False

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        revision = ""
        if self.reads_models:
            from isobasin.arch.user_family import use_family

            args, files = _taken(args, "--family", "a file; `isobasin families --draft MODEL` drafts one")
            for file in files:
                use_family(file)
            args, revisions = _taken(args, "--revision", "a branch, tag or commit of the hub")
            revision = revisions[-1] if revisions else ""
        ctx.meta[SHORT] = "-h" in args and "--help" not in args
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

    def get_help(self, ctx: Any) -> str:
        return _printable(super().get_help(ctx))

    def rows_by_group(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """How each argument and option is written, and its help, by the title of its group."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Arguments", *GROUPS)}
        for param in self.get_params(ctx):
            if getattr(param, "hidden", False):
                continue
            group = (
                "Arguments"
                if param.param_type_name == "argument"
                else getattr(param, "rich_help_panel", None) or GENERAL
            )
            groups[group].append(_row(param))
        for rows in groups.values():
            rows[:] = _joined(rows)
        if self.reads_models:
            groups["General"][:0] = OF_MODELS
        groups["General"].append(groups[GENERAL].pop())  # --help
        return {title: rows for title, rows in groups.items() if rows}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups = self.rows_by_group(ctx)
        formatter.write("\n")
        short = ctx.meta.get(SHORT, False)
        width = max(len(name) for rows in groups.values() for name, _ in rows)
        for title, rows in groups.items():
            if short and title != "Arguments":
                formatter.write(_names(f"{title.partition(' ')[0]}:", [name for name, _ in rows], formatter.width))
                continue
            if title != "Arguments":
                formatter.write(f"{title}:\n")
            formatter.indent()
            formatter.write_dl([(name.ljust(width), text) for name, text in rows], col_max=width)
            formatter.dedent()

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        examples = EXAMPLES[ctx.command_path.partition(" ")[2]]
        formatter.write("Examples:\n" + "".join(f"  isobasin {example}\n" for example in examples))
        if ctx.meta.get(SHORT):
            formatter.write(f"{ctx.command_path} --help describes the options.\n")


class ModelCommand(Command):
    """A command that reads models."""

    reads_models = True


class Group(TyperGroup):
    """A group of commands whose help shows the first sentence of each, whole."""

    def get_help(self, ctx: Any) -> str:
        return _printable(super().get_help(ctx))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        formatter.write("\nCommands (isobasin COMMAND --help shows the options of each):\n")
        formatter.indent()
        formatter.write_dl([(name, _first_sentence(command.help or "")) for name, command in found if command])
        formatter.dedent()


def _printable(text: str) -> str:
    """Letters that the terminal does not have, escaped: click would write them as UTF-8 where it reports ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def _first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


def _row(param: Any) -> tuple[str, str]:
    """How an option is written, and its help with the default in brackets."""
    text, default = param.help or "", param.default
    if param.param_type_name == "argument":
        return str(param.metavar), text
    names = ", ".join(sorted([*param.opts, *param.secondary_opts], key=len))
    if param.is_flag:
        return names, text
    if param.required:
        text += " (required)"
    elif default is not None and default is not ...:
        text += f" [{default}]"
    return f"{names} {param.metavar}", text


def _joined(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The rows, where those of `JOINED` that are both there are one."""
    by_option = {name.partition(" ")[0]: name for name, _ in rows}
    for (first, second), text in JOINED.items():
        if first in by_option and second in by_option:
            both = (f"{by_option[first]}, {by_option[second]}", text)
            rows = [both if row[0] == by_option[first] else row for row in rows if row[0] != by_option[second]]
    return rows


def _names(title: str, names: Sequence[str], width: int) -> str:
    """The names of a group on as few lines as they need, where no line ends inside a name."""
    lines = [title.ljust(10)]
    for name in names:
        if len(lines[-1]) + 2 + len(name) > width:
            lines.append(" " * 10)
        lines[-1] += f"  {name}"
    return "".join(f"{line}\n" for line in lines)


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
