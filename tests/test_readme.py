"""The README: a short first example, and every command in its table. Its blocks are run by test_docs."""

import re
from pathlib import Path

from isobasin.arch.registry import FAMILIES
from isobasin.cli.app import app
from isobasin.cli.study import study

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_first_example_is_short() -> None:
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    assert len(found[1].splitlines()) <= 15
    assert "ib.align(b, to=a)\n" in found[1]


def test_the_table_of_commands_is_complete() -> None:
    documented = set(re.findall(r"^\| `isobasin (\w+)", README, re.MULTILINE))
    available = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert study in [group.typer_instance for group in app.registered_groups]
    available |= {str(group.name) for group in app.registered_groups}
    assert documented == available


def test_the_number_of_model_types_is_that_of_the_registry() -> None:
    """Without the project's own model, which is no type of transformers."""
    found = re.findall(r"(\d+)\s+(?:model )?types of", README)
    assert len(found) == 2
    assert set(map(int, found)) == {len(FAMILIES) - 1}


def test_the_setup_commands_are_named() -> None:
    makefile = (Path(__file__).parents[1] / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test", "docs"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
