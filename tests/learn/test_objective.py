"""Learning from what the two models predict, without labels, and the steps that turn the stream."""

from dataclasses import replace
from pathlib import Path

import learn_subjects as subjects
import pytest
import torch

import isobasin as ib
from isobasin.cli.options import DataOptions, LearnOptions, LearnSetup
from isobasin.errors import IsobasinError
from isobasin.groups import Orthogonal
from isobasin.learn.data import split_held_out
from isobasin.learn.optimizer import ANGLE_PER_PARAMETER, GroupOptimizer, orthogonalized
from isobasin.learn.parameters import GroupParameters
from isobasin.learn.path_loss import HeldOutEvaluator, LinearPath, Objective
from isobasin.learn.trainer import learn
from isobasin.path.evaluation import FlatModel, evaluate_path
from isobasin.runtime import logits, module_of
from isobasin.symmetries import symmetry
from isobasin.tasks import IGNORED, Batch, Task, open_task
from isobasin.weights import Weights

CPU = torch.device("cpu")
IMAGES = ib.ModelConfig.preset(
    "vit", d_model=16, n_layers=1, n_heads=2, d_ff=24, image_size=8, patch_size=4, n_channels=1, n_classes=3
)


def linear_path(a: Weights, b: Weights) -> LinearPath:
    part = symmetry(b.arch)
    return LinearPath.between(a, b, part, {name: g.identity() for name, g in part.groups.items()}, CPU)


def in_float64(path: LinearPath) -> LinearPath:
    a, b = ({name: t.double() for name, t in end.items()} for end in (path.a, path.b))
    return replace(path, module=path.module.double(), a=a, b=b)


def predictions(batch: Batch, *models: Weights) -> list[torch.Tensor]:
    with torch.no_grad():
        return [torch.softmax(logits(m, module_of(m), batch.inputs), -1) for m in models]


def image_pair() -> tuple[Weights, Weights]:
    def sharp(seed: int) -> Weights:
        rng = torch.Generator().manual_seed(seed)
        state = ib.Transformer(IMAGES, seed=seed).state_dict()
        found = {n: t + 0.3 * torch.randn(t.shape, generator=rng) for n, t in state.items() if "positions" not in n}
        return ib.load({**state, **found}, IMAGES.to_dict())

    a = sharp(0)
    return a, subjects.noisy(subjects.scrambled(a))


def unlabelled_images(n: int, seed: int = 0) -> Task:
    pixels = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
    batches = [Batch({"pixel_values": part}, torch.full((len(part),), IGNORED)) for part in pixels.split(8)]
    return Task("image", "pixels", "memory", n, {}, f"pixels {seed}", lambda: iter(batches))


def test_the_loss_compares_with_the_mean_of_the_probabilities_of_both_ends() -> None:
    a, b = subjects.sharp(0), subjects.sharp(1)
    path = linear_path(a, b)
    (batch,) = subjects.rows_task(4, seed=1)
    p, q = predictions(batch, a, b)
    mean = ((p + q) / 2).flatten(0, -2)
    for lam, end in ((0.0, p), (1.0, q)):
        expected = -(mean * end.flatten(0, -2).log()).sum(-1).mean()
        assert float(path.loss(path.b, lam, batch, "ends")) == pytest.approx(float(expected), abs=1e-5)
    torch.testing.assert_close(path.mean_prediction(batch), (p + q) / 2, rtol=1e-4, atol=1e-5)
    other = (p.log() + q.log()).mul(0.5).softmax(-1)
    assert float((other - (p + q) / 2).abs().max()) > 0.01, "a mean of logits is another one"


def test_labels_do_not_count_but_positions_that_are_not_scored_stay_out() -> None:
    path = linear_path(subjects.sharp(0), subjects.sharp(1))
    (batch,) = subjects.rows_task(4, seed=1)
    wrong = replace(batch, targets=(batch.targets + 1) % 11)
    masked = replace(batch, targets=batch.targets.clone())
    masked.targets[:, -3:] = IGNORED
    found = [float(path.loss(path.b, 0.5, one, "ends")) for one in (batch, wrong, masked)]
    assert found[0] == found[1] != found[2]
    short = Batch({"input_ids": batch.inputs["input_ids"][:, :-3]}, batch.targets[:, :-3])  # causal: the same outputs
    assert found[2] == pytest.approx(float(path.loss(path.b, 0.5, short, "ends")), abs=1e-5)
    labels = [float(path.loss(path.b, 0.5, one, "labels")) for one in (batch, wrong)]
    assert labels[0] != labels[1]


