"""One process of a team that learns; `torchrun` starts several: `together.py PLACE`."""

import sys
from pathlib import Path

import learning_subjects as subjects
import torch

from isobasin.learning.exercises import split
from isobasin.learning.learn import Learned, learn
from isobasin.learning.record import packed
from isobasin.learning.team import Team, team_of
from isobasin.symmetries import symmetry


def lesson(team: Team, accumulate: int) -> Learned:
    a = subjects.sharp()
    b = subjects.noisy(subjects.disguised(a, "all-attention"))
    tasks = split(subjects.told(subjects.rows_task(80, seed=1), a))
    start = {name: g.identity() for name, g in symmetry(b.arch).scoped("all-attention").groups.items()}
    lessons = subjects.matching("all-attention", accumulate=accumulate, steps=20, rate=5e-3).lessons
    return learn(a, b, start, *tasks, scope="all-attention", lessons=lessons, team=team)


if __name__ == "__main__":
    torch.set_num_threads(1)
    team = team_of(torch.device("cpu"))
    found = lesson(team, accumulate=1)
    facts = {"size": team.size, "history": found.history, "losses": found.losses, "elements": packed(found.elements)}
    torch.save(facts, Path(sys.argv[1]) / f"rank{team.rank}")
