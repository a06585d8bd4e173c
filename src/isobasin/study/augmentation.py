# SHIM
# mypy: implicit-reexport
from isobasin.tasks.datasets import AUGMENTATIONS as NAMES  # noqa: F401
from isobasin.tasks.datasets import augmentation as augmentation
from isobasin.tasks.datasets import dropped as dropped
from isobasin.tasks.datasets import flipped_and_cropped as flipped_and_cropped
from isobasin.tasks.datasets import shifted as shifted
