"""Picture files: found by class, decoded one at a time, never larger than a screen wall."""

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from isobasin.errors import IsobasinError
from isobasin.tasks.source import DataError, read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
MAX_PIXELS = 64 * 10**6
_SPLITS = {"test": ("test", "val", "validation"), "train": ("train",)}


@dataclass(frozen=True)
class PictureFiles(Sequence[np.ndarray]):
    """Pictures on disk; asking for one decodes it to uint8 (height, width, channels)."""

    files: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.files)

    @overload
    def __getitem__(self, i: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[np.ndarray]: ...
    def __getitem__(self, i: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        if isinstance(i, slice):
            return PictureFiles(self.files[i])
        return decoded(self.content(i), self.files[i])

    def content(self, i: int) -> bytes:
        return read_bytes(self.files[i])

    def size(self, i: int, content: bytes) -> tuple[int, int]:
        """Height and width as the file's head says them, without decoding it."""
        picture = _opened(content, self.files[i])
        return picture.height, picture.width


@dataclass(frozen=True)
class Rows(Sequence[np.ndarray]):
    """The pictures of a `datasets` column."""

    rows: Any
    column: str

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[np.ndarray]: ...
    def __getitem__(self, i: int | slice) -> np.ndarray | Sequence[np.ndarray]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        picture = self.rows[i][self.column]
        _check_pixels(picture, f"row {i + 1}")
        return _array(picture)


def class_folders(data: Path, split: str) -> list[tuple[str, list[Path]]]:
    """Classes and their pictures, both in the order of their names; of a folder with splits inside, that split."""
    if (listed := data / "val" / "val_annotations.txt").is_file() and split == "test":
        return _listed(listed)
    inner = next((data / name for name in _SPLITS.get(split, (split,)) if (data / name).is_dir()), data)
    if inner is not data and _pictures(inner):
        inner = data  # a class may be called "test"
    folders = sorted(f for f in inner.iterdir() if f.is_dir() and not f.name.startswith("."))
    found = [(folder.name, _pictures(folder) or _pictures(folder / "images")) for folder in folders]
    return [(name, files) for name, files in found if files]


def _listed(file: Path) -> list[tuple[str, list[Path]]]:
    """Tiny ImageNet's validation pictures: one folder, and a table of name and class; its test has no labels."""
    classes: dict[str, list[Path]] = {}
    for row in read_bytes(file).decode("utf-8", "replace").splitlines():
        name, _, rest = row.partition("\t")
        classes.setdefault(rest.partition("\t")[0], []).append(file.parent / "images" / Path(name).name)
    return sorted((name, sorted(files)) for name, files in classes.items() if name)


def _pictures(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    files = (f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and not f.name.startswith("."))
    return sorted(f for f in files if f.is_file())


def pillow() -> Any:
    """Pillow's Image module: needed for picture files and image processors only."""
    try:
        from PIL import Image
    except ImportError as error:
        raise IsobasinError("picture files need Pillow: pip install pillow") from error
    return Image


def decoded(content: bytes, file: Path) -> np.ndarray:
    """A picture as uint8 (height, width, channels): 1 for grey, 3 for colour; transparency is dropped."""
    picture = _opened(content, file)
    try:
        return _array(picture)
    except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:  # as Pillow's decoders fail
        raise DataError(file, f"a damaged picture ({error}); remove or replace it") from error


def _opened(content: bytes, file: Path) -> "Image":
    image = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", image.DecompressionBombWarning)  # the size is judged below
            picture: Image = image.open(io.BytesIO(content))
    except image.DecompressionBombError as error:
        raise DataError(file, f"an absurdly large picture ({error!s:.80})") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise DataError(file, "not a picture that Pillow can read; remove or replace it") from error
    _check_pixels(picture, str(file))
    return picture


def _check_pixels(picture: "Image", where: str) -> None:
    size = f"{picture.width} × {picture.height}"
    if picture.width * picture.height > MAX_PIXELS:
        raise DataError(where, f"an absurdly large picture, {size}; expected at most {MAX_PIXELS:,} pixels")


def _array(picture: "Image") -> np.ndarray:
    grey = picture.mode in ("1", "L", "LA", "I", "F") or picture.mode.startswith("I;16")
    array = np.asarray(picture.convert("L" if grey else "RGB"))
    return array[:, :, None] if grey else array
