"""What models are measured on: batches with targets, metric sums, and what a task reads from the models' configs."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.arch.config import Fields
from isobasin.arguments import checks_arguments
from isobasin.display import Shown, Summary
from isobasin.errors import IsobasinError
from isobasin.runtime import max_length
from isobasin.shapes import Float
from isobasin.tasks.source import digest, short_name
from isobasin.weights import Weights

IGNORED = -100  # the target of a position that is not scored, as in torch's cross-entropy
KINDS = ("lm", "mlm", "seq2seq", "text", "image")
_BATCH_SIZES = {"lm": 8, "mlm": 8, "seq2seq": 8, "text": 16, "image": 64}
_FLAGS = {"max_samples": "--max-samples", "batch_size": "--batch-size", "seq_len": "--seq-len"}
_HEADS = {
    "ForCausalLM": "lm",
    "LMHeadModel": "lm",
    "ForMaskedLM": "mlm",
    "ForPreTraining": "mlm",
    "ForConditionalGeneration": "seq2seq",
    "ForSequenceClassification": "text",
    "ForImageClassification": "image",
}
_CLASSIFIERS = ("classifier.weight", "score.weight")


@dataclass(frozen=True)
class Batch:
    """The inputs of a model and the targets of its outputs.

    `targets` are classes (N,), or tokens (N, T) at the positions of the logits that predict them: already shifted for
    a language model, and IGNORED at positions that are not scored; or probabilities of classes (N, C), which score
    every sample. `n_bytes` is the number of bytes of UTF-8 text that the scored tokens cover.
    """

    inputs: dict[str, Tensor]
    targets: Tensor
    n_bytes: int | None = None

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def labelled(self) -> bool:
        """Whether anything is scored."""
        return self.targets.is_floating_point() or bool((self.targets != IGNORED).any())


@dataclass(frozen=True)
class MetricSums:
    """Sums over scored tokens or samples, so that a mean does not depend on the batches."""

    loss: float = 0.0
    correct: float = 0.0
    count: int = 0
    n_bytes: int | None = 0

    @classmethod
    def of(cls, logits: Float[Tensor, "batch *time classes"], batch: Batch) -> "MetricSums":
        """Σ −log p(target), and how often the largest logit is the target: computed in float32, summed in float64.

        If a logit is NaN, the loss and the number of correct predictions are NaN too.
        """
        flat, targets = logits.float().flatten(0, -2), batch.targets.to(logits.device)
        aims = targets if targets.is_floating_point() else targets.flatten()
        losses = F.cross_entropy(flat, aims, ignore_index=IGNORED, reduction="none")
        targets = aims.argmax(-1) if aims.is_floating_point() else aims
        hits = (flat.max(-1).indices == targets).float().masked_fill(losses.isnan(), math.nan)
        # One transfer for all three: each would synchronise the device.
        losses, hits, scored = torch.stack([losses, hits, (targets != IGNORED).float()]).cpu()
        loss, correct = (float(x[scored > 0].double().sum()) for x in (losses, hits))
        return cls(loss, correct, int(scored.count_nonzero()), batch.n_bytes)

    def __add__(self, other: "MetricSums") -> "MetricSums":
        known = self.n_bytes is not None and other.n_bytes is not None
        return MetricSums(
            self.loss + other.loss,
            self.correct + other.correct,
            self.count + other.count,
            (self.n_bytes or 0) + (other.n_bytes or 0) if known else None,
        )

    def metrics(self, kind: str) -> dict[str, float]:
        """Means over all that was scored: loss in nats, accuracy; perplexity of tokens; bits per byte if known."""
        if not self.count:
            raise IsobasinError("nothing was scored: expected at least one token or sample with a target")
        loss = self.loss / self.count
        found = {"loss": loss, "accuracy": self.correct / self.count}
        if kind in ("lm", "mlm", "seq2seq"):
            found["perplexity"] = math.exp(loss) if not loss > 700 else math.inf
        if kind == "lm" and self.n_bytes:
            found["bits_per_byte"] = self.loss / math.log(2) / self.n_bytes
        return found


@dataclass(frozen=True, repr=False)
class Task(Shown):
    """Data prepared for some models; every iteration gives the same batches.

    `kind` is lm, mlm, seq2seq, text or image; `fingerprint` identifies the data, the settings and the tokenizer or
    processor.
    """

    kind: str
    name: str
    source: str
    n_samples: int
    settings: Mapping[str, Any]
    fingerprint: str
    batches: Callable[[], Iterator[Batch]]

    @classmethod
    @checks_arguments
    def from_dataloader(
        cls, loader: Iterable[Any], *, kind: str = "auto", name: str = "dataloader", max_batches: int | None = None
    ) -> "Task":
        """A task from a `DataLoader`, or anything that gives the same batches whenever it is iterated.

        >>> evaluate_path(a, b, Task.from_dataloader(loader))  # doctest: +SKIP

        A batch is a mapping of model inputs with `labels`, as collators of transformers make it: labels of a language
        model are the tokens themselves, and each is predicted from those before it. Or it is a pair (inputs, targets):
        pixels or token ids, and the targets of the outputs as they are. `kind` is lm, mlm, text or image; `auto` finds
        it in the first batch: labels are those of a language model where all that are scored equal the tokens.
        All batches are read once, for the number of samples and the fingerprint.
        """
        if kind not in ("auto", *KINDS):
            raise IsobasinError(f"kind {kind!r}: expected one of auto, {', '.join(KINDS)}")
        if iter(loader) is loader:
            raise IsobasinError(
                f"{name}: a {type(loader).__name__} can be read once only; expected a list of batches, or a DataLoader"
            )
        first = next(iter(loader), None)
        if first is None:
            raise IsobasinError(f"{name}: holds no batch; expected at least one")
        found = _kind_of_batch(first) if kind == "auto" else kind

        def batches() -> Iterator[Batch]:
            for raw in islice(loader, max_batches):
                yield _batch_of(raw, found)

        n_samples, hashed = 0, []
        for batch in batches():
            n_samples += len(batch)
            hashed.append(digest(map(_bytes, (*batch.inputs.values(), batch.targets))))
        settings = {"max_batches": max_batches}
        return cls(found, name, name, n_samples, settings, digest(text.encode() for text in [found, *hashed]), batches)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def summary(self) -> Summary:
        """What is measured, on how many samples, and how they are read."""
        settings = ", ".join(f"{key} {value}" for key, value in self.settings.items() if value is not None)
        return Summary(str(self), {"kind": self.kind, "source": self.source, "settings": settings})

    def __str__(self) -> str:
        what = {"lm": "windows of text", "mlm": "masked windows of text", "seq2seq": "pairs"}
        what |= {"text": "texts", "image": "images"}
        return f"{self.name}: {self.n_samples:,} {what[self.kind]}"


@dataclass(frozen=True)
class Request:
    """The data, the models and the options of a task; None means the default of the kind of task."""

    data: Path
    models: Sequence[Weights]
    tokenizer: str | Path | None = None
    max_samples: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    seed: int = 0
    split: str = "test"
    labelled: bool = True

    def checked(self) -> "Request":
        for name, flag in _FLAGS.items():
            value = getattr(self, name)
            if value is not None and value < 1:
                raise IsobasinError(f"{flag} {value}: expected a whole number of at least 1")
        if self.split not in ("test", "train"):
            raise IsobasinError(f"split {self.split!r} is unknown, expected test or train")
        if not 0 <= self.seed < 2**63:
            raise IsobasinError(f"--seed {self.seed}: expected a whole number from 0 to 2^63 − 1")
        return self

    def settings(self, kind: str) -> dict[str, Any]:
        """The settings that every task records."""
        size = self.batch_size or _BATCH_SIZES[kind]
        found = {"batch_size": size, "max_samples": self.max_samples, "seed": self.seed, "split": self.split}
        return found if self.labelled else found | {"labelled": False}

    def task(
        self,
        kind: str,
        n_samples: int,
        settings: Mapping[str, Any],
        content: str,
        batches: Callable[[], Iterator[Batch]],
    ) -> Task:
        """The task itself; `content` is a digest of all that was read."""
        found = digest([json.dumps([kind, dict(settings), content], sort_keys=True).encode()])
        return Task(kind, short_name(self.data), str(self.data), n_samples, settings, found, batches)


def int64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64)


# -- batches of a DataLoader -------------------------------------------------------------------------------------------


def _kind_of_batch(raw: Any) -> str:
    """The kind of task of a batch: by its targets, one for each sample or one for each token, and by its inputs."""
    inputs, targets, _ = _parts_of(raw)
    if targets.dim() == 1:
        return "image" if "pixel_values" in inputs else "text"
    if "decoder_input_ids" in inputs:
        return "seq2seq"
    ids = inputs.get("input_ids")
    scored = targets != IGNORED
    if ids is not None and ids.shape != targets.shape:
        raise IsobasinError(
            f"a batch has tokens of shape {tuple(ids.shape)} and labels of shape {tuple(targets.shape)}; expected the "
            "same, or decoder_input_ids for an encoder-decoder"
        )
    if not isinstance(raw, Mapping) or ids is None or bool((ids == targets)[scored].all()):
        return "lm"
    return "mlm"


def _batch_of(raw: Any, kind: str) -> Batch:
    """A batch as models are measured on it: on the CPU, with targets at the positions that predict them."""
    inputs, targets, shifted = _parts_of(raw)
    if kind == "lm" and not shifted:
        targets = torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], IGNORED)], 1)
    return Batch(inputs, targets)


def _parts_of(raw: Any) -> tuple[dict[str, Tensor], Tensor, bool]:
    """Inputs by name, targets, and whether these belong to the positions of the outputs as they are."""
    if isinstance(raw, Mapping):
        named = {str(key): value for key, value in raw.items() if isinstance(value, Tensor)}
        key = next((key for key in ("labels", "label") if key in named), None)
        if key is None:
            raise IsobasinError(f"a batch has {', '.join(named) or 'no tensors'}; expected model inputs with labels")
        targets = named.pop(key)
        return {name: t.detach().cpu() for name, t in named.items()}, _classes(targets), False
    if isinstance(raw, list | tuple) and len(raw) == 2 and all(isinstance(x, Tensor) for x in raw):
        x, targets = raw
        name = "pixel_values" if x.is_floating_point() else "input_ids"
        return {name: x.detach().cpu()}, _classes(targets), True
    raise IsobasinError(
        f"a batch is a {type(raw).__name__}; expected a mapping of model inputs with labels, or a pair of tensors"
    )


def _classes(targets: Tensor) -> Tensor:
    """Targets as class numbers or tokens."""
    if targets.is_floating_point() or targets.dim() not in (1, 2):
        raise IsobasinError(
            f"a batch has targets of {targets.dtype} and shape {tuple(targets.shape)}; expected whole numbers, one for "
            "each sample or token"
        )
    return int64(targets.cpu())


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# -- properties of the models ------------------------------------------------------------------------------------------


def name_of(weights: Weights) -> str:
    return str(weights.path) if weights.path else f"a {weights.arch.family} model in memory"


def task_kind(models: Sequence[Weights], kind: str = "auto") -> str:
    """The kind of task that the heads of the models determine; a given `kind` must agree with it."""
    if not models:
        raise IsobasinError("no model is given: a task is opened for the models it measures")
    if kind not in ("auto", *KINDS):
        raise IsobasinError(f"--task {kind}: expected one of auto, {', '.join(KINDS)}")
    found = agreed(models, "task", _kind)
    if kind not in ("auto", found):
        raise IsobasinError(f"--task {kind}: {name_of(models[0])} has a head for {found}; give --task {found} or auto")
    return found


def _kind(weights: Weights) -> str:
    config = Fields(weights.config)
    if weights.family.own:
        if config.has("image_size"):
            return "image"
        if config.has("n_classes"):
            return "text"
        return "lm" if config.flag("causal", False) else "mlm"
    name = weights.family.class_of(weights.config)
    found = next((kind for suffix, kind in _HEADS.items() if name.endswith(suffix)), None)
    if found is None or (found == "seq2seq" and not weights.family.inputs.decoder):
        raise IsobasinError(
            f"{name_of(weights)}: {name} has no head to measure; expected a class that ends in {', '.join(_HEADS)}"
        )
    return found


def agreed(models: Sequence[Weights], what: str, read: Callable[[Weights], Any]) -> Any:
    """The value that `read` gives for all models; different values are an error."""
    values = [read(weights) for weights in models]
    for weights, value in zip(models[1:], values[1:]):
        if value != values[0]:
            raise IsobasinError(
                f"{what}: {name_of(models[0])} has {values[0]}, {name_of(weights)} has {value}; "
                "expected models with the same"
            )
    return values[0]


def window_length(models: Sequence[Weights], requested: int | None) -> int:
    """The requested length, or 256, or the longest that all models accept if that is less."""
    limit = min((n for n in map(max_length, models) if n is not None), default=None)
    if requested is not None and limit is not None and requested > limit:
        raise IsobasinError(f"--seq-len {requested}: the model takes at most {limit} tokens; give at most that")
    return requested or min(256, limit or 256)


def n_classes(weights: Weights) -> int:
    """The number of rows of the classifier's weight: a config may leave it to a default."""
    if weights.family.own:
        return int(weights.config["n_classes"])
    found = next((weights.arch.shapes[name][0] for name in _CLASSIFIERS if name in weights.arch.shapes), None)
    if found is None:
        raise IsobasinError(
            f"{name_of(weights)}: no classifier among its tensors; expected {' or '.join(_CLASSIFIERS)}"
        )
    if found == 1:
        raise IsobasinError(f"{name_of(weights)}: a classifier with one class is a regression, which is not measured")
    return int(found)


def label_names(models: Sequence[Weights]) -> Mapping[str, int]:
    """The names of the classes, if a config gives them (other than LABEL_0, …); all models must agree."""
    maps = [(weights, found) for weights in models if (found := _names(weights))]
    for weights, found in maps[1:]:
        if found != maps[0][1]:
            here, there = (sorted(m, key=m.__getitem__)[:4] for m in (maps[0][1], found))
            raise IsobasinError(
                f"{name_of(weights)}: its classes are {', '.join(there)}…, those of {name_of(maps[0][0])} "
                f"{', '.join(here)}…; models with different label maps can not be compared"
            )
    return maps[0][1] if maps else {}


def _names(weights: Weights) -> dict[str, int]:
    table = Fields(weights.config).table("id2label")
    try:
        found = {str(name): int(number) for number, name in table.items()}
        if not all(0 <= number < 2**31 for number in found.values()):
            raise ValueError("expected numbers from 0 on")
    except ValueError as error:
        raise IsobasinError(
            f"{name_of(weights)}: config.json: id2label has a key that is no number ({error}); correct it"
        ) from error
    plain = all(name == f"LABEL_{number}" for name, number in found.items())
    return {} if plain else found