@pytest.mark.parametrize("objective", ["ends", "labels"])
def test_the_gradient_is_that_of_finite_differences(objective: Objective) -> None:
    path = in_float64(linear_path(subjects.sharp(0), subjects.sharp(1)))
    (batch,) = subjects.rows_task(4, seed=1)
    moved = {name: t.clone().requires_grad_() for name, t in path.b.items()}
    path.loss(moved, 0.4, batch, objective).backward()
    rng = torch.Generator().manual_seed(0)
    for name in ("embed.tokens.weight", "blocks.1.attn.k.weight", "head.weight"):
        direction = torch.randn(path.b[name].shape, generator=rng, dtype=torch.float64)
        around = ({name: path.b[name] + h * direction} for h in (1e-3, -1e-3))
        up, down = (float(path.loss(path.b | one, 0.4, batch, objective)) for one in around)
        grad = moved[name].grad
        assert grad is not None
        expected = (up - down) / 2e-3
        assert float((grad * direction).sum()) == pytest.approx(expected, rel=5e-3, abs=3e-4)
        assert abs(expected) > 0.01


def test_moving_b_leaves_the_ends_as_they_are() -> None:
    path = linear_path(subjects.sharp(0), subjects.sharp(1))
    (batch,) = subjects.rows_task(4, seed=1)
    moved = path.moved(ib.scramble(path.reference, seed=2).elements)
    heights = {lam: [float(path.loss(end, lam, batch, "ends")) for end in (path.b, moved)] for lam in (0.0, 0.5, 1.0)}
    assert heights[0.0][0] == heights[0.0][1]
    assert heights[1.0][0] == pytest.approx(heights[1.0][1], abs=1e-4)
    assert abs(heights[0.5][0] - heights[0.5][1]) > 1e-2
    rebased = replace(path, b=moved)
    torch.testing.assert_close(rebased.mean_prediction(batch), path.mean_prediction(batch), rtol=1e-3, atol=1e-4)


def test_a_classifier_learns_from_images_without_labels() -> None:
    a, b = image_pair()
    start = {name: g.identity() for name, g in symmetry(b.arch).groups.items()}
    task, held_out = split_held_out(unlabelled_images(80))
    found = learn(a, b, start, task, held_out, config=subjects.config())
    assert found.barrier < 0.9 * found.history[0][1]
    assert found.objective == "ends"
    with pytest.raises(IsobasinError, match="memory: no sample has a label; expected labelled data, or objective ends"):
        learn(a, b, start, task, held_out, config=subjects.config(objective="labels"))


def test_without_labels_the_held_out_loss_is_against_the_ends() -> None:
    a, b = image_pair()
    task, mixture = unlabelled_images(12), FlatModel.of(a)
    first, last = mixture.buffer.clone(), mixture.vector(b)
    evaluator = HeldOutEvaluator(mixture, first, last, task, 3)
    images = torch.cat([batch.inputs["pixel_values"] for batch in task])
    p, q = predictions(Batch({"pixel_values": images}, torch.zeros(12)), a, b)
    expected = float(-((p + q) / 2 * q.log()).sum(-1).mean())
    soft = Batch({"pixel_values": images}, (p + q) / 2)
    assert evaluator.loss(last) == pytest.approx(expected, abs=1e-5)
    assert evaluator.loss(first) == pytest.approx(float(-((p + q) / 2 * p.log()).sum(-1).mean()), abs=1e-5)
    assert evaluator.loss(first) != pytest.approx(expected, abs=1e-3)
    curve = evaluate_path(a, b, Task("image", "soft", "memory", 12, {}, "", lambda: iter([soft])), n_points=3)
    entropy = float(-((p + q) / 2 * ((p + q) / 2).log()).sum(-1).mean())
    assert evaluator.barrier_and_mean(last)[0] == pytest.approx(curve.metrics["loss"][1] - entropy, abs=1e-5)
    assert curve.barrier.height < curve.metrics["loss"][1] - entropy


