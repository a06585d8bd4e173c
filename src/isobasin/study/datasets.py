# SHIM
# mypy: implicit-reexport
from isobasin.tasks.datasets import Dataset as Dataset
from isobasin.tasks.datasets import eval_batch_size as at_once  # noqa: F401
from isobasin.tasks.datasets import locate as locate
from isobasin.tasks.datasets import open_dataset as open_dataset
from isobasin.tasks.datasets import open_labelled_texts as rows_of  # noqa: F401
