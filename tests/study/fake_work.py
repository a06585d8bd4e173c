"""Work that costs nothing, for the engines: each call is tallied in a file under the data root."""

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.study.plan import Context, Job
from isobasin.study.store import read_json


def job(function: str, *needs: Job, **settings: Any) -> Job:
    return Job(f"fake_work:{function}", settings, needs)


def add(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """Its number and those of its needs, read from the files they wrote."""
    _tally(settings, context)
    time.sleep(settings.get("seconds", 0))
    total = settings["number"] + sum(float((folder / "weights").read_text()) for folder in needs)
    (out / "weights").write_text(str(total))
    return {"total": total}


def break_down(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    _tally(settings, context)
    raise RuntimeError("broken\ndown")


def refuse(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    _tally(settings, context)
    raise IsobasinError("refused")


def break_once(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """Fails at first; its scratch folder tells it that it was here before."""
    if _first_time(context):
        _tally(settings, context)
        raise RuntimeError("not yet")
    return add(settings, needs, out, context)


def die_once(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """Its worker is killed at first, as one that takes too much memory is."""
    if _first_time(context):
        (out / "half").write_text("written")
        os.kill(os.getpid(), signal.SIGKILL)
    return add(settings, needs, out, context)


def threads(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    import torch

    print("a library that talks")
    return {"threads": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS"), "device": context.device}


def calls(data: Path) -> list[str]:
    """The labels of all calls so far, sorted."""
    tally = data / "tally"
    return sorted(tally.read_text().split()) if tally.exists() else []


def total(folder: Path) -> float:
    return float(read_json(folder / "result.json")["total"])


def _first_time(context: Context) -> bool:
    mark = context.scratch / "was-here"
    first = not mark.exists()
    mark.touch()
    return first


def _tally(settings: Mapping[str, Any], context: Context) -> None:
    assert context.data is not None
    with (context.data / "tally").open("a") as file:
        file.write(f"{settings.get('label', settings.get('number'))}\n")
