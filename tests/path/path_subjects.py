"""Small folders with tokenizers or processors of their own, and data to measure them on."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tiny
from isobasin.runtime import logits, module_of
from isobasin.tasks import Batch, Task
from isobasin.weights import Weights

WORDS = [f"w{i}" for i in range(24)]


@dataclass(frozen=True)
class Subject:
    """Two models of one architecture in folders, and a file or folder of data for them."""

    name: str
    a: Path
    b: Path
    data: Path


def write_tokenizer(folder: Path) -> None:
    """A word-level tokenizer in the usual files: special tokens first, then the words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: k for k, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    ).save_pretrained(folder)


def write_processor(folder: Path) -> None:
    from transformers import ViTImageProcessor

    size = {"height": tiny.IMAGE, "width": tiny.IMAGE}
    ViTImageProcessor(size=size, image_mean=[0.4, 0.5, 0.6], image_std=[0.2, 0.3, 0.25]).save_pretrained(folder)


def _text(rng: np.random.Generator, n: int) -> str:
    return " ".join(rng.choice(WORDS, n))


def write_data(kind: str, place: Path) -> Path:
    from PIL import Image

    rng = np.random.default_rng(0)
    if kind == "text":
        path = place / "text.txt"
        path.write_text(_text(rng, 100))
    elif kind == "labels":
        path = place / "labels.csv"
        rows = [f"{rng.integers(tiny.LABELS)},{_text(rng, int(rng.integers(2, 6)))}" for _ in range(12)]
        path.write_text("label,text\n" + "\n".join(rows) + "\n")
    else:
        path = place / "images"
        for k in range(12):
            folder = path / f"class{k % tiny.LABELS}"
            folder.mkdir(parents=True, exist_ok=True)
            pixels = rng.integers(0, 256, (9, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"{k}.png")
    return path


def subject(case_name: str, kind: str, place: Path) -> Subject:
    case = next(c for c in tiny.CASES if c.name == case_name)
    folders = [place / "a", place / "b"]
    for seed, folder in enumerate(folders):
        tiny.save(case, folder, seed=seed)
        write_processor(folder) if kind == "images" else write_tokenizer(folder)
        if kind == "images":
            config = json.loads((folder / "config.json").read_text())
            names = [f"class{k}" for k in range(tiny.LABELS)]
            config["id2label"] = dict(enumerate(names))
            config["label2id"] = {name: k for k, name in enumerate(names)}
            (folder / "config.json").write_text(json.dumps(config))
    return Subject(case_name, *folders, write_data(kind, place))


def token_task(ids: Tensor, *, batch: int = 2) -> Task:
    """Next-token prediction on these rows."""

    def batches() -> Iterator[Batch]:
        for start in range(0, len(ids), batch):
            rows = ids[start : start + batch]
            targets = torch.cat([rows[:, 1:], torch.full_like(rows[:, :1], -100)], 1)
            yield Batch({"input_ids": rows}, targets, rows[:, 1:].numel())

    return Task("lm", "rows", "memory", len(ids), {}, "rows", batches)


def told_task(weights: Weights, ids: Tensor) -> Task:
    """Every position has as its target what this model finds likeliest there: it is at a minimum of the loss."""
    with torch.no_grad():
        targets = logits(weights, module_of(weights), {"input_ids": ids}).argmax(-1)
    return Task("lm", "rows", "memory", len(ids), {}, "rows", lambda: iter([Batch({"input_ids": ids}, targets)]))


def random_ids(vocabulary: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(vocabulary, shape, generator=torch.Generator().manual_seed(seed))


def settings_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found
