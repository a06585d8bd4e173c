# SHIM
# mypy: implicit-reexport
from isobasin.tasks.loader import MAX_IMAGES as MAX_IMAGES
from isobasin.tasks.loader import MAX_TOKENS as MAX_TOKENS
from isobasin.tasks.loader import unlabeled as unlabeled