def test_orthogonalized_matrices_have_singular_values_near_one_and_stay_skew() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(20, 20, generator=rng)
    skew = x - x.mT
    values = torch.linalg.svdvals(orthogonalized(skew))
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.3
    assert float(torch.linalg.svdvals(skew / skew.norm()).max()) < 0.6, "it was far from that"
    assert float((orthogonalized(skew) + orthogonalized(skew).mT).abs().max()) < 1e-4
    assert torch.equal(orthogonalized(torch.zeros(4, 4)), torch.zeros(4, 4))


def test_a_step_turns_every_plane_by_about_the_same_angle_and_begins_anew() -> None:
    part = symmetry(subjects.sharp().arch)
    parameters = GroupParameters(part)
    optimizer = GroupOptimizer(parameters, lr=1e-2, turn=0.04, rate=1.0)
    rng, before = torch.Generator().manual_seed(0), parameters.elements()["resid"]
    for _ in range(3):
        for p in parameters.tensors():
            p.grad = torch.randn(p.shape, generator=rng)
        (turned,) = parameters.rotations()
        turned.grad = turned.grad - turned.grad.mT if turned.grad is not None else None
        optimizer.step()
        assert float(turned.detach().abs().max()) > 0
        parameters.recentre()
        assert float(turned.detach().abs().max()) == 0
        after = parameters.elements()["resid"]
        step = after.matrix() @ before.matrix().mT
        angles = torch.linalg.eigvals(step).angle().abs()
        assert 0.5 * 0.04 < float(angles.min()) <= float(angles.max()) < 1.4 * 0.04
        assert Orthogonal(16).contains(after)
        before = after
    assert float((before.matrix() - torch.eye(16)).norm()) > 0.1
    assert ANGLE_PER_PARAMETER == 4


def test_data_without_labels_are_read_where_they_are_not_needed(tmp_path: Path) -> None:
    config = ib.ModelConfig.preset("bert", d_model=16, n_layers=1, n_heads=2, d_ff=24, n_positions=16, n_classes=2)
    models = [ib.load(ib.Transformer(config, seed=s).state_dict(), config.to_dict()) for s in (0, 1)]
    (tmp_path / "texts.csv").write_text("text\nplain words\nother words\nthird\n")
    task = open_task(tmp_path / "texts.csv", models, labelled=False)
    assert (task.n_samples, {int(t) for batch in task for t in batch.targets}) == (3, {IGNORED})
    with pytest.raises(IsobasinError, match=r"texts\.csv"):
        open_task(tmp_path / "texts.csv", models)
    (tmp_path / "labelled.csv").write_text("text,label\nplain words,0\nother words,1\n")
    read = [open_task(tmp_path / "labelled.csv", models, labelled=labelled) for labelled in (True, False)]
    assert [[int(t) for batch in task for t in batch.targets] for task in read] == [[0, 1], [IGNORED, IGNORED]]
    assert read[0].fingerprint != read[1].fingerprint


def test_pixels_without_labels(tmp_path: Path) -> None:
    import numpy as np

    a, b = image_pair()
    np.save(tmp_path / "pixels.npy", np.zeros((5, 1, 8, 8), dtype=np.float32))
    task = open_task(tmp_path / "pixels.npy", [a, b], labelled=False, batch_size=2)
    assert [len(batch) for batch in task] == [2, 2, 1]
    with pytest.raises(IsobasinError, match="an array has no labels"):
        open_task(tmp_path / "pixels.npy", [a, b])
    np.save(tmp_path / "wrong.npy", np.zeros((5, 3, 8, 8), dtype=np.float32))
    with pytest.raises(IsobasinError, match="this model expects pixels"):
        open_task(tmp_path / "wrong.npy", [a, b], labelled=False)


def test_labels_that_are_not_read_can_not_be_learned(tmp_path: Path) -> None:
    def check(**flags: object) -> None:
        LearnSetup(LearnOptions(**flags), DataOptions(), tmp_path / "data").check()  # type: ignore[arg-type]

    check(unlabelled=True)
    with pytest.raises(IsobasinError, match="--unlabelled: --objective labels needs labels"):
        check(unlabelled=True, objective="labels")
    with pytest.raises(IsobasinError, match="--objective 'both' is not available, expected one of auto, labels, ends"):
        check(objective="both")
