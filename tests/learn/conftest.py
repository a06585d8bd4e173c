"""Folders with tokenizers and processors are made as in the tests of paths."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "path"))
