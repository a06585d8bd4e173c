"""The matcher `learned`: functions stay, held-out data decide, on our own models and on Hugging Face folders."""

from dataclasses import replace
from pathlib import Path

import learn_subjects as subjects
import path_subjects
import pytest
import torch

import isobasin as ib
from isobasin.errors import IsobasinError, VerificationError
from isobasin.learn import matching as module
from isobasin.learn.data import split_held_out
from isobasin.learn.matching import LearnedMatching
from isobasin.learn.trainer import learn
from isobasin.path.evaluation import evaluate_path
from isobasin.runtime import output_difference, outputs, random_inputs
from isobasin.symmetries import SCOPES
from isobasin.symmetries.transform import Transform
from isobasin.tasks import open_task
from isobasin.weights import Weights


def moved_by(found: ib.Alignment, b: Weights) -> float:
    inputs = random_inputs(b)
    return output_difference(outputs(b, inputs), outputs(found.transform.apply(b), inputs))


@pytest.mark.parametrize("scope", SCOPES)
def test_every_scope_learns_and_keeps_the_function(scope: str) -> None:
    a = subjects.sharp()
    b = subjects.noisy(subjects.scrambled(a, scope))
    task = subjects.told(subjects.rows_task(80, seed=1), a)
    found = ib.align(b, to=a, matcher=subjects.matching(task, scope))
    assert found.kept == "learned"
    assert found.held_out["learned"] < min(found.held_out["start"], found.held_out["naive"])
    assert found.max_output_change is not None
    assert found.max_output_change <= 1e-6
    assert moved_by(found, b) <= 1e-5 * b.arch.sizes.n_layers
    touched = {name for name in b if not torch.equal(b[name], found.transform.apply(b)[name])}
    assert any("blocks.0.attn" in name for name in touched)
    assert any("blocks.1" in name for name in touched) == (scope in ("all-attention", "model"))


def test_what_is_reported_is_the_barrier_of_what_is_given() -> None:
    a = subjects.sharp()
    b = subjects.noisy(subjects.scrambled(a))
    task, held_out = (subjects.told(subjects.rows_task(n, seed=n), a) for n in (40, 24))
    found = ib.align(b, to=a, matcher=subjects.matching(task, lr=1e-3, turn=4e-3, steps=10, held_out=held_out))
    measured = evaluate_path(a, found.transform.apply(b), held_out, n_points=5).barrier.height
    assert 0 < measured < found.held_out["start"]
    assert measured == pytest.approx(found.held_out["learned"], abs=1e-5)
    assert measured == pytest.approx(min(height for _, height in found.held_out_history), abs=1e-4), (
        "canonical forms agree"
    )
    other = evaluate_path(a, found.transform.apply(b), subjects.rows_task(24, seed=9), n_points=5).barrier.height
    assert abs(other - measured) > 1e-3


def test_a_bad_start_is_left_for_none_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    a = subjects.sharp()
    b = subjects.noisy(a, 0.5)
    worse = Transform(b.arch.family, dict(b.arch.spaces), ib.scramble(b, scope="all-attention", seed=1).elements)
    task = subjects.told(subjects.rows_task(80, seed=1), a)
    monkeypatch.setattr(module, "_start", lambda *_: worse)
    found = ib.align(b, to=a, matcher=subjects.matching(task, "all-attention", steps=0))
    assert found.held_out["start"] > found.held_out["naive"]
    assert found.kept == "naive"
    assert subjects.same_bits(found.transform.apply(b), b)
    assert found.distance_after == found.distance_before
    further = ib.align(b, to=a, matcher=subjects.matching(task, "all-attention"))
    assert further.held_out_history[0][1] == pytest.approx(found.held_out["naive"], abs=1e-4), (
        "it begins from the better one"
    )
    assert further.held_out["learned"] <= found.held_out["naive"]


