"""What is done otherwise on CUDA: steps that are recorded, and wider batches for the judge."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import learning_subjects as subjects
import pytest
import torch

from isobasin.learning.course import Course
from isobasin.learning.exercises import on
from isobasin.learning.judge import Judge
from isobasin.learning.learn import learn
from isobasin.learning.lessons import Lessons
from isobasin.learning.motion import Motion
from isobasin.learning.record import FileRecord
from isobasin.learning.step import RecordedStep, Step
from isobasin.learning.team import Alone
from isobasin.match.matchers import WeightMatching
from isobasin.match.whole import match_whole
from isobasin.path.mixture import Mixture
from isobasin.symmetries import symmetry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")


def test_recorded_steps_are_the_steps_whatever_the_shapes_of_batches() -> None:
    cuda = torch.device("cuda")
    a = subjects.sharp()
    b = subjects.noisy(subjects.disguised(a))
    part = symmetry(b.arch).scoped("model")
    start = match_whole(a, b, WeightMatching(scope="model", stage2="none"), device=CPU).elements
    batches = [on(batch, cuda) for batch in subjects.rows_task(30, seed=1, batch=8)]
    assert [len(batch) for batch in batches] == [8, 8, 8, 6]
    ends, totals = [], []
    for kind in (Step, RecordedStep):
        motion = Motion(part).to(cuda)
        step = kind(Course.between(a, b, part, start, cuda), motion, Lessons(), Alone(), None)
        totals.append([float(step([0.3 + 0.05 * k], [batches[3 * k % 4]], 1e-2)) for k in range(12)])
        ends.append(torch.cat([p.detach().flatten() for p in motion.parameters()]))
        assert not isinstance(step, RecordedStep) or len(step._recordings) == 2
    assert totals[1] == pytest.approx(totals[0], rel=1e-4)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)
    assert float(ends[0].abs().max()) > 0.01, "nothing was learned"


def test_a_recorded_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    a, b = subjects.sharp(), subjects.sharp(seed=1)  # two functions: there is always more to learn
    start = match_whole(a, b, WeightMatching(scope="model", stage2="none"), device=CPU).elements
    task, held_out = (subjects.told(subjects.rows_task(32, seed=seed), a) for seed in (1, 2))
    cuda, found = torch.device("cuda"), {}
    for name, stops in {"whole": (), "broken": (17,)}.items():
        for stop in (*stops, None):
            record = FileRecord(tmp_path / name, {})  # read anew, as another process would
            lessons = Lessons(steps=40, check_every=5, rate=1e-2)
            with nullcontext() if stop is None else pytest.raises(KeyboardInterrupt, match="stopped"):
                found[name] = learn(
                    a, b, start, task, held_out, lessons=lessons, record=record, device=cuda, watch=stopping_at(stop)
                )
    for first, second in zip(found["whole"].history, found["broken"].history, strict=True):
        assert second == pytest.approx(first, rel=1e-2)
    heights = [height for _, height in found["broken"].history]
    assert len(set(heights)) == len(heights), "nothing was learned after the stop"


def stopping_at(stop: int | None) -> Callable[[int, int, float], None]:
    def watch(step: int, of: int, barrier: float) -> None:
        if step == stop:
            raise KeyboardInterrupt("stopped")

    return watch


def test_the_judge_finds_the_same_in_wider_batches() -> None:
    a = subjects.sharp()
    b = subjects.disguised(a)
    task = subjects.told(subjects.rows_task(30, seed=1), a)
    heights = []
    for device in (CPU, torch.device("cuda")):
        mixture = Mixture.of(a, device)
        judge = Judge(mixture, mixture.buffer.clone(), task, 5)
        heights.append(judge.barrier(mixture.vector(b)))
    assert heights[1] == pytest.approx(heights[0], rel=1e-4)
    assert heights[0] > 0.1
