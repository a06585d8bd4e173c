"""Labelled text: CSV with or without a header, JSON lines, parquet, or a `datasets` folder."""

import csv
import importlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobasin.tasks.datasets_folder import dataset_columns, is_dataset
from isobasin.tasks.source import DataError, check_exists, read_bytes

ROWS = (".csv", ".tsv", ".jsonl", ".ndjson", ".parquet")
SUFFIXES = (*ROWS, ".json")  # in a folder, a .json file says something about the data
LABELS = ("label", "labels", "class", "target")
TEXTS = ("text", "sentence", "review", "content")
TITLED = ("title", "description")

Label = int | str


@dataclass(frozen=True)
class Table:
    """Texts and their labels as they stand in the file: numbers, or the classes' names.

    `labels` is empty where none were asked for.
    """

    texts: tuple[str, ...]
    labels: tuple[Label, ...]

    def __len__(self) -> int:
        return len(self.texts)


def is_table(data: Path) -> bool:
    """Whether this is a file of rows, a folder of one, or a `datasets` folder."""
    if data.is_dir():
        return is_dataset(data) or bool(_tables_in(data))
    return data.suffix in SUFFIXES or is_dataset(data)


def read_table(data: Path | str, *, split: str = "test", labelled: bool = True) -> Table:
    """Rows of text with their labels; of a folder with several tables the one named after the split.

    With a header (or JSON keys) the columns are found by name: label, labels, class or target; text, sentence,
    review or content, or title and description. A CSV file without one has the label in front, and the other
    columns are the text. Columns are joined by a space.
    """
    data = Path(data)
    if is_dataset(data):
        return _from_columns(data, dataset_columns(data, split), labelled)
    check_exists(data)
    file = _pick(data, split) if data.is_dir() else data
    if file.suffix in (".csv", ".tsv"):
        return _from_csv(file, labelled)
    if file.suffix == ".parquet":
        return _from_columns(file, _parquet(file), labelled)
    return _from_columns(file, _json_columns(file), labelled)


def _tables_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file() and file.suffix in ROWS)


def _pick(folder: Path, split: str) -> Path:
    files = _tables_in(folder)
    named = [file for file in files if file.stem == split] or [file for file in files if file.stem.startswith(split)]
    found = named or files
    if len(found) != 1:
        names = ", ".join(file.name for file in found[:5]) or "none"
        raise DataError(folder, f"expected one table for the split {split!r}, found {names}; name the file itself")
    return found[0]


def _decoded(file: Path) -> str:
    try:
        return read_bytes(file).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(file, f"not UTF-8 text ({error}); convert it") from error


def _from_csv(file: Path, labelled: bool) -> Table:
    rows = _csv_rows(file)
    head = [name.strip().lower() for name in rows[0]] if rows else []
    if _text_columns(head) or set(LABELS) & set(head):
        return _from_columns(file, _by_name(file, head, rows[1:]), labelled)
    return _from_columns(file, {"label": [r[0] for r in rows], "text": [_joined(r[1:]) for r in rows]}, labelled)


def _csv_rows(file: Path) -> list[list[str]]:
    stream = io.StringIO(_decoded(file), newline="")
    usual = csv.field_size_limit(2**31 - 1)  # a review may be longer than the 128 KiB that Python allows
    try:
        reader = csv.reader(stream, delimiter="\t" if file.suffix == ".tsv" else ",", strict=True)
        return [row for row in reader if row]
    except csv.Error as error:
        raise DataError(file, f"not a table that Python's csv can read ({error}); correct it") from error
    finally:
        csv.field_size_limit(usual)


def _by_name(file: Path, head: list[str], rows: list[list[str]]) -> dict[str, list[str]]:
    for number, row in enumerate(rows, 1):
        if len(row) != len(head):
            raise DataError(file, f"row {number} has {len(row)} columns, the header {len(head)}; quote the commas")
    return {name: [row[i] for row in rows] for i, name in enumerate(head)}


def _json_columns(file: Path) -> dict[str, list[Any]]:
    text = _decoded(file)
    try:
        rows = json.loads(text) if file.suffix == ".json" else [json.loads(s) for s in text.split("\n") if s.strip()]
    except (ValueError, RecursionError) as error:
        raise DataError(file, f"not JSON, one object a line ({error}); correct it") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(file, "expected JSON objects with a text and a label, one a line")
    names = {name for row in rows for name in row}
    return {name: [row.get(name) for row in rows] for name in sorted(names)}


def _parquet(file: Path) -> Mapping[str, Sequence[Any]]:
    try:
        pq = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(file, "a parquet file needs pyarrow: pip install pyarrow, or give CSV or JSONL") from error
    try:
        columns: dict[str, list[Any]] = pq.read_table(str(file)).to_pydict()
    except (OSError, ValueError) as error:  # pyarrow's own errors are children of these
        raise DataError(file, f"not a parquet file ({error!s:.160})") from error
    return columns


def _text_columns(names: Iterable[str]) -> list[str]:
    known = list(names)
    plain = [name for name in TEXTS if name in known]
    return plain[:1] or [name for name in TITLED if name in known]


def _from_columns(data: Path, columns: Mapping[str, Sequence[Any]], labelled: bool) -> Table:
    names = {name.strip().lower(): name for name in columns}
    n_rows = max((len(column) for column in columns.values()), default=0)
    if not n_rows:
        raise DataError(data, "no rows in it; expected texts with labels")
    found = [names[name] for name in _text_columns(names)]
    label = next((names[name] for name in LABELS if name in names), None)
    if not found or (labelled and label is None):
        wanted = f"one of {', '.join(TEXTS)}" + (f" and one of {', '.join(LABELS)}" if labelled else "")
        raise DataError(data, f"columns {', '.join(columns):.200}; expected {wanted}")
    texts = tuple(_joined(row) for row in zip(*(columns[name] for name in found)))
    labels = tuple(columns[label]) if labelled and label is not None else ()
    _check_rows(data, texts if labelled else (), labels)
    return Table(texts, tuple(_label(value) for value in labels))


def _joined(parts: Iterable[Any]) -> str:
    return " ".join(str(part) for part in parts if part not in (None, ""))


def _check_rows(data: Path, texts: Sequence[str], labels: Sequence[Any]) -> None:
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise DataError(data, f"row {number} has no text; remove it")
    for number, label in enumerate(labels, 1):
        whole = isinstance(label, int | str) or (isinstance(label, float) and label.is_integer())
        if isinstance(label, bool) or not whole or label == "":
            raise DataError(data, f"row {number} has the label {label!r}; expected a whole number or a class's name")


def _label(value: Any) -> Label:
    return value.strip() if isinstance(value, str) else int(value)
