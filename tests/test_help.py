"""Help, hints and completion of the command line."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from isobasin.cli import run
from isobasin.cli.app import COMMANDS, app
from isobasin.cli.help import EXAMPLES
from isobasin.cli.study import study

NAMES = [*COMMANDS, *(f"study {command.name}" for command in study.registered_commands)]
SCREEN, SHORT = 48, 24  # lines of 80 columns: `--help`, and `-h`
ISOBASIN = "from isobasin.cli import main; main()"


def help_of(name: str, capsys: pytest.CaptureFixture[str], flag: str = "--help") -> str:
    capsys.readouterr()
    assert run([*name.split(), flag]) == 0
    return capsys.readouterr().out


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that these words name, and its arguments."""
    root = get_command(app)
    if words[0] == "study":
        return root.commands["study"].commands[words[1]], words[2:]
    return root.commands[words[0]], words[1:]


def test_every_command_has_examples_and_no_other_has() -> None:
    assert set(EXAMPLES) == set(NAMES)
    assert all(EXAMPLES.values())


@pytest.mark.parametrize("name", NAMES)
def test_help_fits_a_screen_and_says_all(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = help_of(name, capsys)
    lines = text.splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= 80
    short = help_of(name, capsys, "-h")
    assert len(short.splitlines()) <= min(SHORT, len(lines) + 1)
    assert max(map(len, short.splitlines())) <= 80
    command, _ = command_of([*name.split(), ""])
    for param in command.params:
        for option in param.opts if param.param_type_name == "option" else ():
            assert re.search(rf"^  ([^ ]+ )?(\w+, )?{option}[ ,\n]", text, re.MULTILINE), option
            assert re.search(rf" {option}[ ,\n]", short), option
    assert "None" not in text, "an option without a name for its value"
    assert re.search(r"\d{10}", text) is None, "a range of nineteen digits"
    for example in EXAMPLES[name]:
        assert f"  isobasin {example}\n" in text
        assert f"  isobasin {example}\n" in short


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_a_command_line(name: str) -> None:
    for example in EXAMPLES[name]:
        command, arguments = command_of(shlex.split(example.partition(" >")[0]))
        with command.make_context(name, arguments) as context:
            assert context.params
    command, arguments = command_of(shlex.split(f"{EXAMPLES[name][0]} --no-such-option"))
    with pytest.raises(Exception, match="No such option: --no-such-option"):
        command.make_context(name, arguments)


def test_options_of_learning_have_a_group_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_of("align", capsys)
    groups = dict(re.findall(r"^(\w[^\n]*):\n((?:  [^\n]*\n)+)", text, re.MULTILINE))
    assert list(groups) == [
        "Options", "Alignment", "Learning (--matcher learned)", "Data", "Output", "General", "Examples",
    ]  # fmt: skip
    assert re.findall(r"^  (--[\w-]+)", groups["Learning (--matcher learned)"], re.MULTILINE) == [
        "--held-out", "--init", "--steps", "--lr", "--objective", "--unlabelled", "--permutations",
    ]  # fmt: skip
    assert "--to A" in groups["Options"]
    assert "--output" in groups["Options"]  # required, so not among those of the output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("align b --to", "isobasin align"),
        ("align b --no-such-option", "isobasin align"),
        ("align", "isobasin align"),
        ("study run", "isobasin study run"),
        ("study nothing", "isobasin study"),
        ("nothing", "isobasin"),
        ("info x --seed 1", "isobasin info"),
    ],
)
def test_hints_name_the_subcommand(words: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.endswith(f" ({named} --help shows how)\n")


def test_version_has_a_short_name(capsys: pytest.CaptureFixture[str]) -> None:
    from isobasin import __version__

    for flag in ("-v", "--version"):
        assert run([flag]) == 0
        assert capsys.readouterr().out == f"{__version__}\n"


def completed(words: str) -> list[str]:
    environment = {"_ISOBASIN_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run(
        [sys.executable, "-c", ISOBASIN], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_the_shell_completes_commands_and_options() -> None:
    assert completed("isobasin al") == ["align"]
    assert completed("isobasin align --mat") == ["--matcher"]
    assert completed("isobasin study pa") == ["pack"]
    assert completed("isobasin zz") == []


def test_the_shell_completes_the_values_of_options() -> None:
    assert completed("isobasin align --matcher le") == ["learned"]
    assert completed("isobasin study run --engine ") == ["local", "ray"]


def test_values_that_are_completed_are_those_that_are_taken() -> None:
    from isobasin.alignment.heads import HEAD_DISTANCES, STAGES
    from isobasin.cli.align import MATCHERS
    from isobasin.cli.options import INITS
    from isobasin.learn.path_loss import OBJECTIVES
    from isobasin.learn.trainer import PERMUTATIONS
    from isobasin.symmetries import SCOPES
    from isobasin.tasks.task import KINDS

    taken = {
        "scope": SCOPES, "matcher": MATCHERS, "stage2": STAGES, "head_distance": HEAD_DISTANCES, "init": INITS,
        "objective": OBJECTIVES, "permutations": PERMUTATIONS, "task": ("auto", *KINDS),
    }  # fmt: skip
    unnamed = []
    for name in NAMES:
        command, _ = command_of([*name.split(), ""])
        with command.make_context(name, [], resilient_parsing=True) as context:
            for param in command.params:
                found = {item.value for item in param.shell_complete(context, "")}
                if param.name in taken and param.metavar == "NAME":
                    assert found == set(taken[param.name]), (name, param.name)
                elif param.metavar == "NAME" and not found:
                    unnamed.append((name, param.name))
    assert unnamed == [], "a choice that is not completed"


def test_the_completion_script_is_shown() -> None:
    command = [sys.executable, "-c", ISOBASIN, "--show-completion", "bash"]
    named = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # else the shell around the tests
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=named)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_ISOBASIN_COMPLETE=complete_bash" in done.stdout


def test_distances_show_progress_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a terminal would show is recorded instead."""
    from contextlib import contextmanager

    import isobasin as ib
    from isobasin.cli import distance as distance_module

    told: list[tuple[str, int, int]] = []

    @contextmanager
    def recorded(**_: Any) -> Any:
        yield lambda *step: told.append(step)

    monkeypatch.setattr(distance_module, "progress", recorded)
    config = ib.ModelConfig.preset("llama", d_model=8, n_layers=1, n_heads=2, d_ff=12, d_vocab=11, n_positions=8)
    for seed, name in enumerate("ab"):
        ib.Transformer(config, seed=seed).save(tmp_path / name)
    assert run(["distance", str(tmp_path / "a"), str(tmp_path / "b"), "--null-samples", "2"]) == 0
    assert told[0] == ("comparing", 0, 3)
    assert told[-1][1] == told[-1][2] > 3
