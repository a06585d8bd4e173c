"""Text that two language models write themselves: what to learn from where there are no data.

Each model writes half of the windows, token by token from its own predictions at temperature 1; the targets are the
tokens that were written. What decides is another sample.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from isobasin.errors import IsobasinError
from isobasin.learning.lessons import generator
from isobasin.running import module_of
from isobasin.shapes import Int
from isobasin.tasks import IGNORED, Batch, Task
from isobasin.tasks.source import digest
from isobasin.tasks.subjects import is_own, name_of, task_kind, vocabulary, window_length
from isobasin.tasks.tokenizing import open_coder
from isobasin.weights import Weights

WINDOWS = 512  # to learn from, unless a number is given
HELD_OUT = 8  # for so many windows there is one more, to decide
TOGETHER = 64  # windows written at a time
SOURCE = "text that the two models wrote themselves"


@dataclass(frozen=True, kw_only=True)
class OwnText:
    """How much is written: windows of `length` tokens, half of them by each model."""

    windows: int = WINDOWS
    length: int | None = None
    batch_size: int = 8
    seed: int = 0
    tokenizer: str | None = None

    def tasks(self, a: Weights, b: Weights, device: torch.device | None = None) -> tuple[Task, Task]:
        """What is learned from, and what decides."""
        kind = task_kind([a, b])
        if kind != "lm":
            raise IsobasinError(
                f"--data self: {name_of(a)} has a head for {kind} and writes no text; expected language models, "
                "or give data"
            )
        if self.windows < 2:
            raise IsobasinError(f"--data self: {self.windows} window, expected 2 or more, half of them by each model")
        deciding = max(2, self.windows // HELD_OUT)
        return self._task(a, b, self.windows, "learned", device), self._task(a, b, deciding, "held out", device)

    def _task(self, a: Weights, b: Weights, windows: int, purpose: str, device: torch.device | None) -> Task:
        length = window_length([a, b], self.length)
        front = _front([a, b], self.tokenizer)
        each = [
            written(m, -(-windows // 2), length, front=front, seed=self.seed, purpose=f"{purpose} {k}", device=device)
            for k, m in enumerate((a, b))
        ]
        rows = torch.stack(each, 1).flatten(0, 1)[:windows]  # in turns: a batch has as much of A as of B
        settings = {"seq_len": length, "batch_size": self.batch_size, "seed": self.seed, "temperature": 1.0}
        name = digest([purpose.encode(), rows.numpy().tobytes()])

        def batches() -> Iterator[Batch]:
            return (_batch(part, len(front)) for part in rows.split(self.batch_size))

        return Task("lm", "own text", SOURCE, len(rows), settings, name, batches)


def _front(models: Sequence[Weights], tokenizer: str | None) -> list[int]:
    """What their tokenizer puts in front of every text; nothing where there is none."""
    coder = open_coder(models, tokenizer)
    return list(coder.frame("a")[0]) if coder else []


def _batch(rows: Int[Tensor, "n t"], front: int) -> Batch:
    targets = rows.roll(-1, 1)
    targets[:, -1] = IGNORED  # nothing follows
    targets[:, : max(0, front - 1)] = IGNORED  # special tokens were not written
    return Batch({"input_ids": rows}, targets)


@torch.no_grad()
def written(
    model: Weights,
    n: int,
    length: int,
    *,
    front: Sequence[int] = (),
    seed: int,
    purpose: str = "",
    device: torch.device | None = None,
) -> Int[Tensor, "n t"]:
    """n windows from the model's own predictions: behind `front`, or behind a token drawn from all with equal odds."""
    device, rng = device or torch.device("cpu"), generator(seed, "own text", purpose)
    module = module_of(model, attention="sdpa").to(device)
    rows = []
    for start in range(0, n, TOGETHER):
        count = min(TOGETHER, n - start)
        if front:
            ids = torch.tensor([list(front)] * count)
        else:
            ids = torch.randint(vocabulary(model), (count, 1), generator=rng)
        says = _own(module) if is_own(model) else _cached(module)
        while ids.shape[1] < length:
            # Drawn on the CPU, where a generator gives the same on every machine.
            odds = torch.softmax(says(ids.to(device)).float(), -1).cpu()
            if not bool(torch.isfinite(odds).all()):
                raise IsobasinError(f"{name_of(model)}: predicts no finite numbers, so it can not write; give data")
            ids = torch.cat([ids, torch.multinomial(odds, 1, generator=rng)], 1)
        rows.append(ids[:, :length])
    return torch.cat(rows)


Says = Callable[[Tensor], Tensor]  # logits of what follows these tokens


def _own(module: nn.Module) -> Says:
    """Our own model keeps nothing from one token to the next: it reads the window again."""

    def says(ids: Tensor) -> Tensor:
        logits: Tensor = module(ids)
        return logits[:, -1]

    return says


def _cached(module: nn.Module) -> Says:
    """A model of transformers keeps keys and values, and reads only what is new."""
    kept: Any = None
    seen = 0

    def says(ids: Tensor) -> Tensor:
        nonlocal kept, seen
        found = module(input_ids=ids[:, seen:], past_key_values=kept, use_cache=True)
        kept, seen = found.past_key_values, ids.shape[1]
        logits: Tensor = found.logits[:, -1]
        return logits

    return says
