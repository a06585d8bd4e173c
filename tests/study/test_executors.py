"""The graph of jobs: order, failures, retries, resuming; then the same with real processes, some of them killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import fake_work
import pytest

from isobasin.study.executors import LOG, Event, RunJob, execute, local_pool
from isobasin.study.plan import Context, Job
from isobasin.study.store import Store
from isobasin.workers import LocalPool, Outcome, attempt


@dataclass
class InlinePool:
    """Does each job as it is waited for, in this process; remembers how many were under way at most."""

    store: Store
    context: Context
    size: int = 2
    most: int = 0
    under_way: list[Job] = field(default_factory=list)

    def start(self, job: Job) -> None:
        self.under_way.append(job)
        self.most = max(self.most, len(self.under_way))

    def wait(self) -> list[Outcome]:
        job = self.under_way.pop(0)
        return [attempt(job, RunJob(self.store, self.context))]

    def close(self) -> None:
        self.under_way.clear()


@dataclass
class Story:
    """The events, by the label of the job."""

    lines: list[tuple[str, str]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)

    def __call__(self, event: Event, job: Job, why: str) -> None:
        label = str(job.settings.get("label", job.settings.get("number")))
        self.lines.append((event, label))
        self.reasons[label] = why

    def labels(self, event: Event) -> list[str]:
        return [label for found, label in self.lines if found == event]


def context(tmp_path: Path) -> Context:
    return Context(data=tmp_path, device="cpu", scratch=tmp_path / "study/scratch")


def events(jobs: Iterable[Job], tmp_path: Path, *, retry: bool = False) -> Story:
    store, story = Store(tmp_path / "study"), Story()
    execute(jobs, store, InlinePool(store, context(tmp_path)), story, retry=retry)
    return story


def diamond(n: int = 0) -> list[Job]:
    root = fake_work.job("add", number=1 + n)
    left, right = fake_work.job("add", root, number=10), fake_work.job("add", root, number=20)
    return [fake_work.job("add", left, right, number=100)]


def test_needs_are_done_first_and_shared_work_once(tmp_path: Path) -> None:
    story = events(diamond() + diamond(), tmp_path)
    assert story.labels("done") == ["1", "10", "20", "100"]
    assert fake_work.calls(tmp_path) == ["1", "10", "100", "20"]
    (end,) = diamond()
    assert Store(tmp_path / "study").result(end)["total"] == 100 + 11 + 21


def test_what_is_done_is_not_done_again_but_what_changed_is(tmp_path: Path) -> None:
    events(diamond(), tmp_path)
    again = events(diamond(), tmp_path)
    assert again.lines == [("cached", label) for label in ("1", "10", "20", "100")]
    assert len(fake_work.calls(tmp_path)) == 4
    changed = events(diamond(n=1), tmp_path)
    assert changed.labels("done") == ["2", "10", "20", "100"]


def test_weights_that_were_dropped_are_made_again_only_if_needed(tmp_path: Path) -> None:
    (end,), store = diamond(), Store(tmp_path / "study")
    events([end], tmp_path)
    for job in (end, *end.needs, *end.needs[0].needs):
        store.drop_weights(job)
    assert events([end], tmp_path).labels("done") == []
    new = fake_work.job("add", end.needs[0], number=5)
    assert events([end, new], tmp_path).labels("done") == ["1", "10", "5"]
    assert store.result(new)["total"] == 16


def test_a_failure_stops_only_its_dependents(tmp_path: Path) -> None:
    bad = fake_work.job("break_down", label="bad")
    dependent = fake_work.job("add", bad, number=1)
    grandchild = fake_work.job("add", dependent, number=2)
    story = events([grandchild, fake_work.job("add", number=3)], tmp_path)
    assert story.labels("retried") == ["bad"]
    assert story.labels("failed") == ["bad"]
    assert story.labels("blocked") == ["1", "2"]
    assert story.labels("done") == ["3"]
    failure = Store(tmp_path / "study").failure(bad)
    assert failure is not None
    assert (failure["error"], failure["attempts"]) == ("RuntimeError: broken down", 2)


def test_a_mistake_in_the_input_is_not_tried_again(tmp_path: Path) -> None:
    story = events([fake_work.job("refuse", label="bad")], tmp_path)
    assert story.labels("failed") == ["bad"]
    assert story.reasons["bad"] == "refused"
    assert fake_work.calls(tmp_path) == ["bad"]


def test_what_passes_the_second_time_is_fine(tmp_path: Path) -> None:
    story = events([fake_work.job("break_once", number=7)], tmp_path)
    assert [event for event, _ in story.lines] == ["started", "retried", "started", "done"]


def test_earlier_failures_wait_for_retry(tmp_path: Path) -> None:
    bad = fake_work.job("break_down", label="bad")
    dependent = fake_work.job("add", bad, number=1)
    events([dependent], tmp_path)
    second = events([dependent], tmp_path)
    assert second.lines == [("failed", "bad"), ("blocked", "1")]
    assert second.reasons["bad"].endswith("(in an earlier run; --retry tries again)")
    assert fake_work.calls(tmp_path) == ["bad", "bad"]
    assert events([dependent], tmp_path, retry=True).labels("started") == ["bad", "bad"]


def test_no_more_jobs_than_workers_are_under_way(tmp_path: Path) -> None:
    store = Store(tmp_path / "study")
    jobs = [fake_work.job("add", number=n) for n in range(5)]
    for size in (1, 3):
        pool = InlinePool(Store(tmp_path / f"study{size}"), context(tmp_path), size=size)
        execute(jobs, pool.store, pool, Story())
        assert pool.most == size
    assert not store.is_done(jobs[0])


@contextmanager
def processes(tmp_path: Path, size: int = 2) -> Iterator[LocalPool]:
    store = Store(tmp_path / "study")
    store.root.mkdir(exist_ok=True)
    pool = local_pool(store, context(tmp_path), size=size, devices=["cpu"])
    try:
        yield pool
    finally:
        pool.close()


def test_processes_give_the_same_and_a_killed_one_is_replaced(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    store, story = Store(tmp_path / "study"), Story()
    mortal = fake_work.job("die_once", *diamond(), number=1000)
    probe = fake_work.job("threads", label="probe")
    with processes(tmp_path) as pool:
        execute([mortal, probe], store, pool, story)
    assert story.labels("done").count("1000") == 1
    assert story.labels("retried") == ["1000"]
    assert store.result(mortal)["total"] == 1132
    assert store.result(mortal)["files"] == ["weights"], "what the killed one wrote is no part of the result"
    found = store.result(probe)
    assert (found["threads"], found["omp"], found["device"]) == (1, "1", "cpu")
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert "a library that talks" in (store.root / LOG).read_text()
    assert capfd.readouterr().out == ""


SCRIPT = """
import sys
from pathlib import Path
import fake_work
from isobasin.study.executors import execute
from isobasin.study.executors import local_pool
from isobasin.study.plan import Context
from isobasin.study.store import Store

