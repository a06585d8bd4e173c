"""The whole chain on data that ship with the package: train, re-initialise, fine-tune, align, measure, merge, report.

A small RoPE model learns digits. Its attention is drawn anew from two seeds and both are fine-tuned: two models that
do the same and, on the straight line between them, fail. One of them is then moved within its own symmetries.
"""

import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobasin.data import shipped
from isobasin.errors import IsobasinError
from isobasin.files import write_text
from isobasin.match.align import align
from isobasin.match.alignment import Alignment
from isobasin.match.matchers import WeightMatching
from isobasin.merging import merge
from isobasin.model import ModelConfig, Transformer
from isobasin.path.compare import compare, result_of
from isobasin.path.fingerprint import model_facts, model_hash, provenance
from isobasin.plots import plot_path
from isobasin.report import read_result, table_rows, verdict, write_report
from isobasin.study import Recipe, reinitialise, shifted, train
from isobasin.tasks import open_task, read_images, scaled
from isobasin.weights import Weights, load

Watch = Callable[[str, int, int], None]
"""Told of progress: the stage, how much of it is done, of how much."""

OUTPUTS = ("pretrained", "A", "B", "B_aligned", "merged", "path.json", "path.png", "report.html")

MODEL = ModelConfig.preset(
    "vit",
    positions="rope",
    rope_theta=100.0,
    image_size=28,
    patch_size=7,
    n_channels=1,
    d_model=64,
    d_ff=96,
    n_layers=2,
    n_heads=4,
    norm="rms",
    feed_forward="swiglu",
    bias=False,
)
PRETRAINING = Recipe(steps=2000, batch_size=64, peak_lr=6e-3, weight_decay=0.3)
FINETUNING = Recipe(steps=1200, batch_size=64, peak_lr=3e-3, weight_decay=0.3)


@dataclass(frozen=True)
class Setting:
    """What the demo trains and how; the default takes about a minute on two cores."""

    model: ModelConfig = MODEL
    pretraining: Recipe = PRETRAINING
    finetuning: Recipe = FINETUNING
    scope: str = "all-attention"
    n_points: int = 25
    max_samples: int | None = None  # of the 2,000 test images


def run_demo(
    out: str | Path, *, seed: int = 0, setting: Setting | None = None, force: bool = False, watch: Watch | None = None
) -> dict[str, Any]:
    """Run the chain and leave in `out`: four models and their merge, path.json, path.png and report.html.

    Gives back the barriers, the accuracies of both ends and of the merged model, one sentence, the rows of the table,
    and where everything lies. Training draws from `seed`; the two models are fine-tuned side by side, with the seeds
    that follow it.
    """
    setting, out = setting or Setting(), Path(out)
    told = _in_turn(watch or (lambda stage, done, of: None))
    _check_free(out, force=force)
    began = time.perf_counter()
    a, b = _trained_pair(setting, out, seed, told)
    result, found = _measured(setting, a, b, told)
    moved = found.transform.apply(b)
    moved.save(out / "B_aligned", force=force)
    merge([a, load(out / "B_aligned")], names=["A", "B_aligned"]).save(out / "merged", force=force)
    told("merging", 1, 1)
    result["provenance"] = provenance(
        command=shlex.join(["isobasin", "demo", "-o", str(out), "--seed", str(seed)]),
        seed=seed,
        device="cpu",
        seconds=time.perf_counter() - began,
    )
    write_text(out / "path.json", json.dumps(result, allow_nan=False, indent=1) + "\n")
    plot_path(out / "path.json", out / "path.png", metric="loss")
    write_report([out / "path.json"], out / "report.html", force=force)
    told("report", 1, 1)
    return _facts(result, setting, out) | {"seconds": round(time.perf_counter() - began, 1)}


