"""Whole models from independent seeds: the barrier naive, by weights, and learned. One dataset, all pairs of seeds.

    python bench/whole.py cifar10 FOLDER --positions rope --json results/whole/cifar10-rope.json
    python bench/whole.py enwik8 FILE --preset llama --json results/whole/enwik8-llama.json
    python bench/whole.py enwik8 FILE --preset gpt2 --positions learned --tries steps=1000,batch=64,objective=labels

Trains the seeds one after the other (on CUDA as one graph per step), aligns every pair, measures 25 points on test
data. Learning uses training data; a part of the test data that is not reported selects the element that is kept.
A try is a list of fields of `TrainConfig`, and `batch`, the samples in a batch of learning. `share=1` in place of
`steps` takes as many steps as fit into the seconds that training one model took. FILE may be compressed by xz. With
`--seconds` nothing new begins that is not expected to end in time; what has been measured is written.
"""

import argparse
import json
import lzma
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import isobasin as ib
from isobasin.alignment.experts import nearest_elements
from isobasin.alignment.gauge import with_reference_gauge
from isobasin.learn.trainer import LearnResult, TrainConfig, learn
from isobasin.path.evaluation import evaluate_path
from isobasin.study import TrainingRecipe, train
from isobasin.symmetries import symmetry
from isobasin.tasks import Batch, Task

CPU = torch.device("cpu")
CALIBRATION = (20, 220)  # steps of two runs that tell what a step costs


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
        self,
        inputs: Tensor,
        targets: Tensor | None,
        augment: Any,
        train_task: Callable[[int | None], Task],
        held_out: Task,
        test: Task,
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
        "vit",
        positions=arguments.positions or "rope",
        n_layers=6,
        n_heads=4,
        d_model=192,
        d_ff=768,
        image_size=32,
        patch_size=4,
    )
    data = Data(
        x, y, flips_and_crops,
        lambda batch: task("image", "pixel_values", x, y, batch or 250),
        task("image", "pixel_values", tx[:2000], ty[:2000], 1000),
        task("image", "pixel_values", tx[2000:], ty[2000:], 1000),
    )  # fmt: skip
    return config, data, TrainingRecipe(epochs=arguments.epochs, batch_size=256, peak_lr=1e-3, weight_decay=0.05)


