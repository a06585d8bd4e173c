"""Documents as `isobasin path` writes them, made up: the shapes are right, the numbers are a bump and a plane."""

import math
from typing import Any

Document = dict[str, Any]


def bump(lam: float, start: float, end: float, height: float) -> float:
    return (1 - lam) * start + lam * end + height * math.sin(math.pi * lam) ** 2


def curves(lambdas: list[float], ends: tuple[float, float], height: float, kind: str) -> Document:
    loss = [bump(lam, *ends, height) for lam in lambdas]
    accuracy = [max(0.1, 1.0 - 0.28 * value) for value in loss]
    found: Document = {"loss": loss, "accuracy": accuracy}
    if kind == "lm":
        found |= {"perplexity": [math.exp(value) for value in loss], "bits_per_byte": [1.31 * v for v in loss]}
    return found


def barriers(lambdas: list[float], values: list[float], worse: float) -> tuple[float, float]:
    rises = [worse * (v - ((1 - x) * values[0] + x * values[-1])) for x, v in zip(lambdas, values)]
    top = max(range(len(rises)), key=rises.__getitem__)
    return max(0.0, rises[top]), lambdas[top]


def layers(n: int) -> list[Document]:
    found = []
    for layer in range(n):
        for space, gain in (("heads", 0.78 - 0.07 * layer), ("ff", 0.35 + 0.05 * layer)):
            found.append(
                {
                    "layer": layer,
                    "space": space,
                    "distance_before": 1.31 + 0.02 * layer,
                    "distance_after": (1.31 + 0.02 * layer) * (1 - gain),
                    "converged": True,
                    "rank_deficient_kv_heads": [],
                    "max_output_change": 2.4e-7 * 1.6**layer,
                }
            )
    resid = {"layer": None, "space": "resid", "distance_before": 1.4, "distance_after": 0.86, "max_output_change": None}
    return [*found, resid]


def explanation(n: int, barrier: float) -> Document:
    parts = [("attention", 0.33), ("feed-forward", 0.41), ("attention and feed-forward", 0.7)]
    parts += [(f"layer {i}", 0.3 / (1 + i) - 0.02 * i) for i in range(n)]
    components = [{"name": name, "barrier": barrier * (1 - share), "share": share} for name, share in parts]
    return {"barrier": barrier, "lambdas": [0, 0.5, 1], "components": components}


def plane(n: int = 21) -> Document:
    grid_x = [-0.3 + 1.6 * i / (n - 1) for i in range(n)]
    grid_y = [-0.4 + 1.4 * i / (n - 1) for i in range(n)]
    points = {"A": [0.0, 0.0], "B": [1.0, 0.0], "B aligned": [0.45, 0.55]}

    def loss(x: float, y: float) -> float:
        valley = (y - 1.2 * x) ** 2 * 3 + 0.25 * (x * x + y * y - 0.5 * (x + y)) ** 2
        around_b = (x - 1) ** 2 * 7 + y * y * 7
        return 0.2 + valley * around_b / (valley + around_b + 1e-9) * 1.6

    return {"x": grid_x, "y": grid_y, "loss": [[loss(x, y) for x in grid_x] for y in grid_y], "points": points}


def model(name: str, seed: int) -> Document:
    return {
        "name": name,
        "path": f"runs/{name}",
        "sha256": f"{seed:x}" * 64,
        "family": "llama",
        "group": "O(64) × 4·[S4 ≀ (H16 × GL16)] × 4·S128",
        "n_params": 812_736,
        "dtype": "float32",
    }


def document(
    pairs: int = 1,
    n_points: int = 25,
    *,
    naive: float = 1.204,
    aligned: float | None = 0.031,
    kind: str = "image",
    names: tuple[str, str, str] = ("seed0", "seed1", "seed2"),
) -> Document:
    """A whole path.json; without `aligned`, what a run without --align writes."""
    lambdas = [i / (n_points - 1) for i in range(n_points)]
    letters = "ABC"[: 3 if pairs == 3 else 2]
    keys = ["A-B", "A-C", "B-C"][:pairs]
    heights = {"naive": naive} | ({} if aligned is None else {"aligned": aligned})
    found: Document = {"kind": "isobasin.path", "schema": 1, "lambdas": lambdas}
    found["models"] = {letter: model(name, i) for i, (letter, name) in enumerate(zip(letters, names))}
    found["task"] = {
        "kind": kind,
        "name": "mnist" if kind == "image" else "shakespeare",
        "n_samples": 1000,
        "fingerprint": "5f" * 32,
        "settings": {"batch_size": 250, "max_samples": 1000, "seed": 0},
    }
    found["curves"] = {
        key: {p: curves(lambdas, (0.21 + 0.01 * i, 0.19), h, kind) for p, h in heights.items()}
        for i, key in enumerate(keys)
    }
    for part, index in (("barrier", 0), ("barrier_lambda", 1)):
        found[part] = {
            key: {
                path: {
                    metric: barriers(lambdas, values[metric], worse)[index]
                    for metric, worse in (("loss", 1.0), ("accuracy", -1.0))
                }
                for path, values in paths.items()
            }
            for key, paths in found["curves"].items()
        }
    found["not_finite"] = []
    if aligned is not None:
        found["alignment"] = {key: alignment() for key in keys}
        found["explain"] = {key: {p: explanation(4, h) for p, h in heights.items()} for key in keys}
        found["plane"] = {keys[0]: plane()}
    found["provenance"] = {
        "version": "0.1.0",
        "git": "265c28d0c1f8c1d5f6b3a5a4a6d1c6f6f0b1c2d3",
        "command": "isobasin path runs/seed0 runs/seed1 --data mnist --align --explain --plane -o path.json",
        "seed": 0,
        "device": "cpu",
        "dtype": "float32",
        "torch": "2.13.0",
        "transformers": "5.22.2",
        "python": "3.11",
        "created": "2026-11-15T12:00:00Z",
        "seconds": 12.3,
    }
    return found


def alignment() -> Document:
    return {
        "scope": "model",
        "matcher": "weights",
        "stage2": "full",
        "distance_before": 1.36,
        "distance_after": 0.52,
        "max_output_change": 9.8e-7,
        "per_layer": layers(4),
    }


def minimal(n_points: int = 2) -> Document:
    """The least that is a path.json."""
    lambdas = [i / (n_points - 1) for i in range(n_points)]
    loss = [bump(lam, 0.2, 0.3, 0.5) for lam in lambdas]
    return {"kind": "isobasin.path", "schema": 1, "lambdas": lambdas, "curves": {"A-B": {"naive": {"loss": loss}}}}


def with_hole(found: Document, path: str = "naive", at: int = 12) -> Document:
    """The same document with a loss that was not finite at one point."""
    changed = dict(found)
    lines = {**found["curves"]["A-B"], path: {**found["curves"]["A-B"][path]}}
    lines[path]["loss"] = [None if i == at else value for i, value in enumerate(lines[path]["loss"])]
    changed["curves"] = {**found["curves"], "A-B": lines}
    changed["barrier"] = {**found["barrier"], "A-B": {**found["barrier"]["A-B"], path: {"loss": None}}}
    changed["not_finite"] = [{"pair": "A-B", "path": path, "metric": "loss", "lambda": found["lambdas"][at]}]
    return changed
