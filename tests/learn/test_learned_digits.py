"""Two models of digits from different seeds, on the data that ship: weights below naive, learned below a tenth."""

import os
from functools import cache

import numpy as np
import pytest
import torch

import isobasin as ib
from isobasin.data import shipped
from isobasin.demo import MODEL
from isobasin.learn.matching import LearnedMatching
from isobasin.path.evaluation import evaluate_path
from isobasin.runtime import output_difference, outputs, random_inputs
from isobasin.study import shifted, train
from isobasin.study.trainer import TrainingRecipe
from isobasin.tasks import Batch, Task, open_task, read_images, scaled
from isobasin.weights import Weights

FULL = os.environ.get("ISOBASIN_SLOW", "0") == "1"
SIZES = {"d_model": 32, "d_head": 16, "rotary_dims": 16, "d_ff": 48, "n_layers": 1}  # whatever the demo's are
SMALL = ib.ModelConfig.from_dict(MODEL.to_dict() | SIZES)
CONFIG, TRAINING, STEPS, RATE = (MODEL, 400, 250, 1e-2) if FULL else (SMALL, 100, 30, 2e-2)


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images = read_images(shipped("mnist"), "train")
    return scaled(np.array(images.pixels)), torch.tensor(images.labels)


def training_task(batch: int = 64) -> Task:
    x, y = (t[: None if FULL else 4000] for t in digits())
    batches = [Batch({"pixel_values": p}, q) for p, q in zip(x.split(batch), y.split(batch))]
    return Task("image", "digits", "shipped", len(x), {}, "digits", lambda: iter(batches))


def trained(seed: int) -> Weights:
    x, y = digits()
    recipe = TrainingRecipe(steps=TRAINING, batch_size=64, peak_lr=3e-3, weight_decay=0.1)
    model = train(ib.Transformer(CONFIG, seed=seed), x, y, recipe, seed=seed, augment=shifted(by=1)).model
    return ib.load(model.state_dict(), CONFIG.to_dict())


@pytest.mark.slow
def test_two_seeds_meet() -> None:
    a, b = trained(0), trained(1)
    # Of the test images nothing has been learned.
    task = open_task(shipped("mnist"), [a, b], kind="image", batch_size=250, max_samples=None if FULL else 1000)
    points = 13 if FULL else 7
    weights = ib.align(b, to=a, matcher=ib.WeightMatching(scope="model"))
    every = STEPS // (5 if FULL else 2)
    matcher = LearnedMatching(training_task(), steps=STEPS, lr=RATE, check_every=every, augment=shifted(by=1))
    learned = ib.align(b, to=a, matcher=matcher)
    moved = {"naive": b, "weights": weights.transform.apply(b), "learned": learned.transform.apply(b)}
    barrier = {name: evaluate_path(a, end, task, n_points=points).barrier.height for name, end in moved.items()}
    assert barrier["naive"] > 0.3
    assert barrier["weights"] < 0.5 * barrier["naive"]
    assert barrier["learned"] < 0.1 * barrier["naive"]
    assert learned.held_out["learned"] <= min(learned.held_out["start"], learned.held_out["naive"])
    if FULL:  # in the smoke version weights may leave nothing
        assert barrier["learned"] < barrier["weights"]
    inputs = random_inputs(b)
    for end in ("weights", "learned"):
        assert output_difference(outputs(b, inputs), outputs(moved[end], inputs)) <= 1e-5 * CONFIG.n_layers
    assert output_difference(outputs(b, inputs), outputs(a, inputs)) > 1e-2, "the two are not one function"
