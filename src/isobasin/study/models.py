"""Jobs that make the models of a cell: `pretrain` from scratch, `finetune` a re-initialised part, and `baseline`.

Each takes settings, the folders of its needs, a folder to write into and a context, and returns plain JSON.
A trained model is in the folder `model`. `baseline` is tf-idf of words and word pairs with logistic regression, for
comparison with models of labelled text. See `plan` for what a job is.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse import csr_matrix
from scipy.special import log_softmax

from isobasin.errors import ArchitectureError, IsobasinError
from isobasin.files import ResumeFile
from isobasin.model import ModelConfig, Transformer
from isobasin.study.config import DATA_KINDS
from isobasin.study.plan import Context
from isobasin.study.trainer import CheckpointConfig, TrainingRecipe, can_compile, train
from isobasin.symmetries import SCOPES
from isobasin.tasks.datasets import Dataset, augmentation, eval_batch_size, open_dataset, open_labelled_texts
from isobasin.tasks.source import chosen
from isobasin.tasks.task import MetricSums, Task
from isobasin.tasks.tokenizer import Vocabulary, split_words

CHECKPOINT_SECONDS = 30.0  # between two checkpoints
EVALUATION_SAMPLES = 1000  # test samples of the evaluations during training
TEST_SAMPLES = {"lm": 4000}  # windows of a long text in the final test; for other kinds of data, all samples
LOSS_POINTS = 100  # of the curve of training losses in the result
MAX_TERMS = 200_000  # of the baseline
INVERSE_REGULARISATION = 10.0  # C: the weight of the data against ‖w‖²/2
_PATCH_SIZES = {28: 7, 32: 4, 64: 8, 224: 16}
_RECIPE_KEYS = {"batch": "batch_size", "rate": "peak_lr", "decay": "weight_decay", "smoothing": "label_smoothing"}


def pretrain(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """Train a model from scratch: {model, positions, layers, heads, width, dataset, train, seed, sequence, patch}."""
    data = open_dataset(settings["dataset"], context.data, sequence=settings.get("sequence"))
    model = Transformer(model_config(settings, data), seed=settings["seed"])
    return _train_and_test(model, data, settings, out, context)


def finetune(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """Re-initialise a part of a pretrained model and train it: {scope, seed, heads, frozen, dataset, train}.

    With `frozen` only the scope is trained. If the data have another number of classes than the model was pretrained
    with, the model gets a new classifier, the same for all seeds: the starts then differ by the scope only.
    """
    before = Transformer.load(needs[0] / "model")
    data = open_dataset_for(needs[0] / "model", before.config, settings["dataset"], context.data)
    seed, scope = settings["seed"], settings["scope"]
    model = _with_classes(before, data.n_classes)
    model = reinitialise(model, scope, seed=seed, n_heads=settings.get("heads"))
    only = None
    if settings.get("frozen"):
        same_head = data.n_classes == before.config.n_classes
        only = scope_parameters(model, scope) | (frozenset() if same_head else _head_parameters(model))
    return _train_and_test(model, data, settings, out, context, only=only)


def baseline(settings: Mapping[str, Any], needs: Sequence[Path], out: Path, context: Context) -> dict[str, Any]:
    """tf-idf and logistic regression on labelled text: {dataset, limits}; `limits` may cut `train` and `test`."""
    return tf_idf_accuracy(settings["dataset"], context.data, settings.get("limits") or {})


def _train_and_test(
    model: Transformer,
    data: Dataset,
    settings: Mapping[str, Any],
    out: Path,
    context: Context,
    only: Collection[str] | None = None,
) -> dict[str, Any]:
    """Train by `settings["train"]`: {epochs or steps, batch, rate, decay, warmup, smoothing, augment}. Save and test.

    On CUDA in bfloat16, with a step as one graph, compiled where that is possible; otherwise in float32.
    """
    device, table = torch.device(context.device), settings["train"]
    batch_size = eval_batch_size(data.kind, context.device)
    cache_key = {**settings, "data": dict(data.facts), "model": model.config.to_dict()}
    record = ResumeFile(context.scratch / "training", "learning", cache_key, tensors=True)
    probe = data.task("test", samples=EVALUATION_SAMPLES, batch_size=batch_size)

    def loss_and_accuracy(learner: Transformer) -> tuple[float, ...]:
        metrics = evaluate(learner, probe, device)
        return metrics["loss"], metrics["accuracy"]

    cuda = device.type == "cuda"
    found = train(
        model,
        data.train.inputs,
        data.train.targets,
        recipe_from_table(table),
        seed=settings["seed"],
        only=only,
        augment=augmentation(table.get("augment", "none"), data.kind),
        pad=data.pad,
        device=device,
        autocast=torch.bfloat16 if cuda else None,
        graphed=cuda,
        compiled=cuda and can_compile(),
        checkpoints=CheckpointConfig(record, CHECKPOINT_SECONDS, loss_and_accuracy),
    )
    found.model.cpu().save(out / "model")
    if data.vocabulary is not None:
        data.vocabulary.save(out / "model")
    task = data.task("test", samples=TEST_SAMPLES.get(data.kind), batch_size=batch_size)
    result = evaluate(found.model, task, device)
    record.close()
    return result | {
        "n_steps": len(found.losses),
        "n_params": sum(p.numel() for p in model.parameters()),
        "train_losses": downsample(found.losses, LOSS_POINTS),
        "history": [[int(step), *rest] for step, *rest in found.history],
        "data": dict(data.facts),
    }


def recipe_from_table(table: Mapping[str, Any]) -> TrainingRecipe:
    """A table of the grid, whose keys were checked when it was read, as a recipe."""
    given = {key: value for key, value in table.items() if key != "augment" and value is not None}
    return TrainingRecipe(**{_RECIPE_KEYS.get(key, key): value for key, value in given.items()})


@torch.inference_mode()
def evaluate(model: Transformer, task: Task, device: torch.device) -> dict[str, float]:
    """Loss and accuracy, for text also perplexity and bits per byte, in float32."""
    model, total = model.to(device), MetricSums()
    for batch in task:
        total = total + MetricSums.of(model(*(tensor.to(device) for tensor in batch.inputs.values())), batch)
    return total.metrics(task.kind)


def downsample(values: Sequence[float], most: int) -> list[float]:
    """Means of at most `most` runs of equal length."""
    run = max(1, math.ceil(len(values) / most))
    parts = [values[k : k + run] for k in range(0, len(values), run)]
    return [sum(part) / len(part) for part in parts]


def model_config(settings: Mapping[str, Any], data: Dataset) -> ModelConfig:
    """The model of a cell, with inputs and outputs that fit its data. The feed-forward width is 4 times the width.

    For SwiGLU it is 8/3 of the width, rounded up to a multiple of 16, so that three matrices are as large as two.
    """
    model, width = settings["model"], settings["width"]
    sizes = {"n_layers": settings["layers"], "n_heads": settings["heads"], "d_model": width}
    other: dict[str, float] = {}
    sizes["d_ff"] = 16 * math.ceil(8 * width / 48) if model == "llama" else 4 * width
    if data.kind != DATA_KINDS[model]:
        raise IsobasinError(
            f"model {model!r} on data set {data.name!r}, which is {data.kind}: expected {DATA_KINDS[model]} data"
        )
    if data.image is not None:
        channels, side, _ = data.image
        patch = settings.get("patch") or _PATCH_SIZES.get(side) or math.gcd(side, 4)
        sizes |= {"image_size": side, "patch_size": patch, "n_channels": channels}
        other["rope_theta"] = 100.0  # an image has a few dozen positions: with 10,000 most angles would be near zero
    else:
        assert data.vocabulary is not None
        assert data.sequence is not None
        sizes |= {"d_vocab": data.vocabulary.size, "n_positions": data.sequence}
    if data.n_classes is not None:
        sizes["n_classes"] = data.n_classes
    return ModelConfig.preset(model, positions=settings.get("positions"), **sizes, **other)


def open_dataset_for(folder: Path, config: ModelConfig, name: str, root: Path | None) -> Dataset:
    """Data for an existing model, cut to its sequence length or image size; an error if they do not fit."""
    sequence = config.n_positions if config.d_vocab else None
    data = open_dataset(name, root, sequence=sequence, side=config.image_size)
    vocabulary = Vocabulary.read(folder, config.d_vocab or 0)
    kind = "image" if config.image_size else "text" if config.n_classes else "lm"
    if kind != data.kind:
        raise IsobasinError(f"data set {data.name!r} is {data.kind}, but the pretrained model is for {kind} data")
    if data.image is not None and data.image[0] != config.n_channels:
        raise IsobasinError(
            f"data set {data.name!r} has {data.image[0]} channels, the pretrained model reads {config.n_channels}"
        )
    if data.vocabulary is not None and data.vocabulary.content != vocabulary.content:
        raise IsobasinError(
            f"data set {data.name!r}: its vocabulary is not that of the pretrained model; use bytes for both, "
            f"{data.name.partition(':')[0]}:bytes"
        )
    return data


def _head_parameters(model: Transformer) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_parameters() if name.startswith("head."))


def _with_classes(model: Transformer, n_classes: int | None) -> Transformer:
    """The model itself, or one with a new classifier if the number of classes differs."""
    if n_classes == model.config.n_classes:
        return model
    made = Transformer(dataclasses.replace(model.config, n_classes=n_classes), seed=0)
    kept = {name: tensor for name, tensor in model.state_dict().items() if name not in _head_parameters(model)}
    made.load_state_dict(made.state_dict() | kept)
    return made


def scope_parameters(model: Transformer, scope: str) -> frozenset[str]:
    """Names of the parameters in a scope. Attention is q, k, v and o, without the norm before it."""
    if scope not in SCOPES:
        raise ArchitectureError(f"scope {scope!r} is unknown, expected one of {', '.join(SCOPES)}")
    names = [name for name, _ in model.named_parameters()]
    inside = {
        "first-attention": lambda name: name.startswith("blocks.0.attn."),
        "all-attention": lambda name: ".attn." in name,
        "first-block": lambda name: name.startswith("blocks.0."),
        "model": lambda name: True,
    }[scope]
    return frozenset(filter(inside, names))


@torch.no_grad()
def reinitialise(model: Transformer, scope: str, *, seed: int, n_heads: int | None = None) -> Transformer:
    """A new model: the scope as `Transformer(config, seed=seed)` initialises it, the rest bitwise unchanged.

    `n_heads` splits the same width into another number of heads. A configuration has one number of heads for all
    layers, so this needs a scope that contains all attention layers.
    """
    replaced = scope_parameters(model, scope)
    if n_heads is not None and scope not in ("all-attention", "model"):
        raise ArchitectureError(
            f"n_heads={n_heads} with scope {scope!r}: the layers that stay keep {model.config.n_heads} heads; "
            "use scope all-attention or model"
        )
    config = model.config if n_heads is None else _with_heads(model.config, n_heads)
    like = next(model.parameters())
    made = Transformer(config, seed=seed).to(like).train(model.training)
    before = dict(model.named_parameters())
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(before[name].requires_grad)
        if name not in replaced:
            parameter.copy_(before[name])
    return made


def _with_heads(config: ModelConfig, n_heads: int) -> ModelConfig:
    """The same widths of queries and keys, split into other heads; the rotary share of a head stays."""
    width, kv_width = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
    d_head = width // n_heads if n_heads > 0 else 0
    if d_head < 1 or width % n_heads or kv_width % d_head:
        raise ArchitectureError(
            f"n_heads={n_heads}: queries of width {width} and keys of width {kv_width} can not be cut so; "
            "choose a number that divides both"
        )
    rotary_dims = config.rotary_dims * d_head // config.d_head
    return dataclasses.replace(
        config, n_heads=n_heads, n_kv_heads=kv_width // d_head, d_head=d_head, rotary_dims=rotary_dims
    )


def tf_idf_accuracy(name: str, root: Path | None, limits: Mapping[str, int]) -> dict[str, Any]:
    """Test accuracy of logistic regression on tf-idf of words and word pairs; `limits` may cut `train` and `test`.

    Returns {accuracy, terms, train, test}.
    """
    rows = open_labelled_texts(name, root)
    texts, classes = _subset(*rows.train, limits.get("train"))
    test_texts, test_classes = _subset(*rows.test, limits.get("test"))
    words = {word: i for i, word in enumerate(sorted({word for text in texts for word in split_words(text)}))}
    occurrences = TermOccurrences.of(texts, words)
    terms = occurrences.frequent(MAX_TERMS)
    x = occurrences.counts(terms)
    idf = inverse_document_frequency(x)
    weights = logistic_regression(tf_idf(x, idf), classes, len(rows.classes))
    scores = class_scores(weights, tf_idf(TermOccurrences.of(test_texts, words).counts(terms), idf))
    accuracy = float(np.mean(scores.argmax(1) == test_classes))
    return {"accuracy": accuracy, "terms": len(terms), "train": len(texts), "test": len(test_texts)}


def _subset(texts: Sequence[str], classes: Sequence[int], limit: int | None) -> tuple[list[str], np.ndarray]:
    used = chosen(len(texts), limit, seed=0)
    return [texts[i] for i in used], np.array([classes[i] for i in used])


@dataclass(frozen=True)
class TermOccurrences:
    """Every occurrence of a word or a pair of neighbouring words: the number of its text, and of the term."""

    texts: np.ndarray
    terms: np.ndarray
    n_texts: int

    @staticmethod
    def of(texts: Sequence[str], words: Mapping[str, int]) -> "TermOccurrences":
        """Unknown words, and pairs that contain one, are left out."""
        ids = [np.array([words.get(word, -1) for word in split_words(text)], dtype=np.int64) for text in texts]
        place = np.repeat(np.arange(len(texts)), [len(one) for one in ids])
        row = np.concatenate(ids)
        pair = (place[1:] == place[:-1]) & (row[1:] >= 0) & (row[:-1] >= 0)
        pairs = (row[:-1] + 1) * len(words) + row[1:]  # after the words, which are 0 … len(words) − 1
        known = row >= 0
        return TermOccurrences(
            np.concatenate([place[known], place[1:][pair]]), np.concatenate([row[known], pairs[pair]]), len(texts)
        )

    def frequent(self, most: int) -> np.ndarray:
        """The terms that occur in two texts or more, at most the `most` most frequent ones, in ascending order."""
        span = int(self.terms.max()) + 1
        terms, n_texts = np.unique(np.unique(self.texts * span + self.terms) % span, return_counts=True)
        kept = np.argsort(-n_texts, kind="stable")[: min(most, int((n_texts > 1).sum()))]
        return np.sort(terms[kept])

    def counts(self, terms: np.ndarray) -> csr_matrix:
        """(texts, terms) how often each occurs."""
        column = np.searchsorted(terms, self.terms).clip(max=len(terms) - 1)
        here = terms[column] == self.terms
        ones = np.ones(int(here.sum()))
        return csr_matrix((ones, (self.texts[here], column[here])), shape=(self.n_texts, len(terms)))


def inverse_document_frequency(counts: csr_matrix) -> np.ndarray:
    """ln((1 + n) / (1 + number of texts with the term)) + 1."""
    n_texts = np.bincount(counts.indices, minlength=counts.shape[1])
    return np.log((1 + counts.shape[0]) / (1 + n_texts)) + 1


def tf_idf(counts: csr_matrix, idf: np.ndarray) -> csr_matrix:
    """(1 + ln count) · idf, each row of length 1."""
    found = counts.copy()
    found.data = (1 + np.log(found.data)) * idf[found.indices]
    lengths = np.sqrt(np.asarray(found.multiply(found).sum(1))).ravel()
    found.data /= np.repeat(lengths.clip(min=1e-12), np.diff(found.indptr))
    return found


def logistic_regression(
    x: csr_matrix, y: np.ndarray, n_classes: int, *, strength: float = INVERSE_REGULARISATION
) -> np.ndarray:
    """Weights (classes, terms + 1), the last column the intercept: the minimum of ‖w‖²/2 + C Σ cross-entropy."""
    n_terms = x.shape[1]
    one_hot = np.eye(n_classes)[y]

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        weights = flat.reshape(n_classes, n_terms + 1)
        log_probability = log_softmax(class_scores(weights, x), axis=1)
        error = np.exp(log_probability) - one_hot  # (texts, classes)
        gradient = np.empty_like(weights)
        gradient[:, :-1] = strength * (x.T @ error).T + weights[:, :-1]
        gradient[:, -1] = strength * error.sum(0)
        loss = 0.5 * float((weights[:, :-1] ** 2).sum()) - strength * float((log_probability * one_hot).sum())
        return loss, gradient.ravel()

    start = np.zeros(n_classes * (n_terms + 1))
    found = minimize(objective, start, jac=True, method="L-BFGS-B", options={"maxiter": 200, "ftol": 1e-7})
    return found.x.reshape(n_classes, n_terms + 1)


def class_scores(weights: np.ndarray, x: csr_matrix) -> np.ndarray:
    """Scores (texts, classes)."""
    return x @ weights[:, :-1].T + weights[:, -1]
