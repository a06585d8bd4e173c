"""Copies and fine-tunes of one model, and unrelated models: distance, score and fingerprint of each, in a table.

    python bench/distance.py MODEL TEXT FOLDER --json results/distance/stories15M.json

Makes the other models in FOLDER (those that are there already are taken as they are): scrambled and cast copies,
fine-tunes of 10 and 200 steps on the bytes of TEXT, every second layer, the same shape from another seed, untrained and
trained for 200 steps. MODEL is a Llama folder.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import isobasin as ib

LENGTH, BATCH = 64, 4


def batches(text: Path, vocabulary: int, steps: int) -> torch.Tensor:
    ids = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8).long() % vocabulary
    rng = torch.Generator().manual_seed(0)
    starts = torch.randint(len(ids) - LENGTH, (steps, BATCH), generator=rng)
    return ids[starts[..., None] + torch.arange(LENGTH)]


def trained(model: Any, text: Path, steps: int, lr: float) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for step, ids in enumerate(batches(text, model.config.vocab_size, steps)):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, steps - 1):
            print(f"step {step}: loss {float(loss.detach()):.3f}", file=sys.stderr)
    return model.eval()


def every_second(model: Any) -> Any:
    """The model without its even layers: what a distillation may start from."""
    model.model.layers = torch.nn.ModuleList(list(model.model.layers)[1::2])
    model.config.num_hidden_layers = len(model.model.layers)
    return model


def makers(source: Path, text: Path) -> dict[str, Callable[[Path], None]]:
    from transformers import AutoConfig, AutoModelForCausalLM

    def load() -> Any:
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)

    def fresh() -> Any:
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source), dtype=torch.float32)

    def scrambled(out: Path, of: Path = source, dtype: str = "float32") -> None:
        weights = ib.load(of)
        ib.scramble(weights, seed=7).apply(weights).save(out, dtype=dtype)

    def half(out: Path) -> None:
        every_second(load()).save_pretrained(out.with_name("half"))
        scrambled(out, out.with_name("half"))

    return {
        "scrambled": scrambled,
        "bfloat16": lambda out: load().to(torch.bfloat16).save_pretrained(out),
        "scrambled, bfloat16": lambda out: scrambled(out, dtype="bfloat16"),
        "10 steps": lambda out: trained(load(), text, 10, 1e-4).save_pretrained(out),
        "200 steps": lambda out: trained(load(), text, 200, 1e-4).save_pretrained(out),
        "200 steps, scrambled": lambda out: scrambled(out, out.with_name("200-steps")),
        "every second layer, scrambled": half,
        "another seed, untrained": lambda out: fresh().save_pretrained(out),
        "another seed, 200 steps": lambda out: trained(fresh(), text, 200, 1e-3).save_pretrained(out),
    }


def measured(source: Path, other: Path, null_samples: int) -> dict[str, Any]:
    a, b = ib.load(source), ib.load(other)
    start = time.perf_counter()
    found = ib.distance(a, b, null_samples=null_samples)
    seconds = time.perf_counter() - start
    mine, theirs = ib.fingerprint(a), ib.fingerprint(b)
    steps = mine.steps(theirs)
    facts = {"same_fingerprint": mine.matches(theirs), "largest_step": max(steps) if steps else None}
    return {**found.to_dict(), "seconds": round(seconds, 1), "fingerprint": str(theirs), **facts}


def row(name: str, f: dict[str, Any]) -> str:
    naive = "–" if f["naive"] is None else f"{f['naive']:.4f}"
    step = "other shape" if f["largest_step"] is None else str(f["largest_step"])
    return (
        f"| {name} | {naive} | {f['distance']:.4g} | {f['score']:.5f} | {f['null']['quantiles']['0.95']:.5f} | "
        f"{f['null']['largest']:.5f} | {step} | {f['seconds']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--null-samples", type=int, default=8)
    parser.add_argument("--only-make", action="store_true", help="make the models and stop")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name, make in makers(arguments.model, arguments.text).items():
        folder = arguments.folder / name.replace(",", "").replace(" ", "-")
        if not folder.exists():
            make(folder)
        if not arguments.only_make:
            results[name] = measured(arguments.model, folder, arguments.null_samples)
            print(row(name, results[name]), flush=True)
    if arguments.json and results:
        command = f"python bench/distance.py MODEL TEXT FOLDER --null-samples {arguments.null_samples}"
        document = {"version": ib.__version__, "torch": torch.__version__, "command": command, "results": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
