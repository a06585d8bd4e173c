"""What learned matching leaves between language models: permutations that were missed, or features that differ?

    python bench/left.py FILE --widths 128 256 512 --lengths 625 2500 --json results/whole/left.json

For every width (at the middle length) and every length (at the middle width) two Llamas are trained from independent
seeds, matched by weights, then learned. Also printed, per layer, on test text: the mean correlation of
units that weight matching pairs; that of the best pairs, by assignment on the correlations themselves; and how much of
A's hidden units a linear map of *all* of B's predicts (R² on tokens it was not fitted to), which no permutation bounds.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

import isobasin as ib
from isobasin.alignment.experts import nearest_elements
from isobasin.alignment.gauge import with_reference_gauge
from isobasin.learn.trainer import TrainConfig, learn
from isobasin.symmetries import symmetry
from whole import CPU, Data, enwik8, measured, trained


def hidden(model: ib.Transformer, ids: Tensor) -> list[Tensor]:
    """The activations of every layer's units, tokens × units."""
    seen: list[Tensor] = []
    hooks = [b.mlp.down.register_forward_pre_hook(lambda _, x: seen.append(x[0].flatten(0, 1))) for b in model.blocks]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return seen


def r_squared(x: Tensor, y: Tensor) -> float:
    """R² of the best linear map from x to y, fitted on the first half of the rows and measured on the second."""
    half = len(x) // 2
    x, y = (torch.cat([t, torch.ones_like(t[:, :1])], 1) if t is x else t for t in (x.double(), y.double()))
    gram = x[:half].mT @ x[:half]
    gram += 1e-4 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    rest = y[half:] - x[half:] @ torch.linalg.solve(gram, x[:half].mT @ y[:half])
    return float(1 - rest.square().sum() / (y[half:] - y[half:].mean(0)).square().sum())


def correlations(x: Tensor, y: Tensor) -> Tensor:
    x, y = ((t - t.mean(0)) / (t - t.mean(0)).norm(dim=0).clamp_min(1e-12) for t in (x.double(), y.double()))
    return x.mT @ y


def units(a: ib.Transformer, b: ib.Transformer, moved: ib.Transformer, ids: Tensor) -> dict[str, list[float]]:
    """Per layer: correlation of units paired by weights, of the best pairs, and R² of A's units from B's."""
    found: dict[str, list[float]] = {"matched": [], "best": [], "r_squared": []}
    for x, y, z in zip(*(hidden(m, ids) for m in (a, b, moved))):
        table = correlations(x, y).abs().cpu().numpy()
        rows, columns = linear_sum_assignment(-table)
        found["matched"].append(float(correlations(x, z).diagonal().mean()))
        found["best"].append(float(table[rows, columns].mean()))
        found["r_squared"].append(r_squared(y, x))
    return found


def row(arguments: argparse.Namespace, width: int, length: int, device: torch.device) -> dict[str, Any]:
    arguments.steps, arguments.width, arguments.layers, arguments.length = length, width, 6, 256
    config, data, recipe = enwik8(arguments.data, arguments)
    made = [trained(config, data, recipe, seed, device) for seed in (0, 1)]
    models = [model for model, _ in made]
    a, b = (ib.load(m.state_dict(), config.to_dict()) for m in models)
    start = time.perf_counter()
    start_elements = nearest_elements(a, b, "model", ib.WeightMatching(), CPU)
    matched_s = time.perf_counter() - start
    aligned = with_reference_gauge(a, b, symmetry(b.arch), start_elements, CPU).apply(b)
    start = time.perf_counter()
    train_config = TrainConfig(
        steps=arguments.learn, check_every=arguments.learn // 4,
        autocast=torch.bfloat16 if device.type == "cuda" else None,
    )  # fmt: skip
    learned = learn(
        a, b, start_elements, data.train_task(arguments.learn_batch), data.held_out, config=train_config, device=device
    )
    learned_s = time.perf_counter() - start
    in_gauge = with_reference_gauge(a, b, symmetry(b.arch), learned.elements, CPU)
    moved = replace(in_gauge, elements=dict(learned.elements)).apply(b)
    barriers = {
        name: measured(a, end, data, device, arguments.points)
        for name, end in (("naive", b), ("weights", aligned), ("learned", moved))
    }
    facts = {"training_s": [s for _, s in made], "weights_s": matched_s, "learned_s": learned_s}
    return facts | barriers | {"units": units(models[0], models[1], _module(aligned, config), _ids(data))}


def _module(weights: ib.Weights, config: ib.ModelConfig) -> ib.Transformer:
    model = ib.Transformer(config)
    model.load_state_dict({name: weights[name] for name in weights})
    return model.eval()


def _ids(data: Data) -> Tensor:
    return torch.cat([batch.inputs["input_ids"] for batch in data.held_out])[:64]


def main() -> None:
    parser = argparse.ArgumentParser(description="What learned matching leaves, against width and training.")
    parser.add_argument("data", type=Path)
    parser.add_argument("--preset", default="llama")
    parser.add_argument("--positions", default=None)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--lengths", type=int, nargs="*", default=[625, 2500])
    parser.add_argument("--learn", type=int, default=1000)
    parser.add_argument("--points", type=int, default=13)
    parser.add_argument("--learn-batch", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    middle_width, middle = arguments.widths[len(arguments.widths) // 2], arguments.lengths[len(arguments.lengths) // 2]
    cells = {(w, middle) for w in arguments.widths} | {(middle_width, n) for n in arguments.lengths}
    rows: dict[str, Any] = {}
    facts = {"command": " ".join(["python", *sys.argv]), "torch": torch.__version__, "device": arguments.device}
    for width, length in sorted(cells, key=lambda c: (c[0] * c[1], c)):
        found = rows[f"{width} x {length}"] = row(arguments, width, length, torch.device(arguments.device))
        heights = "  ".join(f"{k} {found[k]['barrier']:.3f}" for k in ("naive", "weights", "learned"))
        shares = "  ".join(f"{k} {' '.join(f'{v:.2f}' for v in vs)}" for k, vs in found["units"].items())
        print(f"width {width} steps {length}: loss {found['naive']['loss'][0]:.3f}  {heights}  | {shares}", flush=True)
        if arguments.json:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
