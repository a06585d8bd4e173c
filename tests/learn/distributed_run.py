"""One process of a distributed run; `torchrun` starts several: `distributed_run.py PLACE`."""

import sys
from pathlib import Path

import learn_subjects as subjects
import torch

from isobasin.learn.data import split_held_out
from isobasin.learn.path_loss import ProcessGroup, current_group
from isobasin.learn.trainer import LearnResult, learn
from isobasin.symmetries import symmetry
from isobasin.symmetries.transform import pack_elements


def train(processes: ProcessGroup, accumulate: int) -> LearnResult:
    a = subjects.sharp()
    b = subjects.noisy(subjects.scrambled(a, "all-attention"))
    tasks = split_held_out(subjects.told(subjects.rows_task(80, seed=1), a))
    start = {name: g.identity() for name, g in symmetry(b.arch).scoped("all-attention").groups.items()}
    config = subjects.config(accumulate=accumulate, steps=20, lr=5e-3)
    return learn(a, b, start, *tasks, scope="all-attention", config=config, processes=processes)


if __name__ == "__main__":
    torch.set_num_threads(1)
    processes = current_group(torch.device("cpu"))
    found = train(processes, accumulate=1)
    elements = pack_elements(found.elements)
    facts = {"size": processes.size, "history": found.history, "losses": found.losses, "elements": elements}
    torch.save(facts, Path(sys.argv[1]) / f"rank{processes.rank}")
