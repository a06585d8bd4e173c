"""How near do two independent models come without data? Barriers of every variant, as shares of the naive one.

    python bench/datafree.py --place FOLDER --kinds llama vit-rope --json results/datafree/table.json

Trains three seeds of each kind on the data that ship with the package (kept under --place, so that a second run only
matches), aligns two or three pairs by each variant of whole-model matching, and measures the test loss along the line.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import isobasin as ib
from isobasin.data import shipped
from isobasin.path import evaluate_path
from isobasin.study import Recipe, shifted, train
from isobasin.tasks import Batch, Task, read_images, scaled
from isobasin.weights import Weights

CPU = torch.device("cpu")
LENGTH = 64  # of a text


@dataclass(frozen=True)
class Kind:
    """A small model, how it is trained, and what it is measured on."""

    config: ib.ModelConfig
    recipe: Recipe
    inputs: Tensor
    targets: Tensor | None
    test: Task
    unlabeled: list[dict[str, Tensor]] = field(repr=False)
    augment: Any = None


def batches(key: str, x: Tensor, y: Tensor, size: int) -> list[Batch]:
    return [Batch({key: x[k : k + size]}, y[k : k + size]) for k in range(0, len(x), size)]


def task(kind: str, held: list[Batch]) -> Task:
    return Task(kind, kind, "memory", sum(map(len, held)), {}, "", lambda: iter(held))


def text(preset: str, **sizes: int) -> Kind:
    """Characters of the shipped Shakespeare: the last tenth is for tests."""
    raw = torch.tensor(list(shipped("shakespeare").read_bytes()))
    _, ids = raw.unique(return_inverse=True)
    cut = len(ids) * 9 // 10
    rows = ids[cut : cut + 96 * (LENGTH + 1)].view(-1, LENGTH + 1)
    config = ib.ModelConfig.preset(
        preset, d_model=96, n_layers=3, n_heads=4, d_vocab=int(ids.max()) + 1, n_positions=LENGTH, **sizes
    )
    pieces = ids[: 128 * LENGTH].view(-1, LENGTH)
    return Kind(
        config,
        Recipe(steps=800, batch_size=16, peak_lr=3e-3, weight_decay=0.1),
        ids[:cut],
        None,
        task("lm", batches("input_ids", rows[:, :-1], rows[:, 1:], 48)),
        [{"input_ids": pieces[k : k + 32]} for k in range(0, len(pieces), 32)],
    )


def digits(positions: str) -> Kind:
    def read(split: str) -> tuple[Tensor, Tensor]:
        images = read_images(shipped("mnist"), split)
        return scaled(np.array(images.pixels)), torch.tensor(images.labels)

    (x, y), (test_x, test_y) = read("train"), read("test")
    sizes = {"image_size": 28, "patch_size": 7, "n_channels": 1, "d_model": 64, "d_ff": 128, "n_layers": 3}
    config = ib.ModelConfig.preset("vit", positions=positions, n_heads=4, rope_theta=100.0, **sizes)
    return Kind(
        config,
        Recipe(steps=1200, batch_size=64, peak_lr=3e-3, weight_decay=0.1),
        x,
        y,
        task("image", batches("pixel_values", test_x[:1000], test_y[:1000], 500)),
        [{"pixel_values": x[k : k + 128]} for k in range(0, 512, 128)],
        shifted(by=1),
    )


KINDS: Mapping[str, Callable[[], Kind]] = {
    "llama": lambda: text("llama", d_ff=256),
    "vit-rope": lambda: digits("rope"),
    "vit-sinusoidal": lambda: digits("sinusoidal"),
    "gpt2": lambda: text("gpt2", d_ff=384),
}


def model(name: str, kind: Kind, seed: int, place: Path) -> Weights:
    """Trained once, then read from its folder."""
    folder = place / f"{name}-{seed}"
    if not (folder / "config.json").exists():
        began = time.perf_counter()
        made = ib.Transformer(kind.config, seed=seed)
        done = train(made, kind.inputs, kind.targets, kind.recipe, seed=seed, augment=kind.augment)
        done.model.save(folder)
        print(f"{name}-{seed}: {done} in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return ib.load(folder)
