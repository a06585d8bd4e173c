"""A task from a file or folder, for the models that will be measured on it."""

from collections.abc import Sequence
from pathlib import Path

from isobasin.tasks.datasets_folder import is_hub_id
from isobasin.tasks.pixels import image_task
from isobasin.tasks.request import Request
from isobasin.tasks.sequences import text_task
from isobasin.tasks.source import DataError, check_exists, short_name
from isobasin.tasks.subjects import task_kind
from isobasin.tasks.task import Task, fingerprint
from isobasin.tasks.windows import lm_task, mlm_task
from isobasin.weights import Weights

_TASKS = {"lm": lm_task, "mlm": mlm_task, "text": text_task, "image": image_task}


def open_task(
    data: Path | str,
    models: Sequence[Weights],
    *,
    kind: str = "auto",
    tokenizer: str | Path | None = None,
    max_samples: int | None = None,
    batch_size: int | None = None,
    seq_len: int | None = None,
    seed: int = 0,
    split: str = "test",
) -> Task:
    """What these models can be measured on, from a file, a folder, or a hub id where `datasets` is installed.

    The models' heads say what is measured: language modelling and masked language modelling take text, or a file of
    token ids (`.npy`; `.bin` of uint16), as it is; text classifiers a table (CSV, JSONL, parquet); image classifiers
    MNIST's or CIFAR's files or a folder per class. Of data that come in splits, `split` is used. Without `max_samples`
    all of it is used, of text its first 2²⁴ characters; with it the first windows of text, or a random part of labelled
    samples in their order. A window has `seq_len` tokens: 256 unless the model takes less.

    >>> open_task("tinyshakespeare/input.txt", [a, b], max_samples=100)  # doctest: +SKIP
    """
    place = Path(data)
    found = task_kind(models, kind)
    if not is_hub_id(place):
        check_exists(place)
    request = Request(place, tuple(models), tokenizer, max_samples, batch_size, seq_len, seed, split).checked()
    try:
        prepared = _TASKS[found](request)
    except OSError as error:  # a folder that may not be listed, a disk that fails
        raise DataError(place, f"can not be read ({error.strerror or error})") from error
    return Task(
        kind=found,
        name=short_name(place),
        source=str(data),
        n_samples=prepared.n_samples,
        settings=prepared.settings,
        fingerprint=fingerprint(found, prepared),
        batches=prepared.batches,
    )