def enwik8(file: Path, arguments: argparse.Namespace) -> tuple[ib.ModelConfig, Data, TrainingRecipe]:
    content = lzma.decompress(file.read_bytes()) if file.suffix == ".xz" else file.read_bytes()
    raw = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    length, width = arguments.length, arguments.width
    config = ib.ModelConfig.preset(
        arguments.preset, n_layers=arguments.layers, n_heads=8, d_model=width, n_positions=length,
        d_ff=16 * round(width / 6) if arguments.preset == "llama" else 4 * width,
        **({"positions": arguments.positions} if arguments.positions else {}),
    )  # fmt: skip
    at, n = min(10_000_000, len(raw) // 4), min(40_000, len(raw) // 4 // (length + 1))
    n_test = min(1024, 750_000 // (length + 1))

    def rows(start: int, n: int, batch: int) -> Task:
        part = raw[start : start + n * (length + 1)].view(n, length + 1)
        return task("lm", "input_ids", part[:, :-1].contiguous(), part[:, 1:].contiguous(), batch)

    # The last megabyte is for tests: its first fifth decides, the rest is reported on.
    data = Data(
        raw[:-1_000_000],
        None,
        None,
        lambda batch: rows(at, n, batch or 64),
        rows(len(raw) - 1_000_000, n_test // 4, 64),
        rows(len(raw) - 800_000, n_test, 64),
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


def settings(attempt: str) -> tuple[dict[str, Any], int | None, float | None]:
    """The fields of `TrainConfig` that a try names, its batch and its share of the time of training:
    `steps=1000,lambdas=0.45:0.55,batch=32`."""
    found: dict[str, Any] = {}
    for name, text in (pair.split("=") for pair in attempt.split(",")):
        values = [_value(word) for word in text.split(":")]
        found[name] = values[0] if len(values) == 1 else tuple(values)
    batch = found.pop("batch", None)
    share = found.pop("share", None)
    if unknown := found.keys() - {field.name for field in fields(TrainConfig)}:
        raise SystemExit(f"--tries: {', '.join(sorted(unknown))} is no field of TrainConfig")
    return found, batch, share


def _value(word: str) -> Any:
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(word, word)


def affordable(seconds: float, one: Callable[[int], Any]) -> int:
    """The number of steps that take this long, from the times of two short runs of `one(steps)`."""
    times = []
    for steps in CALIBRATION:
        began = time.perf_counter()
        one(steps)
        times.append(time.perf_counter() - began)
    few, many = CALIBRATION
    each = max(1e-9, (times[1] - times[0]) / (many - few))
    return max(many, int((seconds - times[0]) / each) + few)


def learned(
    a: Any, b: Any, start: Any, data: Data, attempt: str, steps: dict[str, int], arguments: argparse.Namespace,
    device: torch.device, training_s: float,
) -> dict[str, Any]:  # fmt: skip
    """One try: the barrier on test data, the held-out barriers while learning, and the seconds."""
    chosen, batch, share = settings(attempt)

    def one(n_steps: int) -> LearnResult:
        check = {"check_every": max(1, n_steps // 5)}
        config = TrainConfig(
            **{"autocast": torch.bfloat16 if device.type == "cuda" else None} | check | chosen | {"steps": n_steps}
        )
        return learn(
            a, b, start, data.train_task(batch), data.held_out, scope=arguments.scope, config=config, device=device,
            augment=data.augment,
        )  # fmt: skip

    if attempt not in steps:  # as many for every pair
        steps[attempt] = affordable(share * training_s, one) if share else chosen.get("steps", 1000)
    began = time.perf_counter()
    found = one(steps[attempt])
    seconds = time.perf_counter() - began
    part = symmetry(b.arch).scoped(arguments.scope)
    # The gauge of A, but not the unit scales that are nearest to A's: they were learned.
    moved = replace(with_reference_gauge(a, b, part, found.elements, CPU), elements=dict(found.elements)).apply(b)
    row = measured(a, moved, data, device, arguments.points)
    row |= {"seconds": seconds, "steps": steps[attempt], "held_out": list(found.history)}
    held_out = " ".join(f"{step}:{height:.3f}" for step, height in found.history)
    print(f"    {row['barrier']:.4f} ({seconds:.0f} s) {attempt}  held out {held_out}", flush=True)
    return row


def compare(
    a: Any, b: Any, data: Data, steps: dict[str, int], arguments: argparse.Namespace, device: torch.device,
    training_s: float, until: float,
) -> dict[str, Any]:  # fmt: skip
    row: dict[str, Any] = {"naive": measured(a, b, data, device, arguments.points)}
    began = time.perf_counter()
    start = nearest_elements(a, b, arguments.scope, ib.WeightMatching(scope=arguments.scope), CPU)
    aligned = with_reference_gauge(a, b, symmetry(b.arch).scoped(arguments.scope), start, CPU).apply(b)
    row["weights_s"] = time.perf_counter() - began
    row["weights"] = measured(a, aligned, data, device, arguments.points)
    print(f"  naive {row['naive']['barrier']:.4f}  weights {row['weights']['barrier']:.4f} ({row['weights_s']:.0f} s)")
    longest = 0.0
    for attempt in arguments.tries:
        began = time.perf_counter()
        if began + longest > until:
            print(f"    no time left for {attempt}", flush=True)
            continue
        row[f"learned({attempt})"] = learned(a, b, start, data, attempt, steps, arguments, device, training_s)
        longest = max(longest, time.perf_counter() - began)
    return row


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Barriers by way of matching: every pair, and the mean."""
    names = list(dict.fromkeys(k for row in rows.values() for k, v in row.items() if isinstance(v, dict)))
    lines = []
    for name in names:
        found = [row[name] for row in rows.values() if name in row]
        seconds = [f["seconds"] for f in found if "seconds" in f]
        cost = f"  {found[0]['steps']} steps, {sum(seconds) / len(seconds):.1f} s" if seconds else ""
        heights = [f["barrier"] for f in found]
        each = " ".join(f"{height:.3f}" for height in heights)
        lines.append(f"{sum(heights) / len(heights):7.4f}  ({each}){cost}  {name}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Whole-model barriers between independent seeds.")
    parser.add_argument("dataset", choices=("cifar10", "enwik8"))
    parser.add_argument("data", type=Path)
    parser.add_argument("--positions", default=None, help="by default those of the preset; cifar10: rope")
    parser.add_argument("--preset", default="llama")
    parser.add_argument("--scope", default="model", help="of matching; all layers differ in any case")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256, help="tokens in a window of enwik8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--train", type=int, default=20_000)
    parser.add_argument("--epochs", type=float, default=45)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--tries", nargs="*", default=["steps=1000"], help="learned: steps=…,lr=…,batch=…")
    parser.add_argument("--points", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="do not begin what would end later")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    until = time.perf_counter() + arguments.seconds
    for attempt in arguments.tries:
        settings(attempt)
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
    steps: dict[str, int] = {}
    mean_s = sum(seconds) / len(seconds)
    for i, j in list(combinations(range(arguments.seeds), 2))[: arguments.pairs]:
        if rows and time.perf_counter() > until:
            print(f"no time left for pair {i}-{j}", flush=True)
            continue
        print(f"pair {i}-{j}", flush=True)
        rows[f"{i}-{j}"] = compare(models[i], models[j], data, steps, arguments, device, mean_s, until)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(facts | {"pairs": rows}, indent=1, default=float) + "\n")
    ends = next(iter(rows.values()))["naive"]
    print(f"\n{arguments.preset} {config.positions} {config.n_layers} × {config.d_model}, loss {ends['loss'][0]:.3f}, "
          f"training {mean_s:.1f} s")  # fmt: skip
    print("\n".join(table(rows)))


if __name__ == "__main__":
    main()
