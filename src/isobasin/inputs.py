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
    limit = _longest(weights, length)
    if "ForSequenceClassification" in str(weights.config.get("architectures")):
        batch = 1  # without a padding token transformers takes one text at a time
    if data.suffix == ".npy":
        name, rows = _array(data, weights, limit)
    else:
        name, rows = "input_ids", _pieces(_tokens(data, weights)[None], limit)
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))]
    for start in range(0, len(rows), batch):
        yield {name: rows[start : start + batch]}


def _array(data: Path, weights: Weights, limit: int) -> tuple[str, Tensor]:
    """The name of the model's input, and the rows for it."""
    try:
        array = torch.from_numpy(np.load(data, allow_pickle=False))
    except (ValueError, OSError, TypeError, EOFError) as error:  # TypeError: an archive, words, or objects
        raise IsobasinError(f"--data {data}: not a plain numpy array of numbers ({error})") from error
    image = pixels_of(weights)
    if image is not None and array.is_floating_point() and tuple(array.shape[1:]) == image:
        if not bool(torch.isfinite(array).all()):
            raise IsobasinError(f"--data {data}: holds NaN or infinite pixels; expected finite ones")
        return "pixel_values", array[:512].to(torch.float32)
    if image is None and not (array.is_floating_point() or array.is_complex()) and array.dim() == 2 and array.shape[1]:
        ids = _pieces(array.to(torch.int64), limit)
        _check_ids(data, ids, weights)
        return "input_ids", ids
    wanted = (
        f"pixels (images × {' × '.join(map(str, image))}, floating)" if image else "token ids (rows × length, whole)"
    )
    raise IsobasinError(
        f"--data {data}: an array of {array.dtype} with shape {tuple(array.shape)}; this model expects {wanted}"
    )


def _pieces(ids: Tensor, limit: int) -> Tensor:
    """Rows cut to what the model can read at once, MAX_TOKENS in all."""
    rows = ids.unfold(1, limit, limit).flatten(0, 1) if ids.shape[1] > limit else ids
    return rows[: max(1, MAX_TOKENS // max(1, rows.shape[1]))]


def pixels_of(weights: Weights) -> tuple[int, int, int] | None:
    """Channels, height and width of an image for this model; None for a model of tokens."""
    config = {key: value for key, value in weights.config.items() if value is not None}
    size = config.get("image_size", 224 if weights.arch.family == "vit" else None)
    if size is None:
        return None
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return int(config.get("num_channels", config.get("n_channels", 3))), int(height), int(width)


def _check_ids(data: Path, ids: Tensor, weights: Weights) -> None:
    vocab = int(weights.config.get("vocab_size", weights.config.get("d_vocab", 0)))
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
        raise IsobasinError(
            f"--data {data}: token ids from {int(ids.min())} to {int(ids.max())}, but the vocabulary has {vocab}"
        )


def _tokens(data: Path, weights: Weights) -> Tensor:
    text = _text(data)
    if pixels_of(weights):
        raise IsobasinError(f"--data {data}: text, but this model reads images; give pixels as a .npy file")
    if not text.strip():
        raise IsobasinError(f"--data {data}: no text in it")
    if weights.arch.family == "isobasin":
        ids = torch.tensor(list(text.encode()), dtype=torch.int64)  # byte-level
    else:
        ids = torch.tensor(_tokenizer(weights)(text)["input_ids"], dtype=torch.int64)
    _check_ids(data, ids, weights)
    return ids


def _text(data: Path, limit: int = 2**22) -> str:
    files = [data] if data.is_file() else sorted(f for f in data.rglob("*") if f.is_file() and f.suffix in TEXT)
    parts, size = [], 0
    for file in files:
        try:
            with file.open(encoding="utf-8") as stream:
                parts.append(stream.read(limit - size))
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
