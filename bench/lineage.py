"""Lineage of synthetic Llama-shaped models, with times; and of real encoders and language models with derived ones.

    python bench/lineage.py speed FOLDER --json results/lineage/speed.json
    python bench/lineage.py real FOLDER --model path/to/all-MiniLM-L6-v2 --model path/to/stories15M \
        --json results/lineage/real.json

Makes the models in FOLDER (those that are there already are taken as they are), runs `isobasin.lineage`, and compares
every edge with the history: an edge that is not true ends the run with exit code 1.
"""

import argparse
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import isobasin as ib
from synthetic import write_llama

LLAMA = {"d": 288, "layers": 6, "heads": 6, "kv": 6, "ff": 768, "vocab": 16000}  # 15.2 million weights
Truth = dict[str, tuple[str, dict[str, float]]]  # the relation of a model to its parents, with their weights


def read(folder: Path) -> Any:
    from transformers import AutoModel, AutoModelForCausalLM

    architecture = json.loads((folder / "config.json").read_text())["architectures"][0]
    kind = AutoModelForCausalLM if architecture.endswith("ForCausalLM") else AutoModel
    return kind.from_pretrained(folder, dtype=torch.float32)


def scrambled(of: Path, seed: int) -> Callable[[Path], object]:
    def make(out: Path) -> None:
        weights = ib.load(of)
        ib.scramble(weights, seed=seed).apply(weights).save(out, dtype="float32")

    return make


def averaged(weights: Mapping[Path, float]) -> Callable[[Path], object]:
    def make(out: Path) -> None:
        models = [read(path) for path in weights]
        states = [model.state_dict() for model in models]
        total = {n: sum(w * s[n].clone() for w, s in zip(weights.values(), states)) for n in states[0]}
        models[0].load_state_dict(total)
        models[0].save_pretrained(out)

    return make


def pruned(of: Path, share: float) -> Callable[[Path], object]:
    def make(out: Path) -> None:
        model = read(of)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.ndim == 2 and ".layer" in name:
                    p.mul_(p.abs() > p.abs().flatten().kthvalue(int(share * p.numel())).values)
        model.save_pretrained(out)

    return make


def shortened(of: Path, layers: list[int]) -> Callable[[Path], object]:
    def make(out: Path) -> None:
        model = read(of)
        owner = model.encoder if hasattr(model, "encoder") else model.model
        key = "layer" if hasattr(owner, "layer") else "layers"
        setattr(owner, key, torch.nn.ModuleList([getattr(owner, key)[i] for i in layers]))
        model.config.num_hidden_layers = len(layers)
        model.save_pretrained(out)

    return make


