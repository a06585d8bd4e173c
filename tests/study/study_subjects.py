"""Small models of the digits that ship with the package, in folders as `pretrain` and `finetune` leave them."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from isobasin.model import ModelConfig, Transformer
from isobasin.study import TrainingRecipe, train
from isobasin.study.plan import Context
from isobasin.symmetries.transform import scramble
from isobasin.tasks.datasets import open_dataset
from isobasin.weights import load

MEASURED = {"dataset": "digits", "samples": 60, "points": 5}


def context(folder: Path) -> Context:
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    return Context(None, "cpu", scratch)


def config(positions: str, **changes: Any) -> ModelConfig:
    sizes = {"n_layers": 2, "n_heads": 4, "d_model": 16, "d_ff": 16}
    digits = {"image_size": 28, "patch_size": 7, "n_channels": 1, "n_classes": 10}
    return ModelConfig.preset("vit", positions=positions, **(sizes | digits | changes))


def folder_of(positions: str, seed: int = 0, split: str = "test") -> Path:
    """A model that knows by heart what it is measured on: its loss is low, and any wrong turn raises it.

    With the split `train` it has seen some of the training data, and knows a little of all digits.
    """
    return Path(_trained(positions, seed, split).name)


@cache
def _trained(positions: str, seed: int, split: str) -> TemporaryDirectory[str]:
    """The folder is there as long as the tests run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    samples = MEASURED["samples"] if split == "test" else 2000
    (seen,) = open_dataset("digits", None).task(split, samples=samples, batch_size=samples)
    recipe = TrainingRecipe(steps=100, batch_size=60, peak_lr=1e-2)
    made = Transformer(config(positions), seed=seed)
    trained = train(made, seen.inputs["pixel_values"], seen.targets, recipe, seed=seed).model
    torch.set_num_threads(threads)
    folder = TemporaryDirectory(prefix="isobasin-study-")
    trained.save(Path(folder.name) / "model")
    return folder


def reparametrised(folder: Path, out: Path, scope: str, *, seed: int = 1) -> Path:
    """The same function elsewhere on its orbit."""
    model = load(folder / "model")
    scramble(model, scope=scope, seed=seed).apply(model).save(out / "model")
    return out
