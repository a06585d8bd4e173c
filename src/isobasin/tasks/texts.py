"""Plain text from a file or a folder, and token ids from a file."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from isobasin.tasks.source import DataError, check_exists
from isobasin.tasks.tables import is_table, read_table

TEXT = ("", ".txt", ".text", ".md", ".rst", ".raw", ".tokens")
IDS = (".npy", ".bin")


def read_text(data: Path | str, limit: int | None = None) -> str:
    """The text of a file, of a folder's text files in the order of their names, or of a table's text column.

    UTF-8, line ends as they are; files and rows are joined by a newline; at most `limit` characters are read.
    """
    data = Path(data)
    files = _text_files(data) if data.is_dir() else []
    if not files and is_table(data):
        text = "\n".join(read_table(data, labelled=False).texts)[:limit]
    else:
        check_exists(data)
        text = _files_text([data] if data.is_file() else files, limit)
    if not text.strip() and (limit is None or len(text) < limit):  # else there is more behind the blanks
        raise DataError(data, f"no text in it; expected UTF-8 text, in a folder in files {', '.join(TEXT[1:])}")
    return text


def _text_files(folder: Path) -> list[Path]:
    found = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file() and file.suffix in TEXT)
    return [folder / file for file in sorted(found) if not any(part.startswith(".") for part in file.parts)]


def _files_text(files: list[Path], limit: int | None) -> str:
    parts: list[str] = []
    left = limit
    for file in files:
        try:
            # newline="": a translated line end would no longer be the bytes that are counted.
            with file.open(encoding="utf-8", newline="") as stream:
                parts.append(stream.read(-1 if left is None else left))
        except UnicodeDecodeError as error:
            raise DataError(file, f"not UTF-8 text ({error}); convert it") from error
        except OSError as error:
            raise DataError(file, f"can not be read ({error.strerror})") from error
        if left is not None:
            left = max(0, left - len(parts[-1]) - 1)
            if not left:
                break
    return "\n".join(parts)[:limit]


def is_ids(data: Path) -> bool:
    """Whether a file holds numbers in place of words."""
    return data.suffix in IDS


def read_ids(data: Path | str, d_vocab: int) -> Tensor:
    """Token ids (length,) or (rows, length), int64, checked against the vocabulary.

    `.npy` is a plain numpy array; `.bin` is a stream of uint16, or of uint32 where d_vocab is more than 65,536.
    """
    data = Path(data)
    check_exists(data)
    array = load_array(data) if data.suffix == ".npy" else _stream(data, d_vocab)
    if array.is_floating_point() or array.is_complex() or array.dim() not in (1, 2) or array.shape[-1] == 0:
        raise DataError(
            data,
            f"an array of {array.dtype} with shape {tuple(array.shape)}; this model expects token ids, whole numbers "
            "(length) or (rows × length)",
        )
    if not array.numel():
        raise DataError(data, "holds no inputs: expected at least one row of token ids")
    return checked_ids(array.to(torch.int64), d_vocab, data)


def load_array(file: Path) -> Tensor:
    """A .npy file of numbers; nothing in it is ever run."""
    try:
        array = np.load(file, allow_pickle=False)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except (ValueError, OSError, TypeError, EOFError, AttributeError) as error:  # an archive, words, or objects
        raise DataError(file, f"not a plain numpy array of numbers ({error})") from error


def _stream(file: Path, d_vocab: int) -> Tensor:
    kind = "<u2" if d_vocab <= 2**16 else "<u4"
    size = file.stat().st_size
    if size % np.dtype(kind).itemsize:
        raise DataError(file, f"{size:,} bytes are no whole number of token ids of {np.dtype(kind).itemsize} bytes")
    return torch.from_numpy(np.fromfile(file, dtype=kind).astype(np.int64))


def checked_ids(ids: Tensor, d_vocab: int, data: Path | str) -> Tensor:
    """The ids themselves, if the model has them all."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= d_vocab):
        raise DataError(
            data,
            f"token ids from {int(ids.min())} to {int(ids.max())}, but the vocabulary has {d_vocab}; "
            "give ids, or a tokenizer, of this model",
        )
    return ids
