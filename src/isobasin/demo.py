"""An example on data that ship with the package: train, re-initialise, fine-tune, align, measure, merge, report.

A small RoPE model is trained on digits. Its attention is re-initialised from two seeds and both models are fine-tuned:
both are accurate, and their average is not. One of them is then aligned to the other within its symmetries.
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

from isobasin.alignment.align import align
from isobasin.alignment.matchers import WeightMatching
from isobasin.checkpoint.writer import check_output
from isobasin.data import shipped
from isobasin.errors import IsobasinError
from isobasin.files import AtomicOutput, atomic_write, disk_errors
from isobasin.merging import merge
from isobasin.model import ModelConfig, Transformer
from isobasin.path.barrier import midpoint
from isobasin.path.pairs import evaluate_pairs, path_document
from isobasin.path.provenance import model_provenance
from isobasin.report import read_result, table_rows, verdict, write_report
from isobasin.report.figures import plot_path
from isobasin.study import reinitialise, shifted, train
from isobasin.study.trainer import TrainingRecipe
from isobasin.tasks import open_task, read_images, scaled
from isobasin.weights import Weights, load

OnProgress = Callable[[str, int, int], None]  # (stage, done, of)

MODELS = ("pretrained", "A", "B", "B_aligned", "merged")
OUTPUTS = (*MODELS, "path.json", "path.png", "report.html")

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
PRETRAINING = TrainingRecipe(steps=2000, batch_size=64, peak_lr=6e-3, weight_decay=0.3)
FINETUNING = TrainingRecipe(steps=1200, batch_size=64, peak_lr=3e-3, weight_decay=0.3)


@dataclass(frozen=True)
class DemoConfig:
    """The model and its training; the default takes about a minute on two cores."""

    model: ModelConfig = MODEL
    pretraining: TrainingRecipe = PRETRAINING
    finetuning: TrainingRecipe = FINETUNING
    scope: str = "all-attention"
    n_points: int = 25
    max_samples: int | None = None  # of the 2,000 test images


def run_demo(
    out: str | Path,
    *,
    seed: int = 0,
    config: DemoConfig | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Write to `out`: four models and their merge, path.json, path.png and report.html.

    Returns the barriers, the accuracies of both models and of their averages, one sentence, the rows of the table, and
    the paths of the files. `seed` is that of pretraining; the two models are fine-tuned with the two seeds after it.
    """
    config, out = config or DemoConfig(), Path(out)
    on_progress = on_progress or (lambda stage, done, of: None)
    _check_free(out, force=force)
    began = time.perf_counter()
    a, b = _trained_pair(config, out, seed, on_progress)
    matcher = WeightMatching(scope=config.scope)
    models = {"A": a, "B": b}
    task = open_task(shipped("mnist"), [a, b], kind="image", max_samples=config.max_samples, batch_size=250)
    pairs = evaluate_pairs(
        models,
        task,
        aligner=lambda b, a: align(b, to=a, matcher=matcher, watch=partial(on_progress, "aligning")),
        n_points=config.n_points,
        watch=lambda title: partial(on_progress, title.removeprefix("A-B ")),
    )
    found = pairs["A-B"].alignment
    assert found is not None
    found.transform.apply(b).save(out / "B_aligned", force=force)
    merge([a, load(out / "B_aligned")], names=["A", "B_aligned"], align=False).save(out / "merged", force=force)
    on_progress("merging", 1, 1)
    result = path_document(
        pairs,
        task,
        models={label: model_provenance(model) for label, model in models.items()},
        settings={"scope": matcher.scope, "matcher": "weights", "stage2": matcher.stage2},
        command=shlex.join(["isobasin", "demo", "-o", str(out), "--seed", str(seed)]),
        seed=seed,
        device="cpu",
        seconds=time.perf_counter() - began,
    )
    atomic_write(out / "path.json", json.dumps(result, allow_nan=False, indent=1) + "\n")
    plot_path(out / "path.json", out / "path.png", metric="loss")
    write_report([out / "path.json"], out / "report.html", force=force)
    on_progress("report", 1, 1)
    return _facts(result, config, out) | {"seconds": round(time.perf_counter() - began, 1)}


def _check_free(out: Path, *, force: bool) -> None:
    """Refuse a folder that contains an output already, before anything is trained."""
    there = [name for name in OUTPUTS if (out / name).exists()]
    if there and not force:
        raise IsobasinError(f"{out} holds {', '.join(there)} already; use --force to replace them, or another folder")
    for name in MODELS:
        check_output((out / name).resolve(), [], force=force)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise IsobasinError(f"{out} can not be made ({error.strerror}): choose another folder") from error


def _trained_pair(config: DemoConfig, out: Path, seed: int, on_progress: OnProgress) -> tuple[Weights, Weights]:
    """The protocol of the paper: one pretrained model, its attention re-initialised from two seeds, both fine-tuned."""
    digits = read_images(shipped("mnist"), "train")
    images, classes = scaled(np.array(digits.pixels)), torch.tensor(digits.labels)
    stop, lock = threading.Event(), threading.Lock()

    def trained(model: Transformer, recipe: TrainingRecipe, seed: int, stage: str) -> Transformer:
        def watch(done: int, of: int) -> None:
            if stop.is_set():
                raise _Stopped
            with lock:  # two models are trained at a time, each in its thread
                on_progress(stage, done, of)

        return train(model, images, classes, recipe, seed=seed, augment=shifted(by=1), watch=watch).model

    def fine_tune(number: int, name: str) -> None:
        fresh = reinitialise(pretrained, config.scope, seed=seed + number)
        _save(trained(fresh, config.finetuning, seed + number, f"fine-tuning {name}"), out / name)

    with _one_thread():
        pretrained = trained(Transformer(config.model, seed=seed), config.pretraining, seed, "pretraining")
        _save(pretrained, out / "pretrained")
        with ThreadPoolExecutor(2) as pool:
            try:
                for done in [pool.submit(fine_tune, number, name) for number, name in enumerate("AB", 1)]:
                    done.result()
            except BaseException:
                stop.set()  # an interrupt must not wait until the other model is trained
                raise
    return load(out / "A"), load(out / "B")


def _save(model: Transformer, folder: Path) -> None:
    with disk_errors(folder), AtomicOutput(folder, folder=True) as output:
        model.save(output.new)
        output.flush()
        output.commit()


class _Stopped(Exception):
    """The training of the other model has failed or was interrupted."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread per model: the matrices are too small for two, and the numbers do not depend on the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _facts(result: dict[str, Any], config: DemoConfig, out: Path) -> dict[str, Any]:
    """What the command prints."""
    pair = read_result(result).pairs[0]
    accuracy = {path: curve["accuracy"] for path, curve in result["curves"]["A-B"].items()}
    middle = midpoint(result["lambdas"])
    return {
        "scope": config.scope,
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
