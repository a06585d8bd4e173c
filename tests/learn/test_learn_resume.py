"""A run that was killed continues, and ends bitwise where it would have ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import killable_run
import learn_subjects as subjects
import pytest
import torch

import isobasin as ib
from isobasin.files import ResumeFile


def killed(place: Path, at: int, permutations: str) -> int:
    """Run in a process of its own that kills itself after this step; its exit code."""
    words = [sys.executable, str(Path(killable_run.__file__)), str(place), str(at), permutations]
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(words, env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}, timeout=120).returncode


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("permutations", ["fixed", "free"])
def test_a_killed_run_ends_bitwise_where_it_would_have_ended(permutations: str, tmp_path: Path) -> None:
    one = killable_run.learning(tmp_path / "whole", 0, permutations)
    assert killed(tmp_path / "broken", 17, permutations) == -signal.SIGKILL
    two = killable_run.learning(tmp_path / "broken", 0, permutations)
    assert one["steps"] == list(range(1, 31))
    assert two["steps"] == list(range(11, 31)), "it went on from the check at step 10"
    assert one["history"][-1][1] < one["history"][0][1]
    if permutations == "free":
        assert one["tensors"]["moved"] >= 8, "units changed places"
    assert one["history"] == two["history"]
    assert one["losses"] == two["losses"]
    for name, tensor in one["tensors"].items():
        assert torch.equal(tensor, two["tensors"][name]), name


def state_file(output: Path, cache_key: dict[str, Any], *, writes: bool = True) -> ResumeFile:
    return ResumeFile(output, "learning", cache_key, tensors=True, writes=writes)


def test_a_state_belongs_to_one_question(tmp_path: Path) -> None:
    record = state_file(tmp_path / "out", {"rate": 1})
    record.keep("learning", {"step": 3})
    assert state_file(tmp_path / "out", {"rate": 1}).find("learning") == {"step": 3}
    assert state_file(tmp_path / "out", {"rate": 2}).find("learning") is None
    assert state_file(tmp_path / "other", {"rate": 1}).find("learning") is None


def test_a_state_cut_short_is_none(tmp_path: Path) -> None:
    record = state_file(tmp_path / "out", {})
    record.keep("learning", {"step": 3})
    record.path.write_bytes(record.path.read_bytes()[:50])
    assert state_file(tmp_path / "out", {}).find("learning") is None


def test_only_the_writer_leaves_a_state_and_closing_removes_it(tmp_path: Path) -> None:
    state_file(tmp_path / "out", {}, writes=False).keep("learning", {"step": 3})
    assert list(tmp_path.iterdir()) == []
    record = state_file(tmp_path / "out", {})
    record.keep("learning", {"step": 3})
    assert [path.name for path in tmp_path.iterdir()] == [".out.isobasin-learning"]
    record.close()
    assert list(tmp_path.iterdir()) == []


def test_the_same_seed_gives_the_same_bits_and_another_one_does_not() -> None:
    a = subjects.sharp()
    b = subjects.scrambled(a, "all-attention")
    task = subjects.told(subjects.rows_task(40, seed=1), a)
    matcher = subjects.matching(task, "all-attention")
    found = [ib.align(b, to=a, matcher=replace(matcher, seed=seed)).transform.apply(b) for seed in (0, 0, 1)]
    assert subjects.same_bits(found[0], found[1])
    assert not subjects.same_bits(found[0], found[2])
