"""The numbers of a path against a plain loop that loads each interpolated state dict into a fresh model."""

from pathlib import Path

import pytest
import torch
from path_subjects import Subject, random_ids, settings_of, subject, token_task
from torch import Tensor

import isobasin as ib
from isobasin.path.evaluation import FlatModel, evaluate_path, evaluate_points
from isobasin.tasks import IGNORED, Task, open_task
from isobasin.weights import Weights

pytestmark = pytest.mark.hf

KINDS = [
    ("gpt2-lm-tied", "text"),
    ("llama-gqa", "text"),
    ("bert-classifier", "labels"),
    ("bert-masked-lm-tied", "text"),
    ("vit-classifier", "images"),
]


def plain_loop(folder: Path, a: Weights, b: Weights, task: Task, lam: float) -> tuple[float, float]:
    """Loss and accuracy at one point: a model of transformers, loaded whole from the interpolated tensors."""
    import transformers

    kind = getattr(transformers, settings_of(folder)["architectures"][0])
    states = [kind.from_pretrained(m.path, dtype=torch.float32).state_dict() for m in (a, b)]
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    mixed = {k: (1 - lam) * v + lam * states[1][k] if v.is_floating_point() else v for k, v in states[0].items()}
    model.load_state_dict(mixed)
    losses: list[Tensor] = []
    hits: list[Tensor] = []
    for batch in task:
        with torch.no_grad():
            said = model(**batch.inputs).logits.flatten(0, -2)
        wanted = batch.targets.flatten()
        said, wanted = said[wanted != IGNORED], wanted[wanted != IGNORED]
        losses.append(-torch.log_softmax(said.double(), -1)[torch.arange(len(wanted)), wanted])
        hits.append((said.argmax(-1) == wanted).double())
    return float(torch.cat(losses).mean()), float(torch.cat(hits).mean())


@pytest.mark.parametrize(("case", "kind"), KINDS)
def test_every_family_agrees_with_a_plain_loop(case: str, kind: str, tmp_path: Path) -> None:
    s = subject(case, kind, tmp_path)
    a, b = ib.load(s.a), ib.load(s.b)
    task = open_task(s.data, [a, b], batch_size=5, seq_len=7)
    curve = evaluate_path(a, b, task, n_points=4)
    expected = [plain_loop(s.a, a, b, task, lam) for lam in curve.lambdas]
    assert curve.metrics["loss"] == pytest.approx([e[0] for e in expected], abs=1e-6)
    assert curve.metrics["accuracy"] == pytest.approx([e[1] for e in expected], abs=1e-9)
    assert abs(curve.metrics["loss"][1] - curve.metrics["loss"][0]) > 1e-3  # the path leads somewhere


def own_pair() -> tuple[Weights, Weights]:
    config = ib.ModelConfig.preset("llama", d_model=16, n_layers=2, n_heads=2, d_ff=24, d_vocab=19, n_positions=8)
    models = []
    for seed in (0, 1):
        model = ib.Transformer(config, seed=seed)
        rng = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.data.copy_(torch.randn(p.shape, generator=rng) * 0.5)
        models.append(ib.load(model.state_dict(), config.to_dict()))
    return models[0], models[1]


def test_the_ends_are_exactly_the_end_models() -> None:
    a, b = own_pair()
    task = token_task(random_ids(19, 3, 8))
    curve = evaluate_path(a, b, task, n_points=3)
    for end, model in ((0, a), (-1, b)):
        alone = evaluate_path(model, model, task, n_points=2)
        assert curve.metrics["loss"][end] == alone.metrics["loss"][0]
        assert alone.metrics["loss"][0] == alone.metrics["loss"][1]
    assert curve.metrics["loss"][1] not in (curve.metrics["loss"][0], curve.metrics["loss"][-1])


def test_data_that_do_not_fit_give_the_same_numbers_and_are_read_once() -> None:
    a, b = own_pair()
    task = token_task(random_ids(19, 7, 8))
    reads = []

    def counted() -> object:
        for batch in task.batches():
            reads.append(1)
            yield batch

    from dataclasses import replace

    counting = replace(task, batches=counted)
    whole = evaluate_path(a, b, counting, n_points=5)
    assert len(reads) == 4
    parts = evaluate_path(a, b, counting, n_points=5, memory=1)
    assert len(reads) == 8  # once more, not once for each of five points
    assert parts.metrics["loss"] == pytest.approx(whole.metrics["loss"], rel=1e-12)


def test_bfloat16_models_are_mixed_in_float32(tmp_path: Path) -> None:
    a, b = own_pair()
    narrow = []
    for k, model in enumerate((a, b)):
        model.save(tmp_path / str(k), dtype="bfloat16")
        narrow.append(ib.load(tmp_path / str(k)))
    task = token_task(random_ids(19, 3, 8))
    middle = evaluate_path(*narrow, task, n_points=3).metrics["loss"][1]
    states = [{n: w[n].float() for n in w} for w in narrow]
    mixed = {n: 0.5 * states[0][n] + 0.5 * states[1][n] for n in states[0]}
    exact = ib.load(mixed, dict(a.config))
    rounded = ib.load({n: t.bfloat16() for n, t in mixed.items()}, dict(a.config))
    expected, wrong = (evaluate_path(m, m, task, n_points=2).metrics["loss"][0] for m in (exact, rounded))
    assert middle == pytest.approx(expected, abs=1e-6)
    assert abs(wrong - expected) > 1e-5  # rounding the mixture would show


def test_a_model_without_a_head_has_nothing_to_measure(tmp_path: Path) -> None:
    s: Subject = subject("gpt2-bare", "text", tmp_path)
    bare = ib.load(s.a)
    with pytest.raises(ib.IsobasinError, match="nothing to measure"):
        evaluate_path(bare, ib.load(s.b), token_task(random_ids(20, 2, 5)), n_points=2)


def test_no_data_at_all_is_an_error() -> None:
    a, _ = own_pair()
    with pytest.raises(ib.IsobasinError, match="nothing to measure"):
        evaluate_points(FlatModel.of(a), {"x": lambda: None}, token_task(random_ids(19, 0, 8)))
