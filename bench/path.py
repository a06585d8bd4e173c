"""25 points of a path compared with 25 plain evaluations of one model by transformers, on the same batches.

    python bench/path.py [--quick] [--device cuda] [--json FILE]

The plain evaluation is the usual one: the model of transformers as it loads by default, a loop over batches,
cross-entropy of the logits. Ours loads both models, mixes 25 times in place, and is timed whole. Both run in turn,
several times, in one process; the ratio is that of the medians.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

import isobasin as ib
from isobasin.path.evaluation import evaluate_path
from isobasin.tasks import Batch, Task

POINTS = 25
MODELS = {
    "llama": transformers.LlamaConfig(
        hidden_size=288, intermediate_size=768, num_hidden_layers=6, num_attention_heads=6, vocab_size=4096
    ),
    "gpt2": transformers.GPT2Config(n_embd=256, n_layer=6, n_head=8, vocab_size=4096, n_positions=256),
}


def data(vocabulary: int, rows: int, length: int, batch: int, device: str) -> list[Batch]:
    ids = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0)).to(device)
    targets = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
    return [Batch({"input_ids": ids[k : k + batch]}, targets[k : k + batch]) for k in range(0, rows, batch)]


@torch.inference_mode()
def plain(model: torch.nn.Module, batches: list[Batch]) -> float:
    total, count = 0.0, 0
    for batch in batches:
        logits = model(**batch.inputs).logits
        targets = batch.targets.flatten()
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum"))
        count += int((targets != -100).sum())
    return total / count


def compare(name: str, *, rows: int, length: int, device: str, repeats: int) -> dict[str, object]:
    config = MODELS[name]
    batches = data(config.vocab_size, rows, length, 8, device)
    task = Task("lm", "random", "memory", rows, {}, "random", lambda: _each(batches))
    with tempfile.TemporaryDirectory() as place:
        for seed in (0, 1):
            torch.manual_seed(seed)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(Path(place, str(seed)))
        model = transformers.AutoModelForCausalLM.from_pretrained(Path(place, "0")).eval().to(device)
        a, b = (ib.load(Path(place, str(seed))) for seed in (0, 1))
        where = torch.device(device)
        first = evaluate_path(a, b, task, n_points=2, device=where).metrics["loss"][0]
        difference = abs(first - plain(model, batches))
        ours, theirs = [], []
        for _ in range(repeats):
            start = time.perf_counter()
            for _ in range(POINTS):
                plain(model, batches)
            middle = time.perf_counter()
            evaluate_path(a, b, task, n_points=POINTS, device=where)
            theirs.append(middle - start)
            ours.append(time.perf_counter() - middle)
    found = {"path_s": statistics.median(ours), "plain_s": statistics.median(theirs), "loss_difference": difference}
    return found | {"ratio": found["path_s"] / found["plain_s"]}


def _each(batches: list[Batch]) -> Iterator[Batch]:
    return iter(batches)


def main() -> None:
    parser = argparse.ArgumentParser(description="A path of 25 points compared with 25 plain evaluations.")
    parser.add_argument("--quick", action="store_true", help="little data, to see that it runs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, default=None, help="also write the numbers here")
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    size = {"rows": 8, "length": 32} if arguments.quick else {"rows": 64, "length": 256}
    repeats = 1 if arguments.quick else 3
    print(f"{'model':8s} {'25 points':>12s} {'25 × plain':>12s} {'ratio':>8s}")
    results = {}
    for name in MODELS:
        row = compare(name, **size, device=arguments.device, repeats=repeats)
        results[name] = row
        print(f"{name:8s} {row['path_s']:10.2f} s {row['plain_s']:10.2f} s {row['ratio']:8.3f}", flush=True)
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"points": POINTS, "device": arguments.device, **results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
