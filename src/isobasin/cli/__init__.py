"""The command line. Each command parses its options, calls the library and prints; `--help` imports no torch."""

from isobasin.cli.app import main, run

__all__ = ["main", "run"]
