"""The class of a sample as the model counts it: 0 … n − 1."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from isobasin.shapes import Int
from isobasin.tasks.source import DataError
from isobasin.tasks.tables import Label


def class_numbers(
    labels: Sequence[Label], n_classes: int, names: Mapping[str, int], data: Path
) -> Int[np.ndarray, " rows"]:
    """Labels as classes: numbers from 0, numbers from 1 up to exactly n, or names that the model's config knows.

    >>> class_numbers(["1", "3", "2"], 3, {}, Path("x.csv"))
    array([0, 2, 1])
    """
    if not all(_is_number(label) for label in labels):
        return _by_name(labels, n_classes, names, data)
    found = np.array([int(label) for label in labels], dtype=np.int64)
    if found.min() == 1 and found.max() == n_classes:
        return found - 1
    for row in np.flatnonzero((found < 0) | (found >= n_classes))[:1]:
        raise DataError(
            data, f"row {row + 1} has the label {found[row]}; the model's classes are 0 to {n_classes - 1} (or from 1)"
        )
    return found


def _is_number(label: Label) -> bool:
    return isinstance(label, int) or re.fullmatch(r"-?\d+", label) is not None


def _by_name(labels: Sequence[Label], n_classes: int, names: Mapping[str, int], data: Path) -> np.ndarray:
    for row, label in enumerate(labels, 1):
        if not 0 <= names.get(str(label), -1) < n_classes:
            known = f"its classes are {', '.join(list(names)[:8])}" if names else "its config.json names no classes"
            raise DataError(data, f"row {row} has the label {label!r}, which the model does not have: {known}")
    return np.array([names[str(label)] for label in labels], dtype=np.int64)


def folder_classes(classes: Sequence[str], n_classes: int, names: Mapping[str, int], data: Path) -> list[int]:
    """The class each subfolder stands for: by the model's own names, by number, or in the order of the names."""
    if names and all(0 <= names.get(name, -1) < n_classes for name in classes):
        return [names[name] for name in classes]
    if all(name.isdecimal() and int(name) < n_classes for name in classes):
        return [int(name) for name in classes]
    if names or len(classes) != n_classes:
        known = ", ".join(list(names)[:8]) if names else f"{n_classes} without names"
        raise DataError(data, f"the class folders {', '.join(classes):.120} do not match the model's classes: {known}")
    return list(range(n_classes))
