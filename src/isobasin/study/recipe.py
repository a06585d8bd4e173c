# SHIM
# mypy: implicit-reexport
from isobasin.study.trainer import TrainingRecipe as Recipe  # noqa: F401
