"""Labelled images, from whichever layout a folder has."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from isobasin.shapes import Int
from isobasin.tasks.cifar import find_cifar, read_cifar
from isobasin.tasks.datasets_folder import is_dataset, open_dataset
from isobasin.tasks.idx import find_idx, read_idx_pair
from isobasin.tasks.labels import folder_classes
from isobasin.tasks.pictures import SUFFIXES, PictureFiles, Rows, class_folders
from isobasin.tasks.source import DataError, check_exists


@dataclass(frozen=True)
class Images:
    """Pictures and their classes: `pixels[i]` is uint8 (height, width, channels), decoded when asked for.

    `pixels` is one array (images, height, width, channels), or a sequence of files. `labels` count the data's own
    `classes`; `by_folder` says that these are names of folders, whose order means nothing to a model.
    """

    pixels: np.ndarray | Sequence[np.ndarray]
    labels: Int[np.ndarray, " images"]
    classes: tuple[str, ...] | None = None
    by_folder: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def content(self, i: int) -> bytes:
        """The bytes an image is stored as."""
        if isinstance(self.pixels, PictureFiles):
            return self.pixels.content(i)
        return np.ascontiguousarray(self.pixels[i]).tobytes()

    def targets(self, n_classes: int, names: Mapping[str, int], data: Path) -> Int[np.ndarray, " images"]:
        """The classes as the model counts them."""
        found = self.labels
        if self.by_folder and self.classes:
            found = np.array(folder_classes(self.classes, n_classes, names, data), dtype=np.int64)[self.labels]
        elif self.classes and names and set(self.classes) <= set(names):
            found = np.array([names[name] for name in self.classes], dtype=np.int64)[self.labels]
        for i in np.flatnonzero((found < 0) | (found >= n_classes))[:1]:
            raise DataError(
                data, f"image {i + 1} has the label {found[i]}; the model's classes are 0 to {n_classes - 1}"
            )
        return found


def read_images(data: Path | str, split: str = "test") -> Images:
    """Images of a split ("test" or "train") from MNIST's IDX files, CIFAR's binary or python files, a folder with a
    subfolder per class, or a `datasets` folder.
    """
    data = Path(data)
    if is_dataset(data):
        return _from_dataset(data, split)
    check_exists(data)
    if pair := find_idx(data, split):
        return Images(*read_idx_pair(*pair))
    if files := find_cifar(data, split):
        return Images(*read_cifar(files))
    if data.is_dir() and (folders := class_folders(data, split)):
        files = [file for _, members in folders for file in members]
        labels = np.repeat(np.arange(len(folders)), [len(members) for _, members in folders])
        return Images(PictureFiles(tuple(files)), labels, tuple(name for name, _ in folders), by_folder=True)
    if data.is_file():
        raise DataError(data, "a file such as text, but this model reads images; give pictures, or pixels as .npy")
    raise DataError(
        data,
        f"no labelled images of the split {split!r} in it; expected MNIST's IDX files, CIFAR's batches, or a folder "
        f"per class with pictures ({', '.join(SUFFIXES[:4])}…)",
    )


def _from_dataset(data: Path, split: str) -> Images:
    found = open_dataset(data, split)
    kinds = {name: type(feature).__name__ for name, feature in found.features.items()}
    image = next((name for name, kind in kinds.items() if kind == "Image"), None)
    label = next((name for name in ("label", "labels", "fine_label", "class", "target") if name in kinds), None)
    if image is None or label is None:
        raise DataError(data, f"columns {', '.join(kinds)}; expected an image and a label")
    classes = tuple(found.features[label].names) if kinds[label] == "ClassLabel" else None
    labels = np.array(found[label][:], dtype=np.int64)
    if not len(labels):
        raise DataError(data, "no rows in it; expected images with labels")
    return Images(Rows(found, image), labels, classes)
