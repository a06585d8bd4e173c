"""Data that ships inside the package: a part of MNIST, and some Shakespeare. LICENSE.md says what and whose.

>>> from isobasin.data import shipped
>>> sorted(file.name for file in shipped("mnist").iterdir())[0]
't10k-images-idx3-ubyte.gz'
"""

from importlib.resources import files
from pathlib import Path

from isobasin.errors import IsobasinError

SHIPPED = {"mnist": "mnist", "shakespeare": "shakespeare.txt", "licence": "LICENSE.md"}


def shipped(name: str) -> Path:
    """Where it lies: `mnist` is a folder of IDX files, `shakespeare` a text file, `licence` the terms of both."""
    if name not in SHIPPED:
        raise IsobasinError(f"no data named {name!r} ship with isobasin, expected one of {', '.join(SHIPPED)}")
    path = Path(str(files(__name__) / SHIPPED[name]))
    if not path.exists():  # an archive that was not unpacked, or an installation without its data
        raise IsobasinError(f"{path} is missing: the data that ship with isobasin; install the package again")
    return path
