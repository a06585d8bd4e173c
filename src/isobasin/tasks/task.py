"""What a model is measured on: batches with their targets, and the sums a metric is made of."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.shapes import Float
from isobasin.tasks.source import digest

IGNORED = -100  # a position that is not scored


@dataclass(frozen=True)
class Batch:
    """What the model is called with, and what it should have said.

    `targets` are classes (N,), or tokens (N, T) that stand where the logits that predict them stand: shifted already
    for a language model, and IGNORED where nothing is scored. `n_bytes` are the bytes of text, in UTF-8, that the
    scored tokens cover.
    """

    inputs: dict[str, Tensor]
    targets: Tensor
    n_bytes: int | None = None

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True)
class Sums:
    """Totals over scored tokens or samples; they add up, so that a mean is exact whatever the batches were.

    >>> (Sums(2.0, 1.0, 4, 8) + Sums(4.0, 2.0, 2, None)).metrics("text")
    {'loss': 1.0, 'accuracy': 0.5}
    """

    loss: float = 0.0
    correct: float = 0.0
    count: int = 0
    n_bytes: int | None = 0

    @classmethod
    def of(cls, logits: Float[Tensor, "batch *time classes"], batch: Batch) -> "Sums":
        """Σ −log p(target) and the hits of the largest logit: each in float32, summed in float64.

        Where a logit is not a number the loss and the hits are NaN: a model that fails must not look like a guess.
        """
        flat, targets = logits.float().flatten(0, -2), batch.targets.to(logits.device).flatten()
        losses = F.cross_entropy(flat, targets, ignore_index=IGNORED, reduction="none")
        hits = (flat.max(-1).indices == targets).float().masked_fill(losses.isnan(), math.nan)
        # One copy for all three: each would make a device wait.
        losses, hits, scored = torch.stack([losses, hits, (targets != IGNORED).float()]).cpu()
        loss, correct = (float(x[scored > 0].double().sum()) for x in (losses, hits))
        return cls(loss, correct, int(scored.count_nonzero()), batch.n_bytes)

    def __add__(self, other: "Sums") -> "Sums":
        known = self.n_bytes is not None and other.n_bytes is not None
        return Sums(
            self.loss + other.loss,
            self.correct + other.correct,
            self.count + other.count,
            (self.n_bytes or 0) + (other.n_bytes or 0) if known else None,
        )

    def metrics(self, kind: str) -> dict[str, float]:
        """Means over what was scored: loss (nats), accuracy; perplexity for tokens; bits per byte where known."""
        if not self.count:
            raise IsobasinError("nothing was scored: expected at least one token or sample with a target")
        loss = self.loss / self.count
        found = {"loss": loss, "accuracy": self.correct / self.count}
        if kind in ("lm", "mlm"):
            found["perplexity"] = math.exp(loss) if not loss > 700 else math.inf
        if kind == "lm" and self.n_bytes:
            found["bits_per_byte"] = self.loss / math.log(2) / self.n_bytes
        return found


@dataclass(frozen=True)
class Task:
    """Data made ready for some models: iterate it as often as you like, the batches are always the same.

    `kind` is lm, mlm, text or image; `fingerprint` names data, settings and tokenizer or processor together.
    """

    kind: str
    name: str
    source: str
    n_samples: int
    settings: Mapping[str, Any]
    fingerprint: str
    batches: Callable[[], Iterator[Batch]]

    def __iter__(self) -> Iterator[Batch]:
        return self.batches()

    def __str__(self) -> str:
        what = {"lm": "windows of text", "mlm": "masked windows of text", "text": "texts", "image": "images"}
        return f"{self.name}: {self.n_samples:,} {what[self.kind]}"


@dataclass(frozen=True)
class Prepared:
    """What a kind of task makes of its data: `content` is a digest of all that was read."""

    n_samples: int
    settings: Mapping[str, Any]
    content: str
    batches: Callable[[], Iterator[Batch]]


def fingerprint(kind: str, prepared: Prepared) -> str:
    """sha256 over the kind, the settings and the digest of what was read."""
    said = json.dumps([kind, dict(prepared.settings), prepared.content], sort_keys=True)
    return digest([said.encode()])


def int64(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.int64)
