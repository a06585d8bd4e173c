"""The command line. Each command parses its options, calls the library and prints; `--help` imports no torch."""

from isobasin.cli.app import main as main
from isobasin.cli.app import run as run
