"""The same graph on a local Ray: the same numbers, also when a worker is killed on the way."""

import os
from pathlib import Path

import fake_work
import pytest

from isobasin.study.executors import Event, execute, ray_pool
from isobasin.study.plan import Context, Job
from isobasin.study.store import Store

pytest.importorskip("ray", reason="Ray is not installed: pip install 'isobasin[cluster]'")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.environ.get("RAY_ADDRESS") is not None, reason="RAY_ADDRESS names a cluster in use"),
]


def test_ray_gives_the_same_when_a_worker_is_killed(tmp_path: Path) -> None:
    store = Store(tmp_path / "study")
    store.root.mkdir()
    root = fake_work.job("add", number=1)
    mortal = fake_work.job("die_once", root, number=10)
    bad = fake_work.job("break_down", label="bad")
    dependent = fake_work.job("add", bad, mortal, number=5)
    end = fake_work.job("add", mortal, fake_work.job("add", root, number=20), number=100)
    story: list[tuple[str, str]] = []

    def on_event(event: Event, job: Job, why: str) -> None:
        story.append((event, str(job.settings.get("label", job.settings.get("number")))))

    pool = ray_pool(store, Context(tmp_path, "cpu", store.scratch), size=2)
    try:
        execute([dependent, end], store, pool, on_event)
    finally:
        pool.close()
    assert store.result(end)["total"] == 100 + 11 + 21
    assert ("retried", "10") in story
    assert [line for line in story if line[0] in ("failed", "blocked")] == [("failed", "bad"), ("blocked", "5")]
    assert fake_work.calls(tmp_path) == ["1", "10", "100", "20", "bad", "bad"]
