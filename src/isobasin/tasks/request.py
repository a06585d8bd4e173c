"""What the user asked for, checked."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobasin.errors import IsobasinError
from isobasin.weights import Weights

_BATCH = {"lm": 8, "mlm": 8, "text": 16, "image": 64}
_FLAGS = {"max_samples": "--max-samples", "batch_size": "--batch-size", "seq_len": "--seq-len"}


@dataclass(frozen=True)
class Request:
    """Data, models and numbers; None leaves a number to the task."""

    data: Path
    models: Sequence[Weights]
    tokenizer: str | Path | None = None
    max_samples: int | None = None
    batch_size: int | None = None
    seq_len: int | None = None
    seed: int = 0
    split: str = "test"

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
        """What every task writes down of it."""
        size = self.batch_size or _BATCH[kind]
        return {"batch_size": size, "max_samples": self.max_samples, "seed": self.seed, "split": self.split}
