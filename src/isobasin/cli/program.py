"""The whole program: every file of commands registers its own with `app`."""

from isobasin.cli import judging_commands, likening_commands, study_commands
from isobasin.cli.app import app

__all__ = ["app", "judging_commands", "likening_commands", "study_commands"]
