"""Readers of text: tables of labelled rows, plain text, and files of token ids."""

import csv
import importlib
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isobasin.errors import brief
from isobasin.shapes import Int
from isobasin.tasks.source import DataError, check_exists, exists, is_dataset, read_bytes, split_columns

_TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
_LABEL_COLUMNS = ("label", "labels", "class", "target")
_TEXT_COLUMNS = ("text", "sentence", "review", "content")
_TITLE_COLUMNS = ("title", "description")
_KNOWN_COLUMNS = (*_LABEL_COLUMNS, *_TEXT_COLUMNS, *_TITLE_COLUMNS)
_ROWS_PER_BYTE = 16  # of a parquet file: more rows than that are an empty promise of its run-length encoding
_TEXT_SUFFIXES = ("", ".txt", ".text", ".md", ".rst", ".raw", ".tokens")

Label = int | str


@dataclass(frozen=True)
class Table:
    """Texts and their labels as in the file: numbers or names of classes; no `labels` if none were requested."""

    texts: tuple[str, ...]
    labels: tuple[Label, ...]

    def __len__(self) -> int:
        return len(self.texts)


def is_table(data: Path) -> bool:
    """Whether this is a table, a folder with tables, or a `datasets` folder."""
    if exists(data) and data.is_dir():
        return is_dataset(data) or bool(_tables_in(data))
    return data.suffix in (*_TABLES, ".json") or is_dataset(data)


def read_table(data: Path | str, *, split: str = "test", labelled: bool = True) -> Table:
    """Texts and labels of a table (CSV, JSON lines, parquet, `datasets`); of a folder, the table of the split.

    The columns are found by name: label, labels, class or target; text, sentence, review or content, or title and
    description. In a CSV file without a header the first column is the label and the others are the text. Columns of
    text are joined by a space.
    """
    file, columns = read_columns(Path(data), split, _KNOWN_COLUMNS)
    return _from_columns(file, columns, labelled)


def read_columns(data: Path, split: str, known: Sequence[str]) -> tuple[Path, Mapping[str, Sequence[Any]]]:
    """The columns of a table, and its file; the values of JSON objects are read for `known` names only."""
    if is_dataset(data):
        return data, split_columns(data, split)
    check_exists(data)
    file = _only_table(data, split) if data.is_dir() else data
    if file.suffix in (".csv", ".tsv"):
        return file, _csv_columns(file, known)
    return file, _parquet(file) if file.suffix == ".parquet" else _json_columns(file, known)


def _tables_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and file.suffix in _TABLES)


def find_table(folder: Path, split: str) -> Path | None:
    """The table of a split: `train.csv`, else `train_subset.csv`, else the only one whose name begins so."""
    files = _tables_in(folder)
    for fits in (
        [file for file in files if file.stem == split],
        [file for file in files if file.stem == f"{split}_subset"],
        [file for file in files if file.stem.startswith(split)],
    ):
        if len(fits) == 1:
            return fits[0]
    return None


def _only_table(folder: Path, split: str) -> Path:
    """The table of a split, or the only table of the folder."""
    files = _tables_in(folder)
    if found := find_table(folder, split) or (files[0] if len(files) == 1 else None):
        return found
    named = [file for file in files if file.stem.startswith(split)] or files
    names = ", ".join(file.name for file in named[:5]) or "none"
    raise DataError(folder, f"expected one table for the split {split!r}, found {names}; name the file itself")


