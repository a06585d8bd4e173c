"""The paper's protocol: train, re-initialise, fine-tune, align, interpolate."""

from isobasin.study.models import reinitialise as reinitialise
from isobasin.study.models import scope_parameters as scope_parameters
from isobasin.study.trainer import TrainingRecipe as TrainingRecipe
from isobasin.study.trainer import TrainResult as TrainResult
from isobasin.study.trainer import train as train
from isobasin.symmetries import SCOPES as SCOPES
from isobasin.tasks.datasets import shifted as shifted
