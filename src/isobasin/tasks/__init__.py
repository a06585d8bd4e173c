"""Data that models are measured and trained on: text, labelled text and images from ordinary files and folders.

>>> from isobasin.tasks import open_task
>>> task = open_task("imdb/test.csv", [model], max_samples=1000)  # doctest: +SKIP
>>> for batch in task: ...  # doctest: +SKIP
"""

from isobasin.tasks.images import Images, read_images, scaled
from isobasin.tasks.loader import open_task, unlabeled
from isobasin.tasks.source import DataError
from isobasin.tasks.task import IGNORED, Batch, MetricSums, Task
from isobasin.tasks.text import Table, read_ids, read_table, read_text

__all__ = [
    "IGNORED",
    "Batch",
    "DataError",
    "Images",
    "MetricSums",
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
