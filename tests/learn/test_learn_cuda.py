"""What differs on CUDA: steps captured as graphs, and larger batches for held-out evaluation."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import learn_subjects as subjects
import pytest
import torch

from isobasin.alignment.experts import nearest_elements
from isobasin.alignment.matchers import WeightMatching
from isobasin.files import ResumeFile
from isobasin.learn.parameters import GroupParameters
from isobasin.learn.path_loss import SINGLE_PROCESS, HeldOutEvaluator, LinearPath
from isobasin.learn.trainer import Step, TrainConfig, learn
from isobasin.path.evaluation import FlatModel, to_device
from isobasin.symmetries import symmetry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CPU = torch.device("cpu")


def test_graphed_steps_are_the_eager_steps_for_all_shapes_of_batches() -> None:
    cuda = torch.device("cuda")
    a = subjects.sharp()
    b = subjects.noisy(subjects.scrambled(a))
    part = symmetry(b.arch).scoped("model")
    start = nearest_elements(a, b, "model", WeightMatching(stage2="none"), CPU)
    batches = [to_device(batch, cuda) for batch in subjects.rows_task(30, seed=1, batch=8)]
    assert [len(batch) for batch in batches] == [8, 8, 8, 6]
    ends, totals = [], []
    for graphed in (False, True):
        parameters = GroupParameters(part, cuda)
        path = LinearPath.between(a, b, part, start, cuda)
        step = Step(path, parameters, TrainConfig(), SINGLE_PROCESS, graphed=graphed)
        totals.append([float(step([0.3 + 0.05 * k], [batches[3 * k % 4]], 1e-2)) for k in range(12)])
        ends.append(torch.cat([p.detach().flatten() for p in parameters.tensors()]))
        assert len(step._captured) == (2 if graphed else 0)
    assert totals[1] == pytest.approx(totals[0], rel=1e-4)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-3, atol=1e-4)
    assert float(ends[0].abs().max()) > 0.01, "nothing was learned"


def test_a_graphed_run_that_was_stopped_continues_as_if_it_had_not_been(tmp_path: Path) -> None:
    a, b = subjects.sharp(), subjects.sharp(seed=1)  # two functions: there is always more to learn
    start = nearest_elements(a, b, "model", WeightMatching(stage2="none"), CPU)
    task, held_out = (subjects.told(subjects.rows_task(32, seed=seed), a) for seed in (1, 2))
    cuda, found = torch.device("cuda"), {}
    for name, stops in {"whole": (), "broken": (17,)}.items():
        for stop in (*stops, None):
            resume = ResumeFile(tmp_path / name, "learning", {}, tensors=True)  # read anew, as another process would
            config = TrainConfig(steps=40, check_every=5, lr=1e-2)
            with nullcontext() if stop is None else pytest.raises(KeyboardInterrupt, match="stopped"):
                found[name] = learn(
                    a,
                    b,
                    start,
                    task,
                    held_out,
                    config=config,
                    resume=resume,
                    device=cuda,
                    on_progress=stopping_at(stop),
                )
    for first, second in zip(found["whole"].history, found["broken"].history, strict=True):
        assert second == pytest.approx(first, rel=1e-2)
    heights = [height for _, height in found["broken"].history]
    assert len(set(heights)) == len(heights), "nothing was learned after the stop"


def stopping_at(stop: int | None) -> Callable[[int, int, float], None]:
    def on_progress(step: int, of: int, barrier: float) -> None:
        if step == stop:
            raise KeyboardInterrupt("stopped")

    return on_progress


def test_the_evaluator_finds_the_same_in_larger_batches() -> None:
    a = subjects.sharp()
    b = subjects.scrambled(a)
    task = subjects.told(subjects.rows_task(30, seed=1), a)
    heights = []
    for device in (CPU, torch.device("cuda")):
        mixture = FlatModel.of(a, device)
        evaluator = HeldOutEvaluator(mixture, mixture.buffer.clone(), mixture.vector(b), task, 5)
        heights.append(evaluator.barrier_and_mean(mixture.vector(b))[0])
    assert heights[1] == pytest.approx(heights[0], rel=1e-4)
    assert heights[0] > 0.1
