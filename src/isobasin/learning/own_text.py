# SHIM
# mypy: implicit-reexport
from isobasin.learn.data import SOURCE as SOURCE  # noqa: F401
from isobasin.learn.data import WINDOWS as WINDOWS  # noqa: F401
from isobasin.learn.data import GeneratedText as OwnText  # noqa: F401
from isobasin.learn.data import generate as written  # noqa: F401
