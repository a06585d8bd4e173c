# SHIM
# mypy: implicit-reexport
from isobasin.tasks.loader import MAX_IMAGES as MAX_IMAGES  # noqa: F401
from isobasin.tasks.loader import MAX_TOKENS as MAX_TOKENS  # noqa: F401
from isobasin.tasks.loader import unlabeled as unlabeled  # noqa: F401