def _decoded(file: Path) -> str:
    try:
        return read_bytes(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(file, f"not UTF-8 text ({error}); convert it") from error


def _csv_columns(file: Path, known: Sequence[str]) -> Mapping[str, Sequence[Any]]:
    """The columns by the names in the header; without one, those of labelled texts."""
    rows = _csv_rows(file)
    head = [name.strip().lower() for name in rows[0]] if rows else []
    if "label" in known and not set(known) & set(head):
        return {"label": [r[0] for r in rows], "text": [_joined(r[1:]) for r in rows]}
    for number, row in enumerate(rows[1:], 1):
        if len(row) != len(head):
            raise DataError(file, f"row {number} has {len(row)} columns, the header {len(head)}; quote the commas")
    return {name: [row[i] for row in rows[1:]] for i, name in enumerate(head)}


def _csv_rows(file: Path) -> list[list[str]]:
    stream = io.StringIO(_decoded(file), newline="")
    usual = csv.field_size_limit(2**31 - 1)  # the default of Python is 128 KiB, and a text may be longer
    try:
        reader = csv.reader(stream, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
        return [row for row in reader if row]
    except csv.Error as error:
        raise DataError(file, f"not a table that Python's csv can read ({error}); correct it") from error
    finally:
        csv.field_size_limit(usual)


def _json_columns(file: Path, known: Sequence[str]) -> dict[str, Sequence[Any]]:
    """The values of the columns that are read; of others only their number, because each row may have its own."""
    text = _decoded(file)
    try:
        rows = json.loads(text) if file.suffix == ".json" else [json.loads(s) for s in text.split("\n") if s.strip()]
    except (ValueError, RecursionError) as error:
        raise DataError(file, f"not JSON, one object a line ({error}); correct it") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(file, "expected JSON objects, one a line")
    if "\\ud" in text.lower():
        _check_surrogates(file, rows)
    names = sorted({name for row in rows for name in row})
    read = {name for name in names if name.strip().lower() in known}
    return {name: [row.get(name) for row in rows] if name in read else range(len(rows)) for name in names}


def _check_surrogates(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """JSON can escape half a character, which no tokenizer and no file accepts."""
    for number, row in enumerate(rows, 1):
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError) as error:
            raise DataError(file, f"row {number} holds a lone surrogate, which is not text; correct it") from error


def _parquet(file: Path) -> Mapping[str, Sequence[Any]]:
    try:
        pq = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        wanted = "a parquet file needs pyarrow: pip install 'isobasin[study]', or give CSV or JSONL"
        raise DataError(file, wanted) from error
    try:
        opened = pq.ParquetFile(str(file))
        if opened.metadata.num_rows > _ROWS_PER_BYTE * file.stat().st_size:
            raise ValueError(f"{opened.metadata.num_rows} rows, more than a file of its size holds")
        columns: dict[str, list[Any]] = opened.read().to_pydict()
    except Exception as error:  # a damaged file makes pyarrow raise errors of many kinds
        raise DataError(file, f"not a parquet file ({error!s:.160})") from error
    return columns


def _text_columns(names: Iterable[str]) -> list[str]:
    known = list(names)
    plain = [name for name in _TEXT_COLUMNS if name in known]
    return plain[:1] or [name for name in _TITLE_COLUMNS if name in known]


def _from_columns(data: Path, columns: Mapping[str, Sequence[Any]], labelled: bool) -> Table:
    names = {name.strip().lower(): name for name in columns}
    n_rows = max((len(column) for column in columns.values()), default=0)
    if not n_rows:
        raise DataError(data, "no rows in it; expected texts with labels")
    found = [names[name] for name in _text_columns(names)]
    label = next((names[name] for name in _LABEL_COLUMNS if name in names), None)
    if not found or (labelled and label is None):
        wanted = f"one of {', '.join(_TEXT_COLUMNS)}" + (f" and one of {', '.join(_LABEL_COLUMNS)}" if labelled else "")
        raise DataError(data, f"columns {', '.join(columns):.200}; expected {wanted}")
    rows = zip(*(columns[name] for name in found))
    texts = tuple(_text(data, number, row) for number, row in enumerate(rows, 1))
    if not labelled or label is None:
        return Table(texts, ())
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise DataError(data, f"row {number} has no text; remove it")
    return Table(texts, tuple(_label(data, number, value) for number, value in enumerate(columns[label], 1)))


def _text(data: Path, row: int, parts: Sequence[Any]) -> str:
    for part in parts:
        if isinstance(part, list | tuple | dict):
            raise DataError(data, f"row {row} has the text {brief(part)}; expected a string")
    return _joined(parts)


def _joined(parts: Iterable[Any]) -> str:
    return " ".join(str(part) for part in parts if part not in (None, ""))


def _label(data: Path, row: int, value: Any) -> Label:
    whole = isinstance(value, int | str) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole or value == "":
        raise DataError(data, f"row {row} has the label {brief(value)}; expected a whole number or a class's name")
    return value.strip() if isinstance(value, str) else int(value)


# -- classes -----------------------------------------------------------------------------------------------------------


def class_numbers(
    labels: Sequence[Label], n_classes: int, names: Mapping[str, int], data: Path
) -> Int[np.ndarray, " rows"]:
    """Labels as classes 0 … n − 1: given as numbers from 0, as numbers from 1 to exactly n, or as names in the config.

    >>> class_numbers(["1", "3", "2"], 3, {}, Path("x.csv"))
    array([0, 2, 1])
    """
    if not all(map(_is_number, labels)):
        for row, label in enumerate(labels, 1):
            if not 0 <= names.get(str(label), -1) < n_classes:
                known = f"its classes are {', '.join(list(names)[:8])}" if names else "its config.json names no classes"
                raise DataError(data, f"row {row} has the label {brief(label)}, which the model does not have: {known}")
        return np.array([names[str(label)] for label in labels], dtype=np.int64)
    found = np.array([int(label) for label in labels], dtype=np.int64)
    if found.min() == 1 and found.max() == n_classes:
        return found - 1
    for row in np.flatnonzero((found < 0) | (found >= n_classes))[:1]:
        raise DataError(
            data, f"row {row + 1} has the label {found[row]}; the model's classes are 0 to {n_classes - 1} (or from 1)"
        )
    return found


def _is_number(label: Label) -> bool:
    """Whether a label is a whole number of 64 bits."""
    if isinstance(label, int):
        return -(2**63) <= label < 2**63
    return re.fullmatch(r"-?\d{1,18}", label) is not None


def folder_classes(classes: Sequence[str], n_classes: int, names: Mapping[str, int], data: Path) -> list[int]:
    """The class of each subfolder: by the names of the model, by number, or in the order of the names."""
    if names and all(0 <= names.get(name, -1) < n_classes for name in classes):
        return [names[name] for name in classes]
    if all(re.fullmatch(r"\d{1,18}", name) and int(name) < n_classes for name in classes):
        return [int(name) for name in classes]
    if names or len(classes) != n_classes:
        known = ", ".join(list(names)[:8]) if names else f"{n_classes} without names"
        raise DataError(data, f"the class folders {', '.join(classes):.120} do not match the model's classes: {known}")
    return list(range(n_classes))


# -- plain text --------------------------------------------------------------------------------------------------------


def read_text(data: Path | str, limit: int | None = None) -> str:
    """The text of a file, of the text files of a folder sorted by name, or of the text column of a table.

    UTF-8 with unchanged line ends; files and rows are joined by a newline; at most `limit` characters are read.
    """
    data = Path(data)
    files = _text_files(data) if exists(data) and data.is_dir() else []
    if not files and is_table(data):
        text = "\n".join(read_table(data, labelled=False).texts)[:limit]
    else:
        check_exists(data)
        text = _files_text([data] if data.is_file() else files, limit)
    if not text.strip() and (limit is None or len(text) < limit):  # otherwise text may follow the blanks
        raise DataError(
            data, f"no text in it; expected UTF-8 text, in a folder in files {', '.join(_TEXT_SUFFIXES[1:])}"
        )
    return text


def _text_files(folder: Path) -> list[Path]:
    found = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file() and file.suffix in _TEXT_SUFFIXES)
    return [folder / file for file in sorted(found) if not any(part.startswith(".") for part in file.parts)]


def _files_text(files: list[Path], limit: int | None) -> str:
    parts: list[str] = []
    left = limit
    for file in files:
        try:
            # newline="": a translated line end would change the number of bytes.
            with file.open(encoding="utf-8", newline="") as stream:
                parts.append(stream.read(left))
        except UnicodeDecodeError as error:
            raise DataError(file, f"not UTF-8 text ({error}); convert it") from error
        except OSError as error:
            raise DataError(file, f"can not be read ({error.strerror})") from error
        if left is not None and (left := left - len(parts[-1]) - 1) <= 0:
            break
    return "\n".join(parts)[:limit]


# -- token ids ---------------------------------------------------------------------------------------------------------


def is_ids(data: Path) -> bool:
    """Whether a file holds token ids."""
    return data.suffix in (".npy", ".bin")


def read_ids(data: Path | str, d_vocab: int) -> Tensor:
    """Token ids (length,) or (rows, length), int64, checked against the vocabulary.

    `.npy` is a plain numpy array; `.bin` is a sequence of uint16, or of uint32 if d_vocab is more than 65,536.
    """
    data = Path(data)
    check_exists(data)
    if data.suffix == ".npy":
        array = load_array(data)
    else:
        size, kind = data.stat().st_size, np.dtype("<u2" if d_vocab <= 2**16 else "<u4")
        if size % kind.itemsize:
            raise DataError(data, f"{size:,} bytes are no whole number of token ids of {kind.itemsize} bytes")
        array = torch.from_numpy(np.fromfile(data, dtype=kind).astype(np.int64))
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
    """A .npy file of numbers, read without pickle; mapped first, since a header may promise more than there is."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    except Exception as error:  # an archive, strings, objects, or a damaged header, for which numpy raises anything
        raise DataError(
            file, f"not a plain numpy array of numbers ({error!s:.160}); write it with numpy.save"
        ) from error


def checked_ids(ids: Tensor, d_vocab: int, data: Path | str) -> Tensor:
    """The ids, if all of them are in the vocabulary."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= d_vocab):
        raise DataError(
            data,
            f"token ids from {int(ids.min())} to {int(ids.max())}, but the vocabulary has {d_vocab}; "
            "give ids, or a tokenizer, of this model",
        )
    return ids
