"""A family of one's own: a Python file with a `Family`, given by `--family FILE` or `load(…, family=FILE)`.

The file is run, as any script that its user starts. Processes that this one starts find it in an environment variable.
"""

import os
import runpy
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from isobasin.arch.architecture import Architecture
from isobasin.arch.family import Family
from isobasin.arch.registry import FAMILIES, REFUSED
from isobasin.errors import ArchitectureError, brief, one_line

VARIABLE = "ISOBASIN_FAMILY"  # paths of family files, separated as in PATH
_loaded: set[Path] = set()


def use_family(family: Family | str | Path) -> None:
    """Make a family known, in place of one of the same model type; a path is that of a file that defines some."""
    if isinstance(family, Family):
        REFUSED.pop(family.name, None)
        FAMILIES[family.name] = family
        return
    try:
        path = Path(family).resolve(strict=True)
    except (OSError, ValueError) as error:  # not there, a name that is too long, a zero in it
        raise ArchitectureError(
            f"--family {brief(str(family))}: no such file; `isobasin families --draft MODEL` drafts one"
        ) from error
    for each in _defined(path):
        use_family(each)
    _loaded.add(path)
    listed = [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]
    if str(path) not in listed:
        os.environ[VARIABLE] = os.pathsep.join([*listed, str(path)])


def use_listed_families() -> None:
    """Make the families known that the process which started this one had been given."""
    for name in os.environ.get(VARIABLE, "").split(os.pathsep):
        if name and Path(name) not in _loaded:
            use_family(name)


def _defined(path: Path) -> list[Family]:
    if not path.is_file():
        raise ArchitectureError(f"--family {path}: no file; `isobasin families --draft MODEL` drafts one")
    with _running(path):
        found: dict[str, Any] = runpy.run_path(str(path))
    families = found.get("FAMILIES", ())
    if not isinstance(families, tuple | list) or not families or not all(isinstance(f, Family) for f in families):
        raise ArchitectureError(
            f"--family {path}: no FAMILIES in it, expected a tuple of isobasin.arch.Family, as in the files of "
            "isobasin/arch/families"
        )
    return [_guarded(family, path) for family in families]


def _guarded(family: Family, path: Path) -> Family:
    """The family; whatever goes wrong in its functions is a mistake in the file."""

    def describe(config: Mapping[str, Any]) -> Architecture:
        with _running(path):
            found: object = family.describe(config)
        if isinstance(found, Architecture):
            return found
        raise ArchitectureError(
            f"--family {path}: the function of {family.name} returns {brief(found)}, expected an "
            "Architecture; correct the file"
        )

    def derived_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
        with _running(path):
            return family.derived_settings(config)

    return replace(family, describe=describe, derived_settings=derived_settings)


@contextmanager
def _running(path: Path) -> Iterator[None]:
    """Run code of the file: what it prints goes to standard error; what it raises, an exit too, names the file."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except (KeyboardInterrupt, ArchitectureError):
        raise
    except BaseException as error:  # the file is the user's, and may do anything
        said = one_line(f"{type(error).__name__}: {error!s:.160}")
        raise ArchitectureError(f"--family {path}: {said}; correct the file") from error
