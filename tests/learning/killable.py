"""A run of learning that can kill its own process after a given step: `python killable.py PLACE STEP fixed|free`."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import learning_subjects as subjects
import torch

from isobasin.learning.align_learned import align_learned
from isobasin.learning.exercises import split
from isobasin.learning.learn import learn
from isobasin.learning.record import FileRecord, packed


def learning(place: Path, kill_at: int, permutations: str) -> dict[str, Any]:
    """All that such a run ends with, and the steps that this process took."""
    place.mkdir(exist_ok=True)
    a = subjects.sharp()
    task = subjects.told(subjects.rows_task(40, seed=1), a)
    record = FileRecord(place / "out", {"permutations": permutations})
    taken: list[int] = []

    def watch(step: int, of: int, barrier: float) -> None:
        taken.append(step)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if permutations == "fixed":
        b = subjects.disguised(a, "all-attention")
        matcher = subjects.matching("all-attention", accumulate=2)
        found = align_learned(b, to=a, matcher=matcher, task=task, watch=watch, record=record)
        moved = found.transform.apply(b)
        return {
            "steps": taken,
            "history": found.learning,
            "losses": found.losses,
            "tensors": {n: moved[n] for n in moved},
        }
    b = subjects.noisy(subjects.disguised(a))
    lessons = subjects.matching(permutations="free", rate=2e-4).lessons
    start = subjects.misplaced(a, b, units=8)
    kept = learn(a, b, start, *split(task), lessons=lessons, watch=watch, record=record)
    tensors = {f"{n}.{k}": t for n, g in packed(kept.elements).items() for k, t in g.items()}
    tensors["moved"] = (tensors["ff0.index"] != packed(start)["ff0"]["index"]).sum()
    return {"steps": taken, "history": kept.history, "losses": kept.losses, "tensors": tensors}


if __name__ == "__main__":
    torch.set_num_threads(1)
    learning(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
