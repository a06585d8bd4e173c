"""A run that can kill its own process after a given step: `python killable_run.py PLACE STEP fixed|free`."""

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import learn_subjects as subjects
import torch

import isobasin as ib
from isobasin.files import ResumeFile
from isobasin.learn.data import split_held_out
from isobasin.learn.trainer import learn
from isobasin.symmetries.transform import pack_elements


def learning(place: Path, kill_at: int, permutations: str) -> dict[str, Any]:
    """All that such a run ends with, and the steps that this process took."""
    place.mkdir(exist_ok=True)
    a = subjects.sharp()
    task = subjects.told(subjects.rows_task(40, seed=1), a)
    resume = ResumeFile(place / "out", "learning", {"permutations": permutations}, tensors=True)
    taken: list[int] = []

    def on_progress(step: int, of: int, barrier: float) -> None:
        taken.append(step)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    if permutations == "fixed":
        b = subjects.scrambled(a, "all-attention")
        matcher = subjects.matching(task, "all-attention", accumulate=2)
        found = ib.align(b, to=a, matcher=replace(matcher, on_step=on_progress, resume=resume))
        moved = found.transform.apply(b)
        return {
            "steps": taken,
            "history": found.held_out_history,
            "losses": found.losses,
            "tensors": {n: moved[n] for n in moved},
        }
    b = subjects.noisy(subjects.scrambled(a))
    config = subjects.config(permutations="free", objective="labels", lr=2e-4, turn=1e-3)
    start = subjects.misplaced(a, b, units=8)
    kept = learn(a, b, start, *split_held_out(task), config=config, on_progress=on_progress, resume=resume)
    tensors = {f"{n}.{k}": t for n, g in pack_elements(kept.elements).items() for k, t in g.items()}
    tensors["moved"] = (tensors["ff0.index"] != pack_elements(start)["ff0"]["index"]).sum()
    return {"steps": taken, "history": kept.history, "losses": kept.losses, "tensors": tensors}


if __name__ == "__main__":
    torch.set_num_threads(1)
    learning(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
