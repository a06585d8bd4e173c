"""Whole models from independent seeds: the barrier naive, by weights, and learned. One dataset, all pairs of seeds.

    python bench/whole.py cifar10 FOLDER --positions rope --json results/whole/cifar10-rope.json
    python bench/whole.py enwik8 FILE --preset llama --json results/whole/enwik8-llama.json

Trains the seeds one after the other (on CUDA as one graph per step), aligns every pair, measures 25 points on test
data. Learning uses training data; a part of the test data that is not reported selects the element that is kept.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import isobasin as ib
from isobasin.alignment.experts import nearest_elements
from isobasin.alignment.gauge import with_reference_gauge
from isobasin.learn.trainer import TrainConfig, learn
from isobasin.path.evaluation import evaluate_path
from isobasin.study import TrainingRecipe, train
from isobasin.symmetries import symmetry
from isobasin.tasks import Batch, Task

CPU = torch.device("cpu")


def flips_and_crops(x: Tensor, rng: torch.Generator) -> Tensor:
    """Each image mirrored with chance one half and shifted by up to 4 pixels, zeros moving in."""
    n, _, size, _ = x.shape
    flip = (torch.rand(n, generator=rng) < 0.5).to(x.device)
    x = torch.where(flip[:, None, None, None], x.flip(-1), x)
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4), value=-1.0)
    dy, dx = (torch.randint(9, (n,), generator=rng).to(x.device) for _ in range(2))
    span = torch.arange(size, device=x.device)
    rows, columns = dy[:, None] + span, dx[:, None] + span
    each = torch.arange(n, device=x.device)[:, None, None, None]
    channels = torch.arange(x.shape[1], device=x.device)[None, :, None, None]
    return padded[each, channels, rows[:, None, :, None], columns[:, None, None, :]]


def trained(
    config: ib.ModelConfig, data: "Data", recipe: TrainingRecipe, seed: int, device: torch.device
) -> tuple[Any, float]:
    """A trained model on the CPU, and the seconds that it took."""
    start, cuda = time.perf_counter(), device.type == "cuda"
    found = train(
        ib.Transformer(config, seed=seed), data.inputs, data.targets, recipe, seed=seed, augment=data.augment,
        device=device, autocast=torch.bfloat16 if cuda else None, graphed=cuda,
    )  # fmt: skip
    return found.model.eval().requires_grad_(False).cpu(), time.perf_counter() - start


class Data:
    """Training inputs, and tasks: to learn on, to select the element, and to report."""

    def __init__(
        self, inputs: Tensor, targets: Tensor | None, augment: Any, train_task: Task, held_out: Task, test: Task
    ):
        self.inputs, self.targets, self.augment = inputs, targets, augment
        self.train_task, self.held_out, self.test = train_task, held_out, test


def task(kind: str, key: str, x: Tensor, y: Tensor, batch: int) -> Task:
    batches = [Batch({key: x[k : k + batch]}, y[k : k + batch]) for k in range(0, len(x), batch)]
    return Task(kind, kind, "memory", len(x), {}, "", lambda: iter(batches))


def cifar10(folder: Path, arguments: argparse.Namespace) -> tuple[ib.ModelConfig, Data, TrainingRecipe]:
    from isobasin.tasks import read_images, scaled

    sets = {}
    for split in ("train", "test"):
        images = read_images(folder, split=split)
        sets[split] = (scaled(images.pixels), torch.as_tensor(images.labels))
    (x, y), (tx, ty) = sets["train"], sets["test"]
    x, y = x[: arguments.train], y[: arguments.train]
    config = ib.ModelConfig.preset(
        "vit", positions=arguments.positions, n_layers=6, n_heads=4, d_model=192, d_ff=768, image_size=32, patch_size=4
    )
    data = Data(
        x, y, flips_and_crops,
        task("image", "pixel_values", x, y, arguments.learn_batch or 250),
        task("image", "pixel_values", tx[:2000], ty[:2000], 1000),
        task("image", "pixel_values", tx[2000:], ty[2000:], 1000),
    )  # fmt: skip
    return config, data, TrainingRecipe(epochs=arguments.epochs, batch_size=256, peak_lr=1e-3, weight_decay=0.05)


def enwik8(file: Path, arguments: argparse.Namespace) -> tuple[ib.ModelConfig, Data, TrainingRecipe]:
    import numpy as np

    raw = torch.from_numpy(np.fromfile(file, dtype=np.uint8).astype(np.int64))
    length = 256
    config = ib.ModelConfig.preset(
        arguments.preset, n_layers=6, n_heads=8, d_model=256, d_ff=688 if arguments.preset == "llama" else 1024,
        n_positions=length,
    )  # fmt: skip

    def rows(start: int, n: int, batch: int) -> Task:
        part = raw[start : start + n * (length + 1)].view(n, length + 1)
        return task("lm", "input_ids", part[:, :-1].contiguous(), part[:, 1:].contiguous(), batch)

    # The last megabyte is for tests: its first fifth decides, the rest is reported on.
    data = Data(
        raw[:-1_000_000],
        None,
        None,
        rows(10_000_000, 40_000, arguments.learn_batch or 32),
        rows(len(raw) - 1_000_000, 256, 64),
        rows(len(raw) - 800_000, 1024, 64),
    )
    return config, data, TrainingRecipe(steps=arguments.steps, batch_size=64, peak_lr=1e-3, weight_decay=0.1)


def measured(a: Any, b: Any, data: Data, device: torch.device, points: int) -> dict[str, Any]:
    curve = evaluate_path(a, b, data.test, n_points=points, device=device)
    return {
        "loss": [round(v, 5) for v in curve.metrics["loss"]],
        "accuracy": [round(v, 5) for v in curve.metrics["accuracy"]],
        "barrier": curve.barrier.height,
        "accuracy_barrier": curve.barriers["accuracy"].height,
    }


def compare(a: Any, b: Any, data: Data, arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    row: dict[str, Any] = {"naive": measured(a, b, data, device, arguments.points)}
    start = time.perf_counter()
    start_elements = nearest_elements(a, b, "model", ib.WeightMatching(), CPU)
    aligned = with_reference_gauge(a, b, symmetry(b.arch), start_elements, CPU).apply(b)
    row["weights_s"] = time.perf_counter() - start
    row["weights"] = measured(a, aligned, data, device, arguments.points)
    for attempt in arguments.tries:
        start = time.perf_counter()
        settings = dict(pair.split("=") for pair in attempt.split(","))
        train_config = TrainConfig(
            steps=(steps := int(settings.get("steps", 1000))), lr=float(settings.get("lr", 3e-3)),
            check_every=int(settings.get("check", max(1, steps // 5))), accumulate=int(settings.get("accumulate", 1)),
            permutations=settings.get("permutations", "fixed"),
            autocast=torch.bfloat16 if device.type == "cuda" else None,
        )  # fmt: skip
        learned = learn(
            a,
            b,
            start_elements,
            data.train_task,
            data.held_out,
            config=train_config,
            device=device,
            augment=data.augment,
        )
        seconds = time.perf_counter() - start
        in_gauge = with_reference_gauge(a, b, symmetry(b.arch), learned.elements, CPU)
        # The gauge of A, but not the unit scales that are nearest to A's: they were learned.
        moved = replace(in_gauge, elements=dict(learned.elements)).apply(b)
        key = f"learned({attempt})"
        row[key] = measured(a, moved, data, device, arguments.points) | {
            "seconds": seconds, "held_out": list(learned.history),
        }  # fmt: skip
        held_out = " ".join(f"{step}:{height:.3f}" for step, height in learned.history)
        print(f"    {key}: {row[key]['barrier']:.4f} ({seconds:.0f} s) held out {held_out}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole-model barriers between independent seeds.")
    parser.add_argument("dataset", choices=("cifar10", "enwik8"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--positions", default="rope")
    parser.add_argument("--preset", default="llama")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--train", type=int, default=20_000)
    parser.add_argument("--epochs", type=float, default=45)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--tries", nargs="*", default=["steps=1000"], help="learned: steps=…,lr=…,permutations=…")
    parser.add_argument("--learn-batch", type=int, default=None, help="samples in a batch of learning")
    parser.add_argument("--points", type=int, default=25)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device(arguments.device)
    config, data, recipe = {"cifar10": cifar10, "enwik8": enwik8}[arguments.dataset](arguments.data, arguments)
    models, seconds = [], []
    for seed in range(arguments.seeds):
        model, took = trained(config, data, recipe, seed, device)
        models.append(ib.load(model.state_dict(), config.to_dict()))
        seconds.append(took)
        print(f"seed {seed}: trained in {took:.0f} s", flush=True)
    facts = {"command": " ".join(["python", *sys.argv]), "config": config.to_dict(), "training_s": seconds}
    facts |= {"torch": torch.__version__, "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    rows: dict[str, Any] = {}
    for i, j in list(combinations(range(arguments.seeds), 2))[: arguments.pairs]:
        row = compare(models[i], models[j], data, arguments, device)
        rows[f"{i}-{j}"] = row
        line = "  ".join(f"{k} {v['barrier']:.4f}" for k, v in row.items() if isinstance(v, dict))
        ends = row["naive"]
        print(f"{i}-{j}  loss {ends['loss'][0]:.3f} acc {ends['accuracy'][0]:.3f}  {line}  ({row['weights_s']:.0f} s)")
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(facts | {"pairs": rows}, indent=1, default=float) + "\n")


if __name__ == "__main__":
    main()
