"""One try at one job, inside a worker: it never raises, it says what went wrong."""

import traceback
from dataclasses import dataclass

import torch

from isobasin.errors import IsobasinError

from ..jobs import Context, Job, run_job
from ..store import Store


@dataclass(frozen=True)
class Attempt:
    """How it ended: without an error it is done. `again`: another try may end otherwise."""

    error: str | None = None
    again: bool = False


def attempt(job: Job, store: Store, context: Context) -> Attempt:
    """Run a job with one torch thread: sums are then added in one order, whatever the number of cores."""
    torch.set_num_threads(1)
    try:
        run_job(job, store, context)
    except IsobasinError as error:  # it says what to mend, so it would only say it again
        return Attempt(_one_line(str(error)))
    except Exception as error:
        traceback.print_exc()
        return Attempt(_one_line(f"{type(error).__name__}: {error}"), again=True)
    return Attempt()


def _one_line(text: str) -> str:
    return " ".join(text.split())
