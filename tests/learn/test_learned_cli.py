"""What the command line makes of `--matcher learned`: flags, data, the record beside the output, the facts."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import learn_subjects as subjects
import path_subjects
import pytest
import torch

import isobasin as ib
from isobasin.cli import run
from isobasin.cli.align import AlignSetup, learning_facts, learning_lines, learning_step
from isobasin.cli.options import DataOptions, LearnOptions, LearnSetup, MatchOptions
from isobasin.cli.output import progress
from isobasin.errors import IsobasinError
from isobasin.learn.matching import LearnedMatching
from isobasin.learn.trainer import TrainConfig
from isobasin.weights import Weights

pytestmark = pytest.mark.hf
CPU = torch.device("cpu")


@pytest.fixture
def subject(tmp_path: Path) -> path_subjects.Subject:
    return path_subjects.subject("llama-gqa", "text", tmp_path)


@contextmanager
def attempt(
    subject: path_subjects.Subject,
    output: Path,
    b: Weights | None = None,
    *,
    quiet: bool = True,
    data: str | None = "subject",
    **flags: Any,
) -> Iterator[Any]:
    """The context in which the result of these flags is written."""
    source = subject.data if data == "subject" else None
    learning = LearnSetup(LearnOptions(**({"steps": 6, "lr": 1e-2} | flags)), DataOptions(seq_len=6), source)
    setup = AlignSetup(MatchOptions(scope="all-attention", matcher="learned"), None, 0, learning)
    setup.check("align")
    models = {"A": ib.load(subject.a), "B": b or ib.load(subject.b)}
    with ExitStack() as until_written, progress(quiet=quiet) as on_progress:
        yield setup.aligner(models, output, until_written, on_progress, device=CPU, quiet=quiet)(
            models["B"], models["A"]
        )


def test_facts_are_strict_and_the_record_goes_when_the_result_is_written(
    subject: path_subjects.Subject, tmp_path: Path
) -> None:
    record = tmp_path / ".out.A-B.isobasin-learning"
    with attempt(subject, tmp_path / "out") as alignment:
        assert record.exists()
        facts = learning_facts(alignment)
    assert not record.exists()
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    assert set(facts["held_out_barrier"]) == {"naive", "start", "learned"}
    assert facts["kept"] in facts["held_out_barrier"]
    assert facts["held_out_barrier"][facts["kept"]] == min(facts["held_out_barrier"].values())
    lines = learning_lines(facts)
    assert lines[0] == f"learned from  {subject.data}"
    assert lines[1].startswith("held-out barrier  naive ")
    assert learning_lines(facts | {"decided_by": "other"})[0] == f"learned from  {subject.data}, decided by other"


def test_the_output_may_be_the_current_folder(
    subject: path_subjects.Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "place" / "out"
    place.mkdir(parents=True)
    monkeypatch.chdir(place)
    words = ["align", str(subject.b), "--to", str(subject.a), "--matcher", "learned", "--data", str(subject.data)]
    assert run([*words, "--scope", "all-attention", "--steps", "1", "--seq-len", "6", "-o", ".", "--quiet"]) == 0
    assert "config.json" in [path.name for path in place.iterdir()]
    assert [path.name for path in place.parent.iterdir()] == ["out"]


def test_a_result_that_was_not_written_leaves_the_record(
    subject: path_subjects.Subject, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    b = subjects.scrambled(ib.load(subject.b), "all-attention")
    record = tmp_path / ".out.A-B.isobasin-learning"
    with pytest.raises(OSError, match="disk is full"), attempt(subject, tmp_path / "out", b):
        raise OSError("disk is full")
    assert record.exists()
    steps = torch.load(record)["values"].get("learning", {}).get("step")
    with attempt(subject, tmp_path / "out", b, quiet=False) as first:
        pass
    assert ("going on from step" in capsys.readouterr().err) == (steps is not None)
    with attempt(subject, tmp_path / "fresh", b) as second:
        pass
    assert first.held_out_history == second.held_out_history
    assert subjects.same_bits(first.transform.apply(b), second.transform.apply(b))


def test_the_matcher_has_the_defaults_of_the_command_line(subject: path_subjects.Subject, tmp_path: Path) -> None:
    a, b = ib.load(subject.a), ib.load(subject.b)
    learning = LearnSetup(LearnOptions(), DataOptions(seq_len=6), subject.data)
    setup = AlignSetup(MatchOptions(matcher="learned"), None, 0, learning)
    with ExitStack() as until_written:
        given = setup._learned_matcher(learning, b, a, tmp_path / "out", until_written, True, CPU)
    matcher = LearnedMatching(subjects.rows_task(4, seed=0))
    assert {f.name: getattr(given, f.name) for f in fields(TrainConfig)} == {
        f.name: getattr(matcher, f.name) for f in fields(TrainConfig)
    }
    assert (matcher.scope, matcher.seed, matcher.held_out) == ("model", 0, None)
    assert matcher.cache_key() == given.cache_key()


def test_held_out_data_of_their_own(subject: path_subjects.Subject, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(" ".join(reversed(subject.data.read_text().split())))
    models = [ib.load(subject.a), ib.load(subject.b)]
    reading = DataOptions(seq_len=6)
    task, held_out = LearnSetup(LearnOptions(held_out=other), reading, subject.data).tasks(models, 0)
    whole, part = LearnSetup(LearnOptions(), reading, subject.data).tasks(models, 0)
    assert held_out is not None
    assert held_out.source == str(other)
    assert part is None  # a tenth is held out when it learns
    assert task.n_samples == whole.n_samples


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"data": None}, "--matcher learned needs --data"),
        ({"init": "nowhere"}, "--init 'nowhere' is not available, expected one of weights, activations"),
        ({"permutations": "some"}, "--permutations 'some' is not available"),
        ({"steps": -1}, "steps is -1, expected 0 or more"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    subject: path_subjects.Subject, tmp_path: Path, flags: dict[str, Any], message: str
) -> None:
    with pytest.raises(IsobasinError, match=message), attempt(subject, tmp_path / "out", **flags):
        pass


def test_what_is_learned_from_can_not_decide(subject: path_subjects.Subject, tmp_path: Path) -> None:
    with (
        pytest.raises(IsobasinError, match="is --data itself: what is learned from can not decide"),
        attempt(subject, tmp_path / "out", held_out=subject.data),
    ):
        pass


def test_the_bar_says_the_barrier(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress(quiet=True) as on_progress:
        learning_step(on_progress)(1, 3, 0.25)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    with progress(quiet=False) as on_progress:
        learning_step(on_progress)(1, 3, 0.25)
    assert "held-out barrier 0.25" in capsys.readouterr().err
