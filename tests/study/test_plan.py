"""Keys of jobs: what changes them, and what does not."""

from pathlib import Path

import fake_work
import pytest

from isobasin.errors import IsobasinError
from isobasin.files import strict_json
from isobasin.study import plan
from isobasin.study.config import MatcherConfig
from isobasin.study.plan import Context, Job, _matcher_settings, in_order, load_work, run_job
from isobasin.study.store import Store


def context(tmp_path: Path) -> Context:
    return Context(data=tmp_path, device="cpu", scratch=tmp_path / "study/scratch")


def test_a_key_depends_on_everything_that_a_result_does(monkeypatch: pytest.MonkeyPatch) -> None:
    need = Job("pretrain", {"seed": 1})
    key = Job("finetune", {"a": 1, "b": [1, 2]}, (need,)).key
    assert key == Job("finetune", {"b": (1, 2), "a": 1}, (need,)).key
    others = [
        Job("pair", {"a": 1, "b": [1, 2]}, (need,)),
        Job("finetune", {"a": 1, "b": [2, 1]}, (need,)),
        Job("finetune", {"a": 1, "b": [1, 2]}),
        Job("finetune", {"a": 1, "b": [1, 2]}, (Job("pretrain", {"seed": 2}),)),
        Job("finetune", {"a": 1, "b": [1, 2]}, (need, need)),
    ]
    assert key not in {other.key for other in others}
    assert len({other.key for other in others}) == len(others)
    monkeypatch.setattr(plan, "VERSION", {"pretrain": 2, "finetune": 1})
    assert Job("finetune", {"a": 1, "b": [1, 2]}, (Job("pretrain", {"seed": 1}),)).key != key


def test_a_key_is_the_same_on_every_machine() -> None:
    assert Job("pretrain", {"seed": 1, "dataset": "digits"}).name == "pretrain-b3faebf6fa4f5a89afbc9580"


def test_needs_come_first_and_each_job_once() -> None:
    root = Job("pretrain", {})
    left, right = Job("finetune", {"seed": 1}, (root,)), Job("finetune", {"seed": 2}, (Job("pretrain", {}),))
    pair = Job("pair", {}, (left, right))
    assert in_order([pair, left]) == (root, left, right, pair)


def test_every_kind_names_a_function_of_the_study() -> None:
    assert set(plan.WORK) == set(plan.VERSION)
    for kind in plan.WORK:
        assert callable(load_work(kind))
    with pytest.raises(IsobasinError, match="kind of work 'pretrian' is unknown, expected one of baseline"):
        load_work("pretrian")


def test_a_job_runs_once_with_a_scratch_folder_of_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path / "study")
    first = fake_work.job("add", number=1)
    second = fake_work.job("add", first, number=2)
    for job in (first, second, second):
        result = run_job(job, store, context(tmp_path))
    assert result["total"] == 3
    about = {"kind": "fake_work:add", "settings": {"number": 2}, "needs": [first.name]}
    assert result["job"].items() >= about.items()
    assert fake_work.calls(tmp_path) == ["1", "2"]
    assert list(store.scratch.iterdir()) == []


def test_scratch_outlives_a_failure(tmp_path: Path) -> None:
    store, job = Store(tmp_path / "study"), fake_work.job("break_once", number=1)
    with pytest.raises(RuntimeError, match="not yet"):
        run_job(job, store, context(tmp_path))
    assert (store.scratch / job.name / "was-here").exists()
    assert not store.is_done(job)
    assert run_job(job, store, context(tmp_path))["total"] == 1


def test_what_json_has_not_becomes_null() -> None:
    assert strict_json({1: (float("nan"), 2.0), "x": float("inf")}) == {"1": [None, 2.0], "x": None}


def test_an_objective_of_labels_leaves_the_settings_as_they_were() -> None:
    found = {word: _matcher_settings(MatcherConfig(matcher="learned", objective=word)) for word in ("labels", "ends")}
    assert "objective" not in found["labels"]
    assert found["ends"] == found["labels"] | {"objective": "ends"}
    assert _matcher_settings(MatcherConfig(objective="ends")) == _matcher_settings(MatcherConfig())
    assert MatcherConfig(matcher="learned", objective="ends").label == "learned/ends"
    with pytest.raises(IsobasinError, match="objective is 'both', expected one of auto, labels, ends"):
        MatcherConfig.from_table({"matcher": "learned", "objective": "both"})