def tuned(of: Path, steps: int, seed: int) -> Callable[[Path], object]:
    """AdamW on random tokens: a language model on their likelihood, an encoder on agreement of the two halves."""

    def make(out: Path) -> None:
        torch.manual_seed(seed)
        model = read(of).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(steps):
            ids = torch.randint(1000, min(8000, model.config.vocab_size), (4, 32))
            if hasattr(model, "lm_head"):
                loss = model(input_ids=ids, labels=ids).loss
            else:
                means = model(input_ids=ids).last_hidden_state.mean(1)
                loss = (means @ means.mT).square().mean() + (means.norm(dim=1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval().save_pretrained(out)

    return make


def cast(of: Path) -> Callable[[Path], object]:
    return lambda out: read(of).to(torch.bfloat16).save_pretrained(out)


def synthetic_set(folder: Path) -> tuple[dict[str, Callable[[Path], object]], Truth]:
    """Twelve models: noise of 10 % of the weights stands for fine-tuning."""

    def llama(**seeds: int) -> Callable[[Path], object]:
        return lambda out: write_llama(out, **LLAMA, **seeds)

    at = {name: folder / name for name in ("base", "tuned1", "tuned2", "tuned2-copy")}
    makers: dict[str, Callable[[Path], object]] = {
        "base": llama(seed=1),
        "tuned1": llama(seed=2, noise_of=1),
        "tuned2": llama(seed=3, noise_of=1),
        "copy": scrambled(at["base"], 1),
        "tuned2-copy": scrambled(at["tuned2"], 2),
        "soup": averaged({at["tuned1"]: 0.3, at["tuned2"]: 0.7}),
        "soup3": averaged({at["tuned1"]: 0.2, at["tuned2"]: 0.3, at["base"]: 0.5}),
        "merged-copies": lambda out: ib.merge([at["tuned1"], at["tuned2-copy"]], weights=[0.4, 0.6]).save(out),
        "pruned": pruned(at["tuned1"], 0.3),
        "short": shortened(at["base"], [0, 2, 4]),
        "other1": llama(seed=4),
        "other2": llama(seed=5),
    }
    truth: Truth = {
        "copy": ("copy", {"base": 1.0}),
        "tuned2-copy": ("copy", {"tuned2": 1.0}),
        "soup": ("merge", {"tuned1": 0.3, "tuned2": 0.7}),
        "soup3": ("merge", {"tuned1": 0.2, "tuned2": 0.3, "base": 0.5}),
        "merged-copies": ("merge", {"tuned1": 0.4, "tuned2": 0.6}),
        "pruned": ("pruned", {"tuned1": 1.0}),
        "short": ("layers", {"base": 1.0}),
        "tuned1": ("relative", {"base": 1.0}),
        "tuned2": ("relative", {"base": 1.0}),
    }
    return makers, truth


def real_set(folder: Path, source: Path, name: str) -> tuple[dict[str, Callable[[Path], object]], Truth]:
    """A real model, and models derived from it."""
    at = {key: folder / f"{name}-{key}" for key in ("base", "tuned1", "tuned2")}
    makers: dict[str, Callable[[Path], object]] = {
        "base": lambda out: read(source).save_pretrained(out),
        "copy": scrambled(at["base"], 1),
        "cast": cast(at["base"]),
        "tuned1": tuned(at["base"], 5, 1),
        "tuned2": tuned(at["base"], 20, 2),
        "tuned2-copy": scrambled(at["tuned2"], 2),
        "soup": averaged({at["tuned1"]: 0.4, at["tuned2"]: 0.6}),
        "pruned": pruned(at["base"], 0.3),
        "short": shortened(at["tuned2"], [0, 2, 5]),
    }
    truth: Truth = {
        "copy": ("copy", {"base": 1.0}),
        "cast": ("cast", {"base": 1.0}),
        "tuned1": ("relative", {"base": 1.0}),
        "tuned2": ("relative", {"base": 1.0}),
        "tuned2-copy": ("copy", {"tuned2": 1.0}),
        "soup": ("merge", {"tuned1": 0.4, "tuned2": 0.6}),
        "pruned": ("pruned", {"base": 1.0}),
        "short": ("layers", {"tuned2": 1.0}),
    }
    named = {f"{name}-{key}": make for key, make in makers.items()}
    return named, {f"{name}-{k}": (r, {f"{name}-{p}": w for p, w in ps.items()}) for k, (r, ps) in truth.items()}


def wrong_edges(found: Any, truth: Truth) -> list[str]:
    """Edges that are not true: relatives must have a common origin, all others the parents of the history."""
    original = {child: next(iter(ps)) for child, (kind, ps) in truth.items() if kind in ("copy", "cast")}

    def origin(name: str) -> str:
        while name in truth:
            name = next(iter(truth[name][1]))
        return name

    wrong = []
    for edge in found.edges:
        child, parents = original.get(edge.child, edge.child), [original.get(p, p) for p in edge.parents]
        if edge.kind in ("copy", "cast"):
            rounded = truth.get(edge.child, ("", {})) == ("cast", {edge.parents[0]: 1.0})
            true = child == parents[0] and (rounded or not edge.directed)
        elif not edge.directed and edge.weights is None:
            true = origin(child) == origin(parents[0])
        else:
            kind, weights = truth.get(child, ("", {}))
            given = dict(zip(parents, edge.weights or [1.0]))
            true = kind == edge.kind and set(given) == set(weights)
            true = true and all(abs(given[p] - w) < 0.01 for p, w in weights.items())
        wrong += [] if true else [str(edge)]
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "real"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", type=Path, action="append", default=[])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--page", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    makers, truth = (synthetic_set(arguments.folder)) if arguments.what == "speed" else ({}, {})
    for model in arguments.model:
        more, known = real_set(arguments.folder, model, model.name)
        makers, truth = makers | more, truth | known
    for name, make in makers.items():
        if not (arguments.folder / name).exists():
            make(arguments.folder / name)
    paths = [arguments.folder / name for name in makers]
    start = time.perf_counter()
    found = ib.lineage(paths, workers=arguments.workers)
    seconds = time.perf_counter() - start
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    wrong = wrong_edges(found, truth)
    seen = {edge.child for edge in found.edges}
    missing = sorted(set(truth) - seen - {p for edge in found.edges for p in edge.parents})
    facts = {
        "models": [{"name": m.name, "parameters": m.n_params, "layers": m.n_layers} for m in found.models],
        "seconds": round(seconds, 1),
        "processor_seconds": round(sum(u.ru_utime + u.ru_stime for u in used), 1),
        "load_average": os.getloadavg()[0],
        "workers": arguments.workers,
        "edges": [edge.to_dict() for edge in found.edges],
        "wrong": wrong,
        "without_edge": missing,
    }
    for edge in found.edges:
        print(f"{edge}  {edge.distance:.2g}")
    print(f"{len(paths)} models, {seconds:.0f} s, {len(wrong)} wrong edges: {wrong}; without an edge: {missing}")
    if arguments.page:
        ib.write_lineage_page(found, arguments.page, force=True)
    if arguments.json:
        command = f"python bench/lineage.py {arguments.what} FOLDER --workers {arguments.workers}"
        document = {"version": ib.__version__, "torch": torch.__version__, "command": command, **facts}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
