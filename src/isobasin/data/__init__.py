"""Data inside the package: a part of MNIST, two models of its digits, and a text of Shakespeare.

LICENSE.md states their sources and terms.

>>> from isobasin.data import shipped
>>> sorted(file.name for file in shipped("mnist").iterdir())[0]
't10k-images-idx3-ubyte.gz'
"""

from importlib.resources import files
from pathlib import Path

from isobasin.errors import IsobasinError

SHIPPED = {"mnist": "mnist", "digits": "digits", "shakespeare": "shakespeare.txt", "licence": "LICENSE.md"}


def shipped(name: str) -> Path:
    """The path of `mnist` (a folder of IDX files), `digits` (the checkpoints A and B of the demo), `shakespeare` (a
    text file) or `licence` (the terms of all)."""
    if name not in SHIPPED:
        raise IsobasinError(f"no data named {name!r} ship with isobasin, expected one of {', '.join(SHIPPED)}")
    path = Path(str(files(__name__) / SHIPPED[name]))
    if not path.exists():  # a zipped package, or an installation without its data
        raise IsobasinError(f"{path} is missing: the data that ship with isobasin; install the package again")
    return path
