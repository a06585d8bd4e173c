"""Work of a study that trains: `pretrain` from scratch, `finetune` a part that was drawn anew, the simple `baseline`.

Each takes settings, the folders of what it needs, a folder to write into and a context, and gives back plain JSON;
a trained model lies in the folder `model`. See `jobs` for what a job is.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from isobasin.errors import IsobasinError
from isobasin.learning.record import FileRecord, Record
from isobasin.model import Transformer
from isobasin.tasks.task import Sums, Task

from .augmentation import augmentation
from .baseline import accuracy_of_words
from .datasets import Dataset, at_once, open_dataset
from .fitting_models import config_of, head_of, open_for, with_classes
from .graphed import can_compile
from .jobs import Context
from .recipe import Recipe
from .reinitialising import reinitialise, scope_parameters
from .training import Keeping, Point, Trained, train

EVERY_S = 30.0  # between two checkpoints
PROBED = 1000  # test samples that are looked at on the way
MEASURED = {"lm": 4000}  # windows of a long text that a model is measured on at the end; of other data, all
POINTS = 100  # of the curve of training losses that is kept
_LENGTHS = ("epochs", "steps")
_KEYS = {
    "batch": "batch_size",
    "rate": "peak_lr",
    "decay": "weight_decay",
    "warmup": "warmup",
    "smoothing": "label_smoothing",
}


def pretrain(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """A model from scratch: {model, positions, layers, heads, width, dataset, train, seed, sequence, patch}."""
    data = open_dataset(settings["dataset"], context.data, sequence=settings.get("sequence"))
    model = Transformer(config_of(settings, data), seed=settings["seed"])
    return _fitted(model, data, settings, out, context)


def finetune(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """A part of a pretrained model drawn anew and trained: {scope, seed, heads, frozen, dataset, train}.

    With `frozen` the rest stays as it is. On data with another number of classes than it was pretrained on, the model
    gets a new classifier, the same for all seeds: only the scope tells their starts apart.
    """
    before = Transformer.load(needs[0] / "model")
    data = open_for(needs[0] / "model", before.config, settings["dataset"], context.data)
    seed, scope = settings["seed"], settings["scope"]
    model = with_classes(before, data.n_classes)
    model = reinitialise(model, scope, seed=seed, n_heads=settings.get("heads"))
    only = None
    if settings.get("frozen"):
        same_head = data.n_classes == before.config.n_classes
        only = scope_parameters(model, scope) | (frozenset() if same_head else head_of(model))
    return _fitted(model, data, settings, out, context, only=only)


def baseline(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """tf-idf and logistic regression on labelled text: {dataset, limits}; `limits` may cut `train` and `test`."""
    return accuracy_of_words(settings["dataset"], context.data, settings.get("limits") or {})


def _fitted(
    model: Transformer,
    data: Dataset,
    settings: Mapping[str, Any],
    out: Path,
    context: Context,
    only: Collection[str] | None = None,
) -> dict[str, Any]:
    question = {**settings, "data": dict(data.facts), "model": model.config.to_dict()}
    record = FileRecord(context.scratch / "training", question)
    found = fit(model, data, settings["train"], seed=settings["seed"], device=context.device, record=record, only=only)
    found.model.cpu().save(out / "model")
    if data.vocabulary is not None:
        data.vocabulary.save(out / "model")
    tested = data.task("test", samples=MEASURED.get(data.kind), batch_size=at_once(data.kind, context.device))
    result = measured(found.model, tested, torch.device(context.device))
    record.close()
    return result | {
        "n_steps": len(found.losses),
        "n_params": sum(p.numel() for p in model.parameters()),
        "train_losses": thinned(found.losses, POINTS),
        "history": [[int(step), *rest] for step, *rest in found.history],
        "data": dict(data.facts),
    }


def fit(
    model: Transformer,
    data: Dataset,
    table: Mapping[str, Any],
    *,
    seed: int,
    device: str,
    record: Record,
    only: Collection[str] | None = None,
) -> Trained:
    """Train as a grid's table says: {epochs or steps, batch, rate, decay, warmup, smoothing, augment}.

    On CUDA in bfloat16, with a step as one graph, compiled where that is possible; else in float32.
    """
    where = torch.device(device)
    task = data.task("test", samples=PROBED, batch_size=at_once(data.kind, device))

    def probe(learner: Transformer) -> Point:
        said = measured(learner, task, where)
        return said["loss"], said["accuracy"]

    cuda = where.type == "cuda"
    return train(
        model,
        data.train.inputs,
        data.train.targets,
        recipe_of(table),
        seed=seed,
        only=only,
        augment=augmentation(table.get("augment", "none"), data.kind),
        pad=data.pad,
        device=where,
        autocast=torch.bfloat16 if cuda else None,
        graphed=cuda,
        compiled=cuda and can_compile(),
        keeping=Keeping(record, EVERY_S, probe),
    )


def recipe_of(table: Mapping[str, Any]) -> Recipe:
    """A grid's table as a recipe.

    >>> recipe_of({"epochs": 2, "batch": 64, "rate": 1e-3}).batch_size
    64
    """
    if unknown := sorted(set(table) - set(_KEYS) - {*_LENGTHS, "augment"}):
        raise IsobasinError(f"train: unknown key {unknown[0]!r}, expected {', '.join((*_LENGTHS, *_KEYS))} or augment")
    return Recipe(
        **{name: table[name] for name in _LENGTHS if table.get(name) is not None},
        **{name: table[key] for key, name in _KEYS.items() if table.get(key) is not None},
    )


@torch.inference_mode()
def measured(model: Transformer, task: Task, device: torch.device) -> dict[str, float]:
    """Loss and accuracy, perplexity and bits per byte of text, in float32."""
    model, total = model.to(device), Sums()
    for batch in task:
        total = total + Sums.of(model(*(tensor.to(device) for tensor in batch.inputs.values())), batch)
    return total.metrics(task.kind)


def thinned(values: Sequence[float], most: int) -> list[float]:
    """Means of at most `most` runs of equal length.

    >>> thinned([1.0, 3.0, 5.0, 7.0, 9.0], 3)
    [2.0, 6.0, 9.0]
    """
    run = max(1, math.ceil(len(values) / most))
    parts = [values[k : k + run] for k in range(0, len(values), run)]
    return [sum(part) / len(part) for part in parts]
