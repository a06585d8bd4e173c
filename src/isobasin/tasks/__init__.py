"""Data that models are measured and trained on: text, labelled text and images from ordinary files and folders."""

from isobasin.tasks.images import Images as Images
from isobasin.tasks.images import read_images as read_images
from isobasin.tasks.images import scaled as scaled
from isobasin.tasks.loader import open_task as open_task
from isobasin.tasks.loader import unlabeled as unlabeled
from isobasin.tasks.source import DataError as DataError
from isobasin.tasks.task import IGNORED as IGNORED
from isobasin.tasks.task import Batch as Batch
from isobasin.tasks.task import MetricSums as MetricSums
from isobasin.tasks.task import Task as Task
from isobasin.tasks.text import Table as Table
from isobasin.tasks.text import read_ids as read_ids
from isobasin.tasks.text import read_table as read_table
from isobasin.tasks.text import read_text as read_text
