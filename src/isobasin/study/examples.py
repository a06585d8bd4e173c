# SHIM
# mypy: implicit-reexport
from isobasin.tasks.datasets import LabelledExamples as Labelled  # noqa: F401
from isobasin.tasks.datasets import TokenStream as Stream  # noqa: F401
from isobasin.tasks.datasets import training_examples as examples  # noqa: F401
from isobasin.tasks.datasets import no_indices as nothing  # noqa: F401
from isobasin.tasks.datasets import model_inputs as ready  # noqa: F401
from isobasin.tasks.task import IGNORED as IGNORED  # noqa: F401
