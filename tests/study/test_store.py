"""Results on disk: whole or not there."""

import json
from pathlib import Path

import pytest

from isobasin.errors import IsobasinError
from isobasin.study import store as store_module
from isobasin.study.plan import Job
from isobasin.study.store import Store, read_json

JOB = Job("pretrain", {"seed": 1}, (Job("pretrain", {"seed": 0}),))


def filled(store: Store, weights: str = "1") -> None:
    with store.writing(JOB) as place:
        (place.folder / "model").mkdir()
        (place.folder / "model" / "weights").write_text(weights)
        place.commit({"loss": float("nan"), "accuracy": 0.5}, seconds=1.23456)


def test_a_result_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "source_commit", lambda: "3b55832c29a6+")
    store = Store(tmp_path)
    assert not store.is_done(JOB)
    filled(store)
    text = (tmp_path / "done" / JOB.name / "result.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {
        "loss": None,
        "accuracy": 0.5,
        "job": {
            "kind": "pretrain",
            "settings": {"seed": 1},
            "needs": [JOB.needs[0].name],
            "seconds": 1.235,
            "git": "3b55832c29a6+",
        },
        "seconds": 1.235,
        "files": ["model"],
    }
    assert store.is_complete(JOB)
    assert [path.name for path in (tmp_path / "done").iterdir()] == [JOB.name]


def test_work_may_time_its_own_parts(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with store.writing(JOB) as place:
        place.commit({"seconds": {"weights": 0.5}}, seconds=2)
    found = store.result(JOB)
    assert (found["seconds"], found["job"]["seconds"]) == ({"weights": 0.5}, 2)


def test_unfinished_work_leaves_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)

    def interrupted() -> None:
        with store.writing(JOB) as place:
            (place.folder / "half").write_text("1")
            raise KeyboardInterrupt("stop")

    with pytest.raises(KeyboardInterrupt, match="stop"):
        interrupted()
    assert list((tmp_path / "done").iterdir()) == []
    assert not store.is_done(JOB)


def test_what_a_killed_worker_left_is_tidied_away(tmp_path: Path) -> None:
    store = Store(tmp_path)
    filled(store)
    killed = store.writing(JOB)
    left = killed.__enter__().folder
    assert left.is_dir()
    store.remove_unfinished()
    assert not left.exists()
    assert store.is_complete(JOB)


def test_dropped_weights_leave_the_numbers_and_can_come_back(tmp_path: Path) -> None:
    store = Store(tmp_path)
    filled(store)
    store.drop_weights(JOB)
    assert not (store.folder(JOB) / "model").exists()
    assert store.is_done(JOB)
    assert not store.is_complete(JOB)
    assert store.result(JOB)["accuracy"] == 0.5
    filled(store, weights="2")
    assert store.is_complete(JOB)
    assert (store.folder(JOB) / "model/weights").read_text() == "2"


def test_dropping_weights_is_one_step_for_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it deletes a model, a study must not take the rest of the model for a whole one."""
    store = Store(tmp_path)
    filled(store)

    def killed(path: Path, **options: object) -> None:
        raise KeyboardInterrupt("killed")

    monkeypatch.setattr("shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt, match="killed"):
        store.drop_weights(JOB)
    monkeypatch.undo()
    assert not store.is_complete(JOB)
    assert not (store.folder(JOB) / "model").exists()
    assert store.is_done(JOB)


def test_failures_are_kept_until_they_are_forgotten(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert store.failure(JOB) is None
    store.record_failure(JOB, "no memory", 2)
    found = store.failure(JOB)
    assert found is not None
    assert (found["error"], found["attempts"], found["job"]["kind"]) == ("no memory", 2, "pretrain")
    store.remove_failure(JOB)
    assert store.failure(JOB) is None


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_spoilt_result_says_what_to_do(tmp_path: Path, text: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(IsobasinError, match=r"result\.json: .*; delete it to have it made again"):
        read_json(path)
