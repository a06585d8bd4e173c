"""What a model is measured on: text, labelled text, images, from ordinary files and folders.

>>> from isobasin.tasks import open_task
>>> task = open_task("imdb/test.csv", [model], max_samples=1000)  # doctest: +SKIP
>>> for batch in task: ...  # doctest: +SKIP
"""

from .images import Images, read_images
from .opening import open_task
from .pixels import scaled
from .source import DataError
from .tables import Table, read_table
from .task import IGNORED, Batch, Sums, Task
from .texts import read_ids, read_text
from .unlabeled import unlabeled

__all__ = [
    "IGNORED",
    "Batch",
    "DataError",
    "Images",
    "Sums",
    "Table",
    "Task",
    "open_task",
    "read_ids",
    "read_images",
    "read_table",
    "read_text",
    "scaled",
    "unlabeled",
]