if __name__ == "__main__":
    root = Path(sys.argv[1])
    store = Store(root / "study")
    store.root.mkdir(exist_ok=True)
    pool = local_pool(store, Context(root, "cpu", store.scratch), size=1, devices=["cpu"])
    quick = fake_work.job("add", number=1)
    slow = fake_work.job("add", quick, number=2, seconds=float(sys.argv[2]))
    execute([slow], store, pool, lambda event, job, why: print(event, job.settings["number"], flush=True))
    pool.close()
"""


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    """A zombie that waits for its parent is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="children are looked up in /proc")
def test_workers_die_with_a_killed_parent_and_the_next_run_goes_on(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])}
    command = [sys.executable, str(script), str(tmp_path), "120"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as main:
        assert main.stdout is not None
        seen = [main.stdout.readline().strip() for _ in range(3)]
        workers = children(main.pid)
        main.send_signal(signal.SIGKILL)
    assert seen == ["started 1", "done 1", "started 2"]
    assert workers
    for _ in range(300):
        if not any(map(is_alive, workers)):
            break
        time.sleep(0.1)
    assert [pid for pid in workers if is_alive(pid)] == []
    quick = fake_work.job("add", number=1)
    story = events([fake_work.job("add", quick, number=2)], tmp_path)
    assert story.lines == [("cached", "1"), ("started", "2"), ("done", "2")]


UNGUARDED = """
import sys
sys.path += {paths!r}
from pathlib import Path
import fake_work
from isobasin.study.executors import execute, local_pool
from isobasin.study.plan import Context
from isobasin.study.store import Store

root = Path({root!r})
store = Store(root / "study")
store.root.mkdir(exist_ok=True)
pool = local_pool(store, Context(data=root, device="cpu", scratch=root / "scratch"), size=1, devices=["cpu"])
execute([fake_work.job("add", number=1)], store, pool, lambda event, job, why: print(event, why))
pool.close()
print("end", __name__, bool(__file__))
"""


def test_a_script_without_a_main_guard_runs_once(tmp_path: Path) -> None:
    """Workers do not import the script: it would start the study again, and multiprocessing refuses that."""
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED.format(paths=[str(Path(__file__).parent)], root=str(tmp_path)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["started ", "done ", "end __main__ True"]


INTERRUPTED = """
import multiprocessing.util, os, signal, sys, time
sys.path += {paths!r}
from pathlib import Path
import fake_work
from isobasin.workers import LocalPool

start = multiprocessing.util.spawnv_passfds

def start_and_interrupt(path, arguments, files):
    pid = start(path, arguments, files)
    if "spawn_main" in str(arguments):
        time.sleep(0.2)  # the worker's interpreter is up, and waits for what it is given
        os.killpg(0, signal.SIGINT)  # as Ctrl-C in a terminal does
    return pid

multiprocessing.util.spawnv_passfds = start_and_interrupt
pool = LocalPool(str, size=1, log=Path({root!r}) / "log")
try:
    pool.start("a task")
except KeyboardInterrupt:
    print("interrupted", [worker.process.is_alive() for worker in pool._workers])
pool.close()
"""


def test_an_interrupt_while_a_worker_starts_leaves_none_and_prints_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED.format(paths=[str(Path(__file__).parent)], root=str(tmp_path)))
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, start_new_session=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["interrupted [True]"]
