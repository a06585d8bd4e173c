"""Unlabeled inputs for a model: text through its own tokenizer, or arrays of token ids or pixels."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobasin.errors import IsobasinError
from isobasin.running import Inputs
from isobasin.weights import Weights

TEXT = (".txt", ".md", ".text", "")
MAX_TOKENS = 2**15


def unlabeled(data: Path, weights: Weights, *, length: int = 256, batch: int = 4, seed: int = 0) -> Iterator[Inputs]:
    """Batches from a .npy array, a text file or a folder of texts; at most MAX_TOKENS tokens or 512 images."""
    if not data.exists():
        raise IsobasinError(f"--data {data}: no such file or folder")
    if data.suffix == ".npy":
        yield from _array(data, weights, batch)
        return
    ids = _tokens(data, weights)
    limit = _longest(weights, length)
    rows = ids[: MAX_TOKENS // limit * limit].unfold(0, limit, limit) if len(ids) >= limit else ids[None]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    for start in range(0, len(rows), batch):
        yield {"input_ids": rows[order[start : start + batch]]}


def _array(data: Path, weights: Weights, batch: int) -> Iterator[Inputs]:
    try:
        array = torch.from_numpy(np.load(data, allow_pickle=False))
    except (ValueError, OSError) as error:
        raise IsobasinError(f"--data {data}: not a plain numpy array ({error})") from error
    images = array.dim() == 4
    if images == array.is_floating_point() and array.dim() in (2, 4):
        rows = (
            array[:512].to(torch.float32) if images else array[: max(1, MAX_TOKENS // array.shape[1])].to(torch.int64)
        )
        _check_ids(data, rows, weights) if not images else None
        for start in range(0, len(rows), batch):
            yield {"pixel_values" if images else "input_ids": rows[start : start + batch]}
        return
    raise IsobasinError(
        f"--data {data}: an array of {array.dtype} with shape {tuple(array.shape)}; expected token ids "
        "(rows × length, whole numbers) or pixels (images × channels × height × width, floating)"
    )


def _check_ids(data: Path, ids: Tensor, weights: Weights) -> None:
    vocab = int(weights.config.get("vocab_size", weights.config.get("d_vocab", 0)))
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
        raise IsobasinError(
            f"--data {data}: token ids from {int(ids.min())} to {int(ids.max())}, but the vocabulary has {vocab}"
        )


def _tokens(data: Path, weights: Weights) -> Tensor:
    text = _text(data)
    if weights.arch.family == "isobasin":
        ids = torch.tensor(list(text.encode()), dtype=torch.int64)  # byte-level
    else:
        ids = torch.tensor(_tokenizer(weights)(text)["input_ids"], dtype=torch.int64)
    _check_ids(data, ids, weights)
    if not len(ids):
        raise IsobasinError(f"--data {data}: no text in it")
    return ids


def _text(data: Path, limit: int = 2**22) -> str:
    files = [data] if data.is_file() else sorted(f for f in data.rglob("*") if f.is_file() and f.suffix in TEXT)
    parts, size = [], 0
    for file in files:
        try:
            parts.append(file.read_text(encoding="utf-8")[: limit - size])
        except (UnicodeDecodeError, OSError) as error:
            raise IsobasinError(f"--data {file}: not UTF-8 text ({error})") from error
        size += len(parts[-1])
        if size >= limit:
            break
    return "\n".join(parts)


def _tokenizer(weights: Weights) -> Any:
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(str(weights.path), local_files_only=True)
    except (OSError, ValueError, TypeError) as error:
        raise IsobasinError(
            f"{weights.path}: no tokenizer that transformers can load; give --data as a .npy file of token ids"
        ) from error


def _longest(weights: Weights, length: int) -> int:
    limits = [weights.config[k] for k in ("n_positions", "max_position_embeddings") if weights.config.get(k)]
    return min([length, *map(int, limits)])
