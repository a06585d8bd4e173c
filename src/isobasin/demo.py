"""An example on data and models that ship with the package: align, measure, merge, report.

Two small RoPE models of digits, trained from different seeds, are both accurate, and their average is not. B is aligned
to A within its symmetries twice: by the weights alone, and by learning on the training images. The two models are those
that `train=True` makes with seed 0, stored in float16.

What is printed must be the same on every machine. Training is not: rounding errors grow over thousands of steps. So the
models ship, and everything after them runs in one thread and takes few steps.
"""

import json
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from isobasin.alignment.align import align
from isobasin.alignment.matchers import WeightMatching
from isobasin.alignment.result import Alignment
from isobasin.checkpoint.writer import check_output
from isobasin.data import shipped
from isobasin.errors import IsobasinError
from isobasin.files import AtomicOutput, atomic_write, disk_errors
from isobasin.learn.matching import LearnedMatching
from isobasin.merging import merge
from isobasin.model import ModelConfig, Transformer
from isobasin.path.barrier import midpoint
from isobasin.path.evaluation import evaluate_path
from isobasin.path.pairs import PairResult, evaluate_pairs, path_document
from isobasin.path.provenance import model_provenance
from isobasin.report import read_result, verdict, write_report
from isobasin.report.figures import plot_path
from isobasin.study import shifted
from isobasin.study import train as train_model
from isobasin.study.trainer import TrainingRecipe
from isobasin.tasks import Task, open_task, read_images, scaled
from isobasin.weights import Weights, load

OnProgress = Callable[[str, int, int], None]  # (stage, done, of)

MODELS = ("A", "B", "B_aligned", "B_learned", "merged")
OUTPUTS = (*MODELS, "path.json", "learned.json", "path.png", "report.html")
PAIR = "A-B"

MODEL = ModelConfig.preset(
    "vit",
    positions="rope",
    rope_theta=100.0,
    image_size=28,
    patch_size=7,
    n_channels=1,
    d_model=48,  # fewer than what embeddings and head determine: 49 pixels of a patch, 10 classes
    d_ff=96,
    n_layers=2,
    n_heads=4,
    norm="rms",
    feed_forward="swiglu",
    bias=False,
)
TRAINING = TrainingRecipe(steps=2000, batch_size=64, peak_lr=6e-3, weight_decay=0.3)


@dataclass(frozen=True)
class DemoConfig:
    """The models, their training, and how they are aligned and measured; the default takes half a minute on one core,
    and with training two."""

    model: ModelConfig = MODEL
    training: TrainingRecipe = TRAINING
    # Inside unrelated heads the whole group has many optima, and rounding decides which of them is found. The best
    # rotation is unique.
    start: WeightMatching = field(default_factory=lambda: WeightMatching(scope="model", stage2="orthogonal"))
    steps: int = 200  # of learning
    lr: float = 1e-2
    n_points: int = 13
    max_samples: int | None = None  # of the 2,000 test images