def _check_free(out: Path, *, force: bool) -> None:
    """Refuse a place where something of ours lies already, before a minute is spent."""
    there = [name for name in OUTPUTS if (out / name).exists()]
    if there and not force:
        raise IsobasinError(f"{out} holds {', '.join(there)} already; use --force to replace them, or another folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IsobasinError(f"{out} can not be made ({error.strerror}): choose another folder") from error


def _digits() -> tuple[Tensor, Tensor]:
    images = read_images(shipped("mnist"), "train")
    return scaled(np.array(images.pixels)), torch.tensor(images.labels)


def _trained_pair(setting: Setting, out: Path, seed: int, told: Watch) -> tuple[Weights, Weights]:
    """The protocol of the paper: one pretrained model, its attention drawn from two seeds, both fine-tuned."""
    images, classes = _digits()
    stop = threading.Event()

    def learn(model: Transformer, recipe: Recipe, seed: int, stage: str) -> Transformer:
        def watch(done: int, of: int) -> None:
            if stop.is_set():
                raise _Stopped
            told(stage, done, of)

        return train(model, images, classes, recipe, seed=seed, augment=shifted(by=1), watch=watch).model

    def tune(number: int, name: str) -> None:
        fresh = reinitialise(pretrained, setting.scope, seed=seed + number)
        learn(fresh, setting.finetuning, seed + number, f"fine-tuning {name}").save(out / name)

    with _one_thread():
        pretrained = learn(Transformer(setting.model, seed=seed), setting.pretraining, seed, "pretraining")
        pretrained.save(out / "pretrained")
        with ThreadPoolExecutor(2) as pool:
            try:
                for done in [pool.submit(tune, number, name) for number, name in enumerate("AB", 1)]:
                    done.result()
            except BaseException:
                stop.set()  # whoever interrupts does not wait for the other one
                raise
    return load(out / "A"), load(out / "B")


class _Stopped(Exception):
    """The other model's training has failed, or was interrupted."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from a second core: it is better used by the second model. And the numbers
    then do not depend on how many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _in_turn(watch: Watch) -> Watch:
    """Two models learn at a time; whoever watches is told by one of them at a time."""
    lock = threading.Lock()

    def told(stage: str, done: int, of: int) -> None:
        with lock:
            watch(stage, done, of)

    return told


def _measured(setting: Setting, a: Weights, b: Weights, told: Watch) -> tuple[dict[str, Any], Alignment]:
    """path.json but for its provenance: both paths on the test images, and the alignment between them."""
    matcher = WeightMatching(scope=setting.scope)

    def aligner(moving: Weights, reference: Weights) -> Alignment:
        return align(moving, to=reference, matcher=matcher, watch=partial(told, "aligning"))

    models = {"A": a, "B": b}
    task = open_task(shipped("mnist"), [a, b], kind="image", max_samples=setting.max_samples, batch_size=250)
    pairs = compare(
        models, task, aligner=aligner, n_points=setting.n_points, watch=lambda title: partial(told, title[4:])
    )
    result = result_of(pairs, task)
    result["models"] = {label: model_facts(model, model_hash(model)) for label, model in models.items()}
    found = pairs["A-B"].alignment
    assert found is not None
    how = {"scope": matcher.scope, "matcher": "weights", "stage2": matcher.stage2}
    result["alignment"] = {"A-B": how | found.facts}
    return result, found


def _facts(result: dict[str, Any], setting: Setting, out: Path) -> dict[str, Any]:
    """What the command prints: barriers, accuracies, the sentence, the table."""
    pair = read_result(result).pairs[0]
    accuracy = {path: curve["accuracy"] for path, curve in result["curves"]["A-B"].items()}
    middle = len(result["lambdas"]) // 2
    return {
        "scope": setting.scope,
        "matcher": "weights",
        "barrier": result["barrier"]["A-B"],
        "accuracy": {
            "A": accuracy["naive"][0],
            "B": accuracy["naive"][-1],
            "naive average": accuracy["naive"][middle],
            "aligned average": accuracy["aligned"][middle],
        },
        "distance_before": result["alignment"]["A-B"]["distance_before"],
        "distance_after": result["alignment"]["A-B"]["distance_after"],
        "sentence": verdict(pair).sentence,
        "table": [
            {
                "metric": row.metric,
                "path": row.path,
                "A": row.start,
                "middle": row.middle,
                "B": row.end,
                "barrier": row.barrier.height,
            }
            for row in table_rows(pair)
        ],
        "output": str(out),
        "path": str(out / "path.json"),
        "figure": str(out / "path.png"),
        "report": str(out / "report.html"),
    }
