"""Two processes that share the batches learn what one learns from twice as many."""

import os
import subprocess
import sys
from pathlib import Path

import distributed_run
import pytest
import torch

from isobasin.errors import IsobasinError
from isobasin.learn.path_loss import SINGLE_PROCESS, ProcessGroup, average_gradients, current_group
from isobasin.symmetries.transform import pack_elements


def launch(place: Path, processes: int) -> None:
    pytest.importorskip("accelerate")
    here = Path(__file__).parent
    # On CPUs `accelerate launch` wants MPI; torch's own launcher sets what accelerate reads.
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    paths = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    words += [str(here / "distributed_run.py"), str(place)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_two_processes_are_one_with_the_doubled_batch(tmp_path: Path) -> None:
    launch(tmp_path, 2)
    first, second = (torch.load(tmp_path / f"rank{k}") for k in (0, 1))
    assert first["size"] == second["size"] == 2
    assert first["history"] == second["history"]
    double, single = (distributed_run.train(SINGLE_PROCESS, accumulate=n) for n in (2, 1))
    assert first["history"][-1][1] < first["history"][0][1]
    assert distance(first["elements"], second["elements"]) == 0
    assert distance(first["elements"], pack_elements(double.elements)) <= 1e-5
    assert distance(first["elements"], pack_elements(single.elements)) > 1e-3
    assert first["losses"] == pytest.approx(double.losses, abs=1e-5)


def distance(one: dict[str, dict[str, torch.Tensor]], two: dict[str, dict[str, torch.Tensor]]) -> float:
    """The largest difference between two sets of elements."""
    return max(float((t - two[name][key]).abs().max()) for name, part in one.items() for key, t in part.items())


def test_one_process_is_a_group_of_one() -> None:
    assert current_group(torch.device("cpu")) == SINGLE_PROCESS


def test_several_processes_without_accelerate_are_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(IsobasinError, match=r"several processes need the package accelerate: pip install"):
        current_group(torch.device("cpu"))


class Pair(ProcessGroup):
    """A group of two, whose other process has the same gradients."""

    def all_reduce_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return 2 * tensor


def test_gradients_are_averaged() -> None:
    parameters = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True), torch.zeros(1)]
    for k, parameter in enumerate(parameters[:2], 1):
        parameter.grad = torch.full_like(parameter, 6.0 * k)
    average_gradients(Pair(), parameters, 4)
    assert [p.grad.tolist() for p in parameters[:2] if p.grad is not None] == [[3.0] * 2, [6.0] * 3]
    assert parameters[2].grad is None