def run_demo(
    out: str | Path,
    *,
    train: bool = False,
    seed: int = 0,
    config: DemoConfig | None = None,
    force: bool = False,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Write to `out`: both models, B aligned by weights and by learning, the merge of A with the latter, path.json (by
    weights), learned.json, path.png and report.html.

    Returns the barriers, the accuracies of both models and of their averages, the rows of the table, and the paths of
    the files. With `train` the two models are trained first, from `seed` and the seed after it; `seed` is also that of
    learning.
    """
    config, out = config or DemoConfig(), Path(out)
    on_progress = on_progress or (lambda stage, done, of: None)
    _check_free(out, force=force)
    began = time.perf_counter()
    with _one_thread():
        if train:
            _train_pair(config, out, seed, on_progress)
        else:
            for name in "AB":
                load(shipped("digits") / name).save(out / name, dtype="keep", force=force)
        a, b = load(out / "A"), load(out / "B")
        task = open_task(shipped("mnist"), [a, b], kind="image", max_samples=config.max_samples, batch_size=250)
        pairs = _measured(config, a, b, task, seed, on_progress)
    for name, pair in pairs.items():
        assert pair.alignment is not None
        pair.alignment.transform.apply(b).save(out / f"B_{name}", force=force)
    merge([a, load(out / "B_learned")], names=["A", "B_learned"], align=False).save(out / "merged", force=force)
    on_progress("merging", 1, 1)
    results = {}
    for (name, pair), matcher in zip(pairs.items(), ("weights", "learned")):
        results[name] = path_document(
            {PAIR: pair},
            task,
            models={"A": model_provenance(a), "B": model_provenance(b)},
            settings={"scope": config.start.scope, "matcher": matcher, "stage2": config.start.stage2},
            command=shlex.join(
                ["isobasin", "demo", "-o", str(out), *(["--train"] if train else []), "--seed", str(seed)]
            ),
            seed=seed,
            device="cpu",
            seconds=time.perf_counter() - began,
        )
    files = {"aligned": out / "path.json", "learned": out / "learned.json"}
    for name, file in files.items():
        atomic_write(file, json.dumps(results[name], allow_nan=False, indent=1) + "\n")
    read = [read_result(file) for file in files.values()]
    plot_path(replace(read[0], pairs=tuple(result.pairs[0] for result in read)), out / "path.png", metric="loss")
    write_report(list(files.values()), out / "report.html", force=force)
    on_progress("report", 1, 1)
    seconds = round(time.perf_counter() - began, 1)
    return _facts(results, config, out) | {"trained": train, "seed": seed, "seconds": seconds}


def _measured(
    config: DemoConfig, a: Weights, b: Weights, task: Task, seed: int, on_progress: OnProgress
) -> dict[str, PairResult]:
    """The naive path and the path to B aligned by weights (`aligned`); the same naive path with B aligned by learning
    (`learned`)."""

    def aligner(b: Weights, a: Weights) -> Alignment:
        return align(b, to=a, matcher=config.start, watch=partial(on_progress, "aligning"))

    by_weights = evaluate_pairs(
        {"A": a, "B": b},
        task,
        aligner=aligner,
        n_points=config.n_points,
        watch=lambda title: partial(on_progress, title.removeprefix(f"{PAIR} ")),
    )[PAIR]
    images = open_task(shipped("mnist"), [a, b], kind="image", split="train", batch_size=64)
    matcher = LearnedMatching(
        images,
        scope=config.start.scope,
        init=config.start,
        steps=config.steps,
        lr=config.lr,
        check_every=max(1, config.steps // 2),
        seed=seed,
        on_step=lambda done, of, barrier: on_progress("learning", done, of),
    )
    learned = align(b, to=a, matcher=matcher)
    on_progress("learning", config.steps, config.steps)  # it stops where there is no barrier left
    curve = evaluate_path(
        a, learned.transform.apply(b), task, n_points=config.n_points, watch=partial(on_progress, "learned path")
    )
    return {
        "aligned": by_weights,
        "learned": PairResult({"naive": by_weights.curves["naive"], "aligned": curve}, learned),
    }


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


def _train_pair(config: DemoConfig, out: Path, seed: int, on_progress: OnProgress) -> None:
    """Write A and B: the same data and recipe, different seeds. Both are trained at a time, each in its thread."""
    digits = read_images(shipped("mnist"), "train")
    images, classes = scaled(np.array(digits.pixels)), torch.tensor(digits.labels)
    stop, lock = threading.Event(), threading.Lock()

    def trained(name: str, seed: int) -> None:
        def watch(done: int, of: int) -> None:
            if stop.is_set():
                raise _Stopped
            with lock:
                on_progress(f"training {name}", done, of)

        fresh = Transformer(config.model, seed=seed)
        found = train_model(fresh, images, classes, config.training, seed=seed, augment=shifted(by=1), watch=watch)
        _save(found.model, out / name)

    with ThreadPoolExecutor(2) as pool:
        try:
            for done in [pool.submit(trained, name, seed + number) for number, name in enumerate("AB")]:
                done.result()
        except BaseException:
            stop.set()  # an interrupt must not wait until the other model is trained
            raise


def _save(model: Transformer, folder: Path) -> None:
    with disk_errors(folder), AtomicOutput(folder, folder=True) as output:
        model.save(output.new)
        output.flush()
        output.commit()


class _Stopped(Exception):
    """The training of the other model has failed or was interrupted."""


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread: the matrices are too small for two, and the numbers do not depend on the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _facts(results: dict[str, dict[str, Any]], config: DemoConfig, out: Path) -> dict[str, Any]:
    """What the command prints. `naive`: as they are; `aligned`: by weights; `learned`: by learning."""
    curves = {"naive": results["aligned"]["curves"][PAIR]["naive"]}
    barriers = {"naive": results["aligned"]["barrier"][PAIR]["naive"]}
    for name, result in results.items():
        curves[name], barriers[name] = result["curves"][PAIR]["aligned"], result["barrier"][PAIR]["aligned"]
    middle = midpoint(results["aligned"]["lambdas"])
    ends = curves["naive"]["accuracy"]
    alignment = results["aligned"]["alignment"][PAIR]
    return {
        "scope": config.start.scope,
        "matcher": "weights",
        "barrier": barriers,
        "accuracy": {"A": ends[0], "B": ends[-1]}
        | {f"{name} average": curve["accuracy"][middle] for name, curve in curves.items()},
        "distance_before": alignment["distance_before"],
        "distance_after": alignment["distance_after"],
        "sentence": verdict(read_result(results["learned"]).pairs[0]).sentence,
        "steps": config.steps,
        "table": [
            {
                "metric": metric,
                "path": name,
                "A": curve[metric][0],
                "middle": curve[metric][middle],
                "B": curve[metric][-1],
                "barrier": barriers[name][metric],
            }
            for metric in ("loss", "accuracy")
            for name, curve in curves.items()
        ],
        "output": str(out),
        "path": str(out / "path.json"),
        "path_learned": str(out / "learned.json"),
        "figure": str(out / "path.png"),
        "report": str(out / "report.html"),
    }
