"""What a cell is made from, looked for before anything starts: its data, and a checkpoint instead of pretraining."""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from isobasin.errors import IsobasinError
from isobasin.model.config import ModelConfig
from isobasin.model.storage import CONFIG_NAME, WEIGHTS_NAME, read_folder

from . import datasets
from .grid import Cell
from .jobs import Job
from .store import Store
from .vocabulary import FILE as TOKENIZER

_READS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"vit": ("image",), "bert": ("text",), "gpt2": ("lm",), "llama": ("lm",)}
)
_KINDS = MappingProxyType({"image": "pictures", "text": "labelled text", "lm": "one long text"})


@dataclass(frozen=True)
class Checkpoint:
    """A folder of the project's own model, named by its content."""

    folder: Path
    sha256: str

    @property
    def settings(self) -> dict[str, str]:
        return {"name": self.folder.name, "sha256": self.sha256}


def check_cell(cell: Cell, root: Path | None) -> str:
    """Whether the data sets are there and fit the model; gives back the kind of what it is fine-tuned on."""
    for name in dict.fromkeys([cell.pretrain["dataset"] or cell.dataset, cell.dataset]):
        kind = datasets.locate(name, root)
        if kind not in _READS[cell.model]:
            expected = " or ".join(_KINDS[kind] for kind in _READS[cell.model])
            raise IsobasinError(
                f"cell {cell.label!r}: data set {name!r} is {_KINDS[kind]}, {cell.model} reads {expected}"
            )
    return kind


def find_checkpoint(cell: Cell, beside: Path) -> Checkpoint | None:
    """The model that replaces pretraining, by a path from the grid file; its sizes must be those of the cell."""
    if cell.pretrain["checkpoint"] is None or cell.scope == "model":
        return None
    folder = beside / cell.pretrain["checkpoint"]
    config, _ = read_folder(folder)
    _check_sizes(cell, config, folder)
    content = hashlib.sha256()
    for file in _files(folder):
        content.update(hashlib.sha256(file.read_bytes()).digest())
    return Checkpoint(folder, content.hexdigest())


def _files(folder: Path) -> list[Path]:
    """What a model of the study is made of; nothing else in its folder is taken along."""
    return [path for name in (CONFIG_NAME, WEIGHTS_NAME, TOKENIZER) if (path := folder / name).is_file()]


def _check_sizes(cell: Cell, config: ModelConfig, folder: Path) -> None:
    asked = {"positions": cell.positions, "n_layers": cell.layers, "n_heads": cell.heads, "d_model": cell.width}
    for name, value in asked.items():
        if getattr(config, name) != value:
            raise IsobasinError(
                f"pretrain.checkpoint {folder}: {name} is {getattr(config, name)}, but the cell says {value}; mend one"
            )


def plant(job: Job, checkpoint: Checkpoint, store: Store) -> None:
    """Put a copy of a checkpoint where the result of pretraining would be."""
    if store.is_whole(job):
        return
    with store.writing(job) as place:
        (place.folder / "model").mkdir()
        for file in _files(checkpoint.folder):
            shutil.copyfile(file, place.folder / "model" / file.name)
        place.commit({"checkpoint": checkpoint.settings}, seconds=0.0)