@pytest.mark.parametrize("lower", ["start", "naive"])
def test_of_lines_without_a_barrier_the_lower_is_kept(lower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Targets that nobody knows: what mixes two models badly is less sure of itself, and less wrong for that."""
    a = subjects.sharp()
    near = subjects.noisy(a, 0.6)
    scrambling = ib.scramble(near, scope="all-attention", seed=4)
    apart = Transform(near.arch.family, dict(near.arch.spaces), scrambling.elements)
    far = ib.load(apart.apply(near).state_dict("float32"), dict(near.config))
    b, start = (near, apart) if lower == "start" else (far, apart.inverse())
    monkeypatch.setattr(module, "_start", lambda *_: start)
    task = subjects.rows_task(40, seed=1)
    found = ib.align(b, to=a, matcher=subjects.matching(task, "all-attention", held_out=task))
    assert found.held_out == {"naive": 0, "start": 0, "learned": 0}
    lines = [evaluate_path(a, end, task, n_points=5).metrics["loss"] for end in (b, start.apply(b))]
    means = dict(zip(("naive", "start"), (sum(line) / len(line) for line in lines)))
    assert means[lower] == min(means.values()) < max(means.values()) - 0.1
    assert found.kept == lower


def test_lines_that_rounding_tells_apart_are_equally_low() -> None:
    none = Transform("own", {})
    options = [module._Candidate("naive", none, 0.0, 1.0), module._Candidate("start", none, 0.0, 1.0 - 1e-7)]
    assert module._best(options).name == "naive"
    assert module._best([*options, module._Candidate("learned", none, 0.0, 0.999)]).name == "learned"
    assert module._best([*options, module._Candidate("learned", none, 1e-9, 0.5)]).name == "naive"


def test_learning_ends_when_the_barrier_is_gone() -> None:
    a = subjects.sharp()
    task = subjects.told(subjects.rows_task(40, seed=1), a)
    seen: list[tuple[int, int, float]] = []
    matcher = subjects.matching(task, steps=100, check_every=5)
    b = subjects.noisy(subjects.scrambled(a))
    found = ib.align(b, to=a, matcher=replace(matcher, on_step=lambda *progress: seen.append(progress)))
    assert found.held_out["learned"] == 0
    assert seen[-1][0] == found.held_out_history[-1][0] < 100
    assert seen[-1][2] == 0 < seen[0][2]
    assert {of for _, of, _ in seen} == {100}


def test_a_rate_far_too_high_does_no_harm() -> None:
    a = subjects.sharp()
    b = subjects.noisy(subjects.scrambled(a, "all-attention"))
    task = subjects.told(subjects.rows_task(40, seed=1), a)
    found = ib.align(b, to=a, matcher=subjects.matching(task, "all-attention", lr=1e6, steps=10))
    assert found.held_out_history[-1][1] > 2 * found.held_out_history[0][1]
    assert found.kept == "start"
    assert moved_by(found, b) <= 1e-5 * b.arch.sizes.n_layers


def test_units_in_wrong_places_find_their_own_only_when_free() -> None:
    a = subjects.sharp()
    b = subjects.noisy(subjects.scrambled(a), 0.1)
    start = subjects.misplaced(a, b, units=8)
    right = subjects.misplaced(a, b, units=0)["ff0"].tensors()["index"]
    tasks = split_held_out(subjects.told(subjects.rows_task(80, seed=1), a))
    wrong = {}
    for permutations in ("fixed", "free"):
        config = subjects.config(permutations=permutations, lr=1e-3, steps=10, check_every=5)
        found = learn(a, b, start, *tasks, config=config)
        wrong[permutations] = int((found.elements["ff0"].tensors()["index"] != right).sum())
    assert wrong == {"fixed": 8, "free": 0}


def test_an_element_that_would_change_the_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    a = subjects.sharp()
    b = subjects.noisy(subjects.scrambled(a, "all-attention"))
    task = subjects.told(subjects.rows_task(40, seed=1), a)
    monkeypatch.setattr("isobasin.alignment.verification.EXACT", 0.0)
    with pytest.raises(VerificationError, match="would change what this layer adds"):
        ib.align(b, to=a, matcher=subjects.matching(task, "all-attention", steps=10))
    assert ib.align(b, to=a, matcher=subjects.matching(task, "all-attention", steps=1), verify=False)


def test_matchers_that_do_not_fit_are_refused() -> None:
    task = subjects.rows_task(4, seed=0)
    with pytest.raises(IsobasinError, match=r"scope 'half' is unknown, expected one of first-attention"):
        LearnedMatching(task, scope="half")
    with pytest.raises(IsobasinError, match=r"learning has the scope model, its start all-attention"):
        LearnedMatching(task, scope="model", init=ib.WeightMatching(scope="all-attention"))
    with pytest.raises(IsobasinError, match=r"lr is 0\.0, expected more than 0"):
        LearnedMatching(task, lr=0.0)


def test_resume_files_keep_their_names_of_the_settings() -> None:
    matcher = LearnedMatching(subjects.rows_task(4, seed=0), lr=1e-2, seed=3)
    key = matcher.cache_key()
    assert {name: key[name] for name in ("scope", "start", "seed")} == {
        "scope": "model",
        "start": repr(ib.WeightMatching(scope="model")),
        "seed": 3,
    }
    assert key["lessons"] == {
        "steps": 500,
        "rate": 1e-2,
        "warmup": 0.05,
        "lambdas": (0.4, 0.6),
        "accumulate": 1,
        "clip": 1.0,
        "check_every": 50,
        "check_points": 7,
        "permutations": "fixed",
        "autocast": "None",
        "objective": "auto",
        "turn": 0.04,
    }


FOLDERS = [
    ("gpt2-lm-tied", "text"),
    ("llama-gqa", "text"),
    ("bert-classifier", "labels"),
    ("vit-classifier", "images"),
]


@pytest.mark.hf
@pytest.mark.parametrize(("case", "kind"), FOLDERS)
def test_a_hugging_face_folder(case: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = path_subjects.subject(case, kind, tmp_path)
    a = ib.load(subject.a)
    scrambled = subjects.scrambled(a)
    scrambled.save(tmp_path / "scrambled")
    (path_subjects.write_processor if kind == "images" else path_subjects.write_tokenizer)(tmp_path / "scrambled")
    b = ib.load(tmp_path / "scrambled")
    task = subjects.told(open_task(subject.data, [a, b], batch_size=4, seq_len=None if kind == "images" else 6), a)
    # Weights would find everything here: learning begins from B as it is.
    monkeypatch.setattr(module, "_start", lambda *_: Transform(b.arch.family, dict(b.arch.spaces)))
    found = ib.align(b, to=a, matcher=subjects.matching(task, steps=30, check_every=5))
    assert found.held_out["learned"] < found.held_out["naive"]
    assert found.kept == "learned"
    assert moved_by(found, b) <= 1e-5 * b.arch.sizes.n_layers
    found.transform.apply(b).save(tmp_path / "out")
    inputs = random_inputs(b)
    assert (
        output_difference(outputs(b, inputs), outputs(ib.load(tmp_path / "out"), inputs))
        <= 1e-5 * b.arch.sizes.n_layers
    )
