"""Training the seeds of a cell one after the other: seconds for one step of all of them, by kind of step.

    python bench/seeds.py                       # a small model, on the device there is
    python bench/seeds.py --layers 6 --width 192 --batch 256 --device cuda --json results/seeds.json

The images are random: only the time is measured. On CUDA in bfloat16, with eager steps, with the step recorded as one
graph, and compiled before it is recorded.
"""

import argparse
import json
import time
from pathlib import Path

import torch

from isobasin.model import ModelConfig, Transformer
from isobasin.study.trainer import TrainingRecipe, can_compile, train


def timed(arguments: argparse.Namespace, step: str) -> float:
    """Seconds for one step of every seed: a long run less a short one, so that set-up does not count."""
    config = ModelConfig.preset(
        "vit", positions="rope", n_layers=arguments.layers, n_heads=4, d_model=arguments.width,
        d_ff=4 * arguments.width, image_size=arguments.side, patch_size=4,
    )  # fmt: skip
    device = torch.device(arguments.device)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (1024, 3, arguments.side, arguments.side), generator=generator, dtype=torch.uint8)
    classes = torch.randint(10, (1024,), generator=generator)
    seeds = list(range(arguments.seeds))
    options = {"device": device, "graphed": step != "eager"}
    autocast = torch.bfloat16 if device.type == "cuda" else None

    def run(steps: int) -> float:
        models = [Transformer(config, seed=seed) for seed in seeds]
        recipe = TrainingRecipe(steps=steps, batch_size=arguments.batch)
        began = time.perf_counter()
        for model, seed in zip(models, seeds):
            train(model, images, classes, recipe, seed=seed, autocast=autocast, compiled=step == "compiled", **options)
        return time.perf_counter() - began

    run(2)
    short, long = (min(run(steps) for _ in range(arguments.repeats)) for steps in (2, 2 + arguments.steps))
    return (long - short) / arguments.steps


def main() -> None:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description="Seconds for one step of several seeds.")
    parser.add_argument("--layers", type=int, default=6 if cuda else 2)
    parser.add_argument("--width", type=int, default=192 if cuda else 32)
    parser.add_argument("--side", type=int, default=32 if cuda else 16)
    parser.add_argument("--batch", type=int, default=256 if cuda else 16)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50 if cuda else 10)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if cuda else "cpu")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    steps = ["eager", "graph", *(["compiled"] if can_compile() else [])]
    rows = {}
    for step in steps if arguments.device.startswith("cuda") else steps[:1]:
        rows[step] = timed(arguments, step)
        gain = rows["eager"] / rows[step]
        print(f"{step:10} {1000 * rows[step]:8.2f} ms a step of {arguments.seeds} seeds   × {gain:.2f}", flush=True)
    if arguments.json:
        settings = {key: value for key, value in vars(arguments).items() if key != "json"}
        name = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "cpu"
        facts = {"settings": settings, "torch": torch.__version__, "device": name, "seconds": rows}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
