"""Laws of paths: one element on both ends changes nothing; a model and its scrambled copy have no barrier."""

from pathlib import Path

import pytest
import torch
from path_subjects import random_ids, token_task, told_task

import isobasin as ib
import tiny
from isobasin.groups import HeadsElement, Monomial
from isobasin.path.evaluation import evaluate_path
from isobasin.symmetries import symmetry
from isobasin.symmetries.normal_form import normalize
from isobasin.symmetries.transform import Transform
from isobasin.weights import Weights

pytestmark = pytest.mark.hf

CASES = ["gpt2-lm-untied", "llama-gqa", "mistral-gqa", "gpt_neox-half-rotary", "llama-tied"]


def pair(name: str, place: Path) -> tuple[Weights, Weights]:
    case = next(c for c in tiny.CASES if c.name == name)
    for seed in (0, 1):
        tiny.save(case, place / str(seed), seed=seed)
    return ib.load(place / "0"), ib.load(place / "1")


def drawn(weights: Weights, kinds: tuple[type, ...], seed: int) -> Transform:
    groups = symmetry(weights.arch).groups
    elements = {name: group.sample(seed=seed + k) for k, (name, group) in enumerate(groups.items())}
    chosen = {name: g for name, g in elements.items() if isinstance(g, kinds)}
    assert chosen
    return Transform(weights.arch.family, dict(weights.arch.spaces), chosen)


@pytest.mark.parametrize("name", CASES)
def test_the_curve_is_unchanged_when_heads_and_units_of_both_ends_move(name: str, tmp_path: Path) -> None:
    a, b = pair(name, tmp_path)
    task = token_task(random_ids(tiny.VOCABULARY, 3, tiny.LENGTH))
    before = evaluate_path(a, b, task, n_points=5).metrics["loss"]
    element = drawn(a, (HeadsElement, Monomial), 7)
    both = evaluate_path(element.apply(a), element.apply(b), task, n_points=5).metrics["loss"]
    one = evaluate_path(element.apply(a), b, task, n_points=5).metrics["loss"]
    assert both == pytest.approx(before, abs=1e-5)
    assert abs(one[2] - before[2]) > 1e-3  # moving one end alone is another path


@pytest.mark.parametrize("name", ["gpt2-lm-untied", "llama-gqa", "mistral-gqa"])
def test_the_curve_is_unchanged_when_the_stream_of_both_folded_ends_turns(name: str, tmp_path: Path) -> None:
    a, b = (normalize(m).apply(m) for m in pair(name, tmp_path))
    task = token_task(random_ids(tiny.VOCABULARY, 3, tiny.LENGTH))
    before = evaluate_path(a, b, task, n_points=5).metrics["loss"]
    turn = symmetry(a.arch).groups["resid"].sample(seed=5)
    element = Transform(a.arch.family, dict(a.arch.spaces), {"resid": turn})
    both = evaluate_path(element.apply(a), element.apply(b), task, n_points=5).metrics["loss"]
    one = evaluate_path(element.apply(a), b, task, n_points=5).metrics["loss"]
    assert both == pytest.approx(before, abs=1e-5)
    assert abs(one[2] - before[2]) > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_no_barrier_to_itself_or_to_a_scrambled_copy_that_was_aligned(name: str, tmp_path: Path) -> None:
    a, _ = pair(name, tmp_path)
    task = told_task(a, random_ids(tiny.VOCABULARY, 3, tiny.LENGTH))
    assert evaluate_path(a, a, task, n_points=5).barrier.height <= 1e-5
    scrambled = ib.scramble(a, scope="all-attention", seed=3).apply(a)
    aligned = ib.align(scrambled, to=a, matcher=ib.WeightMatching(scope="all-attention")).transform.apply(scrambled)
    assert evaluate_path(a, aligned, task, n_points=5).barrier.height <= 1e-5
    assert evaluate_path(a, scrambled, task, n_points=5).barrier.height > 1e-3


def test_the_barrier_falls_between_trained_models_when_they_are_aligned() -> None:
    """Attention re-initialised from two seeds, then trained: the aligned barrier is below the naive one."""
    start = _trained(ib.Transformer(_CONFIG, seed=0), steps=120, seed=0)
    models = [_trained(_redrawn(start, seed), steps=80, seed=seed) for seed in (1, 2)]
    a, b = (ib.load(m.state_dict(), _CONFIG.to_dict()) for m in models)
    task = token_task(_sequences(64, seed=99))
    naive = evaluate_path(a, b, task, n_points=9)
    found = ib.align(b, to=a, matcher=ib.WeightMatching(scope="all-attention"))
    aligned = evaluate_path(a, found.transform.apply(b), task, n_points=9)
    assert naive.metrics["loss"][0] < 1.9  # they have learned something: guessing costs log(12) = 2.48
    assert aligned.barrier.height < 0.9 * naive.barrier.height


_CONFIG = ib.ModelConfig.preset("llama", d_model=32, n_layers=2, n_heads=4, d_ff=64, d_vocab=12, n_positions=12)


def _sequences(n: int, *, seed: int) -> torch.Tensor:
    """x[t+1] = x[t] + x[t−1] mod 12, with some noise: attention must look back."""
    rng = torch.Generator().manual_seed(seed)
    rows = torch.randint(12, (n, 2), generator=rng)
    for _ in range(10):
        after = (rows[:, -1] + rows[:, -2]) % 12
        noise = torch.rand(n, generator=rng) < 0.1
        after = torch.where(noise, torch.randint(12, (n,), generator=rng), after)
        rows = torch.cat([rows, after[:, None]], 1)
    return rows


def _trained(model: ib.Transformer, *, steps: int, seed: int) -> ib.Transformer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = _sequences(64, seed=1000 * seed + step)
        loss = torch.nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def _redrawn(model: ib.Transformer, seed: int) -> ib.Transformer:
    fresh = ib.Transformer(_CONFIG, seed=seed)
    kept = {name: t for name, t in model.state_dict().items() if ".attn." not in name}
    fresh.load_state_dict(fresh.state_dict() | kept)
    return fresh


def test_measuring_leaves_the_models_as_they_were(tmp_path: Path) -> None:
    a, b = pair("llama-gqa", tmp_path)
    before = {name: a[name].clone() for name in a}
    evaluate_path(a, b, token_task(random_ids(tiny.VOCABULARY, 2, tiny.LENGTH)), n_points=3)
    assert all(torch.equal(a[name], before[name]) for name in a)
