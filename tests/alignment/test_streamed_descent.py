"""Models too large to hold: float32, a block in memory at a time, embeddings a few rows at a time, few sweeps."""

import os
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

import tiny
from isobasin import weights
from isobasin.alignment import problem as problems
from isobasin.alignment.align import align
from isobasin.alignment.descent import descend, from_embeddings, sweep
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.problem import AlignmentProblem
from isobasin.checkpoint import Checkpoint
from isobasin.symmetries import normal_form, symmetry
from isobasin.symmetries.transform import scramble
from isobasin.weights import Weights, load

pytestmark = pytest.mark.hf

FULL = os.environ.get("ISOBASIN_SLOW") == "1"
CPU = torch.device("cpu")
MATCHER = WeightMatching(scope="model")


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every model were large."""
    monkeypatch.setattr(problems, "WIDE", 0)
    for module in (normal_form, weights):
        monkeypatch.setattr(module, "room", lambda *_: 0)
    monkeypatch.setattr(normal_form, "ROWS", 100)


def saved(name: str, place: Path, seed: int = 0) -> Weights:
    tiny.save(tiny.case(name), place / f"{name}{seed}", seed=seed)
    return load(place / f"{name}{seed}")


def whole(a: Weights, b: Weights) -> AlignmentProblem:
    return AlignmentProblem(a, b, symmetry(b.arch), MATCHER, CPU)


@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("name", ["gpt2-lm-untied", *(["llama-gqa", "bert-masked-lm-tied"] if FULL else [])])
def test_a_scrambled_model_comes_back(name: str, tmp_path: Path) -> None:
    model = saved(name, tmp_path)
    copy = scramble(model, scope="model", seed=3).apply(model)
    found = align(copy, to=model, matcher=MATCHER)
    assert found.distance_after <= 1e-4 < 0.5 < found.distance_before
    assert found.max_output_change is not None
    assert found.max_output_change <= 1e-5
    assert len(found.history) <= 4  # the first start is the right one, and nothing is swept twice


@pytest.mark.skipif(not FULL, reason="a comparison of two whole descents; ISOBASIN_SLOW=1 runs it")
def test_few_sweeps_come_about_as_close_as_many(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    a, b = (saved("llama-gqa", tmp_path, seed) for seed in (0, 1))
    many = align(b, to=a, matcher=MATCHER)
    request.getfixturevalue("streamed")
    few = align(b, to=a, matcher=MATCHER)
    assert few.distance_after <= 1.05 * many.distance_after
    assert few.distance_after < few.distance_before
    assert all(later <= earlier for earlier, later in zip(few.history, few.history[1:]))


def test_a_sweep_by_pieces_is_the_sweep(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    a, b = (saved("gpt2-lm-untied", tmp_path, seed) for seed in (0, 1))
    held_square, held_elements, _ = sweep(whole(a, b), from_embeddings(whole(a, b))[0])
    request.getfixturevalue("streamed")
    pieces = replace(whole(a, b), exact=True)  # rounding apart, the pieces add up to the whole
    assert pieces.dtype == torch.float64
    assert len(list(pieces.form_a.pieces("resid"))) > len(pieces.form_a.block("resid"))
    square, found, _ = sweep(pieces, from_embeddings(pieces)[0])
    assert square == pytest.approx(held_square)
    for name, element in held_elements.items():
        for key, tensor in element.tensors().items():
            assert torch.allclose(found[name].tensors()[key].double(), tensor.double(), atol=1e-6), name


@pytest.mark.usefixtures("streamed")
def test_a_sweep_reads_each_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = (saved("llama-gqa", tmp_path, seed) for seed in (0, 1))
    problem = whole(a, b)
    assert problem.dtype == torch.float32
    start = problem.identity
    read: Counter[str] = Counter()
    real = Checkpoint.flat

    def counted(self: Checkpoint, name: str, first: int, last: int) -> torch.Tensor:
        read[name] += last - first
        return real(self, name, first, last)

    monkeypatch.setattr(Checkpoint, "flat", counted)
    sweep(problem, start)
    first = next(iter(a))  # the type checks of these tests look at the first tensor of every mapping
    sizes = {n: torch.Size(s).numel() for n, s in a.arch.shapes.items() if len(s) > 1 and n != first}
    assert {n: read[n] for n in sizes} == {n: 2 * size for n, size in sizes.items()}  # two models under each name
    sweep(problem, start)
    assert {n: read[n] for n in sizes} == {n: 4 * size for n, size in sizes.items()}


@pytest.mark.parametrize("held", [False, True])
def test_elements_keep_copies_only_where_memory_allows(
    held: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not held:
        request.getfixturevalue("streamed")
    a, b = (saved("llama-gqa", tmp_path, seed) for seed in (0, 1))
    problem = whole(a, b)
    start = from_embeddings(problem)[0]
    _, first, _ = sweep(problem, start)
    _, second, _ = sweep(problem, first)
    elements = [*start.values(), *first.values(), *second.values()]
    kept = {id(g): set(vars(g)) - {part.name for part in fields(g)} for g in elements}  # type: ignore[arg-type]
    assert any(kept.values()) == held, kept


def test_a_descent_goes_on_where_it_stopped(tmp_path: Path) -> None:
    a, b = (saved("llama-gqa", tmp_path, seed) for seed in (0, 1))
    problem = whole(a, b)
    start, _ = from_embeddings(problem)
    at_once = descend(problem, start, most=5)
    first = descend(problem, start, most=2)
    assert first.proposed is not None
    again = descend(problem, first, most=3)
    assert again.history == at_once.history[: len(again.history)]
    assert len(again.history) == len(at_once.history) > len(first.history)


@pytest.mark.usefixtures("streamed")
def test_sums_over_the_stream_keep_its_weak_directions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained models have them. Rotated, they lie on every axis beside strong ones, whose rounding would hide them."""
    model = uneven(saved("llama-gqa", tmp_path))
    copy = scramble(model, scope="model", seed=3).apply(model)
    found = align(copy, to=model, matcher=MATCHER).distance_after
    assert found <= 5e-8
    monkeypatch.setattr(problems, "_product", lambda x, y, double: x @ y.mT)
    assert align(copy, to=model, matcher=MATCHER).distance_after > 3 * found


def uneven(model: Weights) -> Weights:
    """The same with a stream of which half the directions are a hundredth of the others."""
    d = model.arch.sizes.d_model
    rotation = torch.linalg.qr(torch.randn(d, d, generator=torch.Generator().manual_seed(1)))[0]
    weaken = rotation * torch.where(torch.arange(d) < d // 2, 1.0, 0.01) @ rotation.mT
    tensors = {}
    for name, tensor in model.items():
        words = model.arch.tensors[name].roles[0].axes
        on_stream = [
            k for k, axis in enumerate(words) if axis.terms and model.arch.space_of(axis.terms[0]).name == "resid"
        ]
        for axis in on_stream if tensor.dim() > 1 else []:
            tensor = (tensor.movedim(axis, -1) @ weaken).movedim(-1, axis).contiguous()
        tensors[name] = tensor
    return load(tensors, dict(model.config))
